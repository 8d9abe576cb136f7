"""Runs frameworks' own tests twice: as they are, and with Troupe's adapter in place of what they test.

    check.py --gits DIR --python PYTHON [--measure] [areal] [verl] [roll]

DIR holds git directories of the frameworks, under any name; the one with the pinned commit is used. PYTHON has the
frameworks' dependencies, pytest and pytest-timeout. --measure: calls by both in turns, instead of the tests. Nothing of
the frameworks is kept: their files are extracted to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(HERE))


def git_directory(gits: str, commit: str) -> str:
    """The git directory under gits, at most two folders deep, that has the commit."""
    for folder, names, _ in os.walk(gits):
        for path in [os.path.join(folder, name) for name in names]:
            if (
                os.path.exists(os.path.join(path, "HEAD"))
                and not subprocess.run(
                    ["git", f"--git-dir={path}", "cat-file", "-e", commit], capture_output=True
                ).returncode
            ):
                return path
        if os.path.relpath(folder, gits).count(os.sep) >= 1 or os.path.basename(folder) == "objects":
            names.clear()
    raise SystemExit(f"no git directory under {gits} has commit {commit}: fetch the repository there")


def extract(gits: str, suite: dict, into: str) -> None:
    source = git_directory(gits, suite["commit"])
    archive = subprocess.Popen(
        ["git", f"--git-dir={source}", "archive", suite["commit"], *suite["extract"]], stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", into], stdin=archive.stdout, check=True)
    if archive.wait():
        raise SystemExit(f"git archive of {suite['commit']} in {source} failed")


def environment(suite: dict, folder: str) -> dict[str, str]:
    return {**os.environ, **suite.get("env", {}), "PYTHONPATH": os.pathsep.join([folder, PACKAGE, HERE])}


def run(python: str, suite: dict, folder: str, plugin: str | None, name: str) -> dict[str, str]:
    """By test, its outcome; a process for each file of tests."""
    outcomes: dict[str, str] = {}
    files = dict.fromkeys(t.partition("::")[0] for t in suite["tests"])
    for file in files:
        tests = [t for t in suite["tests"] if t.partition("::")[0] == file]
        command = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-rA",
            "--tb=short",
            "--timeout",
            "200",
            "-p",
            plugin or suite["reference"],
            *tests,
        ]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(suite, folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        output = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # colours, which a suite's settings may turn on
        found = {t: o for o, t in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (\S+)", output, re.M)}
        missing = [t for t in tests if found.get(t) != "PASSED"]
        outcomes.update({t: found.get(t, "MISSING") for t in tests})
        if missing:
            print(output[-6000:], flush=True)
            print(f"{name}: not passed: {' '.join(missing)}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gits", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("frameworks", nargs="*")
    asked = parser.parse_args()
    with open(os.path.join(HERE, "suites.json")) as f:
        suites = json.load(f)
    failed = False
    for name in asked.frameworks or list(suites):
        suite = suites[name]
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
            extract(asked.gits, suite, folder)
            if asked.measure:
                command = [os.path.abspath(asked.python), os.path.join(HERE, suite["measure"]), name]
                failed |= bool(subprocess.run(command, cwd=folder, env=environment(suite, folder)).returncode)
                continue
            results = {}
            for label, plugin in ((suite["original"], None), (f"troupe.adapters.{name}", f"adapter_{name}")):
                start = time.monotonic()
                outcomes = run(os.path.abspath(asked.python), suite, folder, plugin, f"{name} on {label}")
                results[label] = sum(o == "PASSED" for o in outcomes.values())
                print(
                    f"{name}: {label} passed {results[label]} of {len(outcomes)} in {time.monotonic() - start:.0f} s",
                    flush=True,
                )
            failed |= results[f"troupe.adapters.{name}"] < len(suite["tests"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
