"""The module under test: troupe.ray, or with TROUPE_TEST_RAY=ray the real Ray, whose behaviour the tests expect."""

import importlib
import os
import time

NAME = os.environ.get("TROUPE_TEST_RAY", "troupe.ray")
REAL = NAME == "ray"
ray = importlib.import_module(NAME)


def module(name):
    """ray.NAME of the module under test."""
    return importlib.import_module(f"{NAME}.{name}")


def eventually(condition, what, seconds=20.0):
    """Waits until the condition holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


if REAL:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
