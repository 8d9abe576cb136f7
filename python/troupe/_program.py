"""The command `troupe`: runs the Go program that the package contains."""

from __future__ import annotations

import os
import sys

from . import _core


def main() -> None:
    program = _core.program_path()
    os.execv(program, [program, *sys.argv[1:]])
