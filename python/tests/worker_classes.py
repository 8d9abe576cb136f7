"""Worker classes of the tests."""

import asyncio
import concurrent.futures
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings

import troupe
from troupe import Dispatch, register


class BasicWorker(troupe.Worker):
    """A worker that does what tests need."""

    def __init__(self, worker_config=None):
        super().__init__(worker_config)
        self.count = 0

    def echo(self, *args, **kwargs):
        return [list(args), kwargs] if kwargs or len(args) != 1 else args[0]

    def type_name(self, value):
        return type(value).__name__

    def ranks_by_threads(self, cluster):
        """The rank that each worker of a cluster names, asked by a thread for each of them at once, and again."""
        workers = cluster.workers
        together = threading.Barrier(len(workers))
        with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
            first = list(pool.map(lambda worker: together.wait() >= 0 and worker.rank_of(), workers))
            return first + list(pool.map(lambda worker: worker.rank_of(), workers))

    def rank_of(self):
        return self.rank

    def who(self):
        return {
            "rank": self.rank,
            "world": self.world_size,
            "dp": self.rank_info.dp_rank,
            "role": self.cluster_name,
            "name": self.worker_name,
        }

    def add(self, n=1):
        self.count += n
        return self.count

    def fail(self, message="bad luck"):
        raise ValueError(message)

    def fail_on(self, rank):
        if self.rank == rank:
            raise ValueError("bad luck")
        return self.rank

    def sleep(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            troupe.current_call().check()
            time.sleep(0.005)
        return self.rank

    def compute(self, started, end):
        """Runs until the file end exists, and does not look whether it was cancelled."""
        open(started, "w").close()
        while not os.path.exists(end):
            time.sleep(0.01)

    def hold_lock(self, seconds):
        """Holds the interpreter lock, as foreign code may."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return "free"

    def kill(self, number=signal.SIGKILL):
        os.kill(os.getpid(), number)
        time.sleep(60)

    def leave(self, code):
        print("about to leave")
        sys.exit(code)

    def pid(self):
        return os.getpid()

    def break_core(self):
        """A bug in a goroutine of the core's."""
        from troupe import _seam, _session

        _session.current().core.ask(_seam.Request("panic", {"name": "goroutine"})).get(90)

    def environment(self, *names):
        return {n: os.environ.get(n) for n in names}

    def first_environment(self, *names):
        """Variables that the process was started with; what the interpreter or the host set later is not among them."""
        with open("/proc/self/environ", "rb") as f:
            given = dict(entry.decode().split("=", 1) for entry in f.read().split(b"\0") if entry)
        return {n: given[n] for n in names if n in given}

    def where(self):
        return [os.getcwd(), sys.executable, list(sys.path)]

    def forward(self, handle, method, *args):
        return getattr(handle, method)(*args)

    def call_all(self, cluster, method, *args):
        return cluster.execute_all_sync(method, *args)

    def call_later(self, handle, method, *args):
        """Does not wait for it."""
        self.later = getattr(handle, method).remote(*args)

    def call_and_wait(self, handle, method, *args):
        return troupe.get([getattr(handle, method).remote(*args)])

    def nested(self, handle, array):
        """Futures inside a result."""
        return {
            "list": [handle.echo.remote(1), 2],
            "deep": [{"x": (handle.echo.remote({3}),)}],
            "array": handle.echo.remote(array),
        }

    def had(self):
        return self.later.result(90)

    def give(self, handle):
        return handle

    def deadline(self):
        call = troupe.current_call()
        return [call.remaining, call.caller, call.method, call.cancelled]

    def change(self, array):
        array += 1
        return array

    def fork(self):
        """A child of fork, as DataLoader makes them, ends and leaves the worker as it was."""
        pid = os.fork()
        if pid == 0:
            try:
                troupe.get([])
                troupe.Cluster.attach("workers")
            except troupe.Error as err:
                os._exit(7 if "fork" in str(err) else 8)
            os._exit(9)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def rows(self, rows, factor=1):
        if rows is None:
            return None
        return [r * factor for r in rows] if isinstance(rows, list) else rows

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def scale(self, batch, by=2.0):
        return troupe.Batch({"x": batch["x"] * by}, {"metrics": {"loss": float(self.rank)}})

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def zero(self, x):
        return [self.rank, x]

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, x):
        return [self.rank, x]

    @register(lane="control")
    def status(self):
        return self.count


class AsyncWorker:
    """An async class."""

    def __init__(self):
        self.ready = False
        self.order = []
        self.running = 0
        self.most = 0

    async def initialize(self):
        await asyncio.sleep(0.05)
        self.ready = True

    async def note(self, n):
        self.order.append(n)
        return self.ready

    async def nap(self, seconds):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.order.append("cancelled")
            raise
        finally:
            self.running -= 1
        return self.most

    def plain(self):
        return self.order

    async def ask(self, handle, method, *args):
        return await getattr(handle, method).remote(*args)

    async def block_in_loop(self, handle, seconds):
        if not hasattr(self, "_caught"):
            self._warnings = warnings.catch_warnings(record=True)
            self._caught = self._warnings.__enter__()
            warnings.simplefilter("always")
        return handle.sleep(seconds)

    def warned(self):
        return [str(w.message) for w in self._caught]

    async def block_in_thread(self, handle, seconds):
        """How long a call took that a thread of this worker made."""
        began = time.monotonic()

        def call():
            handle.sleep(seconds)
            return time.monotonic() - began

        return await asyncio.to_thread(call)

    async def block_on_itself(self, handle):
        return handle.plain()


class Stalled:
    """Does nothing for a while between being made and being started, so that its first call is there before it is."""

    def __init__(self):
        sys.setprofile(self.stall)

    def stall(self, frame, event, arg):
        if event == "return" and frame.f_code.co_name == "serve":
            sys.setprofile(None)
            time.sleep(0.5)

    async def ping(self):
        return "pong"


class Vector:
    """Answers as shared/vectors says."""

    def __init__(self, mode, mesh):
        self.mode, self.mesh = mode, mesh
        self.seen = []

    def step(self, part):
        info = troupe.RankInfo.of(int(os.environ["RANK"]), self.mesh)
        self.seen.append([part, not troupe.current_call().no_data])
        if self.mode in ("RANK_ZERO", "ONE_TO_ALL", "ONE_TO_ALL_ONE"):
            return info.rank
        if self.mode == "ALL_TO_ALL":
            return [info.rank, part]
        rows = part if isinstance(part, list) else [part]
        return [[info.dp_rank, info.tp_rank, info.pp_rank, info.cp_rank, row] for row in rows]

    def calls(self):
        seen, self.seen = self.seen, []
        return seen

    def become(self, mode, mesh):
        self.mode, self.mesh = mode, mesh


class Broken:
    def __init__(self):
        raise RuntimeError("no engine here")


class Given:
    """Constructed with arguments."""

    def __init__(self, a, b=2):
        self.a, self.b = a, b

    def get(self):
        return [self.a, self.b]


class Bye:
    def __init__(self, path):
        self.path = path

    def close(self):
        with open(self.path, "w") as f:
            f.write("closed")


class Late(troupe.Worker):
    """Learns its mesh in initialize, as engines do."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, tp):
        self.rank_info = troupe.RankInfo.of(self.rank, {"tp": tp, "cp": 1, "dp": self.world_size // tp, "pp": 1})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def rows(self, rows):
        return [[self.rank_info.dp_rank, self.rank_info.tp_rank, r] for r in rows]


class Caller(troupe.Worker):
    """Calls its driver."""

    def tell(self, method, *args):
        return getattr(self.driver, method)(*args)

    def tell_caller(self, method, *args):
        return getattr(troupe.current_call().driver, method)(*args)

    def tell_pickled(self, n):
        return self.driver.run(lambda x: x + n)

    def keep(self, method):
        """Calls, and says how it ended."""
        try:
            return getattr(self.driver, method)()
        except troupe.Error as err:
            return [type(err).__name__, str(err)]


class LoopCaller:
    """Calls its driver from a loop."""

    async def tell(self, method, *args):
        return await getattr(troupe.driver(), method).remote(*args)


class Streams:
    """Generator methods."""

    def __init__(self):
        self._produced = self._closed = 0

    def count(self, n):
        self._produced = 0
        try:
            for i in range(n):
                self._produced += 1
                yield i
        except GeneratorExit:
            self._closed += 1
            raise

    def fail_after(self, n):
        yield from range(n)
        1 / 0  # noqa: B018

    @register(concurrency=2)
    def count_in_lane(self, n):
        yield from range(n)

    def produced(self):
        return self._produced

    def closed(self):
        return self._closed

    def sum_of(self, handle, n):
        return sum(handle.count(n))

    def pid(self):
        return os.getpid()


class AsyncStreams:
    """Async generator methods."""

    def __init__(self):
        self._produced = self._closed = 0

    async def count(self, n):
        self._produced = 0
        try:
            for i in range(n):
                self._produced += 1
                yield i
                await asyncio.sleep(0)
        except (GeneratorExit, asyncio.CancelledError):
            self._closed += 1
            raise

    async def fail_after(self, n):
        for i in range(n):
            yield i
        1 / 0  # noqa: B018

    def produced(self):
        return self._produced

    def closed(self):
        return self._closed


class Deferred:
    """Methods that return futures and awaitables of their own."""

    def __init__(self):
        from concurrent.futures import Future

        self._futures = [Future() for _ in range(4)]

    @register(concurrency=8)
    def wait_for(self, i):
        return self._futures[i]

    @register(lane="control")
    def resolve(self, i, value):
        self._futures[i].set_result(value)

    @register(lane="control")
    def break_off(self, i):
        self._futures[i].set_exception(LookupError(i))

    def coroutine(self, seconds):
        async def later():
            await asyncio.sleep(seconds)
            return "later"

        return later()

    def of_another(self, handle, x):
        return handle.echo.remote(x)

    @register(lane="control")
    def threads(self):
        import threading

        return [t.name for t in threading.enumerate()]


class AsyncDeferred:
    def __init__(self):
        self.order = []

    async def note(self, n):
        self.order.append(n)
        await asyncio.sleep(0)
        return n

    async def noted(self):
        return self.order

    def in_pool(self):
        from concurrent.futures import ThreadPoolExecutor

        self.pool = ThreadPoolExecutor(1)
        return self.pool.submit(lambda: "from a thread")


class Hostile(BasicWorker):
    """A worker that speaks to the server past the library, with what it was given."""

    def attack(self):
        """Subjects that it publishes to and subscribes to, and those of them that the server refuses."""
        with open("/proc/self/environ") as environ:
            mine = dict(entry.partition("=")[::2] for entry in environ.read().split("\0"))
        with open(mine["TROUPE_ASSIGNMENT"]) as file:
            given = json.load(file)
        assert "token_file" not in given and "creds_file" not in given
        others = ["troupe.@nodes.do.x", "troupe.@nodes.end", "troupe.other.role.one.all", "troupe.@events.other"]
        others += [
            "$JS.API.STREAM.DELETE.KV_troupe_registry",
            "$KV.troupe_registry.x",
            "$SYS.REQ.SERVER.PING",
            "_INBOX.x",
        ]
        host, port = given["urls"][0].rpartition("/")[2].split(":")
        with socket.create_connection((host, int(port)), 60) as connection, connection.makefile("rwb") as stream:
            stream.readline()
            hello = {"auth_token": given["token"], "verbose": False, "lang": "bare", "version": "0"}
            lines = ["CONNECT " + json.dumps(hello), "PING"]
            for i, subject in enumerate(others):
                lines += [f"PUB {subject} 0", "", f"SUB {subject} {i}"]
            stream.write("\r\n".join([*lines, "PING", ""]).encode())
            stream.flush()
            refused = pongs = 0
            while pongs < 2:
                line = stream.readline()
                assert line, "the connection has ended"
                refused += line.startswith(b"-ERR 'Permissions Violation")
                pongs += line.startswith(b"PONG")
        return [2 * len(others), refused]
