"""The process that keeps the head of a shared session running: `python -m troupe.ray._head SPEC`, with SPEC in JSON.

A head that dies is restarted on the same store and address. The agents, the workers and pending calls continue.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from .. import _core, _session
from . import _heads

_OFTEN, _OFTEN_WITHIN = 5, 60.0  # a head that was started this many times within this many seconds is not restarted


def main() -> int:
    spec = json.loads(sys.argv[1])
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    run = tempfile.mkdtemp(prefix="troupe-ray-head-")
    head = Head(spec, run)
    try:
        said = head.start()
        return _serve(spec, said, ended, head) if said else 1
    finally:
        head.end()


class Head:
    """The `troupe up` process."""

    def __init__(self, spec: dict[str, object], run: str) -> None:
        self._spec, self._run = spec, run
        self._process: subprocess.Popen[bytes] | None = None
        self._started: list[float] = []  # times of the recent starts

    def start(self) -> dict[str, object]:
        """Starts the head and waits until it is ready. Returns the fields it reports, or an empty dict if it did not
        start."""
        self._started = [*(t for t in self._started if t > time.monotonic() - _OFTEN_WITHIN), time.monotonic()]
        self._process = _start_head(self._spec, self._run)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line.strip() else {}

    def keep_up(self) -> bool:
        """Restarts the head if it has died. Returns False if it dies too often or does not start."""
        assert self._process is not None
        if self._process.poll() is None:
            return True
        return len(self._started) < _OFTEN and bool(self.start())

    def end(self) -> None:
        if self._process is not None:
            _heads.end_process(self._process)
        shutil.rmtree(self._run, ignore_errors=True)


def _start_head(spec: dict[str, Any], run: str) -> subprocess.Popen[bytes]:
    host = "127.0.0.1" if spec["ip"] in ("127.0.0.1", "localhost", "") else "0.0.0.0"
    command = [
        _core.program_path(),
        "up",
        "--json",
        "--listen",
        f"{host}:{spec['port']}",
        "--store",
        os.path.join(run, "store"),
        "--gpus",
        spec["gpus"],
        "--with-stdin",
        "--labels",
        spec["labels"],
    ]
    if spec["metrics_port"] is not None:
        command += ["--metrics", f"{host}:{spec['metrics_port']}"]
    if spec["resources"]:
        command += ["--resources", spec["resources"]]
    if spec["name"]:
        command += ["--name", "".join(c if c.isalnum() or c in "_-" else "-" for c in spec["name"])[:64]]
    env = {**os.environ, "XDG_STATE_HOME": run, "XDG_RUNTIME_DIR": run}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True)


def _serve(spec: Mapping[str, object], said: dict[str, Any], ended: threading.Event, head: Head) -> int:
    host, port = _session._address(said["url"])
    ip = spec["ip"] or host
    access = {"url": said["url"], "token_file": said.get("token_file", ""), "fingerprint": said.get("fingerprint", "")}
    path = _heads.write("head", str(port), host=host, ip=ip, port=port, stays=bool(spec["stay"]), **access)
    try:
        print(json.dumps({"address": f"{ip}:{port}", "file": path, **access}), flush=True)
        if not spec["stay"]:
            threading.Thread(target=_until_closed, args=(ended,), daemon=True).start()
        while not ended.wait(0.5):
            if not head.keep_up():
                return 1
        return 0
    finally:
        _heads.remove(path)


def _until_closed(ended: threading.Event) -> None:
    """Sets ended when the process that started this one closes the pipe or dies."""
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    ended.set()


if __name__ == "__main__":
    sys.exit(main())
