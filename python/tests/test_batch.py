"""Batches, cutting and joining: no worker is needed."""

import numpy as np
import pytest

import troupe
from troupe import Batch, _split


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
        (lambda: Batch({"a": ["x", "y"]}), "metadata"),
        (lambda: b.select(["q"]), "no q"),
        (lambda: b.__setitem__("w", np.zeros(3)), "3 rows"),
    ):
        with pytest.raises(troupe.InvalidError, match=words):
            bad()


def test_split_and_concat():
    parts = batch(5, lr=0.1).split(3)
    assert [len(p) for p in parts] == [2, 2, 1]
    assert Batch.concat(parts) == batch(5, lr=0.1)
    a, b = Batch({"x": np.zeros(1)}, {"k": 1, "metrics": {"loss": 1.0, "l": [1]}}), Batch({"x": np.ones(2)}, {"k": 2, "metrics": {"loss": 3.0, "l": [2, 3]}})
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
    args = ([1, 2, 3], np.arange(3), batch(3), Chunky([1, 2, 3]), "abc", {"a": [1, 2, 3]}, (1, 2, 3), 5, troupe.Broadcast([9]), troupe.Scatter(["p", "q"]))
    shards, others, info = _split.cut("DP_MP_COMPUTE", 2, args, {"k": [7, 8, 9]}, False)
    assert info.rows == 3
    first, second = shards
    assert first[0] == [1, 2] and second[0] == [3] and second[1].tolist() == [2] and len(first[2]) == 2 and second[3].rows == [3]
    assert first[4:8] == ["abc", {"a": [1, 2, 3]}, (1, 2, 3), 5] == second[4:8]
    assert first[8:] == [[9], "p", [7, 8]] and second[8:] == [[9], "q", [9]]
    assert others[0] is None and isinstance(others[2], Batch) and len(others[2]) == 0 and others[7] == 5


@pytest.mark.parametrize(
    ("mode", "args", "words"),
    [
        ("DP_MP_COMPUTE", ([1],), "fewer rows than data-parallel ranks"),
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


def test_register_refuses_nonsense():
    for kwargs in ({"dispatch_mode": "SOME"}, {"execute_mode": "SOME"}, {"lane": "fast"}, {"concurrency": -1}, {"dispatch_mode": "DP_MP_COMPUTE", "execute_mode": "RANK_ZERO"}):
        with pytest.raises(troupe.InvalidError):
            troupe.register(**kwargs)
