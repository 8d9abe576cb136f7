"""`python -m troupe.ray SCRIPT [ARGUMENTS]` or `python -m troupe.ray -m MODULE [ARGUMENTS]` runs a program with
troupe.ray as its `ray`. With `--adapter NAME` first, the classes of an adapter replace those of the framework. `python
-m troupe.ray install-cli [FOLDER]` puts the `ray` command into a folder, by default that of this interpreter's
programs.

The resolver's folder is put first on PYTHONPATH, so that `import ray` imports troupe.ray in every process of the
program, and a folder with the `ray` command first on PATH. TROUPE_RAY marks such a run and lists its adapters: 1, or
1,verl. Processes of the run inherit these variables.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import sysconfig
from importlib import import_module

_USAGE = """usage: python -m troupe.ray [--adapter NAME] SCRIPT [ARGUMENTS]
       python -m troupe.ray [--adapter NAME] -m MODULE [ARGUMENTS]
       python -m troupe.ray install-cli [FOLDER]    put the ray command into a folder of PATH"""
_HERE = os.path.dirname(os.path.abspath(__file__))


def prepare(adapters: list[str]) -> None:
    """Sets the environment of this process and its children, and imports troupe.ray as `ray`."""
    resolver = os.path.join(_HERE, "_resolver")
    package = os.path.dirname(os.path.dirname(_HERE))
    _first("PYTHONPATH", resolver)
    if os.path.basename(package) not in ("site-packages", "dist-packages"):
        _first("PYTHONPATH", package, after=resolver)
    from .scripts import scripts

    _first("PATH", scripts.install())
    inherited = os.environ.get("TROUPE_RAY", "").split(",")[1:]
    os.environ["TROUPE_RAY"] = ",".join(["1", *dict.fromkeys(inherited + adapters)])
    if resolver not in sys.path:
        sys.path.insert(0, resolver)
    import_module("ray")


def _first(variable: str, folder: str, after: str = "") -> None:
    entries = [e for e in os.environ.get(variable, "").split(os.pathsep) if e and e != folder]
    entries.insert(entries.index(after) + 1 if after in entries else 0, folder)
    os.environ[variable] = os.pathsep.join(entries)


def _adapter(name: str) -> str:
    from ..adapters._install import ADAPTERS

    if name not in ADAPTERS:
        sys.stderr.write(f"there is no adapter {name!r}; there are {', '.join(ADAPTERS)}\n")
        raise SystemExit(2)
    return name


def _install_cli(arguments: list[str]) -> None:
    from .scripts import scripts

    if len(arguments) > 1 or any(a.startswith("-") for a in arguments):
        sys.stderr.write(_USAGE + "\n")
        raise SystemExit(2)
    try:
        path = scripts.install_in(os.path.abspath(arguments[0] if arguments else sysconfig.get_path("scripts")))
    except (OSError, ValueError) as err:
        sys.stderr.write(f"install-cli: {err}\n")
        raise SystemExit(1) from None
    print(f"installed {path}; remove the file to uninstall it")
    found = shutil.which("ray")
    if found is None or not os.path.samefile(found, path):
        print(f"`ray` in this shell is {found or 'not found'}: put {os.path.dirname(path)} first on PATH")


def main() -> None:
    arguments = sys.argv[1:]
    adapters = []
    while arguments[:1] == ["--adapter"]:
        adapters.append(_adapter(arguments[1] if len(arguments) > 1 else ""))
        del arguments[:2]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write(_USAGE + "\n")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "install-cli" and not adapters:
        _install_cli(arguments[1:])
        return
    if arguments[0] == "-m":
        if len(arguments) < 2:
            sys.stderr.write(_USAGE + "\n")
            raise SystemExit(2)
        prepare(adapters)
        sys.argv = arguments[1:]
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    if arguments[0].startswith("-"):
        sys.stderr.write(f"there is no option {arguments[0]}; {_USAGE}\n")
        raise SystemExit(2)
    prepare(adapters)
    sys.argv = arguments
    script = os.path.abspath(arguments[0])
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
