"""Sessions on this machine that several drivers share: a head, and additional nodes.

`ray start --head` and cluster_utils.Cluster start a `_head` process, which keeps `troupe up` running. `ray start
--address` and Cluster.add_node run `troupe join`. Each process writes a file to this user's folder, where drivers find
the address and the token, and `ray stop` finds the processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from .. import _core
from ._labels import HOST_LABEL, IP_LABEL

_START = 60.0  # seconds a process has to report that it is ready


def folder() -> str:
    """Returns the folder of this user's sessions, creating it if needed."""
    path = os.path.join(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), f"troupe-ray-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.stat(path).st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; set RAY_TMPDIR to a folder of your own")
    return path


def known(kind: str = "") -> list[dict[str, Any]]:
    """Returns the running processes announced on this machine, newest first: heads ("head"), joined nodes ("node") and
    sessions started by a driver's init ("session")."""
    found = []
    for name in os.listdir(folder()):
        path = os.path.join(folder(), name)
        try:
            with open(path) as f:
                entry = json.load(f)
        except (OSError, ValueError):
            continue
        if not alive(entry["pid"]):
            remove(path)
            continue
        if kind in ("", entry["kind"]):
            found.append({**entry, "file": path})
    return sorted(found, key=lambda e: -float(e["since"]))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def remove(path: str) -> None:
    try:
        os.remove(path)
    except OSError:
        pass


def write(kind: str, file: str, **entry: object) -> str:
    """Announces a process of this machine and returns the path of its file."""
    path = os.path.join(folder(), f"{kind}-{file}.json")
    with open(path + ".new", "w") as f:
        json.dump({"kind": kind, "pid": os.getpid(), "since": time.time(), **entry}, f)
    os.replace(path + ".new", path)
    return path


def _same(address: str, entry: Mapping[str, object]) -> bool:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return str(entry["port"]) == port and (host in ("127.0.0.1", "localhost", entry["host"], entry["ip"]))


def resolve(address: str | None) -> dict[str, Any] | None:
    """Returns the url, token_file and fingerprint for troupe.init to reach the session at address, or None if the
    driver is to start its own. Raises ConnectionError if address is "auto" and no session is running."""
    if address == "local":
        return None
    if address in (None, ""):
        address = os.environ.get("RAY_ADDRESS") or None
        if address is None:
            running = [
                entry for entry in known("head") if entry.get("stays")
            ]  # started by `ray start`, not by a Cluster object
            return _access(running[0]) if running else None
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        running = known("head") + known("session")
        if not running:
            raise ConnectionError(
                "Could not find any running Ray instance. Please specify the one to connect to by setting `--address` "
                "flag or `RAY_ADDRESS` environment variable."
            )
        return _access(running[0])
    for entry in known("head") + known("session"):
        if _same(str(address), entry):
            return _access(entry)
    scheme = "tls" if os.environ.get("TROUPE_FINGERPRINT") else "nats"
    return {"url": address if "://" in str(address) else f"{scheme}://{address}"}


def _access(entry: Mapping[str, object]) -> dict[str, object]:
    return {k: entry[k] for k in ("url", "token_file", "fingerprint") if entry.get(k)}


def devices(num_gpus: float | None) -> str:
    """Returns the --gpus argument for a number of GPUs: the machine's own if it has exactly that many, simulated ones
    otherwise."""
    if num_gpus is None:
        return "auto"
    count = int(num_gpus)
    if count == 0:
        return "none"
    try:
        real = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        real = 0
    return "auto" if real == count else f"sim:1x{count}"


def declared(
    num_cpus: float | None,
    resources: dict[str, float] | None,
    memory: float | None,
    object_store_memory: float | None = None,
) -> str:
    """Returns the --resources argument for the amounts that a node declares, or an empty string."""
    override = json.loads(os.environ.get("RAY_OVERRIDE_RESOURCES") or "{}")
    override.pop("GPU", None)
    amounts = {
        **(resources or {}),
        **({} if num_cpus is None else {"CPU": int(num_cpus)}),
        **({} if memory is None else {"memory": f"{int(memory)}"}),
        **({} if object_store_memory is None else {"object_store_memory": int(object_store_memory)}),
        **override,
    }
    amounts.pop("object_store_memory", None)  # there is no separate object store
    return json.dumps(amounts) if amounts else ""


def node_labels(ip: str, labels: dict[str, str] | None) -> str:
    """Returns the --labels argument of a node: its own labels, its address, and the name of its host."""
    own = {IP_LABEL: ip or "127.0.0.1", HOST_LABEL: socket.gethostname()}
    return ",".join(f"{key}={value}" for key, value in {**(labels or {}), **own}.items())


def override_gpus(num_gpus: float | None) -> float | None:
    override = json.loads(os.environ.get("RAY_OVERRIDE_RESOURCES") or "{}")
    gpus: float | None = override.get("GPU", num_gpus)
    return gpus


def start_head(
    *,
    port: int = 0,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: dict[str, float] | None = None,
    memory: float | None = None,
    name: str = "",
    ip: str = "127.0.0.1",
    labels: dict[str, str] | None = None,
    metrics_port: int | None = None,
    stay: bool = False,
) -> tuple[subprocess.Popen[bytes] | None, dict[str, Any]]:
    """Starts a head. stay: the head outlives this process and runs until stop(). metrics_port: of its page and metrics;
    None: it has none."""
    spec = {
        "port": port,
        "gpus": devices(override_gpus(num_gpus)),
        "resources": declared(num_cpus, resources, memory),
        "name": name,
        "ip": ip,
        "labels": node_labels(ip, labels),
        "metrics_port": metrics_port,
        "stay": stay,
    }
    command = [sys.executable, "-m", f"{__package__}._head", json.dumps(spec)]
    return _start(command, stay, env={**_clean_environment(), "PYTHONPATH": _python_path()})


def join(
    entry: dict[str, Any],
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: dict[str, float] | None = None,
    memory: float | None = None,
    name: str = "",
    ip: str = "127.0.0.1",
    labels: dict[str, str] | None = None,
    stay: bool = False,
) -> tuple[subprocess.Popen[bytes] | None, dict[str, Any]]:
    """Starts an agent that offers this machine, possibly with simulated resources, to a head."""
    name = name or f"node-{os.urandom(6).hex()}"
    run = tempfile.mkdtemp(prefix="troupe-ray-node-")
    command = [
        _core.program_path(),
        "join",
        entry["url"],
        "--json",
        "--name",
        name,
        "--dir",
        run,
        "--gpus",
        devices(override_gpus(num_gpus)),
        "--labels",
        node_labels(ip, labels),
        "--wait",
        "20s",
    ]
    if amounts := declared(num_cpus, resources, memory):
        command += ["--resources", amounts]
    if entry.get("token_file"):
        command += ["--token-file", entry["token_file"]]
    if entry.get("fingerprint"):
        command += ["--fingerprint", entry["fingerprint"]]
    keep = {k: v for k, v in os.environ.items() if k in ("TROUPE_TOKEN", "TROUPE_FINGERPRINT", "TROUPE_CREDS")}
    process, said = _start(command, stay, env={**_clean_environment(), **keep})
    assert process is not None
    path = write("node", str(process.pid), pid=process.pid, node=name, address=entry["url"], run=run)
    return process, {**said, "name": name, "run": run, "file": path}


def own_address(url: str) -> str:
    """Returns the address of this machine that it uses to reach a head, and at which the head's other nodes reach
    it."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                (host.strip("[]"), int(port or 1))
            )  # connect on a UDP socket sends nothing; the kernel only chooses the source address
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}


def _python_path() -> str:
    """Returns a PYTHONPATH with which the head imports this same package."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.pathsep.join(dict.fromkeys([package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])).rstrip(
        os.pathsep
    )


def _start(command: list[str], stay: bool, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], dict[str, object]]:
    """Starts a program and waits for the line of JSON that it prints when ready."""
    handle, path = tempfile.mkstemp(prefix="troupe-ray-", suffix=".log")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if stay else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=handle,
        env=env,
        start_new_session=True,
    )
    os.close(handle)
    assert process.stdout is not None
    line = _first_line(process)
    if not line.strip():
        end_process(process)
        with open(path, errors="replace") as f:
            text = f.read()[-2000:]
        remove(path)
        raise ConnectionError(f"{command[0]} did not start: {text.strip() or 'no output'}")
    process.stdout.close()
    return process, {**json.loads(line), "log": path}


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    import selectors

    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if selector.select(_START) else b""


def end_process(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """Ends a process started by start_head or join: by closing its standard input and SIGTERM, then by SIGKILL."""
    if process.stdin is not None:
        try:
            process.stdin.close()
        except OSError:
            pass
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(wait)
            return
        except subprocess.TimeoutExpired:
            continue


def stop(force: bool = False, patience: float = 16.0) -> tuple[int, int]:
    """Ends this user's heads and nodes on this machine. Returns the number of processes and of those killed because
    they outlived patience."""
    entries = sorted(
        (e for e in known() if e["kind"] != "session"), key=lambda e: e["kind"] == "head"
    )  # nodes before their head
    for entry in entries:
        _signal(entry["pid"], signal.SIGKILL if force and entry["kind"] == "node" else signal.SIGTERM)
    deadline, killed = time.monotonic() + patience, 0
    for entry in entries:
        while alive(entry["pid"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if alive(entry["pid"]):
            killed += 1
            _signal(entry["pid"], signal.SIGKILL)
        remove(entry["file"])
    return len(entries), killed


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
