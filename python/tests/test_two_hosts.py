"""Large values between two hosts: the tests of two_hosts.py, in a process of their own, since a process has one
session."""

import os
import subprocess
import sys

from conftest import HERE


def test_large_values_between_two_hosts():
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", os.path.join(HERE, "two_hosts.py")]
    p = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110)
    assert p.returncode == 0 and "2 passed" in p.stdout, p.stdout + p.stderr
