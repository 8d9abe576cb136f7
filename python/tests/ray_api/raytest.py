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


def eventually(condition, what, seconds=90.0):
    """Waits until the condition holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


class Counted:
    """Counts how often it is encoded; it arrives as "value"."""

    def __init__(self):
        self.encoded = 0

    def __reduce__(self):
        self.encoded += 1
        return str, ("value",)


def roles(actors):
    """The roles of the processes of Troupe's actors."""
    from troupe.ray.actor import client_of

    return [client_of(a._info.actor_id)._role for a in actors]


if REAL:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
