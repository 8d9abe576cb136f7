"""Runs programs and tests of frameworks on Ray and on troupe.ray, and prints what came out side by side.

    frameworks.py --gits DIR --python PYTHON [NAME ...]

DIR holds git directories of the frameworks, under any name; the one with the pinned commit of frameworks.json is used.
PYTHON has Ray, torch, pytest, pytest-timeout and what the frameworks import; `python3 -m pip install` them into an
environment outside of this tree. Nothing of the frameworks is kept: their files are extracted to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field

from check import HERE, PACKAGE, extract

RUNTIMES = ("ray", "troupe.ray")


@dataclass
class Outcome:
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    said: str = ""
    seconds: float = 0.0

    @property
    def of(self) -> str:
        return f"{len(self.passed)} of {len(self.passed) + len(self.failed)}"


def run(python: str, suite: dict, folder: str, runtime: str, logs: str) -> Outcome:
    outcome, start = Outcome(), time.monotonic()
    launch = [python] if runtime == "ray" else [python, "-m", "troupe.ray"]
    for number, test in enumerate(suite["run"]):
        report = os.path.join(logs, f"{runtime}-{number}.xml")
        if test.endswith(".py") and os.path.exists(os.path.join(HERE, test)):
            command = [*launch, os.path.join(HERE, test), report]
        else:
            chosen = test.split(" ")  # a file, and options of pytest such as --deselect
            settings = ["-p", "no:cacheprovider", "-o", "addopts=", "--timeout=150", f"--junitxml={report}"]
            command = [*launch, "-m", "pytest", "-q", *settings, *suite.get("options", []), *chosen]
        log = os.path.join(logs, f"{runtime}-{number}.log")
        with open(log, "w") as output:
            process = subprocess.Popen(
                command,
                cwd=os.path.join(folder, suite.get("cwd", "")),
                env=environment(suite, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(suite.get("seconds", 900))
            except subprocess.TimeoutExpired:
                outcome.failed[test] = f"not over after {suite.get('seconds', 900)} s"
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        if not os.path.exists(report):
            with open(log, errors="replace") as f:
                outcome.failed.setdefault(test, (f.read().strip().splitlines() or ["no output"])[-1])
            continue
        read(report, outcome)
    outcome.seconds = time.monotonic() - start
    return outcome


def read(report: str, outcome: Outcome) -> None:
    """What a report in the format of JUnit says; skipped tests do not count. A property `said` is for the table."""
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            outcome.failed[name] = bad.get("message", "")
        elif case.find("skipped") is None:
            outcome.passed.append(name)
        for said in case.iter("property"):
            outcome.said = said.get("value", "") if said.get("name") == "said" else outcome.said


def environment(suite: dict, folder: str) -> dict[str, str]:
    path = [os.path.join(HERE, "absent"), *(os.path.join(folder, p) for p in suite.get("path", ["."])), PACKAGE]
    common = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "HF_HUB_OFFLINE": "1"}
    common |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    common |= {"RAY_memory_monitor_refresh_ms": "0", "FRAMEWORKS_ABSENT": ",".join(suite.get("absent", []))}
    return {**os.environ, **common, **suite.get("env", {}), "PYTHONPATH": os.pathsep.join(path)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gits", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--logs", help="a folder for reports and output; a temporary one, which is kept, without it")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    with open(os.path.join(HERE, "frameworks.json")) as f:
        suites = json.load(f)
    if unknown := set(asked.names) - set(suites):
        parser.error(f"no framework {', '.join(sorted(unknown))}: there are {', '.join(suites)}")
    top = os.path.abspath(asked.logs or tempfile.mkdtemp(prefix="frameworks-"))
    rows, worse = [], False
    for name in asked.names or suites:
        suite = suites[name]
        logs = os.path.join(top, name)
        os.makedirs(logs, exist_ok=True)
        outcomes = []
        for runtime in RUNTIMES:
            with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
                extract(asked.gits, suite, folder)
                outcomes.append(run(os.path.abspath(asked.python), suite, folder, runtime, logs))
            for test, why in outcomes[-1].failed.items():
                print(f"{name} on {runtime}: {test}: {why.splitlines()[0] if why else 'failed'}", file=sys.stderr)
        ray, troupe = outcomes
        worse |= not set(ray.passed) <= set(troupe.passed) or ray.said != troupe.said or not ray.passed
        same = "" if not ray.said else ray.said if ray.said == troupe.said else f"{ray.said}; {troupe.said}"
        cells = [f"{name} ({suite['commit'][:8]})", suite["what"], ray.of, troupe.of, same]
        rows.append(f"| {' | '.join(cells)} | {ray.seconds:.0f} | {troupe.seconds:.0f} |")
        print(rows[-1], file=sys.stderr, flush=True)
    print("| framework | what | on Ray | on troupe.ray | said by both | s, Ray | s, troupe.ray |")
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")
    print(f"output: {top}", file=sys.stderr)
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
