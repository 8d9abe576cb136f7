"""The worker host. Agents start it as `python -m troupe.worker`.

It reads its assignment, imports the class and runs the methods on the main thread: sync methods one at a time; if any
method is async, all methods of the class on one event loop. Go answers all other requests meanwhile.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgpack

from . import _constructor, _core, _debug, _error_transfer, _errors, _launch, _rendezvous, _seam, _session, _spare
from ._call import IncomingCall, unpack
from ._seam import ANSWER_MORE, ANSWER_TAKES, CALL, CANCEL, META_PIPELINE, STOPPED, VALUE, CallMeta
from ._serve import Object, OwnLoop, Server, describe, read_args
from ._worker import Worker

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping, Sequence


class Host(Server):
    """Hosts the worker of this process."""

    when_quiet: Any = None  # called when no call has come for some time

    def __init__(self, assignment: str) -> None:
        self.core = _core.get()
        self.core.on_call = self.arrived
        self.lib = self.core.lib
        self.known = {}
        self.values = {}
        self.queue: deque[tuple[int, int, bytes, Any]] = deque()
        self._waiters: list[Any] = []  # called when the queue gets a call, as for a completion
        self._done = False
        self.thread = threading.get_ident()
        self.objects: dict[str, Object] = {}
        self.stopped = False
        self.failed = False
        self.pool: Any = None
        self.loop: Any = None
        self.tasks = {}
        self.loops = {}
        self.side: Any = None  # the loop of async engines in a worker whose own class is sync
        self.held: dict[int, tuple[int, int, bytes, Any]] | None = (
            None  # in an async class, the calls that wait for initialize
        )
        self.wants_thread = False
        fields = self.core.ask(_seam.worker_open(assignment=assignment)).get()
        self.rank, self.world, self.mesh = fields["rank"], fields["world"], fields["mesh"]
        self.role, self.node, self.devices = fields["role"], fields["node"], fields["devices"] or []
        self.config = fields["config"] if isinstance(fields["config"], dict) else {}
        self.raw_config = fields["config"]
        os.environ.update(self.config.get("variables", {}))
        self.session = _session.Session(
            self.core, fields, pickle=bool(self.config.get("pickle")), device=bool(self.config.get("device", True))
        )
        self.session.is_worker = True
        self.session.own = (fields["role"], fields["incarnation"], fields["rank"])
        self.session.driver = self.config.get("driver", "")
        self.session.host = self
        if self.config.get(
            "shipped"
        ):  # the directory is a copy, and is shipped on to the workers that this worker creates
            self.session.working_dir = os.getcwd()
        _session._current = self.session
        _rendezvous.become(self.rank)
        self.codecs = {True: self.session.codec(True), False: self.session.codec(False)}

    # Deliveries from the reader of completions.

    def arrived(self, kind: int, token: int, meta: bytes, body: object) -> None:
        if kind == VALUE:
            self.take_value(token, meta, body)
            return
        item = (kind, token, meta, body)
        if self.loop is not None:
            if _core.running_loop() is self.loop:
                self.in_loop(item)
            else:
                self.loop.call_soon_threadsafe(self.in_loop, item)
            return
        self.queue.append(item)
        self._done = True
        if self._waiters:
            for wake in list(self._waiters):
                wake()

    # The main thread.

    def run(self) -> int:
        """Runs the worker until it ends, and returns the exit code."""
        start = self.core.ask(_seam.worker_start())
        start._waiters.append(self._nudge)
        early: list[tuple[int, int, bytes, Any]] = []  # calls that arrive before the worker is ready for them
        while self.queue or not start._done:
            self.await_some()
            while self.queue:
                item = self.queue.popleft()
                if item[0] == CALL and is_verb(item[2]):
                    self.serve(*item[1:])
                else:
                    early.append(item)
        if start._error is not None:
            sys.stderr.write(f"troupe worker: {start._error}\n")
            return 1
        self.queue.extendleft(reversed(early))
        if any(o.is_async for o in self.objects.values()):
            self.run_async()
        else:
            self.run_sync()
        return 1 if self.failed else 0

    def _nudge(self) -> None:
        self._done = True
        for wake in list(self._waiters):
            wake()

    def await_some(self) -> None:
        """Waits until the queue may have an item."""
        if not self.queue and not self._done:
            self.core.idle(self, self.thread, self.when_quiet)
        self._done = False

    def run_sync(self) -> None:
        self.how = ANSWER_TAKES
        queue = self.queue
        while not self.stopped:
            self.await_some()
            while queue:
                kind, token, meta, body = queue.popleft()
                if kind == CALL:
                    box, body = (
                        [body],
                        None,
                    )  # serve gets the only reference to the body, and drops it before it answers
                    self.serve(token, meta, box.pop())
                elif kind == STOPPED:
                    self.end(body)

    def end(self, body: Any) -> None:
        self.stopped = True
        if len(body):
            self.failed = True
            sys.stderr.write(f"troupe worker: {_errors.from_body(body)}\n")

    def exited(self, token: int, err: SystemExit, meta: bytes) -> None:
        """Ends the process immediately after sys.exit in a method, on whatever thread the method ran. The call is not
        answered, so its caller always gets the error of a lost worker, with the exit code."""
        end_process(err)

    def trusts(self, meta: bytes) -> bool:
        """Returns whether the caller may send pickles. Every process of the run may; items of pipelines may come from
        any program."""
        return self.session.pickle and not meta[CallMeta.flags] & META_PIPELINE

    # Requests of the core.

    def verb(self, call: IncomingCall, body: Any) -> object:
        if call.method == "@make":
            return self.make(call.object, body)
        if call.method == "@set_env":
            os.environ.update(msgpack.unpackb(body))
            hook = getattr(self.objects[call.object].value, "set_env", None)
            if callable(hook):
                hook(msgpack.unpackb(body))
            return None
        if call.method == "@configure":
            value = self.codecs[False].decode(body)
            configure = getattr(self.objects[call.object].value, "configure", None)
            if not callable(configure):
                raise _errors.RefusedError(
                    "the class takes no configuration after its start; give it a method configure(self, config)"
                )
            return configure(value)
        if call.method == "@close":
            made = self.objects.get(call.object)
            close = getattr(made.value, "close", None) if made else None
            return close() if callable(close) else None
        raise _errors.NotFoundError(f"there is no {call.method}")

    def make(self, name: str, body: object) -> object:
        """Creates an object and returns its description."""
        request = msgpack.unpackb(body, strict_map_key=False, ext_hook=msgpack.ExtType)
        config = request["config"]
        for module in self.config.get("warm", ()):  # a forked worker has them already
            importlib.import_module(module)
        if not isinstance(config, dict) or "class" not in config:  # created by a driver in another language
            value = self.plain(request["class"], config, name)
        else:
            cls = self.find(config["class"])
            args, kwargs = read_args(self.codecs[self.session.pickle], config.get("args") or b"")
            value = _function(cls) if config.get("function") else self.construct(cls, args, kwargs, name)
        made = describe(value, int(self.config.get("max_concurrency") or 1000), "")
        if made[0].is_async and name and self.loop is None and not any(o.is_async for o in self.objects.values()):
            self.side = OwnLoop()
        if made[0].is_async and self.side is not None:
            made[1]["side"] = "all"
        self.objects[name] = made[0]
        if made[0].lanes or self.side is not None:
            self.start_thread()
        return made[1]

    def find(self, wanted: dict[str, Any]) -> Any:
        if "pickle" in wanted:
            if wanted["pickle"] in _unpickled:
                return _unpickled[wanted["pickle"]]
            return self.codecs[self.session.pickle]._load(wanted["pickle"])
        return import_class(wanted["path"])

    def plain(self, path: str, config: object, name: str) -> object:
        """Creates an object of a class known only by its path. The constructor gets the configuration, if there is
        one."""
        cls = import_class(known_classes().get(path, path))
        return self.construct(cls, [] if config is None else [config], {}, name)

    def construct(
        self, cls: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], name: str
    ) -> object:
        if name == "":
            args, kwargs = _constructor.arguments(cls, args, kwargs, self.worker_config())
        if not isinstance(cls, type) or not issubclass(cls, Worker) or name:
            return cls(*args, **kwargs)
        from ._config import RankInfo

        value = cls.__new__(cls)
        value.rank, value.world_size, value.rank_info = self.rank, self.world, RankInfo.of(self.rank, self.mesh)
        value.cluster_name, value.worker_name = self.role, os.environ.get("WORKER_NAME", f"{self.role}-{self.rank}")
        value.worker_config, value.devices = self.worker_config(), list(self.devices)
        value.logger = logger(value.worker_name)
        cls.__init__(value, *args, **kwargs)
        return value

    def worker_config(self) -> object:
        body = self.config.get("worker_config")
        return None if body is None else _launch.unpack_config(self.codecs[self.session.pickle].decode(body))

    # Methods beside the main thread.

    def start_thread(self) -> None:
        """Starts the thread that reads calls of lanes beside the main thread."""
        if self.wants_thread or self.loop is not None:
            return
        from concurrent.futures import ThreadPoolExecutor

        self.wants_thread = True
        self.pool = ThreadPoolExecutor(128, thread_name_prefix="troupe")
        if self.session.server is None:
            self.core.on_side_call = self.arrived_beside
        self.core.read_side()

    def arrived_beside(self, kind: int, token: int, meta: bytes, body: object) -> None:
        """Starts a call of a lane beside the main thread. Runs on the thread that reads the side queue."""
        if kind == VALUE:
            self.take_value(token, meta, body)
            return
        if kind == CANCEL:
            self.cancel_in(token)
            return
        call = IncomingCall(self.core, token, meta)
        if self.objects[call.object].is_async:
            self.beside_thread().begin_in(self.side, token, call, body)
        else:
            self.pool.submit(self.beside_thread().serve, token, meta, body)

    # Async classes.

    def run_async(self) -> None:
        import asyncio

        self.how = ANSWER_MORE  # the loop sends the answers of one iteration together
        asyncio.run(self.main())

    async def main(self) -> None:
        import asyncio

        self.loop = asyncio.get_running_loop()
        self.over = self.loop.create_future()
        _core.serving_loops.add(self.loop)
        self.core.enter_loop(self.loop)
        while self.queue:
            self.in_loop(self.queue.popleft())
        await self.over
        self.core.leave_loop(self.loop)
        self.loop = None

    def in_loop(self, item: tuple[int, int, bytes, object]) -> None:
        kind, token, meta, body = item
        if kind == CANCEL:
            if not self.cancel_task(token) and self.held is not None and self.held.pop(token, None) is not None:
                self.values.pop(token, None)
                self.fail(token, _errors.CancelledError("the call was cancelled"))
                self.core.push_soon(self.loop)
        elif kind == STOPPED:
            self.end(body)
            if not self.over.done():
                self.over.set_result(None)
        elif self.held is not None:
            self.held[token] = item
        else:
            call = IncomingCall(self.core, token, meta)
            task = self.loop.create_task(self.serve_async(token, call, body))
            self.tasks[token] = task
            if call.method == "initialize":
                self.held = {}
                task.add_done_callback(self.initialized)

    def initialized(self, _: object) -> None:
        """Starts, in order, the calls that arrived while initialize ran."""
        held, self.held = self.held or {}, None
        for item in held.values():
            self.in_loop(item)

    # Signals.

    def stop_on(self, *signals: int) -> None:
        """Stops the worker gracefully on the first signal, and lets a second one kill it."""

        def stop(number: int, _: object) -> None:
            for s in signals:
                signal.signal(s, signal.SIG_DFL)
            self.core.ask(_seam.worker_stop(grace=5.0))

        for s in signals:
            signal.signal(s, stop)


def _function(work: object) -> object:
    """Returns the object that runs a function used as a stage."""
    from . import _stage

    return _stage.host(work)


def is_verb(meta: bytes) -> bool:
    """Returns whether a call is a request of the core rather than a method call."""
    method = CallMeta.size + unpack(meta)[4]
    return meta[method : method + 1] == b"@"


def known_classes() -> dict[str, str]:
    """Reads names of classes, for drivers in other languages, from TROUPE_CLASSES=name=package.module:Class,…"""
    pairs = [p.partition("=") for p in os.environ.get("TROUPE_CLASSES", "").split(",") if p]
    return {name: path for name, _, path in pairs}


_unpickled: dict[bytes, Any] = {}  # classes of this process while it was a spare


def prepare_class(config: _spare.Config) -> None:
    """Does what can be done before a spare knows its rank: the imports, and the class method prepare of the class."""
    os.environ.update(config.get("variables", {}))
    _search(config.get("sys_path", []))
    for module in config.get("warm", ()):
        importlib.import_module(module)
    wanted = config.get("class") or {}
    if "pickle" not in wanted:
        cls = import_class(wanted["path"])
    elif config.get("pickle"):
        cls = _unpickled[wanted["pickle"]] = pickle.loads(wanted["pickle"])
    else:
        return  # the worker refuses it
    if any(isinstance(vars(one).get("prepare"), classmethod) for one in getattr(cls, "__mro__", ())):
        cls.prepare()


def import_class(path: str) -> Any:
    """Imports the class at package.module.Class or package.module:Class.Inner."""
    if ":" in path:
        module_name, _, rest = path.partition(":")
        names = rest.split(".")
    else:
        *module_parts, last = path.split(".")
        module_name, names = ".".join(module_parts), [last]
    if not module_name:
        raise _errors.NotFoundError(f"{path!r} is no import path; give package.module.Class")
    found: Any = None
    while True:
        try:
            found = importlib.import_module(module_name)
            break
        except ModuleNotFoundError as err:
            outer, _, inner = module_name.rpartition(".")
            if not outer or err.name is None or not (module_name == err.name or module_name.startswith(err.name + ".")):
                raise
            module_name, names = outer, [inner, *names]  # the path names a class inside a class
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            raise _errors.NotFoundError(f"{module_name} has no {'.'.join(names)}") from None
    return found


def logger(name: str) -> logging.Logger:
    import logging

    log = logging.getLogger(f"troupe.{name}")
    if not logging.getLogger().handlers and not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


def prepare(host: Host) -> None:
    """Gives the process the driver's search path. If a directory is missing on this node, or the Python version
    differs, the error names it."""
    wanted = host.config.get("python", "")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if wanted and wanted != here:
        raise _errors.RefusedError(
            f"the driver runs Python {wanted}, and {sys.executable} on node {host.node} is {here}; install {wanted} "
            f"there, or run the driver on {here}"
        )
    paths = host.config.get("sys_path", [])
    absent = [p for p in paths if not os.path.exists(p)]
    if absent and not host.config.get("shipped"):
        raise _errors.RefusedError(
            f"the driver finds modules in {', '.join(absent)}, which node {host.node} does not have; put it there, "
            "take it out of the driver's "
            "sys.path, or ship a folder with init(working_dir=…)"
        )
    _search(paths)


def _search(paths: Sequence[str]) -> None:
    sys.path.extend(path for path in paths if path not in sys.path)


def main() -> int:
    _spare.become_worker(prepare_class)
    path = os.environ.pop(
        "TROUPE_ASSIGNMENT", None
    )  # removed, so that child processes do not take themselves for workers
    if not path:
        sys.stderr.write("troupe.worker is started by an agent, which says in TROUPE_ASSIGNMENT what it is to play\n")
        return 2
    _buffer_lines()
    host = Host(path)
    host.stop_on(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    _debug.start(os.path.dirname(path), f"{host.role}/{host.rank}")
    try:
        try:
            prepare(host)
        except _errors.Error as err:
            host.core.ask(_seam.worker_fail(error=_error_transfer.describe(err))).get(5)
            sys.stderr.write(f"troupe worker: {err}\n")
            return 1
        code = host.run()
    except SystemExit as err:
        end_process(err)
    try:
        host.core.ask(_seam.worker_close()).get(6)
    except _errors.Error:
        pass
    return code


def _buffer_lines() -> None:
    """Makes an unbuffered stdout line-buffered, as on a terminal. PYTHONUNBUFFERED, which the agent sets for all
    programs, makes two writes of each print, between which processes that share the pipe may write. Another setting of
    the user stays."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def end_process(err: SystemExit) -> NoReturn:
    """Ends the process as sys.exit does: a message goes to standard error, and makes the exit code 1."""
    code = err.code if isinstance(err.code, int) else 0 if err.code is None else 1
    if not isinstance(err.code, (int, type(None))):
        sys.stderr.write(f"{_errors.text_of(err.code)}\n")
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit(code)


def _exit(code: int) -> None:
    """Ends the process without waiting for threads left by user code."""
    import atexit

    try:
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # Import the module under its real name, so that code which imports troupe.worker gets the running module.
    from troupe import worker

    if sys.argv[1:]:
        from troupe import _forkserver

        _forkserver.serve()  # returns only in forked workers
    _exit(worker.main())
