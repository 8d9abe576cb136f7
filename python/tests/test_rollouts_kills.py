"""Rollouts while everything around them is killed: the short form of `make soak-rollouts`."""

import json
import os
import subprocess
import sys

import conftest


def test_no_group_is_lost_or_trained_twice_and_no_finished_turn_made_again():
    soak = os.path.join(conftest.ROOT, "benchmarks", "python", "soak_rollouts.py")
    shape = ["--prompts", "8", "--siblings", "4", "--turns", "3", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, soak, "--seconds", "10", *shape], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["prompts"] == result["trained"] >= 8 and result["turns_finished"] > 0
    assert sum(result["kills"].values()) >= 2, result
