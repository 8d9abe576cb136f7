#!/usr/bin/env bash
# Shows on a machine with an NVIDIA GPU that the inventory is nvidia-smi's, that a foreign process on a device makes it
# refused by name, and that the device is granted again when that process has ended.
# Needs nvidia-smi, python3 with torch, and bin/troupe (make build). Run: make gpu-check
set -u
cd "$(dirname "$0")/../.."
home=$(mktemp -d)
export XDG_STATE_HOME=$home
cleanup() { kill "${holder:-}" "${head:-}" 2>/dev/null; wait 2>/dev/null; rm -rf "$home"; }
trap cleanup EXIT
fail() { echo "FAILED: $*"; exit 1; }

echo "== nvidia-smi"
nvidia-smi --query-gpu=index,uuid,name,memory.total --format=csv,noheader || fail "no nvidia-smi here"

bin/troupe up --listen 127.0.0.1:0 --gpus auto --name here >"$home/head.log" 2>&1 &
head=$!
for _ in $(seq 100); do
	bin/troupe gpus --json >"$home/gpus.json" 2>/dev/null && grep -q uuid "$home/gpus.json" && break
	sleep 0.1
done
echo "== troupe gpus"
bin/troupe gpus || fail "$(cat "$home/head.log")"
for uuid in $(nvidia-smi --query-gpu=uuid --format=csv,noheader); do
	grep -q "$uuid" "$home/gpus.json" || fail "$uuid is not in the inventory"
done

count=$(nvidia-smi -L | wc -l)
echo "== all $count devices are granted"
bin/troupe reserve --bundles "$count" --devices 1 --json >"$home/reserved.json" || fail "reserve: $(cat "$home/reserved.json")"
id=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["id"])' "$home/reserved.json")
bin/troupe release "$id" || fail "release"

echo "== a foreign process takes device 0"
python3 -c 'import torch,time; x=torch.ones(1<<28, device="cuda:0"); torch.cuda.synchronize(); print("holds 1 GiB", flush=True); time.sleep(600)' &
holder=$!
refused=no
for _ in $(seq 150); do
	bin/troupe explain --bundles "$count" --devices 1 >"$home/explain.txt" 2>&1
	if grep -q "$holder\|process" "$home/explain.txt"; then refused=yes; break; fi
	sleep 0.2
done
cat "$home/explain.txt"
[ $refused = yes ] || fail "the device is offered although process $holder is on it"
bin/troupe gpus

echo "== the process ends"
kill -9 "$holder"; wait "$holder" 2>/dev/null
for _ in $(seq 150); do
	bin/troupe reserve --bundles "$count" --devices 1 --wait 1s --json >"$home/reserved.json" 2>/dev/null && echo "granted again" && exit 0
	sleep 0.2
done
bin/troupe gpus
fail "not granted again: $(cat "$home/reserved.json")"
