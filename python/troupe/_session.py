"""init: a driver's session, and the private head it may have started."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from . import _check, _codec, _core, _errors, _output, _runs, _traceback

_PORT = 7422  # of a head, where a URL has none
_START = 30.0  # seconds for a private head to become ready
_LEASE = (1.0, 86_400.0)  # seconds: the least and the most that init takes


class Head:
    """A head of our own, as a child process with a folder of its own. It ends when its standard input does. `troupe status` and `logs`
    find it by the record of this run."""

    def __init__(self, gpus: str, namespace: str, resources: Mapping[str, Any] | None = None) -> None:
        import json
        import subprocess
        import tempfile

        gpus, declared = _declared(gpus, resources)
        self.dir = tempfile.mkdtemp(prefix="troupe-")
        self._log = open(os.path.join(self.dir, "log"), "wb")  # noqa: SIM115
        env = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
        env.update(dict.fromkeys(("XDG_STATE_HOME", "XDG_RUNTIME_DIR"), self.dir))
        program = _core.program_path()
        command = [program, "up", "--json", "--listen", "127.0.0.1:0", "--store", os.path.join(self.dir, "store"), "--gpus", gpus, "--with-stdin"]
        if declared:
            command += ["--resources", json.dumps(declared)]
        self._run = _runs.create(namespace)
        if self._run is not None:
            command += ["--log-dir", os.path.join(self._run, "logs")]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env, start_new_session=True
            )
            line = self._first_line()
        except OSError as err:
            _remove(self.dir)
            raise _errors.UnavailableError(f"a private head cannot be started: {program}: {err.strerror}; build it with `make python`") from err
        except BaseException:  # an interrupt: the caller will not use it
            if hasattr(self, "process"):
                self.process.kill()
                self.close()
            else:  # Popen has closed its standard input, with which it ends
                _remove(self.dir)
            raise
        if not line.strip():
            log = self._tail()
            self.close()
            raise _errors.UnavailableError(f"a private head did not start: {log or 'it said nothing'}")
        said = json.loads(line)
        self.url, self.token_file, self.fingerprint = said["url"], said.get("token_file", ""), said.get("fingerprint", "")
        if self._run is not None:
            _runs.record(self._run, {**said, "driver": _who(), "driver_pid": os.getpid(), "namespace": namespace})

    def _first_line(self) -> bytes:
        """What it says when it is ready. One that does not become ready is ended, and the read with it."""
        assert self.process.stdout is not None
        timer = threading.Timer(_START, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            return self.process.stdout.readline()
        finally:
            timer.cancel()

    def _tail(self) -> str:
        self._log.flush()
        with open(self._log.name, "rb") as f:
            return f.read()[-2000:].decode(errors="replace").strip()

    def close(self) -> None:
        """Ends it in order, and by force if that takes too long."""
        import subprocess

        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass
        for end, patience in ((None, 10), (self.process.terminate, 5), (self.process.kill, 5)):
            if end is not None:
                end()
            try:
                self.process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                pass
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
        if self._run is not None:
            _runs.end(self._run)
        _remove(self.dir)

    def abandon(self) -> None:
        """In a forked child: the head is the parent's, and ends with it."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    os.close(stream.fileno())
                except (OSError, ValueError):
                    pass


class Session:
    """A driver's session, or a worker's own for the calls it makes."""

    def __init__(
        self, core: _core.Core, fields: dict[str, Any], *, pickle: bool, head: Head | None = None, working_dir: str | None = None, device: bool = True
    ) -> None:
        self.core = core
        self.id: int = fields["runtime"]
        self.url: str = fields["url"]
        self.namespace: str = fields["namespace"]
        self.session: str = fields["session"]
        self.pickle = pickle
        self.head = head
        self.working_dir = working_dir
        self.device = device  # tensors of results may stay on their device
        self.is_worker = False
        self.driver = ""  # of a worker: the session of the driver that created it
        self.own = ("", "", -1)  # of a worker: its role, the role's incarnation, and its rank
        self.host: Any = None  # of a worker: what runs its methods
        self.server: Any = None  # of the objects that this process serves
        self.pool: Any = None  # the workers of remote functions
        self.output: _output.Reader | None = None
        self.closed = False
        self.clusters: dict[tuple[str, str], Any] = {}  # opened from handles, by role and incarnation
        self._pid = os.getpid()
        self._addresses = [_address(u) for u in self.url.split(",") if u]

    def codec(self, trusted: bool) -> _codec.Codec:
        """How values travel: in calls of this run with pickles, in items of pipelines without."""
        if not self.pickle:
            why = "pickles were turned off with troupe.init(pickle=False)"
        elif not trusted:
            why = "pickles travel only in calls, between the processes of one run; an item of a pipeline may be another's"
        else:
            why = ""
        return _codec.Codec(pickle=not why, why_not=why, handles=True)

    def close(self, now: bool = False) -> None:
        """Takes down what this driver created and ends the session; in a worker, takes down what it created. With now, workers are
        killed instead of stopped. It may be called more than once."""
        global _current
        if self.closed or self._pid != os.getpid():
            return
        if self.is_worker:
            self._end_created(now)
            return
        self.closed = True
        if _current is self:
            _current = None
        try:
            self._ask_close(now)
        finally:
            if self.server is not None:
                self.server.close()
            if self.head is not None:
                self.head.close()

    def _end_created(self, now: bool) -> None:
        """In a worker: what it has created ends; its session is the process's."""
        if self.server is not None:
            self.server.close()
        self.pool = None
        self.core.ask("end_created", runtime=self.id, now=now).get(15)

    def _ask_close(self, now: bool) -> None:
        self.core.cancel_all()  # their results would be dropped: the workers need not finish them
        ask = self.core.ask("close", runtime=self.id, now=now)
        deadline = time.monotonic() + 15
        self.core.wait(ask, deadline)
        if self.output is not None:
            self.output.join()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<troupe.Session {self.namespace} at {self.url}{' closed' if self.closed else ''}>"


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition("://")[2].rpartition("@")[2].rpartition(":")
    if not host and not port.isdigit():
        host, port = port, ""
    host = host.strip("[]")
    return "127.0.0.1" if host in ("localhost", "::1") else host, int(port) if port.isdigit() else 0


_current: Session | None = None
_init_lock = threading.Lock()


def current(start: bool = True) -> Session:
    """The session of this process. One that has none gets one, as init() would make it."""
    session = _current
    if session is not None and session._pid != os.getpid():
        session.core.check()
    if session is None or session.closed:
        if not start:
            raise _errors.ClosedError("there is no session; call troupe.init() first")
        return init()
    return session


def init(
    url: str | None = None,
    namespace: str | None = None,
    *,
    gpus: str = "auto",
    resources: Mapping[str, Any] | None = None,
    pickle: bool = True,
    working_dir: str | None = None,
    token: str | None = None,
    token_file: str | None = None,
    fingerprint: str | None = None,
    creds_file: str | None = None,
    ca_file: str | None = None,
    name: str | None = None,
    lease: float = 0.0,
    output: str | None = None,
    device: bool = True,
    timeout: float | None = 30.0,
) -> Session:
    """Attaches to a head, or starts a private one as a child process.

    url: of the head, "HOST:PORT" or with a scheme; "auto": the head that runs on this machine; None: TROUPE_URL, or a private head on
    `gpus` ("auto", "none", "sim:2x8"). resources: totals that the node of a private head declares instead of the machine's, such as
    {"CPU": 100, "GPU": 8, "memory": "64GiB", "licence": 2}; GPUs are simulated ones then. namespace: the space of
    names of this run; None: TROUPE_NAMESPACE, or a new one, which is printed; on a private head "default". pickle=False: nothing is pickled or unpickled. working_dir: a
    folder that workers run in, instead of this process's. lease: seconds that the roles and reservations of this driver outlive
    it when it is cut off or suspended, 1 to 86,400; 0 is 15. When its process ends without a word, they end within seconds
    whatever the lease is. output: what workers print and this process shows: "all"; "errors", stderr alone; "none"; "raw", every line
    unchanged and without limits. None: TROUPE_OUTPUT, or "all". The last lines on stderr of a worker that dies are always shown.
    device=False: tensors on a device travel through memory in every call of this run, and arrive in memory.
    A session that is open is returned again; one with another url or namespace must be closed first.
    In a worker it returns the worker's own session, which needs no init. Usable as a context manager.
    """
    global _current
    lease = _lease(lease)
    _check.seconds("timeout", timeout)
    shown = _output.of_session(output)
    with _init_lock:
        if _current is not None and not _current.closed and _current._pid == os.getpid():
            if (url not in (None, "auto", _current.url) and _address(str(url)) not in _current._addresses) or namespace not in (None, _current.namespace):
                raise _errors.ExistsError(
                    f"this process has a session at {_current.url}, namespace {_current.namespace}; call troupe.shutdown() before another init"
                )
            return _current
        core = _core.get()
        core.check()
        env = os.environ.get
        url = url or env("TROUPE_URL") or None
        if url == "auto":
            url = _head_url()
        elif url is not None:
            url = ",".join(_with_scheme(u.strip()) for u in url.split(","))
        head = None
        bus: dict[str, Any] = {}
        given_namespace = namespace or env("TROUPE_NAMESPACE")
        namespace = given_namespace or ("default" if url is None else _runs.new_namespace())
        if url is None:
            head = Head(gpus, namespace, resources)
            url, token_file, fingerprint = head.url, head.token_file, head.fingerprint or None
        elif resources is not None:
            raise _errors.InvalidError(f"resources={resources!r} is for a private head, and {url} is another's: its nodes declare theirs with `troupe up|join --resources`")
        elif gpus != "auto":
            raise _errors.InvalidError(f"gpus={gpus!r} is for a private head, and {url} is another's; leave one of them out")
        bus["urls"] = [u.strip() for u in url.split(",")]
        given = {
            "token": token or (None if head or token_file else env("TROUPE_TOKEN")),
            "token_file": token_file or (None if token else env("TROUPE_TOKEN_FILE")),
            "creds_file": creds_file or env("TROUPE_CREDS"),
            "ca_file": ca_file or env("TROUPE_CA"),
            "fingerprint": fingerprint or (None if head else env("TROUPE_FINGERPRINT")),
        }
        if not any((given["token"], given["token_file"], given["creds_file"])):
            given.update(_local_head(url))
        bus.update({k: v for k, v in given.items() if v})
        try:
            reader = _output.Reader(core)
            fields = core.ask(
                "open", bus=bus, namespace=namespace, name=name or _who(), lease=lease,
                private=head is not None, output=shown,
            ).get(timeout)
        except BaseException:
            if head is not None:
                head.close()
            raise
        _traceback.install(_errors.Error)
        _current = Session(core, fields, pickle=pickle, head=head, working_dir=working_dir, device=_check.flag("device", device))
        _current.output = reader
        reader.start()
        if head is None and not given_namespace:
            print(f"troupe: namespace {namespace} on {_current.url}; `troupe status` shows it", file=sys.stderr, flush=True)
        return _current


def _declared(gpus: str, resources: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """The devices, and the other totals, of a private head, as the command line takes them."""
    if resources is None:
        return gpus, {}
    if not isinstance(resources, Mapping):
        raise _errors.InvalidError(f"resources={resources!r} is of type {type(resources).__name__}; give a dict such as {{'CPU': 100, 'GPU': 8}}")
    made: dict[str, Any] = {}
    for name, amount in resources.items():
        what = f"resources[{_check.text('resources', name)!r}]"
        if name == "GPU":
            if gpus != "auto":
                raise _errors.InvalidError(f"{what} and gpus={gpus!r} both say which devices there are: give one of them")
            count = _check.integer(what, amount)
            gpus = f"sim:1x{count}" if count else "none"
        elif name == "CPU":
            made[name] = _check.integer(what, amount, 1)
        elif name == "memory":
            made[name] = f"{_check.memory(what, amount)}B"
        else:
            made[name] = _check.thousandths(what, amount) / 1000
    return gpus, made


def _lease(seconds: float) -> float:
    """A lease in seconds that makes sense; 0: the default."""
    least, most = _LEASE
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not (seconds == 0 or least <= seconds <= most):
        raise _errors.InvalidError(f"lease={seconds!r} must be {least:g} to {most:g} seconds, or 0 for the default")
    return float(seconds)


def _local_head(url: str) -> dict[str, str]:
    """What the head on this machine asks for, if it is at that URL: as `troupe` finds it."""
    said = _head_file()
    if _address(said.get("url", "")) != _address(url):
        return {}
    return {"token_file": said.get("token_file", ""), "fingerprint": said.get("fingerprint", "")}


def _head_file() -> dict[str, str]:
    """What the head on this machine has written of itself; empty if none runs."""
    import json

    try:
        with open(_head_path()) as f:
            said: dict[str, str] = json.load(f)
            return said
    except (OSError, ValueError):
        return {}


def _head_path() -> str:
    return os.path.join(_runs.state_dir(), "head.json")


def _head_url() -> str:
    url = _head_file().get("url", "")
    if not url:
        raise _errors.UnavailableError(f"no head runs on this machine ({_head_path()} does not exist): start one with `troupe up`, or call init() for a private one")
    return url


def _with_scheme(url: str) -> str:
    """A URL as the command line takes it: HOST:PORT is nats://HOST:PORT, unless the head there uses TLS."""
    if "://" not in url:
        known = _head_file().get("url", "")
        scheme = known.partition("://")[0] if known and _address(known) == _address(url) else "nats"
        url = f"{scheme}://{url}"
    scheme = url.partition("://")[0]
    host, port = _address(url)
    if scheme not in ("nats", "tls", "ws", "wss") or not host:
        raise _errors.InvalidError(f"url {url!r}: give HOST:PORT, nats://HOST:PORT, tls://HOST:PORT, or \"auto\" for the head on this machine")
    return url if port else f"{url}:{_PORT}"


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _who() -> str:
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except Exception:
        user = "unknown"
    script = os.path.basename(sys.argv[0] or "python")
    return f"{user}@{socket.gethostname()} {script}[{os.getpid()}]"


def shutdown(now: bool = False) -> None:
    """Closes the session of this process, if there is one. now: the workers of the run are killed, and running calls with them."""
    _check.flag("now", now)
    if _current is not None:
        _current.close(now)


def is_initialized() -> bool:
    return _current is not None and not _current.closed and _current._pid == os.getpid()


def _at_exit() -> None:
    session = _current
    if session is None or session._pid != os.getpid() or session.is_worker:
        return
    try:
        session.close()
    except Exception as err:
        os.write(2, f"troupe: at exit: {_errors.text_of(err)}\n".encode())


def _after_fork() -> None:
    """In a child: sockets and pipes that are the parent's are closed, so that their ends are seen when the parent ends."""
    session = _current
    if session is None:
        return
    if session.head is not None:
        session.head.abandon()
    import socket

    try:
        fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for fd in fds:
        try:
            peer = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        try:
            at = peer.getpeername()
        except OSError:
            continue
        finally:
            peer.close()
        if isinstance(at, tuple) and (at[0], at[1]) in session._addresses:
            os.close(fd)


os.register_at_fork(after_in_child=_after_fork)
# Before the threads that are still about are joined: those that wait for us get their end. Without it, at the usual time.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
