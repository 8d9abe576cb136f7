"""Exceptions and values that are hard to put into words, and workers that raise and return them."""

import sys
import threading

import troupe
from troupe import register


class StrRaises(Exception):
    def __str__(self):
        raise RuntimeError("no text of this")


class NothingPrints(Exception):
    def __str__(self):
        raise ValueError("\udc80")

    __repr__ = __str__


class StrIsNoText(Exception):
    def __str__(self):
        return 3


class StrExits(Exception):
    def __str__(self):
        sys.exit(9)


class NoModule(Exception):
    __module__ = None


class StrangeNames(Exception):
    pass


StrangeNames.__qualname__ = "Strange\ud800"
StrangeNames.__module__ = "mod\ud801"


class NoClass(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class of this")


class Needs(Exception):
    """Cannot be made from a text."""

    def __init__(self, a, b):
        super().__init__(a, b)


class ExitsWhenMade(Exception):
    """Ends the process of whoever makes one from a text."""

    def __init__(self, lock):
        if isinstance(lock, str):
            sys.exit(7)
        super().__init__(lock)


def _chained():
    try:
        raise NothingPrints
    except NothingPrints as err:
        raise ValueError("the outer one") from err


def _noted():
    err = ValueError("with a note")
    err.__notes__ = ["\ud800", 3]
    raise err


def _in_strange_file():
    exec(compile("raise ValueError('in a strange file')", "\ud800.py", "exec"))


def _syntax():
    err = SyntaxError("\ud800")
    err.lineno, err.offset, err.text, err.filename = "x", object(), 3, b"\xff"
    raise err


def _raise(err):
    raise err


# By name: how it is raised, and what its caller must find in the error.
KINDS = {
    "lone surrogate": (lambda: _raise(ValueError("\ud800 alone")), "\\ud800 alone"),
    "str raises": (lambda: _raise(StrRaises("x")), "StrRaises"),
    "nothing prints": (lambda: _raise(NothingPrints("x")), "NothingPrints"),
    "str is no text": (lambda: _raise(StrIsNoText("x")), "StrIsNoText"),
    "str exits": (lambda: _raise(StrExits("x")), "StrExits"),
    "no module": (lambda: _raise(NoModule("of nowhere")), "of nowhere"),
    "strange names": (lambda: _raise(StrangeNames("of somewhere")), "of somewhere"),
    "no class": (lambda: _raise(NoClass("classless")), "classless"),
    "not to be pickled": (lambda: _raise(ExitsWhenMade(threading.Lock())), "unlocked"),
    "cannot be made again": (lambda: _raise(Needs("one", 2)), "one"),
    "huge": (lambda: _raise(ValueError("begins here " + "x" * 30_000_000 + " and ends here")), "begins here"),
    "with NULs": (lambda: _raise(ValueError("a\0b")), "a\0b"),
    "chained": (_chained, "the outer one"),
    "noted": (_noted, "with a note"),
    "strange file": (_in_strange_file, "in a strange file"),
    "syntax": (_syntax, "SyntaxError"),
    "own with odd details": (
        lambda: _raise(troupe.RefusedError("odd details", details={"a": StrRaises(), 3: "\ud800"})),
        "odd details",
    ),
    "own with odd message": (lambda: _raise(troupe.RefusedError(StrRaises())), "StrRaises"),
    "own of odd fields": (
        lambda: _raise(troupe.RefusedError("odd fields", role=object(), remote_traceback=b"\xff", details=3)),
        "odd fields",
    ),
}


class Unpicklable:
    def __reduce__(self):
        raise StrRaises

    __repr__ = StrRaises.__str__


class RaisesWhenLoaded:
    """Its pickle raises when it is read."""

    def __reduce__(self):
        return _raise, (NothingPrints("x"),)


def _cyclic():
    value = []
    value.append(value)
    return value


def generator():
    yield 1


# Values that do not travel.
VALUES = {
    "lone surrogate": lambda: "\ud800",
    "in a map": lambda: {"\ud800": 1},
    "not to be pickled": Unpicklable,
    "lock": threading.Lock,
    "generator": generator,
    "cyclic": _cyclic,
    "in a set": lambda: {"\ud800"},
}


class Worker(troupe.Worker):
    """Sync methods, on the main thread and beside it."""

    def fail(self, kind):
        KINDS[kind][0]()

    @register(lane="control")
    def fail_in_control(self, kind):
        KINDS[kind][0]()

    @register(concurrency=2)
    def fail_in_lane(self, kind):
        KINDS[kind][0]()

    def give(self, kind):
        return VALUES[kind]()

    @register(concurrency=2)
    def give_in_lane(self, kind):
        return VALUES[kind]()

    def take(self, value):
        return "taken"

    def leave(self, code):
        sys.exit(code)

    def tell(self, method, kind):
        return getattr(self.driver, method)(kind)

    def echo(self, x):
        return x


class Async:
    async def leave(self, code):
        sys.exit(code)

    async def fail(self, kind):
        KINDS[kind][0]()

    async def give(self, kind):
        return VALUES[kind]()

    async def take(self, value):
        return "taken"

    async def echo(self, x):
        return x


class Broken:
    """Cannot be made."""

    def __init__(self, kind):
        KINDS[kind][0]()


class BrokenClose(Worker):
    """Cannot be closed in order."""

    def close(self):
        raise NothingPrints


class Unspeakable:
    """Prints what is no text, and ends."""

    def leave(self, code):
        import os

        os.write(2, b"last words \xff\xfe\x00\n")
        sys.exit(code)
