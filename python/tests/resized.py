"""Workers of roles that are resized."""

import os
import threading
import time

import troupe
from troupe import Dispatch, register


def check(pool):
    """Returns what is wrong with the answers of a pool that was loaded with 7."""
    rows = list(range(24))
    got = pool.rows(rows, timeout=60)
    wrong = [] if [x for x, _ in got] == rows else [f"rows {got}"]
    if {loaded for _, loaded in got} != {7}:
        wrong.append(f"an answer of a rank that was not loaded: {got}")
    ranks = pool.who(timeout=60)
    if ranks != list(range(len(ranks))):
        wrong.append(f"ranks of two sizes: {ranks}")
    return wrong


class Pool(troupe.Worker):
    loaded = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, replay=True)
    def load(self, value):
        self.loaded = value

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def rows(self, rows):
        return [(x, self.loaded) for x in rows]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    def slow(self, seconds):
        time.sleep(seconds)
        return self.rank


class Caller(troupe.Worker):
    """Calls a pool until it is told to end."""

    def begin(self, pool):
        self.wrong, self.stop, self.made = [], threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.call, args=(pool,))
        self.thread.start()
        return self.made.wait(60)

    def call(self, pool):
        while not self.stop.is_set():
            try:
                self.wrong.extend(check(pool))
                self.made.set()
            except Exception as err:
                self.wrong.append(repr(err))

    def end(self):
        self.stop.set()
        self.thread.join()
        return self.wrong
