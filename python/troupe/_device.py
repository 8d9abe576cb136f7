"""Device tensors by reference: the producer keeps the tensor, and a receiver takes it by the shortest path available to
it.

A tensor in a result, an argument or a value of put stays on its device. The message contains a reference to it, the
UUID of the device and an IPC handle. A receiver that can access the device opens the handle and copies the tensor, or
uses it in place. Another receiver on the same host gets the bytes in chunks, through pages that both processes have
registered (staging). All others get them over the bus. The reference is counted like any other: the producer drops the
tensor when no process refers to it.

The device library is accessed through _device_backend.Backend; _cuda.Cuda implements it for CUDA. Threads and sockets
start with the first tensor that is lent or received.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import selectors
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from . import _codec, _core, _errors, _reference, _session
from ._cuda import Cuda
from ._device_backend import Backend, DeviceError, Lent, Wait, nothing
from ._seam import FREED, PUT_FAILED, WANTED, CompletionHead, WantedMeta

if TYPE_CHECKING:
    import torch

    from ._session import Session

SMALLEST = 1 << 20  # bytes from which the tensors of a message are lent; fewer travel in the message
LARGE = 16 << 20  # bytes from which a tensor that is copied is lent by itself; smaller ones share blocks
MOST = 500  # tensors lent by themselves, and blocks, in one message, whose list of references is bounded
BLOCK = 64 << 20  # bytes of a block: a receiver that keeps one small tensor keeps its block
_ALIGN = 256  # alignment of tensors in a block
_DESCRIPTION = 512  # bytes of the description of a block in a message
CHUNK = 32 << 20  # bytes copied at once
SLOTS = 4  # chunks of one connection
_CONNECTIONS = 8  # readers per producer, and producers per reader; each connection pins SLOTS * CHUNK bytes
_IDLE = 60.0  # seconds after which an idle connection is closed
_SILENCE = 30.0  # seconds without a chunk after which a reader falls back to the bus
_SUFFIX = ".device"
_ENV = (
    "TROUPE_DEVICE"  # "0": tensors travel in their messages; "host": no IPC handles; "bus": neither handles nor staging
)

counters = {
    "lent": 0,
    "own": 0,
    "opened": 0,
    "shared": 0,
    "staged": 0,
    "bus": 0,
}  # number of tensors, by the way they were received
last_refusal = ""  # why the last IPC handle was not used

_backend: Backend = Cuda()
_lock = threading.Lock()  # guards _lender and _sources
_lender: Lender | None = None
_sources: dict[str, Source] = {}  # connections to producers, by socket path
_shares = threading.local()  # .on: whether the decoder returns tensors in place
_message = threading.local()  # .blocks: the blocks of the message that is being decoded, by number


def backend() -> Backend:
    return _backend


def mode() -> str:
    return os.environ.get(_ENV, "")


# The producer.


class Lending:
    """The tensors lent by one message, or by the messages to several ranks. Each tensor is lent once."""

    def __init__(self, snapshot: bool, share: bool) -> None:
        self._snapshot = snapshot  # whether to lend copies, which later writes do not change
        self._share = share  # whether receivers use the tensors in place
        self._known: dict[
            int, tuple[Any, tuple[_reference.Reference, bytes]]
        ] = {}  # by id of the tensor, which stays alive here
        self._room: dict[int, int] = {}
        self._devices: set[int] = set()

    def takes(self, value: object) -> bool:
        """Returns whether a tensor may stay on its device."""
        return backend().is_tensor(value) and mode() != "0"

    def alone(self, value: torch.Tensor) -> bool:
        """Returns whether a tensor is lent by itself, not in a block: it is large, or is lent without a copy."""
        return bool(value.nbytes >= (LARGE if self._snapshot else SMALLEST)) and len(self._known) < MOST

    def add(self, value: object) -> tuple[_reference.Reference, bytes] | None:
        """Lends a tensor. Returns a reference to it and its encoded description, or None if memory for a copy is
        short."""
        if id(value) not in self._known:
            lent = backend().lend(value, self._snapshot, self._room)
            if lent is None:
                return None
            self._devices.add(lent.device)
            self._known[id(value)] = value, _lend(lent, self._share)
        return self._known[id(value)][1]

    def blocks(self) -> Blocks:
        """Returns a collector for the small tensors of one message."""
        return Blocks(self)

    def add_block(
        self, values: Sequence[torch.Tensor], starts: list[int], nbytes: int
    ) -> tuple[_reference.Reference, bytes] | None:
        """Lends a block with copies of tensors. Returns a reference to it and its encoded description, or None if
        memory for it is short."""
        lent = backend().pack(values, starts, nbytes, self._room)
        if lent is None:
            return None
        self._devices.add(lent.device)
        return _lend(lent, self._share)

    def finish(self) -> None:
        """Waits until the tensors are complete. Must be called before their message is sent."""
        for device in self._devices:
            backend().wait(device)
        self._devices.clear()


class Blocks:
    """The tensors of one message that are not lent by themselves. They are copied into blocks, which are lent.

    In the message a tensor is [block, start, dtype, shape]. The first tensor of a block also has the description of
    the block, for which the message reserves _DESCRIPTION bytes, because it is known only when all tensors are."""

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self._blocks: list[_Block] = []
        self._open: dict[int, int] = {}  # by device, the number of the block that is being filled
        self.tensors = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def full(self) -> bool:
        return len(self._blocks) >= MOST

    def add(self, value: torch.Tensor) -> tuple[bytes, bytearray]:
        """Adds a tensor. Returns its encoded fields, and the room for the description of its block, or no room."""
        self.tensors += 1
        device = backend().device_of(value)
        number = self._open.get(device, -1)
        first = number < 0 or self._blocks[number].nbytes + value.nbytes > BLOCK
        if first:
            number = self._open[device] = len(self._blocks)
            self._blocks.append(_Block())
        block = self._blocks[number]
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        fields = bytes(msgpack.packb([number, block.nbytes, dtype, shape]))
        block.values.append(value)
        block.starts.append(block.nbytes)
        block.nbytes += -(-value.nbytes // _ALIGN) * _ALIGN
        if not first:
            return fields, bytearray()
        return b"\x95" + fields[1:] + struct.pack(">BH", 0xC5, _DESCRIPTION), block.description

    def lend(self, note: Callable[[_reference.Reference], None]) -> bool:
        """Lends the blocks, and calls note with the reference of each. Returns False if the tensors must travel in the
        message: they are few, or device memory is short."""
        if sum(block.nbytes for block in self._blocks) < SMALLEST:
            return False
        made = []
        for block in self._blocks:
            pair = self._lending.add_block(block.values, block.starts, block.nbytes)
            if pair is None or len(pair[1]) > _DESCRIPTION:
                return False
            made.append(pair)
        for block, (ref, description) in zip(self._blocks, made, strict=True):
            block.description[: len(description)] = description
            note(ref)
        return True


class _Block:
    def __init__(self) -> None:
        self.values: list[Any] = []
        self.starts: list[int] = []
        self.nbytes = 0
        self.description = bytearray(_DESCRIPTION)


def lend(session: Session, lent: Lent) -> tuple[int, str]:
    """Makes a value with one use of a tensor. Returns its number, and the socket for readers of its bytes."""
    global _lender
    session.core.check()
    with _lock:
        if _lender is None or _lender.pid != os.getpid():
            _lender = Lender(session.core)
        lender = _lender
    number = lender.add(session, lent)
    counters["lent"] += 1
    return number, lender.path


def find(owner: str, number: int) -> Lent | None:
    """Returns a tensor that this process lends."""
    return _lender.find(owner, number) if _lender is not None else None


def _lend(lent: Lent, share: bool) -> tuple[_reference.Reference, bytes]:
    session = _session.current(start=False)
    number, path = lend(session, lent)
    ref = _reference.Reference(session, session.session, number)
    fields = {
        "owner": session.session,
        "id": number,
        "dtype": lent.dtype,
        "shape": list(lent.shape),
        "uuid": lent.uuid,
        "socket": path,
    }
    if lent.handle:
        fields["handle"], fields["offset"] = lent.handle, lent.offset
    if share:
        fields["share"] = True
    return ref, bytes(msgpack.packb(fields))


class Lender:
    """The tensors that this process lends, and the thread that serves readers of their bytes."""

    def __init__(self, core: _core.Core) -> None:
        self.pid = os.getpid()
        self._core = core
        self._tensors: dict[tuple[str, int], Lent] = {}  # by session and number
        self._sessions: dict[int, str] = {}  # session names, by runtime
        self._buffer = bytearray(64 << 10)
        self._address = ctypes.addressof((ctypes.c_char * len(self._buffer)).from_buffer(self._buffer))
        self._selector = selectors.DefaultSelector()
        fd = core.lib.troupe_lent()
        if fd < 0:
            raise core.fail(fd)
        self._selector.register(fd, selectors.EVENT_READ, self._take)
        self.path, self._listener = _listen()
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            atexit.register(self._remove)
        self._readers: set[Reader] = set()
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._run, daemon=True, name="troupe-device").start()

    def add(self, session: Any, lent: Lent) -> int:
        number = int(self._core.lib.troupe_lend(session.id))
        if number < 0:
            raise self._core.fail(number)
        self._sessions[session.id] = session.session
        self._tensors[session.session, number] = lent
        self._core.lib.troupe_count_device(session.id, 0, lent.nbytes)
        return number

    def find(self, owner: str, number: int) -> Lent | None:
        return self._tensors.get((owner, number))

    def count(self) -> int:
        return len(self._tensors)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(_IDLE / 4 if self._readers else None):
                key.data()
            now = time.monotonic()
            for reader in [r for r in self._readers if r.lent is None and now - r.active > _IDLE]:
                self.drop(reader)

    def _take(self) -> None:
        """Handles the core's completions about lent values."""
        while (n := self._core.lib.troupe_take_lent(self._address, len(self._buffer))) > 0:
            at = 0
            while at < n:
                kind, _, number, _, meta, _, _, _ = CompletionHead.layout.unpack_from(self._buffer, at)
                at += CompletionHead.size
                (runtime,) = WantedMeta.layout.unpack_from(self._buffer, at)
                at += meta + 7 & ~7
                owner = self._sessions.get(runtime, "")
                if kind == FREED:
                    self._tensors.pop((owner, number), None)
                elif kind == WANTED:
                    self._fill(runtime, owner, number)
        if n < 0:
            raise self._core.fail(n)

    def _fill(self, runtime: int, owner: str, number: int) -> None:
        """Gives the core the bytes of a value, for a receiver without a shorter path."""
        lent, lib = self._tensors.get((owner, number)), self._core.lib
        address: Any
        if lent is None:
            return  # the value was freed meanwhile
        try:
            if lent.raw:
                lib.troupe_fill(runtime, number, 0, self._bytes_of(lent), lent.nbytes)
                return
            body = _codec.Codec().encode(lent.value)
            address = body if isinstance(body, bytes) else self._core.place(body)
            lib.troupe_fill(runtime, number, 0, address, len(body))
        except Exception as err:
            text = msgpack.packb(
                {
                    "code": "application",
                    "message": f"the bytes of a tensor cannot be copied: {_errors.text_of(err)}",
                    "rank": -1,
                }
            )
            lib.troupe_fill(runtime, number, PUT_FAILED, text, len(text))

    def _bytes_of(self, lent: Lent) -> int:
        """Copies the bytes of a tensor to memory of the core, and returns the address."""
        address: int = self._core.lib.troupe_alloc(lent.nbytes)
        if not address:
            raise MemoryError(f"no room for {lent.nbytes} bytes")
        try:
            backend().read(lent, 0, address, lent.nbytes)()
        except BaseException:
            self._core.lib.troupe_release(address)
            raise
        return address

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            conn, _ = self._listener.accept()
        except OSError:
            return
        if not _same_user(conn) or len(self._readers) >= _CONNECTIONS:
            conn.close()  # the reader falls back to the bus
            return
        try:
            reader = Reader(self, conn)
        except (OSError, DeviceError):
            conn.close()
            return
        self._readers.add(reader)
        self._selector.register(conn, selectors.EVENT_READ, reader.serve)

    def drop(self, reader: Reader) -> None:
        self._readers.discard(reader)
        self._selector.unregister(reader.conn)
        reader.close()

    def _remove(self) -> None:
        if self.pid == os.getpid():
            try:
                os.unlink(self.path)
            except OSError:
                pass

    def _forked(self) -> None:
        """Closes the sockets in a forked child, so that readers notice the end of their producer and do not wait for
        its child."""
        for reader in self._readers:
            reader.conn.close()
        if self._listener is not None:
            self._listener.close()


class Reader:
    """A process that reads lent tensors in chunks. A slot of its memory is overwritten only after it has freed the
    slot."""

    def __init__(self, lender: Lender, conn: socket.socket) -> None:
        self.conn = conn
        self.lent: Lent | None = None  # the tensor being sent
        self.active = time.monotonic()
        self._lender = lender
        self._at = 0
        self._free = list(range(SLOTS))
        self._flying: deque[tuple[int, int, int, Wait]] = deque()
        conn.setblocking(False)
        fd = os.memfd_create("troupe-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SLOTS * CHUNK)
            _seal(fd)
            self._memory = Mapping(fd, SLOTS * CHUNK, writable=True)
            self._pinned = backend().register(self._memory.address, SLOTS * CHUNK, True)
            socket.send_fds(conn, [msgpack.packb(["ring", SLOTS, CHUNK])], [fd])
        finally:
            os.close(fd)

    def serve(self) -> None:
        """Handles the reader's messages."""
        try:
            while True:
                try:
                    data = self.conn.recv(4096)
                except BlockingIOError:
                    break
                if not data:
                    raise OSError("the reader has ended")
                self._handle(msgpack.unpackb(data))
            self._pump()
        except (OSError, DeviceError, ValueError, TypeError, IndexError, msgpack.UnpackException):
            self._lender.drop(self)

    def _handle(self, message: Sequence[Any]) -> None:
        self.active = time.monotonic()
        if message[0] == "free":
            slot = message[1]
            if slot in self._free or not 0 <= slot < SLOTS:
                raise ValueError("a slot that is free")
            self._free.append(slot)
        elif message[0] == "get":
            _, owner, number, nbytes = message
            lent = self._lender.find(owner, number)
            if lent is None or lent.nbytes != nbytes or self.lent is not None:
                self.conn.send(msgpack.packb(["none"]))
                return
            self.lent, self._at = lent, 0
        else:
            raise ValueError("an unknown message")

    def _pump(self) -> None:
        """Copies chunks into free slots, two at a time, and tells the reader when each is complete."""
        lent = self.lent
        if lent is None:
            return
        while True:
            while self._free and self._at < lent.nbytes and len(self._flying) < 2:
                slot, n = self._free.pop(0), min(CHUNK, lent.nbytes - self._at)
                wait = backend().read(lent, self._at, self._memory.address + slot * CHUNK, n)
                self._flying.append((slot, self._at, n, wait))
                self._at += n
            if not self._flying:
                break
            slot, offset, n, wait = self._flying.popleft()
            wait()
            self.conn.send(msgpack.packb(["chunk", slot, offset, n]))
        if self._at == lent.nbytes:
            self.lent = None

    def close(self) -> None:
        self.conn.close()
        for *_, wait in self._flying:
            try:
                wait()
            except DeviceError:
                pass
        if self._pinned:
            backend().unregister(self._memory.address)
        self._memory.close()


# The receiver.


class sharing:
    """A block in which decoded tensors are used in place, if on is true."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._before = getattr(_shares, "on", False)
        _shares.on = self._on

    def __exit__(self, *_: object) -> None:
        _shares.on = self._before


def receive(codec: _codec.Codec, fields: Any) -> torch.Tensor:
    """Returns a tensor of a message: on this process's device if it has one, otherwise in host memory."""
    if isinstance(fields, list):
        return _part(codec, fields)
    try:
        share = getattr(_shares, "on", False) or fields.get("share") is True
        owner, number, dtype, shape, path = (
            fields["owner"],
            fields["id"],
            fields["dtype"],
            tuple(fields["shape"]),
            fields["socket"],
        )
        nbytes = _codec._SIZES[dtype]
        for axis in shape:
            nbytes *= axis
        if not (isinstance(owner, str) and isinstance(number, int) and isinstance(path, str) and 0 < nbytes < 1 << 48):
            raise ValueError("a field has the wrong type")
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise _errors.MalformedError(f"a tensor on a device that does not say what it is: {err}") from err
    ref = _reference.Reference.received(owner, number)
    lent = find(owner, number)
    if lent is not None:  # lent by this process
        counters["own"] += 1
        return lent.value if share else backend().copy(lent)
    on_device = backend().ready()
    if on_device and (opened := _open(fields, nbytes, ref if share else None)) is not None:
        counters["shared" if share else "opened"] += 1
        _count_taken(nbytes)
        value, wait = opened
        if not share:
            _codec.finish_later(wait, ref)  # the producer keeps the tensor until the copy is complete
        return value
    if path and mode() != "bus":
        source = _source(path)
        if (
            source is not None
            and (value := _staged(source, owner, number, dtype, shape, nbytes, on_device)) is not None
        ):
            counters["staged"] += 1
            _count_taken(nbytes)
            return value
    counters["bus"] += 1
    ref._codec = codec
    with _codec.another_message():
        value = ref.result()
    return backend().to_device(value) if on_device else value


def _part(codec: _codec.Codec, fields: list[Any]) -> torch.Tensor:
    """Returns a tensor that its message has in a block. The block is received with its first tensor, as a whole."""
    blocks: dict[int, Any] = _message.__dict__.setdefault("blocks", {})
    try:
        number, start, dtype, shape, *description = fields
        if description:
            unpacker = msgpack.Unpacker()
            unpacker.feed(description[0])
            blocks[number] = receive(codec, unpacker.unpack())
            _codec.finish_later(blocks.clear, None)
        block, nbytes = blocks[number], _codec._SIZES[dtype]
        for axis in shape:
            nbytes *= axis
        if not 0 <= start <= start + nbytes <= block.nbytes:
            raise ValueError("it is not in its block")
        return _codec.part_of(block, start, nbytes, dtype, tuple(shape))
    except (AttributeError, KeyError, TypeError, ValueError, msgpack.UnpackException) as err:
        raise _errors.MalformedError(f"a tensor in a block that does not say what it is: {err}") from err


def _count_taken(nbytes: int) -> None:
    session = _session.current(start=False)
    session.core.lib.troupe_count_device(session.id, 1, nbytes)


def _open(fields: dict[str, object], nbytes: int, keep: object) -> tuple[torch.Tensor, Wait] | None:
    """Opens the tensor by its IPC handle. Returns the tensor and a function that waits for it, or None if another path
    must be used."""
    global last_refusal
    handle, uuid = fields.get("handle"), fields.get("uuid")
    if mode() in ("host", "bus"):
        last_refusal = f"{_ENV}={mode()}"
    elif not isinstance(handle, bytes) or not isinstance(uuid, bytes):
        last_refusal = "the producer's allocator gives no handle"
    else:
        try:
            if backend().reaches(uuid):
                return backend().open(fields, nbytes, keep)
            last_refusal = "this process does not see the device"
        except DeviceError as err:
            last_refusal = str(err)
    return None


def _staged(
    source: Source, owner: str, number: int, dtype: str, shape: tuple[int, ...], nbytes: int, on_device: bool
) -> torch.Tensor:
    """Fetches the tensor from its producer in chunks. Returns None if the producer does not provide it."""
    core = _core.get()
    try:
        if on_device:
            room, pointer = backend().empty(nbytes)
            if not source.fetch(
                owner, number, nbytes, lambda offset, address, n: backend().write(pointer + offset, address, n)
            ):
                return None
            return backend().tensor(room, dtype, shape)
        room = bytearray(nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))

        def copy(offset: int, address: int, n: int) -> Wait:
            core.copy(start + offset, address, n)
            return nothing

        if not source.fetch(owner, number, nbytes, copy):
            return None
        return _codec._make(dtype, shape, memoryview(room), True)
    except (OSError, DeviceError, ValueError, TypeError, IndexError, msgpack.UnpackException):
        return None


def _source(path: str) -> Source | None:
    """Returns a connection to the producer that listens on a socket, or None if this process cannot reach it."""
    with _lock:
        source = _sources.get(path)
        if source is not None and source.usable():
            return source
        _sources.pop(path, None)
        for other in [] if len(_sources) < _CONNECTIONS else list(_sources):
            if _sources[other].end():
                del _sources[other]
                break
        if len(_sources) >= _CONNECTIONS:
            return None
    try:
        made = Source(path)  # outside of the lock, because a stopped producer would block all other threads
    except (OSError, ValueError, TypeError, msgpack.UnpackException):
        return None
    with _lock:
        source = _sources.setdefault(path, made)
    if source is not made:  # another thread was faster
        made.end()
    return source


class Source:
    """A connection to a producer, and the memory that the producer fills."""

    def __init__(self, path: str) -> None:
        folder, name = os.path.split(path)
        if folder != _folder() or not name.endswith(_SUFFIX):
            raise ValueError("a socket elsewhere")
        _check_private(folder)
        self._pid = os.getpid()
        self._busy = threading.Lock()  # one tensor at a time
        self._closed = False
        self._memory: Mapping | None = None
        self._pinned = False
        self._conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._conn.settimeout(_SILENCE)
            self._conn.connect(path)
            if not _same_user(self._conn):
                raise ValueError("a producer of another user")
            data, fds, _, _ = socket.recv_fds(self._conn, 4096, 1)
            try:
                kind, self._slots, self._chunk = msgpack.unpackb(data)
                size = self._slots * self._chunk
                if (
                    kind != "ring"
                    or not 0 < self._slots <= 64
                    or not 0 < self._chunk <= 1 << 30
                    or not _is_sealed(fds[0], size)
                ):
                    raise ValueError("no memory that could be mapped")
                self._memory = Mapping(fds[0], size, writable=False)
            finally:
                for fd in fds:
                    os.close(fd)
            if backend().ready():
                self._pinned = backend().register(self._memory.address, size, False)
        except BaseException:
            self._close()
            raise

    def usable(self) -> bool:
        """Returns whether the producer still answers. It closes idle connections."""
        if self._closed or self._pid != os.getpid():
            return False
        if not self._busy.acquire(blocking=False):
            return True
        try:
            poller = select.poll()
            poller.register(self._conn, select.POLLIN)
            if not poller.poll(0):  # the producer sends nothing unasked, so readable would mean closed
                return True
        finally:
            self._busy.release()
        self.end()
        return False

    def end(self) -> bool:
        """Closes the connection, unless it is in use. Returns whether it did."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            self._close()
        finally:
            self._busy.release()
        return True

    def fetch(self, owner: str, number: int, nbytes: int, begin: Callable[[int, int, int], Wait]) -> bool:
        """Fetches a tensor chunk by chunk; begin(offset, address, number) starts the copy of each. Returns False if the
        producer does not have it."""
        with self._busy:
            if self._closed or self._memory is None:
                return False
            flying: deque[tuple[int, Wait]] = deque()
            try:
                return self._fetch(owner, number, nbytes, begin, flying)
            except BaseException:
                while flying:  # copies out of the memory must end before it is unmapped
                    try:
                        flying.popleft()[1]()
                    except DeviceError:
                        pass
                self._close()  # chunks may be under way
                raise

    def _fetch(
        self,
        owner: str,
        number: int,
        nbytes: int,
        begin: Callable[[int, int, int], Wait],
        flying: deque[tuple[int, Wait]],
    ) -> bool:
        assert self._memory is not None
        self._conn.send(msgpack.packb(["get", owner, number, nbytes]))
        got = 0
        while got < nbytes:
            data = self._conn.recv(4096)
            if not data:
                raise OSError("the producer has ended")
            message = msgpack.unpackb(data)
            if message == ["none"] and got == 0:
                return False
            kind, slot, offset, n = message
            if (
                kind != "chunk"
                or offset != got
                or not 0 <= slot < self._slots
                or not 0 < n <= min(self._chunk, nbytes - got)
            ):
                raise ValueError("a chunk that was not asked for")
            flying.append((slot, begin(offset, self._memory.address + slot * self._chunk, n)))
            got += n
            if len(flying) == 2:
                self._done(flying)
        while flying:
            self._done(flying)
        return True

    def _done(self, flying: deque[tuple[int, Wait]]) -> None:
        slot, wait = flying[0]
        wait()
        flying.popleft()
        self._conn.send(msgpack.packb(["free", slot]))

    def _close(self) -> None:
        """Closes the connection. The caller must have exclusive use of it."""
        if self._closed:
            return
        self._closed = True
        self._conn.close()
        if self._memory is not None:
            if self._pinned and self._pid == os.getpid():
                backend().unregister(self._memory.address)
            self._memory.close()


# Memory and sockets.

_libc: Any = None
_PROT_READ, _PROT_WRITE, _MAP_SHARED, _DONTFORK = 1, 2, 1, 10
_F_ADD_SEALS, _F_GET_SEALS, _SEALS = 1033, 1034, 2 | 4  # F_SEAL_SHRINK | F_SEAL_GROW


class Mapping:
    """A shared mapping of a descriptor, at an address for C functions."""

    def __init__(self, fd: int, n: int, writable: bool) -> None:
        global _libc
        if _libc is None:
            _libc = ctypes.CDLL(None, use_errno=True)
            _libc.mmap.restype = ctypes.c_void_p
            _libc.mmap.argtypes = [
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_long,
            ]
            _libc.munmap.argtypes = _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
            _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        at = _libc.mmap(None, n, _PROT_READ | (_PROT_WRITE if writable else 0), _MAP_SHARED, fd, 0)
        if at is None or at == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "the memory of a connection cannot be mapped")
        _libc.madvise(at, n, _DONTFORK)
        self.address: int = at
        self._n = n

    def close(self) -> None:
        if self.address:
            _libc.munmap(self.address, self._n)
            self.address = 0


def _seal(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)


def _is_sealed(fd: int, size: int) -> bool:
    """Returns whether the memory has at least that size and is sealed, so that reading it cannot fail."""
    import fcntl

    return fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS and os.fstat(fd).st_size >= size


def _folder() -> str:
    """Returns the private directory of shared memory, the same as the core's."""
    return os.environ.get("TROUPE_SHM_DIR") or f"/tmp/troupe-shm-{os.getuid()}"


def _check_private(folder: str) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{folder} is not private")


def _same_user(conn: socket.socket) -> bool:
    _, uid, _ = struct.unpack("iii", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def _listen() -> tuple[str, socket.socket | None]:
    """Returns the path and the listening socket for readers; "" and None if shared memory is off or its directory is
    unusable."""
    if os.environ.get("TROUPE_SHM") == "0" or mode() == "bus":
        return "", None
    folder = _folder()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.path.join(folder, os.urandom(16).hex() + _SUFFIX)
    try:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        _check_private(folder)
        _sweep(folder)
        listener.bind(path + ".bind")
        listener.listen(64)
        listener.setblocking(False)
        os.rename(path + ".bind", path)  # a socket under the final name without a listener is therefore a leftover
    except (OSError, ValueError):
        listener.close()
        return "", None
    return path, listener


def _sweep(folder: str) -> None:
    """Removes the sockets of processes that ended without removing them."""
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            probe.settimeout(0.1)
            try:
                probe.connect(os.path.join(folder, name))
            except ConnectionRefusedError:
                try:
                    os.unlink(os.path.join(folder, name))
                except OSError:
                    pass
            except OSError:
                pass
            finally:
                probe.close()


def count() -> int:
    """Returns the number of tensors that this process keeps for others."""
    return 0 if _lender is None else _lender.count()
