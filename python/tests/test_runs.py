"""Runs on one head: each driver that names no namespace has its own; commands find what a run has made."""

import os
import subprocess
import sys
import textwrap

import pytest

import troupe
from troupe import _core

SCRIPT = """
import sys, time, troupe

class Trainer:
    def step(self, n):
        print("step", n)
        return n + 1

s = troupe.init(output="none")
a = troupe.actor(Trainer, name=sys.argv[1])
print(s.namespace, a.step(1), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def shared(session):
    """The environment of a driver at a head that others use too, with no namespace named."""
    env = {k: v for k, v in os.environ.items() if k != "TROUPE_NAMESPACE"}
    return {
        **env,
        "TROUPE_URL": session.url,
        "TROUPE_TOKEN_FILE": session.head.token_file,
        "TROUPE_FINGERPRINT": session.head.fingerprint,
    }


@pytest.fixture
def command(shared):
    def run(*args):
        p = subprocess.run(
            [_core.program_path(), *args],
            env=shared,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
        )
        return p.returncode, p.stdout, p.stderr

    return run


def start(path, env, role):
    path.write_text(textwrap.dedent(SCRIPT))
    return subprocess.Popen(
        [sys.executable, str(path), role],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    return process.communicate("\n", timeout=90)[1]


def test_two_runs_of_one_script_do_not_collide_and_commands_find_them(shared, command, tmp_path):
    runs = [start(tmp_path / "train.py", shared, "trainer_of_runs") for _ in range(2)]
    namespaces = [r.stdout.readline().split()[0] for r in runs]
    try:
        assert namespaces[0] != namespaces[1]
        assert all(n.startswith("train-") for n in namespaces)
        code, status, err = command("status")
        assert code == 0, err
        assert all(f"namespace {n}" in status and "train.py[" in status for n in namespaces), status
        code, table, err = command("roles")
        assert code == 0, err
        assert "NAMESPACE" in table
        assert all(n in table for n in namespaces)
        code, out, err = command("stacks", "trainer_of_runs")
        assert code == 2
        assert all(n in err for n in namespaces), err
        assert "--namespace" in err
        code, out, err = command("stacks", "trainer_of_runs", "--namespace", namespaces[1])
        assert code == 0, err
        assert end(runs[0]).count(namespaces[0]) == 1  # printed once
        for words in (("stacks",), ("roles",), ("logs",), ("describe", "role")):  # now the name is unique
            code, out, err = command(*words, "trainer_of_runs")
            assert code == 0, (words, err)
        code, out, err = command("destroy", "trainer_of_runs")
        assert code == 1
        assert namespaces[1] in err
    finally:
        for r in runs:
            if r.poll() is None:
                end(r)
    code, out, err = command("logs", "trainer_of_runs")
    assert code == 0, err
    assert "step 1" in out
    assert "2 namespaces have output" in err


def test_a_taken_name_says_who_has_it_and_how_it_is_removed(session):
    import worker_classes

    with (
        troupe.Cluster("taken", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=1)),
        pytest.raises(troupe.ExistsError) as taken,
    ):
        troupe.actor(worker_classes.BasicWorker, name="taken")
    text = str(taken.value)
    assert f"[{os.getpid()}]" in text
    assert " since 2" in text
    assert f"`troupe destroy taken --namespace {session.namespace} --run {os.getpid()}`" in text


def test_a_role_of_another_namespace_is_named(session, script):
    import worker_classes

    with troupe.Cluster("elsewhere", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=1)):
        p = script(
            "import troupe\ntry:\n    troupe.Cluster.attach('elsewhere')\nexcept troupe.NotFoundError as err:\n    "
            "print(err)"
        )
    assert f"in namespace {session.namespace}" in p.stdout
