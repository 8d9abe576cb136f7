"""The `ray` command: status, start, stop. It is on PATH in programs run by `python -m troupe.ray`, and in shells once
`python -m troupe.ray install-cli` was run; elsewhere, use `python -m troupe.ray.scripts`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import stat
import sys
from typing import Any

from .. import _heads, _labels

# Options of `ray start` that are accepted without effect.
_WITHOUT_EFFECT = (
    "--dashboard-port",
    "--dashboard-host",
    "--include-dashboard",
    "--object-store-memory",
    "--temp-dir",
    "--redis-password",
    "--object-manager-port",
    "--node-manager-port",
    "--min-worker-port",
    "--max-worker-port",
    "--worker-port-list",
    "--ray-client-server-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--ray-debugger-external",
    "--system-config",
    "--plasma-directory",
    "--runtime-env-agent-port",
)
_REFUSED = {
    "job": "run the script itself: `python -m troupe.ray SCRIPT`",
    "submit": "`python -m troupe.ray SCRIPT`",
    "up": "`troupe up`, and `troupe join` on each machine",
    "down": "end the agents, then the head",
    "attach": "ssh",
    "exec": "ssh",
    "memory": "`troupe status`",
    "timeline": "`troupe timeline`",
    "logs": "`troupe logs`",
    "list": "`troupe status`",
    "get": "`troupe status`",
    "summary": "`troupe status`",
    "dashboard": "`troupe up --metrics`",
    "debug": "`breakpoint()` and `troupe debug`",
    "stack": "`troupe stacks`",
    "microbenchmark": "`make bench-python`",
    "monitor": "`troupe status`",
    "health-check": "`ray status`",
    "symmetric-run": "`ray start` on each machine, then the script",
}


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in _REFUSED:
        print(f"ray {given[0]} is not in troupe.ray; nearest in Troupe: {_REFUSED[given[0]]}", file=sys.stderr)
        return 2
    args = _parser().parse_args(given)
    try:
        return int(args.do(args))
    except (ConnectionError, OSError, ValueError) as err:
        print(f"ray: {err}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ray", description="Sessions of troupe.ray on this machine.")
    parser.add_argument("--version", action="version", version="ray, version 2.60.0 (troupe.ray)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    start = commands.add_parser("start", help="start a head, or add this machine to one")
    start.set_defaults(do=_start)
    start.add_argument("--head", action="store_true")
    start.add_argument("--address", default="")
    start.add_argument("--port", type=int, default=None)
    start.add_argument("--node-ip-address", default="")
    start.add_argument("--node-name", default="")
    start.add_argument("--num-cpus", type=float, default=None)
    start.add_argument("--num-gpus", type=float, default=None)
    start.add_argument("--memory", type=float, default=None)
    start.add_argument("--resources", default="{}", help="a JSON object of amounts by name")
    start.add_argument("--labels", default="", help="labels of the node: key=value,key=value, or a JSON object")
    start.add_argument("--metrics-export-port", type=int, default=None, help="of the page and the metrics of the head")
    start.add_argument("--block", action="store_true")
    for ignored in ("--disable-usage-stats", "--no-monitor", "--no-redirect-output", "-v", "--verbose"):
        start.add_argument(ignored, action="store_true", help="without effect")
    start.add_argument("--log-style", help="without effect")
    for ignored in _WITHOUT_EFFECT:
        start.add_argument(ignored, help="without effect")
    stop = commands.add_parser("stop", help="end the sessions and nodes of this user on this machine")
    stop.set_defaults(do=_stop)
    stop.add_argument("-f", "--force", action="store_true")
    stop.add_argument("-g", "--grace-period", type=float, default=16.0)
    stop.add_argument("-v", "--verbose", action="store_true")
    status = commands.add_parser("status", help="nodes and resources; exit code 1 if there is no session")
    status.set_defaults(do=_status)
    status.add_argument("--address", default=None)
    status.add_argument("-v", "--verbose", action="store_true")
    status.add_argument("--redis-password", help="without effect")
    return parser


def _start(args: argparse.Namespace) -> int:
    if args.head == bool(args.address):
        raise ValueError("give --head to start a head, or --address=HOST:PORT to add this machine to one")
    amounts = {
        "num_cpus": args.num_cpus,
        "num_gpus": args.num_gpus,
        "memory": args.memory,
        "resources": json.loads(args.resources),
        "labels": _labels_of(args.labels),
    }
    if args.head:
        ip = args.node_ip_address or "127.0.0.1"
        port = 6379 if args.port is None else args.port
        process, said = _heads.start_head(
            port=port, name=args.node_name, ip=ip, metrics_port=args.metrics_export_port, stay=not args.block, **amounts
        )
        print(
            f'Ray runtime started.\n\nTo connect to it: ray.init(address="{said["address"]}"), or `export '
            f"RAY_ADDRESS={said['address']}`."
        )
        print(_how_to_add(said))
    else:
        access = _heads.resolve(args.address)
        if access is None:
            raise ConnectionError(f"there is no head at {args.address}")
        ip = args.node_ip_address or _heads.own_address(access["url"])
        name = "".join(c if c.isalnum() or c in "_-" else "-" for c in args.node_name)[:64]
        process, said = _heads.join(access, name=name, ip=ip, stay=not args.block, **amounts)
        print(f"Ray runtime started.\n\nThis node is {said['name']}.")
    print(f"Its warnings: {said['log']}\nTo end it: ray stop", flush=True)
    if args.block and process is not None:
        try:
            return process.wait()
        except KeyboardInterrupt:
            _heads.end_process(process)
    return 0


def _how_to_add(said: dict[str, Any]) -> str:
    """Returns the whole command that adds a node to a head. The token itself is not printed."""
    join = f"ray start --address='{said['address']}'"
    if not said.get("fingerprint"):
        return f"To add a node on this machine:\n  {join}\nOther machines reach a head with --node-ip-address."
    token = shlex.quote(said["token_file"])
    return (
        f"To add a node, copy the file {token} to its machine, for its user alone, and run there:\n"
        f'  TROUPE_FINGERPRINT={said["fingerprint"]} TROUPE_TOKEN="$(cat {token})" {join}'
    )


def _labels_of(text: str) -> dict[str, str]:
    if text.startswith("{"):
        return _labels.check_labels(json.loads(text))
    pairs = [pair.split("=") for pair in text.split(",") if pair.strip()]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"Label string is not a key-value pair: {'='.join(pair)}")
    return _labels.check_labels({key.strip(): value.strip() for key, value in pairs})


def _stop(args: argparse.Namespace) -> int:
    found, killed = _heads.stop(args.force, args.grace_period)
    if not found:
        print("Did not find any active Ray processes.")
    else:
        print(f"Stopped all {found} Ray processes." + (f" {killed} of them had to be killed." if killed else ""))
    return 0


def _status(args: argparse.Namespace) -> int:
    from .. import _session, _state

    access = _heads.resolve(args.address or "auto")
    assert access is not None
    _session.init(address=args.address or "auto", namespace="ray-status")
    try:
        nodes = _state.control_call("placement", "nodes")
        waiting = _state.control_call("placement", "waiting")
        groups = [g for g in _state.control_call("placement", "groups") if g["state"] in ("PENDING", "RESCHEDULING")]
    finally:
        _session.shutdown()
    print("======== Autoscaler status ========\nNode status\n-----------------------------------\nActive:")
    for node in nodes:
        if node["alive"]:
            print(f" 1 {node['name']} ({node['node_id']})")
    print("Pending:\n (no pending nodes)\n\nResources\n-----------------------------------\nTotal Usage:")
    total: dict[str, list[float]] = {}
    for node in nodes:
        for name, amount in node["total"].items() if node["alive"] else ():
            if not name.startswith("node:"):
                used = total.setdefault(name, [0.0, 0.0])
                used[0] += amount - node["free"].get(name, 0.0)
                used[1] += amount
    for name, (used_amount, all_of_it) in sorted(total.items()):
        print(f" {_amount(name, used_amount)}/{_amount(name, all_of_it)} {name}")
    print("\nPending Demands:")
    rows = [json.dumps(demand) + ": 1+ pending tasks/actors" for demand in waiting]
    rows += [json.dumps(g["bundles"]) + f" ({g['strategy']}): 1+ pending placement groups" for g in groups]
    print("\n".join(" " + row for row in rows) if rows else " (no resource demands)")
    return 0


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.2f}GiB" if name in ("memory", "object_store_memory") else f"{amount:g}"


def install() -> str:
    """Installs the command for programs run by `python -m troupe.ray`. Returns the folder to put on PATH."""
    folder = os.path.join(_heads.folder(), "bin")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, "ray")
    text = f'#!/bin/sh\nPYTHONPATH={_heads._python_path()!r} exec {sys.executable!r} -m {__package__} "$@"\n'
    if _read(path) != text:
        _write(path, text, stat.S_IRWXU)
    return folder


def install_in(folder: str) -> str:
    """Installs the command in a folder, which becomes the `ray` of a shell that has it on PATH. Returns its path."""
    if not os.path.isdir(folder):
        raise ValueError(f"{folder} is no folder: give one that is on PATH")
    path = os.path.join(folder, "ray")
    text = f'#!/bin/sh\n{_MARK}exec {sys.executable!r} -m {__package__} "$@"\n'
    there = _read(path)
    if (there is None and os.path.lexists(path)) or (there is not None and _MARK not in there):
        raise ValueError(f"{path} is another program, such as Ray's own: remove it, or give another folder")
    _write(path, text, 0o755)
    return path


_MARK = "# installed by python -m troupe.ray install-cli; remove this file to uninstall it\n"


def _read(path: str) -> str | None:
    """Returns the text of a file, or None if it cannot be read as one."""
    try:
        with open(path) as f:
            return f.read()
    except (OSError, UnicodeDecodeError):
        return None


def _write(path: str, text: str, mode: int) -> None:
    """Writes an executable that does not exist half written."""
    fresh = f"{path}.{os.getpid()}"
    with open(fresh, "w") as f:
        f.write(text)
    os.chmod(fresh, mode)
    os.replace(fresh, path)


cli = main
