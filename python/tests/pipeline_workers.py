"""Worker classes that are stages of pipelines."""

import asyncio
import os
import signal
import time

import numpy as np

import troupe


class ItemWorker(troupe.Worker):
    def double(self, value):
        return value * 2

    def folder(self):
        return os.getcwd()

    def odd(self, value):
        return value if value % 2 else None

    def fail(self, value):
        if value == "bad":
            raise ValueError(f"{value} luck")
        return value

    def split(self, item):
        """Several outputs of one item, each to its stream."""
        assert isinstance(item, troupe.Item)
        plain = f"{item.value} {item.key} {item.stream} {item.attempt} {item.version}"
        return [troupe.Item(plain, to="left"), troupe.Item([item.id], key="k2", to="right"), troupe.Item(3, to="right")]

    def add(self, group):
        return sum(item.value for item in group)

    def norm(self, array):
        return {"dtype": str(array.dtype), "sum": float(array.sum()), "back": array + 1}

    def object(self, value):
        return lambda: value

    def die_once(self, item):
        """Is killed at the first sight of some items."""
        value, folder = item.value
        if value % 40 == 7:
            try:
                os.close(os.open(os.path.join(folder, str(value)), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
        return value

    def hold(self, value):
        time.sleep(600)  # the test kills the worker

    def pid(self):
        return os.getpid()


class Plain:
    """Made by a file."""

    def __init__(self, config):
        self.by = config["by"]

    def times(self, item):
        return item.value * self.by


class Async:
    def __init__(self):
        self.over = {}

    def end(self, id):
        return self.over.setdefault(id, asyncio.Event())  # whoever comes first, the item or its abort

    async def generate(self, item):
        """Goes on until it is aborted, and then gives what it has."""
        await self.end(item.id).wait()
        return f"part of {item.value}"

    async def hold(self, id):
        """The same for a request."""
        await self.end(id).wait()
        return f"part of {id}"

    @troupe.register(lane="control")
    async def abort(self, id):
        self.end(id).set()


def array():
    return np.arange(50_000, dtype=np.float32)


class RequestWorker(troupe.Worker):
    """Answers requests."""

    def who(self, value, delay=0.0):
        time.sleep(delay)
        return value, self.rank

    def echo(self, value, named=None):
        return [value, named]

    def fail(self, text):
        raise KeyError(text)

    @troupe.register(lane="control")
    def pid(self):
        return os.getpid()
