"""Values on the wire."""

import datetime
import decimal
import enum
import glob
import json
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import msgpack
import numpy as np
import pytest

import conftest
import troupe
from troupe import _codec

WIRE = os.path.join(conftest.ROOT, "bus", "wire", "testdata")


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Point:
    x: int
    y: list = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    name: str
    weights: object = None


def round_trip(value, codec=None):
    codec = codec or _codec.Codec(pickle=True)
    body = codec.encode(value)
    return codec.decode(bytearray(body if isinstance(body, bytes) else body.join()))


ZONE = datetime.timezone(datetime.timedelta(hours=2))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, float("inf"), "", "grüße", b"", b"\0\xff", [], [1, [2, []]], {}, {"a": 1},
        {2: "two", None: 2, True: 3, 1.5: 4, "x": 5}, (), (1, (2, "x")), {1, 2}, frozenset({"a"}), 3 + 4j, decimal.Decimal("1.50"), Color.RED,
        Color.BLUE, Level.LOW, Point(1, [2]), Frozen("a", (1,)), datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.date(2026, 1, 2),
        datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.datetime(2026, 1, 2, 3, tzinfo=ZONE), datetime.time(1, 2),
        datetime.timedelta(days=-1, seconds=2), 2**80, [(1, {2: {3}})], {"nested": Point(1, [Point(2, [])])},
    ],
    ids=lambda v: repr(v)[:40],
)  # fmt: skip
def test_values_keep_their_type(value):
    got = round_trip(value)
    assert got == value
    assert type(got) is type(value)


def test_an_ordered_dict_keeps_its_order_and_attributes():
    """As the state dict of a torch module has them. It is not pickled: its arrays can be shared."""
    value = OrderedDict([("b", np.ones(5000)), ("a", OrderedDict([(2, "two"), ((1, 2), None)]))])
    value._metadata = OrderedDict([("", {"version": 1})])
    for codec in (_codec.Codec(pickle=True), _codec.Codec(pickle=False)):
        got = round_trip(value, codec)
        assert type(got) is OrderedDict and list(got) == ["b", "a"] and (got["b"] == 1).all()
        assert type(got["a"]) is OrderedDict and got["a"] == value["a"]
        assert got._metadata == value._metadata and type(got._metadata) is OrderedDict
    assert vars(round_trip(OrderedDict())) == {}


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (2, 3, 4), (5000, 7)])
def test_arrays(dtype, shape):
    value = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    got = round_trip({"a": value})["a"]
    assert got.dtype == value.dtype and got.shape == value.shape and (got == value).all()
    assert got.flags.writeable
    got[...] = 0


def test_arrays_that_do_not_lie_in_order():
    base = np.arange(60000, dtype="f4").reshape(200, 300)
    for value in (base[::2], base.T, base[:, ::3], base[::-1], np.asfortranarray(base), base.astype(">f4")):
        assert (round_trip(value) == value).all()


def test_large_arrays_are_copied_once_and_aligned():
    codec = _codec.Codec()
    value = {"pad": "x" * 7, "a": np.arange(200_000.0), "t": (np.ones(50_000, "u1"), {"deep": [np.zeros(30_000)]})}
    walk = codec.encode(value)
    assert isinstance(walk, _codec.Walk)
    body = bytearray(walk.join())
    got = codec.decode(body)
    assert (got["a"] == value["a"]).all() and type(got["t"]) is tuple and (got["t"][1]["deep"][0] == 0).all()
    address = np.frombuffer(body, "u1").__array_interface__["data"][0]
    assert (got["a"].__array_interface__["data"][0] - address) % 64 == 0, "a view of the body, at its aligned place"
    got["a"][0] = 7
    assert _codec.Codec().decode(body)["a"][0] == 7, "no copy was made"
    got["t"][0][0] = 7
    assert _codec.Codec().decode(body)["t"][0][0] == 1, "a small array does not keep the body"


def test_numpy_scalars_keep_their_type():
    for value in (np.float32(1.5), np.int8(-3), np.uint64(2**63), np.bool_(True), np.float64(2)):
        got = round_trip([value])[0]
        assert got == value and type(got) is type(value)


def test_a_tensor_of_no_type_here_keeps_its_bytes():
    value = troupe.Tensor("bfloat16", (2, 2), b"\1\2\3\4\5\6\7\x08")
    got = round_trip(value)
    if isinstance(got, troupe.Tensor):
        assert got == value
    else:  # torch has the type
        assert str(got.dtype) == "torch.bfloat16" and tuple(got.shape) == (2, 2)
    with pytest.raises(troupe.InvalidError, match="has 8 bytes, not 3"):
        troupe.Tensor("bfloat16", (2, 2), b"abc")


def test_what_msgpack_cannot_say_is_pickled():
    add = 3
    assert round_trip(lambda x: x + add)(4) == 7
    import functools

    assert round_trip(functools.partial(max, 3))(2) == 3


def test_without_pickle_the_error_names_the_value_its_type_and_the_remedy():
    codec = _codec.Codec(pickle=False)
    with pytest.raises(troupe.EncodeError) as e:
        codec.encode([1, {"f": object()}])
    assert "builtins.object" in str(e.value) and "send dicts, lists" in str(e.value) and "object at" in str(e.value)
    pickled = _codec.Codec(pickle=True).encode(object())
    with pytest.raises(troupe.RefusedError, match="a pickle was sent"):
        codec.decode(pickled)


def test_types_are_imported_only_for_those_who_may_send_pickles():
    body = msgpack_ext(_codec.DATACLASS, ["antigravity", "X", {}])
    with pytest.raises(troupe.RefusedError, match="antigravity has not been imported"):
        _codec.Codec(pickle=False).decode(body)
    with pytest.raises(troupe.RefusedError, match="no such type"):
        _codec.Codec(pickle=True).decode(msgpack_ext(_codec.DATACLASS, ["os", "Nothing", {}]))


def msgpack_ext(code, value):
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(value)))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc1", b"\x92\x01", b"\xd9\xff", b"\xa1\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
        b"\x01\x01", b"\xc7\x01\x01\x3f", b"\xc7\x02\x01\x00\x92", b"\xd4\x7f\x00", b"\xc7\x00\x10",
    ],
    ids=bytes.hex,
)  # fmt: skip
def test_bad_bodies_are_refused(body):
    for filler in (b"", bytes(20_000)):  # the second is long enough to be walked
        with pytest.raises(troupe.Error):
            _codec.Codec(pickle=True).decode(body + filler)


def test_deep_nesting_is_refused():
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(troupe.EncodeError):
        _codec.Codec().encode(deep)
    with pytest.raises(troupe.Error):
        _codec.Codec().decode(b"\x91" * 20_000 + b"\x01")
    loop = []
    loop.append(loop)
    with pytest.raises(troupe.EncodeError):
        _codec.Codec(pickle=True).encode(loop)


def test_a_large_body_of_many_small_things():
    value = [[i, str(i)] for i in range(60_000)]
    assert round_trip(value) == value


# The fixtures that Go wrote, described as their own reader does.

sys.path.insert(0, WIRE)
import read_fixtures  # noqa: E402


class Bare(read_fixtures.Tensor):
    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, list(shape), bytes(data)


def bare(value):
    """A decoded value as the fixtures' reader has it."""
    if isinstance(value, list):
        return [bare(v) for v in value]
    if isinstance(value, dict):
        return {k: bare(v) for k, v in value.items()}
    if isinstance(value, datetime.datetime):
        return msgpack.Timestamp.from_datetime(value)
    if _codec.is_array(value):
        head, data = _codec.tensor_parts(value)
        dtype, shape = msgpack.unpackb(head)
        return Bare(dtype, shape, data)
    return value


def in_microseconds(words):
    """Python's instants are no finer."""
    if words.get("type") == "time":
        words["nanoseconds"] -= words["nanoseconds"] % 1000
    for item in words.get("items", []):
        in_microseconds(item)
    return words


@pytest.mark.parametrize("path", sorted(glob.glob(os.path.join(WIRE, "body-*.bin"))), ids=os.path.basename)
def test_fixtures_of_the_wire(path):
    with open(path, "rb") as f:
        body = f.read()
    with open(path[:-4] + ".json") as f:
        want = in_microseconds(read_fixtures.expected(json.load(f), body))
    value = _codec.Codec().decode(bytearray(body))
    assert read_fixtures.describe(bare(value)) == want
    again = _codec.Codec().encode(value)
    assert (
        read_fixtures.describe(
            bare(_codec.Codec().decode(bytearray(again if isinstance(again, bytes) else again.join())))
        )
        == want
    )


def test_the_fixtures_are_there():
    assert len(glob.glob(os.path.join(WIRE, "body-*.bin"))) > 20
