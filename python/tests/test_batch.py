"""Batches, cutting and joining: no worker is needed."""

import collections
import dataclasses
import os

import msgpack
import numpy as np
import pytest

import split_values
import troupe
from troupe import Batch, _codec, _split


def batch(n=5, **meta):
    return Batch({"x": np.arange(n), "y": np.arange(2 * n, dtype="f4").reshape(n, 2)}, meta)


def test_a_batch_is_its_columns():
    b = batch(5, step=3)
    assert len(b) == 5 and b["x"][4] == 4 and b.keys() == ["x", "y"] and "y" in b and b.meta["step"] == 3
    assert len(b[1:3]) == 2 and b[1:3].meta["step"] == 3
    b["z"] = np.zeros(5)
    assert b.select(["z"]).keys() == ["z"]
    assert Batch({"l": [1, 2]})["l"].dtype == np.int64
    for bad, words in (
        (lambda: Batch({"a": np.zeros(2), "b": np.zeros(3)}), "a has 2, b has 3"),
        (lambda: Batch({"a": np.zeros(())}), "without axes"),
        (lambda: Batch({"a": 3}), "a batch holds arrays"),
        (lambda: Batch({"a": 3}), "metadata"),
        (lambda: b.select(["q"]), "no q"),
        (lambda: b.__setitem__("w", np.zeros(3)), "3 rows"),
    ):
        with pytest.raises(troupe.InvalidError, match=words):
            bad()


def test_rows_of_strings_and_objects():
    ragged = [[1], [2, 3], [], [4], [5]]
    objects = np.array([{"role": "user"}, None, (1, 2), "text", np.arange(3)], dtype=object)
    b = Batch(
        {"uid": list("abcde"), "ragged": ragged, "objects": objects, "words": np.array(["a", "bb", "c", "d", "e"])}
    )
    assert b["uid"].dtype == object and b["ragged"][1] == [2, 3] and b["words"].dtype == "<U2"
    parts = b.split(2)
    assert parts[1]["uid"].tolist() == ["d", "e"] and parts[0]["objects"][0] == {"role": "user"}
    parts[1]["words"] = np.array(["much longer", "e"])
    joined = Batch.concat(parts)
    assert joined["words"].tolist() == ["a", "bb", "c", "much longer", "e"] and joined["ragged"].tolist() == ragged
    assert joined.pad(4)[0]["uid"].tolist() == list("abcdeabc")
    square = np.array([["a", 1], ["b", 2]], dtype=object)  # what numpy makes of rows that are lists of one length
    codec = _codec.Codec()
    for value in (b, Batch({"square": square, "bytes": np.array([b"a", b"bcd"])}), Batch({"none": np.array([], "U3")})):
        body = codec.encode(value)
        got = codec.decode(bytearray(body if isinstance(body, bytes) else body.join()))
        assert got == value and [a.dtype for a in got.arrays.values()] == [a.dtype for a in value.arrays.values()]


def test_bytes_that_are_no_object_array_are_refused():
    codec = _codec.Codec()
    for fields in (["<f8", [1], b"12345678"], ["|O", [3], [1]], ["<U1", [2], b"1234"], ["|O", "x", [1]], [1]):
        body = msgpack.packb(msgpack.ExtType(_codec.OBJECT_ARRAY, msgpack.packb(fields)))
        with pytest.raises(troupe.MalformedError):
            codec.decode(body)


def test_split_and_concat():
    parts = batch(5, lr=0.1).split(3)
    assert [len(p) for p in parts] == [2, 2, 1]
    assert Batch.concat(parts) == batch(5, lr=0.1)
    a, b = (
        Batch({"x": np.zeros(1)}, {"k": 1, "metrics": {"loss": 1.0, "l": [1]}}),
        Batch({"x": np.ones(2)}, {"k": 2, "metrics": {"loss": 3.0, "l": [2, 3]}}),
    )
    joined = Batch.concat([a, b, Batch({}, {"late": 1})])
    assert joined.meta == {"k": 1, "metrics": {"loss": [1.0, 3.0], "l": [1, 2, 3]}, "late": 1}
    with pytest.raises(troupe.InvalidError, match="different arrays"):
        Batch.concat([a, Batch({"y": np.zeros(1)})])
    with pytest.raises(troupe.InvalidError, match="dtypes"):
        Batch.concat([a, Batch({"x": np.zeros(1, "f4")})])


def test_pad_and_trim():
    padded, added = batch(5).pad(4)
    assert added == 3 and list(padded["x"]) == [0, 1, 2, 3, 4, 0, 1, 2]
    assert padded.trim(added) == batch(5)
    assert batch(2).pad(7)[0]["x"].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert batch(4).pad(2) == (batch(4), 0)


class Chunky:
    """Rows of somebody else's making."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def chunk(self, n):
        return [Chunky(list(p)) for p in np.array_split(self.rows, n)]

    @staticmethod
    def concat(parts):
        return Chunky([r for p in parts for r in p.rows])


def test_what_is_cut_goes_by_type_and_marks():
    args = (
        [1, 2, 3],
        np.arange(3),
        batch(3),
        Chunky([1, 2, 3]),
        "abc",
        {"a": [1, 2, 3]},
        (1, 2, 3),
        5,
        troupe.Broadcast([9]),
        troupe.Scatter(["p", "q"]),
    )
    shards, others, info = _split.cut("DP_MP_COMPUTE", 2, args, {"k": [7, 8, 9]}, False)
    assert info.rows == 3
    first, second = shards
    assert (
        first[0] == [1, 2]
        and second[0] == [3]
        and second[1].tolist() == [2]
        and len(first[2]) == 2
        and second[3].rows == [3]
    )
    assert first[4:8] == ["abc", {"a": [1, 2, 3]}, (1, 2, 3), 5] == second[4:8]
    assert first[8:] == [[9], "p", [7, 8]] and second[8:] == [[9], "q", [9]]
    assert others[0] is None and isinstance(others[2], Batch) and len(others[2]) == 0 and others[7] == 5


@pytest.mark.parametrize(
    ("mode", "args", "words"),
    [
        ("DP_MP_COMPUTE", ([1],), r"fewer rows than data-parallel ranks.* 1 rows for 2 .*options\(pad=True\)"),
        (
            "DP_MP_COMPUTE",
            ([],),
            "fewer rows than data-parallel ranks: argument 1 has 0 rows for 2 data-parallel ranks$",
        ),
        ("DP_MP_DISPATCH_FIRST_COLLECT_ALL", ([1],), "1 rows for 2 data-parallel ranks$"),
        ("DP_MP_COMPUTE", ([1, 2], [1, 2, 3]), "argument 1 has 2, argument 2 has 3"),
        ("DP_MP_COMPUTE", (troupe.Split(3),), "has no rows"),
        ("DP_MP_COMPUTE", (troupe.Scatter([1, 2, 3]),), "one element a data-parallel rank"),
        ("ALL_TO_ALL", ([1, 2, 3],), "the list must have one element a rank"),
        ("ALL_TO_ALL", (7,), "no list but of type int"),
    ],
)
def test_mistakes_are_found_before_anything_is_sent(mode, args, words):
    with pytest.raises(troupe.InvalidError, match=words):
        _split.cut(mode, 2, args, {}, False)


@dataclasses.dataclass
class Experience:
    tokens: np.ndarray
    reward: np.ndarray
    step: int = 0


Pair = collections.namedtuple("Pair", "x y")
TWO, THREE = np.zeros((2, 3)), np.zeros(3)


@pytest.mark.parametrize(
    "value",
    [
        {"tokens": TWO, "reward": np.zeros(2)},
        {"tokens": TWO, "temperature": 0.7, "stop": ["a", "b"]},
        {"batch": {"tokens": TWO}, "step": 1},
        collections.OrderedDict(x=troupe.Tensor("bfloat16", (2, 1), b"1234")),
        (TWO, np.zeros(2)),
        Pair(TWO, np.zeros(2)),
        Experience(TWO, np.zeros(2)),
    ],
)
def test_a_container_of_rows_is_split_or_given_to_all_only_when_told(value):
    for mode in _split._DP:
        for args, kwargs, name in (((1, value), {}, "argument 2"), ((), {"data": value}, 'argument "data"')):
            with pytest.raises(troupe.InvalidError) as caught:
                _split.is_cut(mode, args, kwargs)
            text = str(caught.value)
            assert text.startswith(f"{name} is a {type(value).__name__} whose arrays all have 2 rows")
            assert "Batch({" in text and "Broadcast(" in text
        assert not _split.is_cut(mode, (troupe.Broadcast(value),), {})
    assert not _split.is_cut("ONE_TO_ALL", (value,), {}), "every rank gets everything there"


@pytest.mark.parametrize(
    "value",
    [
        {"weight": TWO, "bias": THREE},
        {"weight": TWO, "scale": np.zeros(())},
        {"stop": ["a", "b"]},
        (1, 2),
        Experience(TWO, THREE),
        {},
        {"deep": {"a": TWO, "b": (THREE,)}},
        os.environ,
    ],
)
def test_other_containers_go_to_all(value):
    assert not _split.is_cut("DP_MP_COMPUTE", (value,), {})


def test_a_container_of_itself_is_looked_through_once():
    value = {"a": TWO}
    value.update(b=value, c=value)
    with pytest.raises(troupe.InvalidError, match="2 rows"):
        _split.is_cut("DP_MP_COMPUTE", (value,), {})


def test_a_tensordict_is_split_into_the_rows_that_arrays_beside_it_have():
    columns = split_values.make_columns(0, 5, 8)
    (first, *_, last), _, _ = _split.cut("DP_MP_COMPUTE", 4, (columns, np.arange(5)), {}, False)
    assert [len(v) for v in first] == [2, 2] and [len(v) for v in last] == [1, 1]
    shards, _, info = _split.cut("DP_MP_COMPUTE", 4, (columns,), {}, True)
    assert [len(s[0]) for s in shards] == [2, 2, 2, 2] and info.padding == 3
    with pytest.raises(troupe.InvalidError, match=r"divided into \[1, 4\] rows by Lopsided.chunk, .* into \[3, 2\]"):
        _split.cut("DP_MP_COMPUTE", 2, (Lopsided(range(5)), np.arange(5)), {}, False)


class Lopsided(collections.UserList):
    def chunk(self, n):
        return [Lopsided(self[:1]), Lopsided(self[1:])]


def test_padding_that_could_not_be_trimmed_is_refused():
    for mode, value in (("DP_MP_DISPATCH_FIRST_COLLECT_ALL", [1, 2, 3]), ("ALL_TO_ALL", troupe.Split([1, 2, 3]))):
        with pytest.raises(troupe.InvalidError, match="padding could not be trimmed"):
            _split.cut(mode, 2, (value,), {}, True)


def test_join():
    assert _split.join([[1], [], [2, 3]]) == [1, 2, 3]
    assert _split.join([np.arange(2), np.arange(1)]).tolist() == [0, 1, 0]
    assert _split.join([Chunky([1]), Chunky([2])]).rows == [1, 2]
    assert _split.join([None, [1], None]) == [1]
    assert _split.join([None, None]) is None
    assert _split.join([1, 2]) == [1, 2]
    with pytest.raises(troupe.InvalidError, match="cannot be joined"):
        _split.join([[1], 2])
    with pytest.raises(troupe.InvalidError, match="different types"):
        _split.join([[1], np.zeros(1)])
    columns = [split_values.make_columns(0, 3, 8), split_values.make_columns(3, 5, 8)]
    joined = split_values.digest(_split.join(columns))
    assert joined == split_values.digest(split_values.make_columns(0, 5, 8))
    del columns[1].columns["y"]
    with pytest.raises(troupe.InvalidError, match=r"Columns cannot be joined: .*options\(collect_all=True\)"):
        _split.join(columns)
    with pytest.raises(troupe.InvalidError, match="Lopsided cannot be joined: the type has no concat"):
        _split.join([Lopsided([1]), Lopsided([2])])


def test_register_refuses_nonsense():
    for kwargs in (
        {"dispatch_mode": "SOME"},
        {"execute_mode": "SOME"},
        {"lane": "fast"},
        {"concurrency": -1},
        {"dispatch_mode": "DP_MP_COMPUTE", "execute_mode": "RANK_ZERO"},
    ):
        with pytest.raises(troupe.InvalidError):
            troupe.register(**kwargs)
