"""A device in the host's memory: device memory is a memfd, an IPC handle names the memfd of a process. It stands for
CUDA on machines without."""

import contextlib
import ctypes
import mmap
import os
import signal
import struct

import numpy as np

from troupe import _cuda_mover
from troupe import _device_backend as _device


class DeviceArray(np.ndarray):
    """An array in device memory. Its slices are in the same memory."""

    is_cuda = True

    def __array_finalize__(self, source):
        self.memory = getattr(source, "memory", None)


class Memory:
    """One allocation, with the array at an offset, as of a caching allocator."""

    def __init__(self, nbytes, fd=None, offset=4096):
        self.owns = fd is None
        self.fd = os.memfd_create("device") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, offset + nbytes)
        self.offset = offset
        self.map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)

    def array(self, dtype, shape, writable=True):
        count = int(np.prod(shape))
        array = np.frombuffer(self.map, dtype, count, self.offset).reshape(shape).view(DeviceArray)
        array.memory = self
        return array

    def address(self):
        return np.frombuffer(self.map, "u1").ctypes.data

    def has(self, array):
        return self.address() <= array.ctypes.data < self.address() + len(self.map)

    def __del__(self):
        if self.owns:
            os.close(self.fd)


class HostMover:
    """Copies in memory of the host, element by element of the records."""

    def __init__(self, device):
        self.device = device

    def mark(self):
        self.device.marks += 1
        return self.device.marks

    @contextlib.contextmanager
    def at_work(self, after):
        assert after is None or after <= self.device.marks
        yield

    def memory(self, nbytes):
        if self.device.full:
            raise _device.DeviceError("no memory for weights")
        array = self.device.device_array(np.zeros(nbytes, "u1"))
        self.device.allocated += 1
        return self.device.lend(array, False, {})

    def table(self, copies):
        return np.frombuffer(copies, "i8").reshape(-1, 7).tolist()

    def pack(self, table, arena):
        self.copy(table, lambda tensor, offset, n: ctypes.memmove(arena + offset, tensor, n))

    def unpack(self, table, arena):
        self.copy(table, lambda tensor, offset, n: ctypes.memmove(tensor, arena + offset, n))

    def copy(self, table, move):
        for address, offset, run, n0, n1, s0, s1 in table:
            for outer in range(n1):
                for inner in range(n0):
                    move(address + outer * s1 + inner * s0, offset, run)
                    offset += run

    def digests(self, parts):
        out = []
        for source, target, n in parts:
            if target:
                ctypes.memmove(target, source, n)
            words = np.frombuffer((ctypes.c_char * (-(-n // 8) * 8)).from_address(target or source), "i8")
            with np.errstate(over="ignore"):
                total = int(_cuda_mover.digest_of(words, np.arange(len(words))))
            out.append((total + n * _cuda_mover._LENGTH) % (1 << 64))
        return out

    def wait(self):
        pass


class HostDevice:
    """A device with a name; processes with the same name see the same device."""

    def __init__(self, name=b"one", exports=True, opens=True):
        self.name, self.exports, self.opens = name.ljust(16), exports, opens
        self.full = False  # no memory for a copy
        self.kill_at = -1  # writes until the process kills itself
        self.registered = self.marks = self.allocated = 0

    def uuid_of(self, device):
        return self.name

    def mover(self, device):
        return HostMover(self)

    def address_of(self, value):
        return value.ctypes.data

    def device_array(self, source):
        source = np.asarray(source)
        array = Memory(source.nbytes).array(source.dtype, source.shape)
        array[...] = source
        return array

    def ready(self):
        return True

    def is_tensor(self, value):
        return type(value) is DeviceArray and value.memory is not None and value.memory.has(value)

    def lend(self, value, snapshot, room):
        if self.full:
            return None
        kept = self.device_array(value) if snapshot else value
        handle = struct.pack("<II", os.getpid(), kept.memory.fd).ljust(64) if self.exports else b""
        offset = kept.ctypes.data - kept.memory.address()
        return _device.Lent(
            kept, kept.dtype.name, kept.shape, kept.nbytes, kept.ctypes.data, 0, self.name, handle, offset
        )

    def device_of(self, value):
        return 0

    def pack(self, values, starts, nbytes, room):
        block = self.device_array(np.zeros(nbytes, np.uint8))
        for value, start in zip(values, starts, strict=True):
            block[start : start + value.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return self.lend(block, False, room)

    def reaches(self, uuid):
        return uuid == self.name

    def open(self, fields, nbytes, keep):
        if not self.opens:
            raise _device.DeviceError("a foreign namespace")
        pid, number = struct.unpack_from("<II", fields["handle"])
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as err:
            raise _device.DeviceError("invalid handle") from err
        memory = Memory(nbytes, fd, fields["offset"])
        memory.owns, memory.keep = True, keep
        array = memory.array(fields["dtype"], fields["shape"])
        if keep is not None:
            return array, _device.nothing
        copy = self.device_array(np.zeros(array.shape, array.dtype))

        def wait():
            copy[...] = array

        return copy, wait

    def wait(self, device):
        pass

    def empty(self, nbytes):
        memory = Memory(nbytes)
        return memory, memory.array("u1", (nbytes,)).ctypes.data

    def tensor(self, room, dtype, shape):
        return room.array(dtype, shape)

    def to_device(self, value):
        return self.device_array(value)

    def copy(self, lent):
        return self.device_array(lent.value)

    def read(self, lent, offset, address, n):
        return lambda: ctypes.memmove(address, lent.pointer + offset, n)

    def write(self, pointer, address, n):
        def wait():
            self.kill_at -= 1
            if self.kill_at == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            ctypes.memmove(pointer, address, n)

        return wait

    def register(self, address, n, writable):
        self.registered += 1
        return True

    def unregister(self, address):
        self.registered -= 1
