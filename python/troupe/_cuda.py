"""CUDA tensors of torch, through the CUDA driver API: handles, copies and pinned memory. Nothing here initialises
CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _codec
from ._device_backend import DeviceError, Lent, Wait, nothing

if TYPE_CHECKING:
    import torch

    from ._cuda_mover import CudaMover

_PORTABLE, _READ_ONLY, _LAZY_PEER, _NON_BLOCKING, _NO_TIMING = 1, 8, 1, 1, 2


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def _load() -> ctypes.CDLL | None:
    lib = ctypes.CDLL("libcuda.so.1")
    u64, size, integer, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    for name, args in {
        "cuDeviceGet": (pointer, integer),
        "cuDeviceGetCount": (pointer,),
        "cuDeviceGetUuid_v2": (pointer, integer),
        "cuDevicePrimaryCtxRetain": (pointer, integer),
        "cuCtxPushCurrent_v2": (pointer,),
        "cuCtxPopCurrent_v2": (pointer,),
        "cuMemGetAddressRange_v2": (pointer, pointer, u64),
        "cuMemAlloc_v2": (pointer, size),
        "cuMemFree_v2": (u64,),
        "cuIpcGetMemHandle": (pointer, u64),
        "cuIpcOpenMemHandle_v2": (pointer, _Handle, ctypes.c_uint),
        "cuIpcCloseMemHandle": (u64,),
        "cuMemcpyDtoDAsync_v2": (u64, u64, size, pointer),
        "cuMemcpyDtoHAsync_v2": (pointer, u64, size, pointer),
        "cuMemcpyHtoDAsync_v2": (u64, pointer, size, pointer),
        "cuMemHostRegister_v2": (pointer, size, ctypes.c_uint),
        "cuMemHostUnregister": (pointer,),
        "cuStreamCreate": (pointer, ctypes.c_uint),
        "cuStreamSynchronize": (pointer,),
        "cuEventCreate": (pointer, ctypes.c_uint),
        "cuEventRecord": (pointer, pointer),
        "cuEventSynchronize": (pointer,),
        "cuGetErrorName": (integer, pointer),
    }.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = integer, list(args)
    return lib


class Cuda:
    """Implements Backend for CUDA."""

    def __init__(self) -> None:
        self._lib: Any = None
        # guards the fields below; reentrant, because the collector may free, and so unmap, a tensor while it is held
        self._lock = threading.RLock()
        self._contexts: dict[int, Any] = {}  # by device
        self._streams: dict[int, Any] = {}  # streams for reads, by device
        self._events: dict[int, list[Any]] = {}  # unused events, by device
        self._uuids: dict[bytes, int] | None = None
        self._names: dict[int, bytes] = {}  # UUIDs, by device
        self._opened: dict[
            tuple[int, bytes], list[int]
        ] = {}  # by device and handle: the address, and the number of tensors that use it

    def ready(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def is_tensor(self, value: Any) -> bool:
        torch = sys.modules.get("torch")
        return (
            torch is not None
            and type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.is_cuda
            and torch.version.hip is None
            and value.layout is torch.strided
            and str(value.dtype).removeprefix("torch.") in _codec._SIZES
        )

    # The driver.

    def _call(self, name: str, *args: object) -> None:
        if self._lib is None:
            try:
                self._lib = _load()
            except (OSError, AttributeError) as err:
                raise DeviceError(f"libcuda.so.1 cannot be used: {err}") from err
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceError(f"{name}: {(text.value or b'error').decode()} ({code})")

    @contextlib.contextmanager
    def _context(self, device: int) -> Iterator[None]:
        """Makes the device's primary context, which torch uses too, current in this thread."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(number), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _uuid(self, device: int) -> bytes:
        if device not in self._names:
            number, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDeviceGetUuid_v2", uuid, number)
            self._names[device] = bytes(uuid)
        return self._names[device]

    def _devices(self) -> dict[bytes, int]:
        """Returns the devices visible to this process, by UUID."""
        if self._uuids is None:
            count = ctypes.c_int()
            self._call("cuDeviceGetCount", ctypes.byref(count))
            self._uuids = {self._uuid(i): i for i in range(count.value)}
        return self._uuids

    # Lending.

    def lend(self, value: torch.Tensor, snapshot: bool, room: dict[int, int]) -> Lent | None:
        import torch

        source, device = value.detach(), value.device.index
        if not snapshot and source.is_contiguous():
            return self._lent(source)

        def clone() -> torch.Tensor:
            return source.clone(memory_format=torch.contiguous_format)

        copy = self._allocate(device, source.nbytes, room, clone)
        return None if copy is None else self._lent(copy)

    def device_of(self, value: torch.Tensor) -> int:
        return int(value.device.index)

    def pack(self, values: Sequence[torch.Tensor], starts: list[int], nbytes: int, room: dict[int, int]) -> Lent | None:
        import torch

        device = values[0].device

        def empty() -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        block = self._allocate(device.index, nbytes, room, empty)
        if block is None:
            return None
        into = [block[at : at + v.nbytes].view(v.dtype).reshape(v.shape) for v, at in zip(values, starts, strict=True)]
        torch._foreach_copy_(into, [v.detach() for v in values])
        return self._lent(block)

    def _allocate(
        self, device: int, nbytes: int, room: dict[int, int], make: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Returns what make allocates, or None if memory is short."""
        import torch

        if device not in room:  # half of the free memory, so that the copies leave room for the next step
            free, _ = torch.cuda.mem_get_info(device)
            room[device] = (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2
        if room[device] < nbytes:
            return None
        try:
            made = make()
        except torch.cuda.OutOfMemoryError:
            return None
        room[device] -= nbytes
        return made

    def _lent(self, source: torch.Tensor) -> Lent:
        pointer, device = source.data_ptr(), source.device.index
        handle, offset = self._export(device, pointer)
        dtype, shape = str(source.dtype).removeprefix("torch."), tuple(source.shape)
        return Lent(source, dtype, shape, source.nbytes, pointer, device, self._uuid(device), handle, offset)

    def uuid_of(self, device: int) -> bytes:
        return self._uuid(device)

    def mover(self, device: int) -> CudaMover:
        from ._cuda_mover import CudaMover

        return CudaMover(self, device)

    def allocate(self, device: int, nbytes: int) -> tuple[int, Callable[[], None]]:
        """Allocates memory beside torch's, which any process may open. Returns its address, and a function that frees
        it."""
        pointer = ctypes.c_uint64()
        with self._context(device):
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), nbytes)

        def free() -> None:
            with self._context(device):
                self._call("cuMemFree_v2", pointer.value)

        return pointer.value, free

    def wait(self, device: int) -> None:
        sys.modules["torch"].cuda.current_stream(device).synchronize()

    def _export(self, device: int, pointer: int) -> tuple[bytes, int]:
        """Returns the IPC handle of an allocation and the pointer's offset in it; the handle is empty if the allocator
        supports none."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        try:
            with self._context(device):
                self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
        except DeviceError:
            return b"", 0
        return bytes(handle.bytes), pointer - base.value

    # Receiving.

    def reaches(self, uuid: bytes) -> bool:
        return uuid in self._devices()

    def open(self, fields: Mapping[str, Any], nbytes: int, keep: object) -> tuple[torch.Tensor, Wait]:
        import torch

        device, offset, dtype, shape = (
            self._devices()[fields["uuid"]],
            fields.get("offset"),
            fields["dtype"],
            tuple(fields["shape"]),
        )
        shared = _Shared(self, device, fields["handle"], offset, nbytes, keep)
        if keep is not None:
            whole = torch.as_tensor(shared, device=f"cuda:{device}")
            return self.tensor(whole, dtype, shape), nothing
        stream = torch.cuda.current_stream(device).cuda_stream
        try:
            room = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
            with self._context(device):
                self._call("cuMemcpyDtoDAsync_v2", room.data_ptr(), shared.pointer, nbytes, stream)
        except BaseException:
            shared.close()
            raise

        def wait() -> None:
            try:
                with self._context(device):
                    self._call("cuStreamSynchronize", stream)
            finally:
                shared.close()

        return self.tensor(room, dtype, shape), wait

    def map(self, device: int, handle: bytes, offset: object, nbytes: int) -> int:
        """Returns the address of a part of another process's allocation. The allocation stays mapped while a tensor
        uses it."""
        if len(handle) != 64 or not isinstance(offset, int) or offset < 0:
            raise DeviceError("a handle that is none")
        base, size, found = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        with self._context(device), self._lock:
            entry = self._opened.setdefault((device, handle), [0, 0])
            entry[1] += 1
            if entry[0] == 0:
                try:
                    self._call(
                        "cuIpcOpenMemHandle_v2", ctypes.byref(found), _Handle.from_buffer_copy(handle), _LAZY_PEER
                    )
                except DeviceError:
                    del self._opened[device, handle]
                    raise
                entry[0] = found.value
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), entry[0])
        if offset + nbytes > size.value:
            self.unmap(device, handle)
            raise DeviceError("a tensor beyond the end of its allocation")
        return int(entry[0]) + offset

    def unmap(self, device: int, handle: bytes) -> None:
        with self._context(device), self._lock:
            entry = self._opened[device, handle]
            entry[1] -= 1
            if entry[1] == 0:
                del self._opened[device, handle]
                self._call("cuIpcCloseMemHandle", entry[0])

    def address_of(self, value: torch.Tensor) -> int:
        return int(value.data_ptr())

    def empty(self, nbytes: int) -> tuple[torch.Tensor, int]:
        import torch

        room = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{torch.cuda.current_device()}")
        return room, room.data_ptr()

    def tensor(self, room: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        return room.view(getattr(torch, dtype)).reshape(shape)

    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        import torch

        return value.to(f"cuda:{torch.cuda.current_device()}") if isinstance(value, torch.Tensor) else value

    def copy(self, lent: Lent) -> torch.Tensor:
        return lent.value.clone()

    # Copies.

    def read(self, lent: Lent, offset: int, address: int, n: int) -> Wait:
        device = lent.device
        with self._context(device):
            with self._lock:
                stream = self._streams.get(device)
                if stream is None:
                    stream = ctypes.c_void_p()
                    self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
                    self._streams[device] = stream
            self._call("cuMemcpyDtoHAsync_v2", address, lent.pointer + offset, n, stream)
            return self._event(device, stream)

    def write(self, pointer: int, address: int, n: int) -> Wait:
        import torch

        device = torch.cuda.current_device()
        stream = torch.cuda.current_stream(device).cuda_stream
        with self._context(device):
            self._call("cuMemcpyHtoDAsync_v2", pointer, address, n, stream)
            return self._event(device, stream)

    def _event(self, device: int, stream: object) -> Wait:
        """Records an event in the stream. Returns a function that waits for it."""
        free = self._events.setdefault(device, [])
        try:
            event = free.pop()
        except IndexError:
            event = ctypes.c_void_p()
            self._call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        self._call("cuEventRecord", event, stream)

        def wait() -> None:
            with self._context(device):
                self._call("cuEventSynchronize", event)
            free.append(event)

        return wait

    def _any_context(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context of a device that this process already uses. Pinned memory belongs to all contexts."""
        return self._context(
            next(iter(self._contexts)) if self._contexts else sys.modules["torch"].cuda.current_device()
        )

    def register(self, address: int, n: int, writable: bool) -> bool:
        try:
            with self._any_context():
                self._call("cuMemHostRegister_v2", address, n, _PORTABLE | (0 if writable else _READ_ONLY))
        except DeviceError:
            return False  # copies are slower without it
        return True

    def unregister(self, address: int) -> None:
        try:
            with self._any_context():
                self._call("cuMemHostUnregister", address)
        except DeviceError:
            pass


class _Shared:
    """A part of another process's memory, in the form that torch accepts. It is unmapped when no tensor uses it."""

    def __init__(self, cuda: Cuda, device: int, handle: bytes, offset: object, nbytes: int, keep: object) -> None:
        self._cuda, self._device, self._handle = cuda, device, handle
        self._keep = keep  # the reference that makes the producer keep the tensor
        self._open = False
        self.pointer = cuda.map(device, handle, offset, nbytes)
        self._open = True
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 2,
        }

    def close(self) -> None:
        if self._open:
            self._open = False
            self._cuda.unmap(self._device, self._handle)
            self._keep = None

    def __del__(self) -> None:
        try:
            if self._open:
                sys.modules["torch"].cuda.synchronize(self._device)  # kernels may still use the memory
            self.close()
        except Exception:  # the interpreter is exiting
            pass
