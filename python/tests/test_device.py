"""Tensors on a device: how they travel, when their producer drops them, and which way is taken when the shortest is
closed."""

import dataclasses
import gc
import os
import socket
import time

import numpy as np
import pytest

import host_device
import troupe
from troupe import Dispatch, _device, _reference, register

MIB = 1 << 20
CHUNK = 1 << 20  # of staging, in these tests


@dataclasses.dataclass
class Pair:
    left: object
    right: object


class Holder:
    """A worker with a device."""

    def __init__(self, name="one", **settings):
        _device._backend = self.device = host_device.HostDevice(name.encode(), **settings)
        _device.CHUNK = CHUNK
        self.kept = self.weights = None

    def make(self, n=5 * MIB + 10, value=1):
        self.weights = self.device.device_array(np.arange(n, dtype=np.uint32).astype(np.uint8) + np.uint8(value))
        return self.weights

    @register(share=True)
    def lend(self):
        return self.weights

    def several(self, n, size=MIB):
        return Pair(
            [self.device.device_array(np.full(size, i % 256, np.uint8)) for i in range(n)],
            {"small": self.device.device_array(np.arange(10))},
        )

    def change(self, value):
        self.weights[...] = value

    def kind(self, x):
        return type(x).__name__

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def kinds(self, rows, whole):
        return [(type(rows).__name__, int(row[1]), type(whole.left).__name__) for row in rows]

    def crc(self, x):
        import zlib

        return type(x).__name__, zlib.crc32(np.ascontiguousarray(x).view(np.ndarray))

    def sums(self, pair):
        return [int(x[0]) for x in pair.left], [type(x).__name__ for x in pair.left], int(pair.right["small"].sum())

    def keep(self, x):
        self.kept = x

    @register(replay=True)
    def initialize(self, x):
        self.kept = x
        return type(x).__name__

    def push(self, to, method, n=2 * MIB, value=3, **options):
        """Calls another worker with a tensor of this one."""
        self.weights = self.device.device_array(np.full(n, value, np.uint8))
        return getattr(to, method).options(**options)(self.weights)

    def push_parts(self, to, rows):
        parts = self.device.device_array(np.arange(rows * MIB, dtype=np.uint32).astype(np.uint8).reshape(rows, MIB))
        both = Pair(self.device.device_array(np.zeros(MIB, np.uint8)), None)
        return to.kinds(parts, troupe.Broadcast(both))

    def push_small_parts(self, to, rows):
        size = 512 << 10
        parts = self.device.device_array(np.arange(rows * size, dtype=np.uint32).astype(np.uint8).reshape(rows, size))
        whole = Pair(self.device.device_array(np.zeros(size, np.uint8)), None)
        return to.kinds(list(parts), troupe.Broadcast(whole))

    def put(self, n=2 * MIB, value=4):
        self.weights = self.device.device_array(np.full(n, value, np.uint8))
        return troupe.put(self.weights)

    def kept_first(self):
        return int(self.kept[0])

    def drop(self):
        self.kept = None
        gc.collect()

    def set(self, **settings):
        for name, value in settings.items():
            setattr(self.device, name, value)

    def counts(self):
        gc.collect()
        lender = _device._lender
        return {
            **_device.counters,
            "kept": _device.count(),
            "readers": len(lender._readers) if lender else 0,
            "why": _device.last_refusal,
            "registered": self.device.registered,
            "socket": lender.path if lender else "",
        }

    def pid(self):
        return os.getpid()


def until(holds, patience=90.0):
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def crc(n=5 * MIB + 10, value=1):
    import zlib

    return zlib.crc32(np.arange(n, dtype=np.uint32).astype(np.uint8) + np.uint8(value))


@pytest.fixture(scope="module")
def producer(session):
    actor = troupe.actor(Holder)
    yield actor
    actor.cluster.shutdown()


@pytest.fixture(scope="module")
def receiver(session):
    actor = troupe.actor(Holder)
    yield actor
    actor.cluster.shutdown()


@pytest.fixture(scope="module")
def elsewhere(session):
    """A worker with another device."""
    actor = troupe.actor(Holder, "two")
    yield actor
    actor.cluster.shutdown()


@pytest.fixture(autouse=True)
def nothing_left(session, producer):
    before = _reference.counts()  # of other tests: the newest version of weights stays until the session ends
    yield
    gc.collect()
    until(lambda: (c := _reference.counts())["owned"] <= before["owned"] and c["held"] <= before["held"])
    until(lambda: producer.counts()["kept"] == 0)


def grown(actor, before, *names):
    now = actor.counts()
    return [now[n] - before[n] for n in names]


def test_a_receiver_on_the_device_copies_it_there(producer, receiver):
    before = receiver.counts()
    made = producer.make.remote()
    assert receiver.crc(made) == ("DeviceArray", crc())
    assert receiver.crc(x=made) == ("DeviceArray", crc()), "again, from the same reference"
    assert grown(receiver, before, "opened", "staged", "bus") == [2, 0, 0]
    assert producer.counts()["kept"] == 1
    producer.change(9)
    assert receiver.crc(made) == ("DeviceArray", crc()), "what the worker writes later does not change its result"


def test_the_producer_keeps_it_until_every_reader_has_dropped_it(producer, receiver):
    made = producer.make.remote(2 * MIB)
    receiver.keep.options(share=True)(made)
    assert receiver.counts()["shared"] == 1
    del made
    gc.collect()
    time.sleep(1.0)  # longer than a value without holders lives
    assert producer.counts()["kept"] == 1, "the receiver uses it in place"
    receiver.drop()
    began = time.monotonic()
    until(lambda: producer.counts()["kept"] == 0)
    assert time.monotonic() - began < 20


def test_in_place_without_any_copy(producer, receiver):
    producer.make(2 * MIB)
    receiver.keep.options(share=True)(producer.lend.remote())
    producer.change(77)
    assert receiver.kept_first() == 77
    receiver.drop()
    receiver.keep(producer.lend.remote())
    producer.change(78)
    assert receiver.kept_first() == 77, "without share it is a copy"
    receiver.drop()


def test_a_process_without_a_device_gets_memory(producer):
    before = dict(_device.counters)
    got = producer.make()
    assert (
        type(got) is np.ndarray and got.flags.writeable and np.array_equal(got[:300], (np.arange(300) + 1).astype("u1"))
    )
    future = producer.make.remote(3 * MIB, 2)
    assert future.result().nbytes == 3 * MIB and future[0].result()[0] == 2
    assert _device.counters["staged"] - before["staged"] == 2 and _device.counters["lent"] == before["lent"]


def test_other_devices_and_closed_ways(producer, receiver, elsewhere):
    want = ("DeviceArray", crc())
    before = elsewhere.counts()
    assert elsewhere.crc(producer.make.remote()) == want
    assert (
        grown(elsewhere, before, "staged", "bus") == [1, 0] and "does not see the device" in elsewhere.counts()["why"]
    )
    assert elsewhere.counts()["registered"] == 1 and producer.counts()["registered"] >= 1

    before = receiver.counts()
    receiver.set(opens=False)
    assert receiver.crc(producer.make.remote()) == want and "foreign namespace" in receiver.counts()["why"]
    receiver.set(opens=True)
    producer.set(exports=False)
    assert receiver.crc(producer.make.remote()) == want and "gives no handle" in receiver.counts()["why"]
    producer.set(exports=True)
    assert grown(receiver, before, "opened", "staged", "bus") == [0, 2, 0]

    for how, counts in (("host", [0, 1, 0]), ("bus", [0, 0, 1])):
        before = receiver.counts()
        receiver.cluster.set_env({"TROUPE_DEVICE": how})
        made = producer.make.remote()
        assert receiver.crc(made) == want and grown(receiver, before, "opened", "staged", "bus") == counts
        receiver.cluster.set_env({"TROUPE_DEVICE": ""})
        assert receiver.crc(made) == want and elsewhere.crc(made) == want, "by the other ways too"
        del made


def test_a_tensor_as_an_argument(producer, receiver, elsewhere):
    before = receiver.counts()
    assert producer.push(receiver, "kind") == producer.push(receiver.cluster, "kind", ranks=[0])[0] == "DeviceArray"
    assert grown(receiver, before, "opened", "staged", "bus") == [2, 0, 0]
    assert producer.push(elsewhere, "kind") == "DeviceArray"
    producer.push(receiver, "keep")
    producer.change(9)
    assert receiver.kept_first() == 3, "the caller may write to it when the call has returned"
    producer.push(receiver, "keep", share=True)
    producer.change(9)
    assert receiver.kept_first() == 9, "in place"
    receiver.drop()
    assert producer.push(receiver, "kind", device=False) == "ndarray"
    assert producer.push(receiver, "initialize") == "ndarray", "arguments that are replayed must outlive their caller"
    receiver.drop()


def test_arguments_that_are_cut(producer):
    before = producer.counts()
    pair = troupe.Cluster("pair", Holder, None, troupe.WorkerConfig(world_size=2))
    try:
        assert producer.push_parts(pair, 4) == [("DeviceArray", 1, "DeviceArray")] * 4
        assert [c["opened"] for c in pair.counts()] == [1, 1]
        assert grown(producer, before, "lent") == [2], "a block for each part"
    finally:
        pair.shutdown()


def test_a_tensor_that_was_put(producer, receiver):
    ref = producer.put()
    producer.change(9)
    before = receiver.counts()
    assert receiver.kind(ref) == "DeviceArray" and grown(receiver, before, "opened") == [1]
    receiver.keep(ref)
    assert receiver.kept_first() == 4 and int(ref.result()[0]) == 4
    receiver.drop()


def test_opting_out(producer, receiver):
    before = producer.counts()
    assert receiver.crc(producer.make.options(device=False).remote()) == ("ndarray", crc())
    producer.set(full=True)
    assert receiver.crc(producer.make.remote()) == ("ndarray", crc()), "no memory for a copy on the device"
    producer.set(full=False)
    assert grown(producer, before, "lent") == [0]
    assert type(producer.make(1000)) is np.ndarray, "small ones travel in their message"
    assert grown(producer, before, "lent") == [0]
    with pytest.raises(troupe.InvalidError, match="share"):
        producer.make.options(share="yes")


def test_several_in_one_result(producer, receiver):
    before = receiver.counts()
    made = producer.several.remote(5)
    assert receiver.sums(made) == ([0, 1, 2, 3, 4], ["DeviceArray"] * 5, 45)
    got = made.result()
    assert [int(x[5]) for x in got.left] == [0, 1, 2, 3, 4] and got.right["small"].sum() == 45
    assert grown(receiver, before, "opened") == [1] and producer.counts()["kept"] == 1, "in one block"


def test_many_small_tensors_stay_on_the_device_in_blocks(producer, receiver, elsewhere):
    """A state dict of small tensors is lent as a few blocks, by each way, to any number of receivers."""
    made = producer.several.remote(300, 200 << 10)  # 60 MB
    want = ([i % 256 for i in range(300)], ["DeviceArray"] * 300, 45)
    before = {r: r.counts() for r in (receiver, elsewhere)}
    for way, counts in (("", [1, 0, 0]), ("host", [0, 1, 0]), ("bus", [0, 0, 1])):
        receiver.cluster.set_env({"TROUPE_DEVICE": way})
        before = receiver.counts()
        assert receiver.sums(made) == want
        assert grown(receiver, before, "opened", "staged", "bus") == counts
    receiver.cluster.set_env({"TROUPE_DEVICE": ""})
    assert elsewhere.sums(made) == want and producer.counts()["kept"] == 1
    got = made.result()
    assert [int(x[-1]) for x in got.left] == want[0] and got.right["small"].tolist() == list(range(10))
    assert type(got.left[0]) is np.ndarray and got.left[0].flags.writeable, "in memory, where there is no device"
    del made, got
    before = producer.counts()
    several = producer.several.remote(5, 20 * MIB)
    assert receiver.sums(several)[0] == list(range(5)), "tensors of 20 MiB are lent by themselves"
    assert grown(producer, before, "lent") == [5]
    del several
    producer.set(full=True)
    assert receiver.sums(producer.several.remote(30, 200 << 10))[1] == ["ndarray"] * 30, "no memory for a block"
    producer.set(full=False)


def test_small_tensors_of_cut_arguments(producer):
    pair = troupe.Cluster("smalls", Holder, None, troupe.WorkerConfig(world_size=2))
    try:
        before = producer.counts()
        assert producer.push_small_parts(pair, 6) == [("list", 1, "DeviceArray")] * 6
        assert grown(producer, before, "lent") == [2], "a block for each part"
    finally:
        pair.shutdown()


def test_a_killed_receiver_releases_what_it_had(producer):
    victim = troupe.actor(Holder)
    kept, made = producer.make.remote(2 * MIB), producer.make.remote()
    victim.keep.options(share=True)(kept)
    readers = producer.counts()["readers"]
    victim.set(opens=False, kill_at=3)  # in the middle of a transfer
    with pytest.raises(troupe.WorkerLostError):
        victim.crc(made)
    until(lambda: producer.counts()["readers"] <= readers)
    assert producer.make().nbytes, "others are served"
    assert producer.counts()["kept"] >= 2
    del kept, made
    until(lambda: (gc.collect(), producer.counts()["kept"])[1] == 0)
    victim.cluster.shutdown()


def test_a_killed_producer_is_reported(receiver):
    victim = troupe.actor(Holder)
    made = victim.make.remote()
    troupe.wait([made])
    path = victim.counts()["socket"]
    os.kill(victim.pid(), 9)
    with pytest.raises(troupe.WorkerLostError):
        victim.pid()
    for way in ("", "host"):
        receiver.cluster.set_env({"TROUPE_DEVICE": way})
        with pytest.raises(troupe.WorkerLostError):
            receiver.crc(made)
    receiver.cluster.set_env({"TROUPE_DEVICE": ""})
    assert receiver.kind(1) == "int" and os.path.exists(path)
    victim.cluster.shutdown()
    del made
    fresh = troupe.actor(Holder)
    fresh.make.remote().result()
    own = fresh.counts()["socket"]
    assert os.path.exists(own) and not os.path.exists(path), "the next process removes the socket of a killed one"
    fresh.cluster.shutdown()
    until(lambda: not os.path.exists(own))


def test_strangers_do_no_harm(producer, elsewhere):
    elsewhere.crc(producer.make.remote())
    path = producer.counts()["socket"]
    assert os.stat(path).st_uid == os.getuid() and os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
    readers = producer.counts()["readers"]
    for junk in (b"\xc1", b"\x93\x01\x02", b"x" * 3000, b"\x92\xa4free\x09", b"\x94\xa3get\xa1x\x01\x05"):
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        conn.connect(path)
        conn.send(junk)
        conn.close()
    until(lambda: producer.counts()["readers"] == readers)
    assert elsewhere.crc(producer.make.remote()) == ("DeviceArray", crc())
    codec = _device._codec.Codec()
    for fields in (
        {},
        {"owner": 1},
        {"owner": "x", "id": 1, "dtype": "uint8", "shape": [-5], "socket": ""},
        {"owner": "x", "id": 1, "dtype": "odd", "shape": [], "socket": ""},
    ):
        with pytest.raises(troupe.MalformedError):
            _device.receive(codec, fields)


def test_several_readers_at_once(producer, receiver, elsewhere):
    receiver.cluster.set_env({"TROUPE_DEVICE": "host"})
    made = producer.make.remote(40 * MIB)
    calls = [actor.crc.remote(made) for actor in (receiver, elsewhere)]
    assert made.result().nbytes == 40 * MIB
    assert [c.result() for c in calls] == [("DeviceArray", crc(40 * MIB))] * 2
    receiver.cluster.set_env({"TROUPE_DEVICE": ""})
