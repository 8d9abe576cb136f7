"""Workers that raise, for the tests of errors."""

import os
import sys
import threading

import troupe
from troupe import register


class Custom(Exception):
    """Its constructor takes other arguments than those it passes on."""

    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint


class Slotted(Exception):
    def __init_subclass__(cls, **kwargs):
        raise TypeError("this class has no subclasses")


class Raises(troupe.Worker):
    def value_error(self):
        raise ValueError("bad luck", 7)

    def key_error(self):
        return {}["k"]

    def chained(self):
        try:
            self.key_error()
        except KeyError as err:
            raise Custom(5, hint=["try", "again"]) from err

    def missing_file(self):
        return open("/nonexistent/file")

    def no_memory(self):
        raise MemoryError("no room")

    def no_memory_for_an_array(self):
        import numpy as np

        return np.zeros(1 << 45)

    def lock_argument(self):
        raise ValueError("holds a lock", threading.Lock())

    def no_subclass(self):
        raise Slotted("alone")

    def unknown_type(self):
        made = type("Made", (Exception,), {"__module__": "module_of_the_worker"})
        raise made("known there")

    def call_and_fail(self, other, method):
        return getattr(other, method)()

    def leave(self, code):
        sys.exit(code)

    @register(lane="control")
    def leave_in_control(self, code):
        sys.exit(code)

    @register(concurrency=2)
    def leave_in_lane(self, code):
        sys.exit(code)

    def health(self):
        return "the worker's own"

    def with_timeout(self, timeout, blocking="default", wait=None):
        return [timeout, blocking, wait]

    def pair(self):
        return 1, "two"

    def wait_on(self, rank, path):
        """The rank waits until the file exists."""
        import time

        while self.rank == rank and not os.path.exists(path):
            time.sleep(0.01)
        return self.rank

    def configure(self, config):
        self.configured = config

    def configuration(self):
        return self.configured


class RaisesAsync:
    async def leave(self, code):
        sys.exit(code)


class Exits(troupe.Worker):
    def __init__(self, *_):
        sys.exit("nothing to do here")
