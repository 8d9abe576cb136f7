"""Spares: worker processes that are started in advance, and take over a rank by one message of their agent
(nodes/spares.go)."""

from __future__ import annotations

import array
import base64
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypedDict

import msgpack

_VARIABLE = "TROUPE_SPARE"  # as in nodes/spares.go
_CONTROL = 3  # descriptor of the agent's socket

# The part of a worker's configuration that a spare uses. A class has a path, or is pickled.
Config = TypedDict(
    "Config",
    {
        "variables": dict[str, str],
        "sys_path": list[str],
        "warm": list[str],
        "pickle": bool,
        "class": dict[str, Any],
    },
    total=False,
)


class _Takeover(TypedDict):
    env: dict[str, str]
    dir: str


def become_worker(prepare: Callable[[Config], None]) -> None:
    """Returns in a spare when it is a worker, with the environment, folder and output of that; immediately in any other
    process. The Go library is not loaded before, because it reads the environment when it is."""
    path = os.environ.pop(_VARIABLE, None)
    if path is None:
        return
    with socket.socket(fileno=_CONTROL) as control:
        control.set_inheritable(False)
        folder = os.getcwd()
        try:
            prepare(_config(path))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        control.sendall(b"ready\n")
        message, (stdout, stderr) = _take(control)
    sys.stdout.flush()
    sys.stderr.flush()
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(message["env"])
    os.chdir(message["dir"])
    if sys.path and sys.path[0] == folder:
        sys.path[0] = os.getcwd()


def _config(path: str) -> Config:
    """Returns the configuration in an assignment file, which is that of all workers of the role."""
    with open(path) as file:
        assignment = msgpack.unpackb(base64.b64decode(json.load(file)["assignment"]), strict_map_key=False)
    config = assignment["config"]
    if not isinstance(config, dict):  # of a role that a driver in another language has created
        return {"class": {"path": assignment["class"]}}
    found: Config = assignment["config"]
    return found


def _take(control: socket.socket) -> tuple[_Takeover, tuple[int, int]]:
    """Waits for the message of the agent. The end of the socket ends the process: it is not needed."""
    numbers = array.array("i")
    first, extra, _, _ = control.recvmsg(1, socket.CMSG_SPACE(2 * numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    if not first or len(numbers) != 2:
        os._exit(0)
    with control.makefile("rb") as file:
        text = file.read()
    if not text:
        os._exit(0)
    return json.loads(text), (numbers[0], numbers[1])
