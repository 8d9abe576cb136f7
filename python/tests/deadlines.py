"""Workers whose methods make calls, for the tests of deadlines."""

import time

import troupe
from troupe import register


class Node:
    """A worker that calls others. Methods on the control lane show what it does meanwhile."""

    def __init__(self):
        self.entered = []
        self.left = {}

    def echo(self, value):
        return value

    def remaining(self):
        return troupe.current_call().remaining

    def remaining_of(self, other, timeout=None):
        method = other.remaining if timeout is None else other.remaining.options(timeout=timeout)
        return method()

    def circle(self, other, me):
        """Calls another worker, which calls this one and waits for it."""
        self.entered.append("circle")
        try:
            return other.back.remote(me).result()
        except troupe.Error as err:
            self.left["circle"] = f"{type(err).__name__}: {err.message}"
            raise

    def back(self, first):
        self.entered.append("back")
        try:
            return first.echo("back")
        except troupe.Error as err:
            self.left["back"] = f"{type(err).__name__}: {err.message}"
            raise

    def leave_behind(self, other):
        """Starts a call and returns without its result."""
        self.behind = other.when_told.remote()
        return "returned"

    def behind_result(self):
        return self.behind.result(60)

    def when_told(self):
        self.entered.append("when_told")
        while "told" not in self.entered:
            time.sleep(0.01)
        return "told"

    def after_the_end(self, other):
        """Makes calls after the caller has given up."""
        self.entered.append("after_the_end")
        call = troupe.current_call()
        while not call.cancelled:
            time.sleep(0.01)
        try:
            other.echo("without a timeout")
        except troupe.Error as err:
            self.left["without"] = f"{type(err).__name__}: {err.message}"
        self.left["with"] = other.echo.options(timeout=60)("with a timeout")

    def routed(self, router_of):
        router = troupe.Router(router_of, method="remaining")
        try:
            return router.call()
        finally:
            router.close()

    @register(lane="control")
    def tell(self):
        self.entered.append("told")

    @register(lane="control")
    def state(self):
        return list(self.entered), dict(self.left)


class AsyncNode:
    def __init__(self):
        self.entered = []
        self.left = {}

    async def back(self, first):
        self.entered.append("back")
        try:
            return await first.echo.remote("back")
        finally:
            self.left["back"] = await first.state.remote()

    async def echo(self, value):
        return value

    async def state(self):
        return list(self.entered), dict(self.left)
