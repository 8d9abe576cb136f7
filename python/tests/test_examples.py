"""The examples do what they say."""

import os
import subprocess
import sys

import conftest

EXAMPLES = os.path.join(conftest.ROOT, "examples", "python")


def run(name, *args, cwd):
    return subprocess.run(
        [sys.executable, os.path.join(EXAMPLES, name), *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        check=True,
    ).stdout


def test_the_reference_example(tmp_path):
    out = run("reference.py", cwd=tmp_path)
    assert "4 workers, dp 2, tp 2" in out and "step 30: loss 0.0" in out


def test_the_rollouts_survive_a_killed_sampler(tmp_path):
    out = run("rollouts.py", cwd=tmp_path)
    assert "4 groups trained, 24 turns finished" in out and "WorkerLostError" in out, out


def test_the_grpo_loop_learns_and_plots(tmp_path):
    out = run("grpo.py", "--steps", "40", "--group", "24", "--plot", "curve.svg", cwd=tmp_path)
    rewards = [float(line.split()[4]) for line in out.splitlines() if line.startswith("step")]
    assert rewards[0] < 0.25 and rewards[-1] > 0.7, out
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")


def test_training_goes_on_after_a_rank_is_killed(tmp_path):
    out = run("elastic_ddp.py", cwd=tmp_path)
    assert "losses equal: True" in out and "the group is formed again" in out, out
