"""Sessions: init connects a driver to a head, and starts a private head if needed."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from . import _check, _codec, _core, _errors, _opening, _output, _runs, _seam, _traceback

_PORT = 7422  # default port of a head's URL
_CLOSE = 15.0  # seconds for the workers of a run to end
_QUIET_CLOSE = 1.5  # seconds after which the end of a session says what it waits for
_SHOWN = 8  # number of workers that a message names
_START = 30.0  # seconds for a private head to become ready
_LEASE = (1.0, 86_400.0)  # shortest and longest lease that init accepts, in seconds


class Head:
    """A private head, a child process with its own directory. It exits when its standard input is closed. `troupe
    status` and `logs` find it through the record of this run."""

    def __init__(self, gpus: str, namespace: str, resources: Mapping[str, object] | None = None) -> None:
        import json
        import subprocess
        import tempfile

        gpus, declared = _declared(gpus, resources)
        self.dir = tempfile.mkdtemp(prefix="troupe-")
        self._log = open(os.path.join(self.dir, "log"), "wb")  # noqa: SIM115
        env = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
        env.update(dict.fromkeys(("XDG_STATE_HOME", "XDG_RUNTIME_DIR"), self.dir))
        program = _core.program_path()
        command = [
            program,
            "up",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--store",
            os.path.join(self.dir, "store"),
            "--gpus",
            gpus,
            "--with-stdin",
        ]
        if declared:
            command += ["--resources", json.dumps(declared)]
        self._run = _runs.create(namespace)
        if self._run is not None:
            command += ["--log-dir", os.path.join(self._run, "logs")]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=env,
                start_new_session=True,
            )
            line = self._first_line()
        except OSError as err:
            _remove(self.dir)
            raise _errors.UnavailableError(
                f"a private head cannot be started: {program}: {err.strerror}; build it with `make python`"
            ) from err
        except BaseException:  # an interrupt: the caller will not get this head
            if hasattr(self, "process"):
                self.process.kill()
                self.close()
            else:  # the interrupted Popen has closed the pipe to standard input, so the head exits
                _remove(self.dir)
            raise
        if not line.strip():
            log = self._tail()
            self.close()
            raise _errors.UnavailableError(f"a private head did not start: {log or 'it said nothing'}")
        said = json.loads(line)
        self.url, self.token_file, self.fingerprint = (
            said["url"],
            said.get("token_file", ""),
            said.get("fingerprint", ""),
        )
        if self._run is not None:
            _runs.record(self._run, {**said, "driver": _who(), "driver_pid": os.getpid(), "namespace": namespace})

    def _first_line(self) -> bytes:
        """Returns the line that the head prints when it is ready. A head that is not ready in time is killed, which
        ends the read."""
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
        """Stops the head gracefully, and kills it if that takes too long."""
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
        """Closes the pipes in a forked child. The head belongs to the parent and ends with it."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    os.close(stream.fileno())
                except (OSError, ValueError):
                    pass


class Session:
    """The connection of this process to a head: a driver's session, or a worker's own for the calls it makes."""

    def __init__(
        self,
        core: _core.Core,
        fields: dict[str, Any],
        *,
        pickle: bool,
        head: Head | None = None,
        working_dir: str | None = None,
        device: bool = True,
    ) -> None:
        self.core = core
        self.id: int = fields["runtime"]
        self.url: str = fields["url"]
        self.namespace: str = fields["namespace"]
        self.session: str = fields["session"]
        self.pickle = pickle
        self.head = head
        self.working_dir = working_dir
        self.device = device  # whether tensors of results may stay on their device
        self.opening = _opening.Opening({})
        self.is_worker = False
        self.driver = ""  # in a worker: the session of the driver that created it
        self.own = ("", "", -1)  # in a worker: role, incarnation of the role, and rank
        self.host: Any = None  # in a worker: the Host that runs its methods
        self.server: Any = None  # serves the objects of this process
        self.pool: Any = None  # the workers of remote functions
        self.weights: dict[str, object] = {}  # by name
        self.output: _output.Reader | None = None
        self.closed = False
        self.clusters: dict[tuple[str, str], Any] = {}  # clusters opened from handles, by role and incarnation
        self._pid = os.getpid()
        self._addresses = [_address(u) for u in self.url.split(",") if u]

    def codec(self, trusted: bool) -> _codec.Codec:
        """Returns a codec for values: trusted calls of this run may contain pickles, items of pipelines may not."""
        if not self.pickle:
            why = "pickles were turned off with troupe.init(pickle=False)"
        elif not trusted:
            why = (
                "pickles travel only in calls, between the processes of one run; an item of a pipeline may be another's"
            )
        else:
            why = ""
        return _codec.Codec(pickle=not why, why_not=why, handles=True)

    def close(self, now: bool = False) -> None:
        """Shuts down everything this process created and, in a driver, ends the session. With now, workers are killed
        instead of stopped. Repeated calls have no effect."""
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
        """Ends what this worker created. The session itself lasts as long as the process."""
        if self.server is not None:
            self.server.close()
        self.pool = None
        self.core.ask(_seam.end_created(runtime=self.id, now=now)).get(15)

    def _ask_close(self, now: bool) -> None:
        self.core.cancel_all()  # their results would be dropped, so the workers need not finish them
        ask = self.core.ask(_seam.close(runtime=self.id, now=now))
        try:
            if not self.core.wait(ask, time.monotonic() + _QUIET_CLOSE):
                self._say_unfinished()
            self.core.wait(ask, time.monotonic() + _CLOSE)
        except KeyboardInterrupt:  # the first one may have ended the program; this one ends the wait
            self.core.ask(_seam.unfinished(runtime=self.id, now=True))
            self.core.wait(ask, time.monotonic() + _QUIET_CLOSE)
            raise
        if self.output is not None:
            self.output.join()

    def _say_unfinished(self) -> None:
        """Says which workers the end of the session waits for."""
        asked = self.core.ask(_seam.unfinished(runtime=self.id))
        self.core.wait(asked, time.monotonic() + _QUIET_CLOSE)
        lines = asked._value or []
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        what = ", ".join(lines[:_SHOWN]) + more if lines else "its roles to end"
        remedy = "Ctrl-C kills them, and so does troupe.shutdown(now=True)"
        os.write(2, f"troupe: the session ends, and waits for workers: {what}; {remedy}\n".encode())

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
    """Returns the session of this process. If there is none, calls init(), or, with start=False, raises ClosedError."""
    session = _current
    if session is not None and session._pid != os.getpid():
        session.core.check()
    if session is None or session.closed:
        if not start:
            raise _errors.ClosedError("there is no session; call troupe.init() first")
        return init()
    return session


@_opening.noting_given
def init(
    url: str | None = None,
    namespace: str | None = None,
    *,
    gpus: str = "auto",
    resources: Mapping[str, object] | None = None,
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
    """Connects to a head, or starts a private one as a child process, and returns the session.

    - url: the head's address, "HOST:PORT" or with a scheme. "auto": the head that runs on this machine. None:
      TROUPE_URL, or a private head.
    - namespace: the scope of this run's names. None: TROUPE_NAMESPACE, or "default" on a private head, or else a new
      namespace, which is printed.
    - gpus: devices of a private head: "auto", "none" or simulated ones, "sim:2x8" for 2 nodes with 8 each.
    - resources: totals that a private head's node declares instead of the machine's, such as {"CPU": 100, "GPU": 8,
      "memory": "64GiB", "licence": 2}. The GPUs are then simulated.
    - pickle=False: nothing is pickled or unpickled.
    - working_dir: a directory that is copied once to each node, where workers run in the copy. Default: they run in
      this process's directory.
    - token, token_file, fingerprint, creds_file, ca_file: credentials for the head. Defaults: TROUPE_TOKEN,
      TROUPE_TOKEN_FILE, TROUPE_FINGERPRINT, TROUPE_CREDS, TROUPE_CA, or those of the head on this machine.
    - name: a readable name for this driver. Default: user, host, script and process id.
    - lease: seconds, 1 to 86,400, that this driver's roles and reservations outlive it when it is disconnected or
      suspended; 0 means 15. If its process dies, they end within seconds regardless of the lease.
    - output: what this process shows of its workers' output: "all"; "errors", only stderr; "none"; "raw", every line
      unchanged and without limits. None: TROUPE_OUTPUT, or "all". The last stderr lines of a worker that dies are
      always shown.
    - device=False: device tensors travel through host memory in every call of this run, and arrive there.
    - timeout: seconds to connect; None: no limit.

    If a session is open, init returns it; other settings than those it has are an ExistsError that names them. A
    program that uses Troupe before init has the session that init() without arguments opens. In a worker, init returns
    the worker's own session, which exists without init. As a context manager, the session closes at the end of the
    block.
    """
    global _current
    lease = _lease(lease)
    _check.seconds("timeout", timeout)
    shown = _output.of_session(output)
    settings = {
        "gpus": gpus, "resources": resources, "pickle": pickle, "working_dir": working_dir, "lease": lease,
        "output": shown["mode"], "device": _check.flag("device", device),
    }  # fmt: skip
    with _init_lock:
        if _current is not None and not _current.closed and _current._pid == os.getpid():
            _refuse_other_settings(_current, _opening.given.get())
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
            raise _errors.InvalidError(
                f"resources={resources!r} is for a private head, and {url} is another's: its nodes declare theirs "
                "with `troupe up|join --resources`"
            )
        elif gpus != "auto":
            raise _errors.InvalidError(
                f"gpus={gpus!r} is for a private head, and {url} is another's; leave one of them out"
            )
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
            request = _seam.open(
                bus=bus,
                namespace=namespace,
                name=name or _who(),
                lease=lease,
                private=head is not None,
                output=shown,
                cli=_command_line(head, bus),
            )
            fields = core.ask(request).get(timeout)
        except BaseException:
            if head is not None:
                head.close()
            raise
        _traceback.install(_errors.Error, KeyboardInterrupt)
        _current = Session(core, fields, pickle=pickle, head=head, working_dir=working_dir, device=device)
        _current.output = reader
        _current.opening = _opening.Opening(
            {k: _opening.normal(k, v) for k, v in {**settings, **given, "name": name or _who()}.items()}
        )
        reader.start(_current.id)
        if head is None and not given_namespace:
            print(
                f"troupe: namespace {namespace} on {_current.url}; `troupe status` shows it",
                file=sys.stderr,
                flush=True,
            )
        return _current


def _command_line(head: Head | None, bus: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a shell on this machine needs to reach the session's head with the `troupe` command: variables
    before it and flags after it. A token and the password of a URL are not shown."""
    import shlex

    if head is not None and head._run is not None:
        return {"env": "", "flags": f"--run {os.getpid()}"}
    urls = ",".join(re.sub(r"//.*@", "//…@", url) for url in bus["urls"])
    known = {} if head is not None else _local_head(urls)  # the command finds these by itself
    variables = {
        "TROUPE_TOKEN": "…" if bus.get("token") else None,
        "TROUPE_TOKEN_FILE": bus.get("token_file"),
        "TROUPE_CREDS": bus.get("creds_file"),
        "TROUPE_FINGERPRINT": bus.get("fingerprint"),
    }
    given = {name: value for name, value in variables.items() if value and value not in known.values()}
    env = " ".join(f"{name}={value if value == '…' else shlex.quote(value)}" for name, value in given.items())
    return {"env": env, "flags": f"--url {shlex.quote(urls)}"}


def _refuse_other_settings(session: Session, asked: Mapping[str, Any]) -> None:
    """Raises ExistsError if init was given other settings than the open session has. A worker has its driver's, of
    which it knows the place."""
    url, namespace = asked.get("url"), asked.get("namespace")
    found = []
    if url is not None and url != session.url and not _is_at(session, url):
        found.append(f"url is {_without_password(session.url)!r}, not {_without_password(url)!r}")
    if namespace not in (None, session.namespace):
        found.append(f"namespace is {session.namespace!r}, not {namespace!r}")
    if not session.is_worker:
        found += session.opening.differences(asked)
    if found:
        opened = "that of its run" if session.is_worker else f"opened by {session.opening.by}"
        raise _errors.ExistsError(
            f"this process has a session already, {opened}, with other settings: {'; '.join(found)}. "
            "Call troupe.shutdown() before another init, or leave these arguments out"
        )


def _without_password(url: str) -> str:
    return ",".join(
        f"{scheme}{sep}{rest.rpartition('@')[2]}" for scheme, sep, rest in (u.rpartition("://") for u in url.split(","))
    )


def _is_at(session: Session, url: str) -> bool:
    """Returns whether a session is at that URL. In a worker, "auto" is the head of its run."""
    if url == "auto":
        return session.is_worker or _address(_head_file().get("url", "")) in session._addresses
    return _address(url) in session._addresses


def _declared(gpus: str, resources: Mapping[str, object] | None) -> tuple[str, dict[str, object]]:
    """Returns the devices and the other totals of a private head, in the form of the command line."""
    if resources is None:
        return gpus, {}
    if not isinstance(resources, Mapping):
        raise _errors.InvalidError(
            f"resources={resources!r} is of type {type(resources).__name__}; give a dict such as "
            f"{{'CPU': 100, 'GPU': 8}}"
        )
    made: dict[str, Any] = {}
    for name, amount in resources.items():
        what = f"resources[{_check.text('resources', name)!r}]"
        if name == "GPU":
            if gpus != "auto":
                raise _errors.InvalidError(
                    f"{what} and gpus={gpus!r} both say which devices there are: give one of them"
                )
            count = _check.integer(what, amount)
            gpus = f"sim:1x{count}" if count else "none"
        elif name == "CPU":
            made[name] = _check.integer(what, amount)
        elif name == "memory":
            made[name] = f"{_check.memory(what, amount)}B"
        else:
            made[name] = _check.thousandths(what, amount) / 1000
    return gpus, made


def _lease(seconds: float) -> float:
    """Checks a lease in seconds; 0 means the default."""
    least, most = _LEASE
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not (seconds == 0 or least <= seconds <= most)
    ):
        raise _errors.InvalidError(f"lease={seconds!r} must be {least:g} to {most:g} seconds, or 0 for the default")
    return float(seconds)


def _local_head(url: str) -> dict[str, str]:
    """Returns the credentials of the head on this machine if it is the one at that URL, as the `troupe` command
    does."""
    said = _head_file()
    if _address(said.get("url", "")) != _address(url):
        return {}
    return {"token_file": said.get("token_file", ""), "fingerprint": said.get("fingerprint", "")}


def _head_file() -> dict[str, str]:
    """Returns what the head on this machine has recorded about itself; empty if none runs."""
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
        raise _errors.UnavailableError(
            f"no head runs on this machine ({_head_path()} does not exist): start one with `troupe up`, or call "
            "init() for a private one"
        )
    return url


def _with_scheme(url: str) -> str:
    """Completes a URL as the command line does: HOST:PORT becomes nats://HOST:PORT, unless the head there is known to
    use TLS."""
    if "://" not in url:
        known = _head_file().get("url", "")
        scheme = known.partition("://")[0] if known and _address(known) == _address(url) else "nats"
        url = f"{scheme}://{url}"
    scheme = url.partition("://")[0]
    host, port = _address(url)
    if scheme not in ("nats", "tls", "ws", "wss") or not host:
        raise _errors.InvalidError(
            f'url {url!r}: give HOST:PORT, nats://HOST:PORT, tls://HOST:PORT, or "auto" for the head on this machine'
        )
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
    """Closes the session of this process, if there is one. With now=True, the workers of the run are killed, along with
    the calls they run."""
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
    """Closes the parent's sockets and pipes in a forked child, so that their peers notice when the parent ends."""
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
# threading._register_atexit runs _at_exit before the interpreter joins the remaining threads, so that threads waiting
# for Troupe can end. Without it, atexit runs it at the usual time.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
