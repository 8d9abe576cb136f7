"""The wheel carries the Go program and library: it is for one platform, any Python 3, and the glibc they need."""

import os
import re
import sys

from setuptools import setup
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    from wheel.bdist_wheel import bdist_wheel

BIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "troupe", "bin")


def glibc_needed() -> tuple[int, int]:
    """The newest glibc that a symbol in one of the binaries is of."""
    newest = (2, 17)
    for name in os.listdir(BIN):
        with open(os.path.join(BIN, name), "rb") as f:
            for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", f.read()):
                newest = max(newest, (int(major), int(minor)))
    return newest


class Platform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        if sys.platform == "linux" and os.path.isdir(BIN):
            major, minor = glibc_needed()
            platform = f"manylinux_{major}_{minor}_{platform.partition('linux_')[2]}"
        return "py3", "none", platform


setup(distclass=Platform, cmdclass={"bdist_wheel": Wheel})
