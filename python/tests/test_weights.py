"""Weights: versions that are published by shards, staged beside the work, and committed in one copy."""

import os
import signal
import sys
import time
import types
import uuid

import numpy as np
import pytest

import troupe
import weights_workers
from host_device import HostDevice
from troupe import Box, _device


def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def name():
    return f"policy-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(session, name):
    """Starts roles whose workers have opened the weights; they end with the test."""
    made = []

    def begin(cls, world=2, **config):
        role = f"{cls.__name__.lower()}-{len(made)}"
        config = troupe.WorkerConfig(world_size=world, **config)
        made.append(troupe.Cluster(role, cls, worker_config=config))
        made[-1].execute_all_sync("open", name)
        return made[-1]

    yield begin
    for cluster in made:
        cluster.shutdown()


def publish(train, step):
    (version,) = set(train.execute_all_sync("step", step))
    return version


def take(infer, version=None):
    return infer.execute_all_sync("take", version)


def seen(infer):
    (found,) = set(infer.execute_all_sync("seen"))
    return found


def members(name, role):
    """The members of a role, as the service knows them."""
    return [m for m in troupe.weights(name).status()["members"] if m.get("role") == role]


def member(name, role):
    (found,) = members(name, role)
    return found


def committed(name, role):
    return [troupe.Version(**m["committed"]) for m in members(name, role)]


def test_rows_become_columns_version_by_version(start, name):
    train, infer = start(weights_workers.Train), start(weights_workers.Infer)
    for step in (5, 6, 7):
        version = publish(train, step)
        assert version == troupe.Version(1, step)
        assert all(before < step for before in take(infer, version)), "staging does not change the tensors"
        assert seen(infer) == (step, version)
    late = start(weights_workers.Infer)
    take(late)
    assert seen(late) == (7, version), "one that comes late takes the newest"
    four = start(weights_workers.Infer, 4)
    take(four, version)
    until(lambda: committed(name, four.name) == [version] * 4)
    status = troupe.weights(name).status()
    assert status["publisher"] == train.name and status["tensors"] == 2 and status["current"] == 8
    assert status["versions"][-1]["state"] == "complete" and status["bytes"]["host"] > 0


def test_a_rank_that_is_restarted_begins_with_the_newest_version(start, session, name):
    train = start(weights_workers.Train)
    publish(train, 1)
    config = troupe.WorkerConfig(world_size=1, policy="restart_rank", restarts=1)
    with troupe.Cluster("ready", weights_workers.Ready, worker_config=config, worker_kwargs={"name": name}) as ready:
        assert seen(ready) == (1, (1, 1))
        version = publish(train, 2)
        os.kill(pid := ready.workers[0].pid(), signal.SIGKILL)
        until(lambda: (ready.info()[0]["state"], ready.info()[0]["pid"]) != ("ready", pid))
        ready.wait_ready(120)
        assert seen(ready) == (2, version)


def test_an_engine_loads_by_name(start, name):
    train, engine = start(weights_workers.Train), start(weights_workers.Engine, 1)
    for step in (1, 2):
        version = publish(train, step)
        assert engine.workers[0].take() == version
        assert engine.workers[0].seen() == (step, step, version)
    newer = publish(train, 3)
    with pytest.raises(troupe.ApplicationError, match="KeyError"):
        engine.workers[0].take(fails=True)
    assert engine.workers[0].seen()[2] == version
    until(lambda: member(name, engine.name)["failed"] == "KeyError: 'a'")
    assert engine.workers[0].take() == newer == engine.workers[0].seen()[2]


def test_an_async_worker_waits_for_versions(start):
    train, infer = start(weights_workers.Train), start(weights_workers.AsyncInfer, 1)
    following = infer.workers[0].follow.remote(3)
    for step in (1, 2, 3):
        publish(train, step)
    taken = following.result(120)
    assert taken[-1] == 3 and taken == sorted(set(taken))


def test_a_receiver_is_killed_while_it_stages(start, name, tmp_path):
    train, infer, dying = start(weights_workers.Train), start(weights_workers.Infer), start(weights_workers.Infer, 1)
    take(infer, publish(train, 1))
    pid = dying.workers[0].pid()
    lost = dying.execute_all_async("stage_forever", str(tmp_path / "staged"))
    until((tmp_path / "staged").exists)
    os.kill(pid, signal.SIGKILL)
    version = publish(train, 2)
    take(infer, version)
    assert seen(infer) == (2, version)
    with pytest.raises(troupe.WorkerLostError):
        lost.result(120)
    until(lambda: not committed(name, dying.name))
    take(infer, publish(train, 3))
    until(lambda: [v["step"] for v in troupe.weights(name).status()["versions"]] == [3])


def test_a_publisher_is_killed_while_it_publishes(start, name, tmp_path):
    train = start(weights_workers.Train, policy="restart_rank", restarts=2)
    infer = start(weights_workers.Infer)
    version = publish(train, 1)
    take(infer, version)
    pid = train.workers[1].pid()
    lost = train.workers[1].publish_forever.remote(str(tmp_path / "published"))
    until((tmp_path / "published").exists)
    waiting = infer.execute_all_async("take", troupe.Version(1, 1000))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(troupe.Error, match="SIGKILL"):
        waiting.result(120)
    with pytest.raises(troupe.Error):
        lost.result(120)
    assert seen(infer) == (1, version), "nothing was changed"
    train.wait_ready(120)
    train.workers[1].open(name)
    again = publish(train, 1)
    assert again == troupe.Version(2, 1) and again > version
    take(infer, again)
    assert seen(infer) == (1, again)


@pytest.fixture
def both(session, name):
    """Publishes and takes in this process: returns the weights, and a function that binds both sides."""
    w = troupe.weights(name)

    def bind(source, target):
        w.bind(source, use="publish")
        w.bind(target, use="take")
        return w

    return bind


def test_one_process_publishes_and_takes(both):
    source = {"x": np.arange(200_000, dtype="i8").reshape(400, 500), "s": np.array(2.5), "none": np.zeros((0, 4), "f4")}
    target = {k: np.zeros_like(v) for k, v in source.items()}
    w = both(source, target)
    assert w is troupe.weights(w.name) and w.version is None and w.available() == []
    waiting = w.next()
    first = w.publish(1)
    assert waiting.result(120) == first and w.available() == [first] and w.lag == 1
    assert w.stage(first) == first and not target["x"].any()
    assert w.commit() == first == w.version and w.lag == 0
    assert all(np.array_equal(source[k], target[k]) for k in source)
    with pytest.raises(troupe.TimedOutError, match="no version newer than step 1"):
        w.next(after=first, timeout=0.01).result(120)
    with pytest.raises(troupe.RefusedError, match="nothing is staged"):
        w.commit(first)
    with pytest.raises(troupe.ExistsError):
        w.publish(1)


def test_views_and_transposed_arrays(both):
    whole, target = np.arange(600 * 700, dtype="f4").reshape(600, 700), np.zeros((700, 600), "f4")
    w = both({"x": whole[::2, 10:20]}, {"x": target.T[:300, :10]})
    w.commit(w.stage(w.publish(1)))
    assert np.array_equal(target.T[:300, :10], whole[::2, 10:20]) and not target.T[300:].any()


def test_deltas_are_exact(both):
    rng = np.random.default_rng(0)
    source = rng.integers(0, 1 << 16, 1 << 20, dtype="u2")
    target = np.zeros_like(source)
    w = both({"x": source}, {"x": target})
    taken = []
    for step in range(1, 6):
        if step > 1:
            changed = rng.choice(source.size, source.size // 50, replace=False)
            source[changed] = rng.integers(0, 1 << 16, changed.size, dtype="u2")
        version = w.publish(step, mode="delta")
        if step != 3:  # one is missed
            w.commit(w.stage(version))
            assert np.array_equal(source, target), step
            until(lambda v=version: tuple(me(w)["committed"].values()) == v)
            taken.append(me(w)["bytes"])
    assert taken[-1]["process"] == taken[0]["process"] == source.nbytes, "the whole was taken once"
    assert 0 < taken[-1]["delta process"] < source.nbytes // 2
    source[:] = 0
    w.commit(w.stage(w.publish(9, mode="auto")))
    assert not target.any()


def me(w):
    return next(m for m in w.status()["members"] if not m["publishes"])


def test_bfloat16_travels_as_bytes(both):
    source = bytearray(os.urandom(2 * 300 * 400))
    target = bytearray(len(source))
    whole = troupe.Tensor("bfloat16", (300, 400), source)
    halves = [
        troupe.Tensor("bfloat16", (150, 400), memoryview(target)[i * 120_000 : (i + 1) * 120_000]) for i in (0, 1)
    ]
    w = both({"x": whole}, {"x": [Box((300, 400), (150 * i, 0), half) for i, half in enumerate(halves)]})
    version = w.publish(1)
    w.commit(w.stage(version))
    assert source == target
    got = {}
    w.bind(load=lambda pairs: got.update(pairs))
    assert w.commit(w.stage(version)) == version
    assert (got["x"].dtype, got["x"].shape, bytes(got["x"].data)) == ("bfloat16", (300, 400), bytes(source))


class Sharded:
    """A tensor with parts as torch.distributed.checkpoint has them: its second half is here."""

    def __init__(self, whole):
        self.shape, self._local = whole.shape, whole[len(whole) // 2 :].copy()

    def __create_chunk_list__(self):
        offsets = (self.shape[0] - len(self._local), 0)
        return [types.SimpleNamespace(offsets=offsets, sizes=self._local.shape)]

    def to_local(self):
        return self._local


def test_tensors_with_a_list_of_chunks(both):
    whole = np.arange(24.0).reshape(6, 4)
    target = np.zeros((3, 4))
    w = both({"x": Sharded(whole)}, {"x": Box((6, 4), (3, 0), target)})
    w.commit(w.stage(w.publish(1)))
    assert np.array_equal(target, whole[3:])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"y": np.zeros((4, 4), "f4")}, "tensor 'y': no process that publishes has it"),
        ({"x": np.zeros((4, 5), "f4")}, r"tensor 'x': its shape as a whole is \[4 5\] here and \[4 4\] elsewhere"),
        ({"x": np.zeros((4, 4), "f8")}, "tensor 'x': its dtype is float64 here and float32 elsewhere"),
        ({"x": np.frombuffer(bytes(64), "f4").reshape(4, 4)}, "tensor 'x' is read-only"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(both, target, message):
    with pytest.raises(troupe.Error, match=message.replace("'", "['\"]")):
        w = both({"x": np.zeros((4, 4), "f4")}, target)
        w.stage(w.publish(1))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": [1, 2]}, "tensor 'x': a list has troupe.Box objects, not int"),
        ({"x": "text"}, "tensor 'x': it is of type str"),
        ({"x": np.zeros(2, "c8")}, "tensor 'x': weights have no dtype complex64"),
        ({"x": np.zeros(2, ">f4")}, "tensor 'x': its dtype >f4 has another byte order"),
        ({"x": np.zeros(2)[::-1]}, "tensor 'x': it goes backwards"),
        ({"x": Box((4,), (0, 0), np.zeros(2))}, "tensor 'x': the shape of the whole"),
        ({"x": Box((4,), (3,), np.zeros(2))}, "tensor 'x': the part of shape"),
        ({3: np.zeros(2)}, "3 is no name of a tensor"),
        ([np.zeros(2)], "bind a dict of tensors by name"),
        (None, "bind either tensors or load="),
    ],
)
def test_what_cannot_be_bound_is_named(session, name, tensors, message):
    with pytest.raises(troupe.InvalidError, match=message.replace("'", "['\"]")):
        troupe.weights(name).bind(tensors)


def test_mistakes(session, name):
    w = troupe.weights(name)
    with pytest.raises(troupe.InvalidError, match="no tensors are bound to publish"):
        w.publish(1)
    with pytest.raises(troupe.InvalidError, match="no tensors are bound to take"):
        w.stage()
    with pytest.raises(troupe.InvalidError, match="'most'"):
        w.publish(1, mode="most")
    with pytest.raises(troupe.InvalidError, match="7 is no version"):
        w.stage(7)
    with pytest.raises(troupe.InvalidError, match="use='both'"):
        w.bind({}, use="both")
    with pytest.raises(troupe.InvalidError, match="no name"):
        troupe.weights("no name").available()
    w.bind({"x": np.zeros(3)})
    with pytest.raises(troupe.TimedOutError, match="no version was published yet"):
        w.stage(timeout=0.5)


class DeviceTensor:
    """As much of torch.Tensor as weights need, on numpy: a tensor of a device says so, and has no address."""

    layout, is_meta, is_nested, is_cuda = "strided", False, False, False

    def __init__(self, array, device="cpu"):
        self.array, self.device = array, types.SimpleNamespace(type=device)
        self.shape, self.dtype = array.shape, f"torch.{array.dtype.name}"

    def detach(self):
        return self

    def element_size(self):
        return self.array.itemsize

    def stride(self):
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def data_ptr(self):
        assert self.device.type == "cpu", "memory of a device was used as memory of the host"
        return self.array.ctypes.data

    def copy_(self, other, non_blocking=False):
        self.array[...] = other.array


def empty(shape, dtype, pin_memory=False):
    return DeviceTensor(np.empty(shape, str(dtype).removeprefix("torch.")))


def test_tensors_of_torch_and_of_a_device(both, monkeypatch):
    """With a stand-in, because torch may not be installed: strides are elements, and a device is reached by copies."""
    monkeypatch.setitem(
        sys.modules,
        "torch",
        types.SimpleNamespace(
            Tensor=DeviceTensor,
            nn=types.SimpleNamespace(Parameter=DeviceTensor),
            strided="strided",
            empty=empty,
            float32="torch.float32",
        ),
    )
    source = DeviceTensor(np.arange(60_000, dtype="f4").reshape(200, 300).T, "xpu")
    near, far = DeviceTensor(np.zeros((300, 100), "f4")), DeviceTensor(np.zeros((300, 100), "f4"), "xpu")
    w = both({"x": source}, {"x": [Box((300, 200), (0, 0), near), Box((300, 200), (0, 100), far)]})
    for step in (1, 2):
        source.array += 1
        version = w.publish(step)
        w.stage(version)
        before = far.array.copy()
        assert not np.array_equal(before, source.array[:, 100:])
        w.commit(version)
        assert np.array_equal(np.hstack([near.array, far.array]), source.array)
    got = {}
    w.bind(load=lambda pairs: got.update(pairs))
    w.commit(w.stage(version))
    assert isinstance(got["x"], DeviceTensor) and np.array_equal(got["x"].array, source.array)


@pytest.fixture
def device():
    _device._backend = HostDevice()  # stays: a thread of the process serves readers with it from now on
    return _device._backend


def lent_values():
    """What this process lends, also of other tests: the newest version of a name stays until its session ends."""
    return set(_device._lender._tensors.items()) if _device._lender else set()


def test_tensors_on_one_device_stay_there(both, device):
    """Rows become columns through arenas of the device: their bytes do not come to the host."""
    whole = device.device_array(np.arange(60_000, dtype="f4").reshape(200, 300))
    bits, none = device.device_array(np.arange(1001, dtype="i2")), np.zeros((0, 4), "f4")
    left, right = (device.device_array(np.zeros((200, 150), "f4")) for _ in range(2))
    odd = device.device_array(np.zeros(1001, "i2"))
    parts = [Box((200, 300), (0, 0), left), Box((200, 300), (0, 150), right)]
    w = both({"x": whole, "y": bits, "none": none}, {"x": parts, "y": odd, "none": none.copy()})
    before = lent_values()
    for step in range(1, 6):
        whole += 1
        bits += 1
        version = w.publish(step)
        expected = whole.copy()
        whole[...] += 1  # the version is a snapshot
        w.stage(version)
        assert not np.array_equal(left, expected[:, :150]), "staging does not change the tensors"
        w.commit(version)
        assert np.array_equal(np.hstack([left, right]), expected) and np.array_equal(odd, bits)
    (member,) = (m for m in w.status()["members"] if m.get("use") == "take")
    assert set(member["bytes"]) == {"device"} and device.registered == 0
    until(lambda: len(lent_values() - before) == 1)  # the bucket of the newest version
    assert device.allocated <= 4, "the arenas are used again"
    w.bind({"x": whole.copy()}, use="publish")
    w.bind({"x": parts}, use="take")
    w.commit(w.stage(w.publish(6)))
    assert np.array_equal(np.hstack([left, right]), whole)


WAYS = [("InferOnDevice", "device"), ("InferElsewhere", "host"), ("InferByBus", "host"), ("Infer", "host")]


def test_receivers_of_a_device_by_every_way(start, name):
    """On the device of the publishers, on another of the host, over the bus, and in memory of the host."""
    train = start(weights_workers.TrainOnDevice)
    receivers = [(start(getattr(weights_workers, cls)), way) for cls, way in WAYS]
    for step in (1, 2, 3):
        version = publish(train, step)
        for infer, _ in receivers:
            take(infer, version)
            assert seen(infer) == (step, version)
    for infer, way in receivers:
        until(lambda infer=infer: committed(name, infer.name) == [version] * 2)
        assert all(set(m["bytes"]) == {way} for m in members(name, infer.name))
    one = start(weights_workers.InferOnDevice, 1)
    take(one, version)
    assert seen(one) == (3, version), "what was packed for two is packed again for one"
    publish(train, 4)
    until(lambda: max(train.execute_all_sync("kept")) <= 6)


def test_deltas_of_tensors_on_a_device(start, name):
    """They are made and applied in memory of the host."""
    train = start(weights_workers.DeltasOnDevice)
    infer, far = start(weights_workers.InferOnDevice), start(weights_workers.Infer)
    for step in (1, 2, 3, 4):
        version = publish(train, step)
        for receiver in (infer, far):
            take(receiver, version)
            assert seen(receiver) == (step, version)


def test_a_receiver_on_the_device_is_killed(start, name, tmp_path):
    train, infer = start(weights_workers.TrainOnDevice), start(weights_workers.InferOnDevice)
    dying = start(weights_workers.InferOnDevice, 1)
    take(infer, publish(train, 1))
    pid = dying.workers[0].pid()
    lost = dying.execute_all_async("stage_forever", str(tmp_path / "staged"))
    until((tmp_path / "staged").exists)
    os.kill(pid, signal.SIGKILL)
    for step in range(2, 6):
        version = publish(train, step)
        take(infer, version)
        assert seen(infer) == (step, version)
    with pytest.raises(troupe.WorkerLostError):
        lost.result(120)
    until(lambda: max(train.execute_all_sync("kept")) <= 3)


def test_a_device_without_memory_is_named(both, device):
    source, target = device.device_array(np.ones(70_000)), device.device_array(np.zeros(70_000))
    w = both({"x": source}, {"x": target})
    device.full = True
    with pytest.raises(troupe.Error, match="no memory for weights"):
        w.publish(1)
    device.full = False
    version = w.publish(2)
    device.full = True
    with pytest.raises(troupe.Error, match="no memory for weights"):
        w.stage(version)
    device.full = False
    w.commit(w.stage(version))
    assert np.array_equal(source, target)


def test_a_bucket_that_was_changed_is_refused(both, device):
    source, target = device.device_array(np.arange(70_000.0)), device.device_array(np.zeros(70_000))
    w = both({"x": source}, {"x": target})
    before = lent_values()
    version = w.publish(1)
    ((_, lent),) = lent_values() - before
    lent.value[5] ^= 1
    with pytest.raises(troupe.Error, match="another digest"):
        w.stage(version)
    lent.value[5] ^= 1
    w.commit(w.stage(version))
    assert np.array_equal(source, target)
