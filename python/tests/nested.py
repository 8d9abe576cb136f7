"""Workers that create workers, for test_nested."""

import os
import time

import troupe


class Leaf(troupe.Worker):
    """The lowest level."""

    def pid(self):
        return os.getpid()

    def apply(self, function, *args):
        return function(*args)

    def nap(self, seconds):
        time.sleep(seconds)

    def tell(self, method, *args):
        return getattr(troupe.driver(), method)(*args)


class Middle(troupe.Worker):
    """Creates leaves, and whatever else a driver creates."""

    def pid(self):
        return os.getpid()

    def grow(self, name="leaves", **config):
        self.leaves = troupe.Cluster(name, Leaf, worker_config=troupe.WorkerConfig(**{"world_size": 2, **config}))
        return self.leaves.execute_all_sync("pid")

    def leaf(self):
        return self.leaves.workers[0]

    def occupy(self):
        self.running = [w.nap.remote(60) for w in self.leaves.workers]

    def reserve(self, devices):
        self.reservation = troupe.Reservation([{"GPU": devices}])
        return self.reservation.nodes

    def serve_ledger(self, name=None):
        self.ledger = Ledger()
        return troupe.serve(self.ledger, name)

    def entries(self):
        return self.ledger.entries

    def square(self, numbers):
        return troupe.get([_square.remote(n) for n in numbers])

    def by_value(self):
        """A class that only this function has."""

        class Local:
            def about(self, value):
                return (os.getpid(), value)

        return troupe.actor(Local).about({1, 2})

    def kill(self, handle):
        troupe.kill(handle)

    def end(self):
        troupe.shutdown()
        return troupe.is_initialized()

    @troupe.register(lane="control")
    def beside(self):
        return "beside"


class Top(troupe.Worker):
    """Creates a middle, which creates leaves."""

    def pid(self):
        return os.getpid()

    def grow(self, **config):
        self.middle = troupe.actor(Middle, name="middle")
        return [self.middle.pid(), *self.middle.grow(**config)]

    def occupy(self):
        self.middle.occupy()


class AsyncTop:
    """An async worker that creates an actor without stopping its loop."""

    async def ask(self, value):
        import asyncio

        leaf = await asyncio.to_thread(troupe.actor, Leaf)
        return await leaf.apply.remote(sorted, value)


class Ledger:
    def __init__(self):
        self.entries = []

    def note(self, entry):
        self.entries.append(entry)
        return len(self.entries)


@troupe.remote
def _square(n):
    return n * n
