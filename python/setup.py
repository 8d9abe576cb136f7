"""The wheel carries the Go program and library: it is for one platform, any Python 3, and the glibc they need."""

import os
import re
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    from wheel.bdist_wheel import bdist_wheel

HERE = os.path.dirname(os.path.abspath(__file__))
BIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "troupe", "bin")


def glibc_needed() -> tuple[int, int]:
    """The newest glibc that a symbol in one of the binaries is of."""
    newest = (2, 17)
    for name in os.listdir(BIN):
        with open(os.path.join(BIN, name), "rb") as f:
            for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", f.read()):
                newest = max(newest, (int(major), int(minor)))
    return newest


def version() -> str:
    """That of the program: make sets it. Otherwise that of the file VERSION of the repository."""
    if given := os.environ.get("TROUPE_VERSION"):
        return given
    with open(os.path.join(HERE, "..", "VERSION")) as f:
        return f.read().strip()


class Build(build_py):
    """Writes the version into the package that is built."""

    def run(self) -> None:
        super().run()
        path = os.path.join(self.build_lib, "troupe", "__init__.py")
        if not self.editable_mode and os.path.exists(path):
            with open(path) as f:
                text = f.read()
            with open(path, "w") as f:
                f.write(re.sub(r'^__version__ = ".*"$', f'__version__ = "{version()}"', text, flags=re.M))


class Platform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        if sys.platform == "linux" and os.path.isdir(BIN):
            major, minor = glibc_needed()
            machine = (
                os.environ.get("TROUPE_MACHINE") or platform.partition("linux_")[2]
            )  # make release builds for others too
            platform = f"manylinux_{major}_{minor}_{machine}"
        return "py3", "none", platform


setup(version=version(), distclass=Platform, cmdclass={"bdist_wheel": Wheel, "build_py": Build})
