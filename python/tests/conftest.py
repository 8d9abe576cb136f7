"""What the tests share: one private head, and scripts that run in processes of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest

import troupe

# Whoever runs the tests in the background may have had interrupts ignored, which every process below would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def said(stderr):
    """What a script printed, without the line that the end of its session prints on a slow machine."""
    return "".join(
        line for line in stderr.splitlines(True) if not line.startswith("troupe: the session ends, and waits")
    )


@contextlib.contextmanager
def kernel_config():
    """Settings of nbclient whose kernel has sockets in a folder of its own: ports may be taken by others before the
    kernel binds them."""
    from traitlets.config import Config

    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        yield Config({"KernelManager": {"transport": "ipc", "ip": os.path.join(folder, "socket")}})


@pytest.fixture(scope="session")
def session():
    """A head with two simulated nodes of eight devices, for all tests."""
    with troupe.init(gpus="sim:2x8") as s:
        yield s


@pytest.fixture(scope="session")
def workers(session):
    """Two workers of the test class, for tests that leave them as they were."""
    import worker_classes

    with troupe.Cluster(
        "workers", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=2)
    ) as cluster:
        yield cluster


@pytest.fixture
def script(session):
    """Runs a script as a driver of its own at the same head; returns the finished process."""

    def run(text, *, timeout=90, env=None, check=True, wait=True):
        head = session.head
        surroundings = {
            **os.environ,
            "PYTHONPATH": HERE + os.pathsep + os.environ.get("PYTHONPATH", ""),
            "TROUPE_URL": session.url,
            "TROUPE_TOKEN_FILE": head.token_file,
            "TROUPE_FINGERPRINT": head.fingerprint,
            "TROUPE_NAMESPACE": "script",
            **(env or {}),
        }
        p = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(text)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in surroundings.items() if v},
            cwd=HERE,
        )
        if not wait:
            return p
        try:
            out, err = p.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            p.kill()
            out, err = p.communicate()
            raise AssertionError(f"no end in {timeout} s\n{out}\n{err}") from None
        if check and p.returncode:
            raise AssertionError(f"exit {p.returncode}\n{out}\n{err}")
        return subprocess.CompletedProcess(p.args, p.returncode, out, err)

    return run
