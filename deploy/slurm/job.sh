#!/bin/bash
# A training job on four nodes under Slurm: one replica of `troupe launch` on each. Rank 0 is the head and runs the driver,
# the others are agents, and all end with the driver's exit code.
#
#   sbatch deploy/slurm/job.sh python train.py
#
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --kill-on-bad-exit=0

set -euo pipefail
umask 077

# The token that the replicas share, in a file that only its owner can read, on a file system that all nodes see.
token=$(mktemp "${TROUPE_TOKEN_DIR:-$HOME}/.troupe-$SLURM_JOB_ID-XXXXXX")
trap 'rm -f "$token"' EXIT
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$token"

# Rank, world and head come from SLURM_PROCID, SLURM_NTASKS and the first node of the list.
unset SLURM_LAUNCH_NODE_IPADDR
export TROUPE_HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):7422"
srun troupe launch --token-file "$token" --wait 15m -- "$@"
