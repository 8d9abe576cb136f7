"""The two classes of the conformance suite (actors/actorstest) as Python plays them."""

import os
import threading

import troupe


class Exercise:
    def __init__(self, config=None):
        self._config = config
        self._events = []
        self._lock = threading.Condition()
        self._released = set()

    def _happen(self, event):
        with self._lock:
            self._events.append(event)
            self._lock.notify_all()
            return len(self._events)

    def _until(self, holds, call=None):
        """Waits until it holds; False: the call was cancelled first."""
        with self._lock:
            while not holds():
                if call is not None and call.cancelled:
                    return False
                self._lock.wait(0.005)
            return True

    def configure(self, config):
        self._config = config

    def echo(self, value):
        return value

    def args(self, *args, **kwargs):
        return [len(args), sorted(kwargs)]

    def double(self, n):
        if type(n) is not int:
            raise troupe.RefusedError(f"want int, not {type(n).__name__}")
        return 2 * n

    def note(self, event):
        return self._happen(event)

    def size(self, data):
        return len(data)

    def big(self, n):
        return bytes(i * 7 & 255 for i in range(256)) * (n // 256) + bytes(i * 7 & 255 for i in range(n % 256))

    def fail(self, message):
        raise RuntimeError(message)

    def panic(self, message):
        raise AssertionError(message)

    def block(self, key):
        if type(key) is not str:
            raise troupe.RefusedError("want str")
        self._happen("begin " + key)
        if self._until(lambda: key in self._released, troupe.current_call()):
            self._happen("end " + key)
            return key
        self._happen("cancel " + key)
        raise troupe.CancelledError("cancelled")

    def ignore(self, key):
        self._happen("begin " + key)
        if not self._until(lambda: key in self._released, troupe.current_call()):
            self._happen("cancel " + key)
            self._until(lambda: key in self._released)
        self._happen("end " + key)
        return key

    @troupe.register(concurrency=3)
    def meet(self, key):
        return self.block(key)

    @troupe.register(lane="control")
    def ping(self):
        return "pong"

    @troupe.register(lane="control")
    def events(self):
        with self._lock:
            return list(self._events)

    @troupe.register(lane="control")
    def release(self, key):
        with self._lock:
            self._released.add(key)
            self._lock.notify_all()

    @troupe.register(lane="control")
    def configured(self):
        return self._config

    @troupe.register(lane="control")
    def env(self, name):
        return os.environ.get(name, "")


def _await(self, event):
    if not self._until(lambda: event in self._events, troupe.current_call()):
        raise troupe.CancelledError("cancelled")


# The table's name for it is a keyword of Python's.
setattr(Exercise, "await", troupe.register(lane="control")(_await))


class Second:
    def __init__(self, config=None):
        if config == "fail":
            raise RuntimeError("told to fail")
        if config == "panic":
            raise AssertionError("told to panic")
        self._config = config

    def config(self):
        return self._config

    def where(self):
        call = troupe.current_call()
        return [call.object, int(os.environ["RANK"])]
