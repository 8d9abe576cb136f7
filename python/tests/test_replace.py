"""Taken names: the command in ExistsError ends the role from any shell, and replace=True ends it from the program."""

import os
import re
import subprocess

import pytest

import troupe
import worker_classes
from troupe import _core

CREATE = 'troupe.Cluster("taken", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=2))'


def shell(command, state=None):
    """Runs a command as a user's shell does that knows nothing of the head but what its state folder says."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
    env["PATH"] = os.path.dirname(_core.program_path()) + os.pathsep + env["PATH"]
    if state is not None:
        env["XDG_STATE_HOME"] = str(state)
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=env)


def command_in(text):
    return re.search(r"remove it with `([^`]+)`", text)[1]


def config(**fields):
    return troupe.WorkerConfig(world_size=2, **fields)


def test_the_command_in_exists_error_reaches_a_private_head(session):
    troupe.Cluster("taken", worker_classes.BasicWorker, worker_config=config())
    with pytest.raises(troupe.ExistsError, match="owned by .*replace=True ends it first") as caught:
        troupe.Cluster("taken", worker_classes.BasicWorker, worker_config=config())
    command = command_in(str(caught.value))
    assert f"--run {os.getpid()}" in command and f"--namespace {session.namespace}" in command
    ran = shell(command)
    assert ran.returncode == 0 and "role taken is gone" in ran.stdout, ran.stderr
    with troupe.Cluster("taken", worker_classes.BasicWorker, worker_config=config()) as again:
        assert again.echo(1) == [1, 1]


def test_the_command_in_exists_error_reaches_a_head_with_credentials(session, script, tmp_path):
    ran = script(
        f"""
        import time, worker_classes, troupe
        first = {CREATE}
        try:
            {CREATE}
        except troupe.ExistsError as err:
            print(err, flush=True)
        time.sleep(600)
        """,
        wait=False,
    )
    try:
        command = command_in(ran.stdout.readline())
        assert f"TROUPE_TOKEN_FILE={session.head.token_file}" in command and f"--url {session.url}" in command
        assert "--namespace script" in command
        gone = shell(command, state=tmp_path)  # a shell that finds no head by itself
        assert gone.returncode == 0 and "role taken is gone" in gone.stdout, gone.stderr
    finally:
        ran.kill()
        ran.communicate()


def test_a_token_and_a_password_are_not_in_the_command():
    from troupe import _session

    bus = {"urls": ["nats://user:secret@host:4222", "tls://other:4222"], "token": "hidden", "creds_file": "/my creds"}
    line = _session._command_line(None, bus)
    assert line == {
        "env": "TROUPE_TOKEN=… TROUPE_CREDS='/my creds'",
        "flags": "--url 'nats://…@host:4222,tls://other:4222'",
    }


def test_replace_ends_the_role_of_the_name_and_its_calls(session, tmp_path):
    old = troupe.Cluster("taken", worker_classes.BasicWorker, worker_config=config(num_gpus_per_worker=8))
    pids = old.pid()
    running = old.workers[0].sleep.remote(600)
    with troupe.Cluster(
        "taken", worker_classes.BasicWorker, worker_config=config(num_gpus_per_worker=8), replace=True
    ) as new:
        assert not set(new.pid()) & set(pids), "the devices of the old one were free"
        with pytest.raises(troupe.Error):
            running.result(60)
        with pytest.raises(troupe.NotFoundError, match="taken has been destroyed"):
            old.echo(1)
        old.shutdown()
        assert new.echo(1) == [1, 1], "the end of the old handle does not touch the new role"
    with troupe.Cluster("taken", worker_classes.BasicWorker, worker_config=config(), replace=True) as free:
        assert free.echo(2) == [2, 2], "a name that is free is taken as always"


def test_replace_ends_roles_of_other_programs_failed_and_starting_ones(session, script):
    other = script(
        f"""
        import time, worker_classes, troupe
        {CREATE}
        print("made", flush=True)
        time.sleep(600)
        """,
        wait=False,
    )
    try:
        assert other.stdout.readline() == "made\n", other.stderr.read()
        ran = script(
            f"""
            import worker_classes, troupe
            made = {CREATE[:-1]}, replace=True)
            print(made.echo(1))
            try:
                made.workers[0].kill()
            except troupe.WorkerLostError:
                pass
            made.died().result(60)
            print({CREATE[:-1]}, replace=True).echo(2))
            class Never(troupe.Worker):
                def __init__(self, config=None):
                    import time
                    time.sleep(600)
            config = troupe.WorkerConfig(world_size=2)
            starting = troupe.Cluster.create("taken", Never, worker_config=config, replace=True)
            print({CREATE[:-1]}, replace=True).echo(3))
            """,
            timeout=90,
        )
        assert ran.stdout.split("\n")[:3] == ["[1, 1]", "[2, 2]", "[3, 3]"], ran.stderr
    finally:
        other.kill()
        other.communicate()


def test_an_actor_is_replaced(session):
    old = troupe.actor(worker_classes.BasicWorker, name="one")
    new = troupe.actor(worker_classes.BasicWorker, name="one", replace=True)
    assert new.echo(1) == 1 and old.cluster != new.cluster
    with pytest.raises(troupe.InvalidError, match="get_if_exists=True keeps"):
        troupe.actor(worker_classes.BasicWorker, name="one", replace=True, get_if_exists=True)
    with pytest.raises(troupe.InvalidError, match="replace"):
        troupe.actor(worker_classes.BasicWorker, name="one", replace="yes")
    new.cluster.shutdown()
