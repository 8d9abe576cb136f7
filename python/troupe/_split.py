"""Splits the arguments of a call and joins its answers. Go plans which rank gets which part; this module splits and
joins the values."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import _codec, _errors
from ._batch import Batch, join_arrays, sizes
from ._register import Broadcast, Scatter, Split

_DP = ("DP_MP_COMPUTE", "DP_MP_DISPATCH_FIRST", "DP_MP_DISPATCH_FIRST_COLLECT_ALL")
_PADDED = ("DP_MP_COMPUTE", "DP_MP_DISPATCH_FIRST")  # modes that join rows, so that padding can be trimmed again
_NO_DATA = -1


class Plan:
    """The plan that Go made for one mode: which parts of a call go to which ranks, and which answers it returns."""

    __slots__ = ("collect", "id", "parts", "prefixes", "result", "shards", "single")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.id: int = fields["id"]
        self.shards: int = fields["shards"]
        self.parts: list[tuple[int, list[int]]] = [(p["shard"], p["ranks"]) for p in fields["parts"]]
        self.collect: list[int] = fields["collect"] or []
        self.result: str = fields["result"]
        self.single = len(self.parts) == 1
        self.prefixes: dict[tuple[str, bool], bytes] = {}  # encoded prefixes of calls, cached by the cluster

    def called(self) -> list[int]:
        return sorted(r for _, ranks in self.parts for r in ranks)


def has_rows(value: Any) -> bool:
    """Returns whether the DP modes split a value, judging by its type alone."""
    if type(value) is list:
        return True
    if _codec.is_array(value):
        return len(value.shape) > 0
    if isinstance(value, Batch):
        return bool(value.arrays)
    if is_tensordict(value):
        return len(value.batch_size) > 0
    return callable(getattr(value, "chunk", None)) and hasattr(value, "__len__")


def is_tensordict(value: object) -> bool:
    """Returns whether the value has the interface of a TensorDict or a tensorclass. Imports nothing."""
    return all(hasattr(type(value), name) for name in ("batch_size", "chunk", "split", "cat"))


class Cut:
    """How the arguments of one call were split: the number of shards, rows and added rows."""

    __slots__ = ("padding", "rows", "shards")

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.rows = 0
        self.padding = 0


def is_cut(mode: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Returns whether any argument differs between the parts."""
    values = [*args, *kwargs.values()]
    if mode == "ALL_TO_ALL" or mode in _DP:
        marks = [_mark(mode, v, name) for v, name in zip(values, _names(args, kwargs), strict=True)]
        return any(mark != "broadcast" for mark in marks)
    for v in values:
        if isinstance(v, (Scatter, Split)):
            raise _errors.InvalidError(
                f"an argument is marked {type(v).__name__.lower()}, but {mode} gives every rank the same arguments"
            )
    return False


def _names(args: Sequence[object], kwargs: Mapping[str, object]) -> list[str]:
    return [f"argument {i + 1}" for i in range(len(args))] + [f'argument "{n}"' for n in kwargs]


def plain(value: object) -> object:
    return value.value if isinstance(value, Broadcast) else value


def cut(
    mode: str, shards: int, args: Sequence[object], kwargs: Mapping[str, object], pad: bool
) -> tuple[list[list[Any]], list[Any], Cut]:
    """Splits the arguments. Returns the arguments of each shard, keyword arguments last; those for ranks without data;
    and the row counts."""
    values = [*args, *kwargs.values()]
    names = _names(args, kwargs)
    marks = [_mark(mode, v, name) for v, name in zip(values, names, strict=True)]
    info = Cut(shards)
    rows = {n: _length(v, n) for v, m, n in zip(values, marks, names, strict=True) if m == "split"}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{n} has {k}" for n, k in rows.items())
        raise _errors.InvalidError(f"split arguments must have the same number of rows: {counts}")
    info.rows = next(iter(rows.values()), 0)
    if pad and info.rows:
        if mode not in _PADDED:
            raise _errors.InvalidError(f"{mode} gives one answer a rank: padding could not be trimmed from it again")
        info.padding = -info.rows % shards
    out: list[list[Any]] = [[] for _ in range(shards)]
    others = []
    word = "rank" if mode == "ALL_TO_ALL" else "data-parallel rank"
    for value, mark, name in zip(values, marks, names, strict=True):
        if mark == "split" and info.rows + info.padding < shards:
            raise _errors.InvalidError(_fewer_rows(mode, name, shards, word, info))
        pieces = _pieces(value, mark, name, shards, word, info)
        if len(rows) > 1 and mark == "split":
            _check_sizes(pieces, name, info)
        for i, piece in enumerate(pieces):
            out[i].append(piece)
        others.append(_head(value, mark))
    return out, others, info


def _fewer_rows(mode: str, name: str, shards: int, word: str, info: Cut) -> str:
    text = f"fewer rows than {word}s: {name} has {info.rows} rows for {shards} {word}s"
    if info.rows and mode in _PADDED:
        text += "; options(pad=True) repeats rows until there is one for each, and trims the result again"
    return text


def _check_sizes(pieces: list[Any], name: str, info: Cut) -> None:
    """Raises an error if rows of this argument would meet other rows of another one: a type's own chunk may divide
    differently."""
    got, wanted = [len(piece) for piece in pieces], sizes(info.rows + info.padding, info.shards)
    if got != wanted:
        raise _errors.InvalidError(
            f"{name} was divided into {got} rows by {type(pieces[0]).__name__}.chunk, and the other arguments into "
            f"{wanted}: split it before the call, and mark it Scatter"
        )


def _mark(mode: str, value: object, name: str) -> str:
    if isinstance(value, Broadcast):
        return "broadcast"
    if isinstance(value, Scatter):
        return "scatter"
    if isinstance(value, Split):
        if not has_rows(value.value):
            raise _errors.InvalidError(
                f"{name} is marked split, but a value of type {type(value.value).__name__} has no rows; "
                "Batch({…}) splits named arrays"
            )
        return "split"
    if mode == "ALL_TO_ALL":
        return "scatter"
    if has_rows(value):
        return "split"
    _refuse_rows_inside(value, name)
    return "broadcast"


def _refuse_rows_inside(value: object, name: str) -> None:
    """Raises an error for a container of arrays that all have the same number of rows: it may be a batch to be split,
    or weights for every rank."""
    lengths = set()
    for array in _arrays_inside(value):
        lengths.add(len(array) if len(array.shape) else None)
        if len(lengths) > 1:
            return
    if not lengths or None in lengths:
        return
    raise _errors.InvalidError(
        f"{name} is a {type(value).__name__} whose arrays all have {lengths.pop()} rows: Batch({{…}}) splits rows "
        "between the ranks, Broadcast(value) gives every rank all of them; say which is meant"
    )


def _arrays_inside(value: object) -> Iterator[Any]:
    """Yields the arrays in dicts, tuples and dataclasses, also nested ones."""
    values, seen = [value], set()
    while values:
        value = values.pop()
        if _codec.is_array(value):
            yield value
        elif id(value) not in seen:  # a container may contain itself
            seen.add(id(value))
            values.extend(_children(value))


def _children(value: Any) -> Iterable[object]:
    if isinstance(value, (dict, UserDict)) or is_tensordict(value):
        return list(value.values())
    if isinstance(value, tuple):
        return value
    return [getattr(value, field, None) for field in getattr(type(value), "__dataclass_fields__", ())]


def _length(value: Any, name: str) -> int:
    value = value.value if isinstance(value, Split) else value
    return len(value)


def _pieces(value: object, mark: str, name: str, shards: int, word: str, info: Cut) -> list[object]:
    if mark == "broadcast":
        return [plain(value)] * shards
    if mark == "scatter":
        return _scatter(value, name, shards, word)
    value = value.value if isinstance(value, Split) else value
    if info.padding:
        value = _padded(value, info)
    return _chunks(value, sizes(info.rows + info.padding, shards))


def _scatter(value: object, name: str, shards: int, word: str) -> list[object]:
    values = value.values if isinstance(value, Scatter) else value
    rule = f"{name}: the list must have one element a {word}"
    if not isinstance(values, (list, tuple)):
        raise _errors.InvalidError(
            f"{rule}: it is no list but of type {type(values).__name__}, and there are {shards} (mark it Broadcast if "
            "all are to have it)"
        )
    if len(values) != shards:
        raise _errors.InvalidError(f"{rule}: it has {len(values)}, and there are {shards}")
    return list(values)


def _chunks(value: Any, wanted: list[int]) -> list[Any]:
    if not isinstance(value, (list, Batch, _codec.Tensor)) and not _codec.is_array(value):
        return _foreign_chunks(value, wanted)
    out, start = [], 0
    for size in wanted:
        out.append(value[start : start + size])
        start += size
    return out


def _foreign_chunks(value: Any, wanted: list[int]) -> list[object]:
    chunks = list(value.chunk(len(wanted)))
    if is_tensordict(value) and [len(chunk) for chunk in chunks] != wanted:  # torch's chunk makes the last ones smaller
        return list(value.split(wanted))
    if len(chunks) != len(wanted):
        raise _errors.InvalidError(f"{type(value).__name__}.chunk({len(wanted)}) gave {len(chunks)} parts")
    return chunks


def _padded(value: Any, info: Cut) -> Any:
    if isinstance(value, Batch):
        return value.pad(info.shards)[0]
    added = info.padding
    if isinstance(value, list):
        return value + [value[i % len(value)] for i in range(added)]
    if _codec.is_array(value) or is_tensordict(value):
        parts, left = [value], added
        while left:
            parts.append(value[: min(left, len(value))])
            left -= len(parts[-1])
        return _concat(parts)
    raise _errors.InvalidError(f"a value of type {type(value).__name__} cannot be padded; pad it before the call")


def _head(value: object, mark: str) -> Any:
    """Returns the value that ranks without data get instead."""
    if mark == "broadcast":
        return plain(value)
    if mark == "split":
        value = value.value if isinstance(value, Split) else value
        if isinstance(value, Batch):
            return value.head()
    return None


def encode_parts(
    codec: _codec.Codec, plan: Plan, mode: str, args: Sequence[object], kwargs: Mapping[str, object], pad: bool
) -> tuple[list[Any], Cut]:
    """Encodes a body for each part. A value shared by several parts is encoded once."""
    by_shard, others, info = cut(mode, plan.shards, args, kwargs, pad)
    shared: dict[int, bytes] = {}
    lending = codec.lending()
    bodies = []
    try:
        for shard, _ in plan.parts:
            values = others if shard == _NO_DATA else by_shard[shard]
            write = functools.partial(_body, codec, values, len(args), list(kwargs), shared)
            bodies.append(codec.walk(lending, write))
        if lending is not None:
            lending.finish()
    except BaseException:
        _codec.take_references()  # drop the references of values that will not be sent
        raise
    return bodies, info


def _body(
    codec: _codec.Codec,
    values: Sequence[object],
    positional: int,
    names: list[str],
    shared: dict[int, bytes],
    walk: _codec.Walk,
) -> None:
    walk._add(b"\x92" + _codec._array_head(positional))
    for i, value in enumerate(values):
        if i == positional:
            walk._add(_codec._map_head(len(names)))
        if i >= positional:
            walk._add(codec._pack(names[i - positional]))
        known = shared.get(id(value))
        if known is None:
            before = walk.size
            try:
                known = codec._pack(value)
            except _codec.Big:
                walk.value(value, 1)
                continue
            assert before == walk.size
            shared[id(value)] = known  # the values live until the call is made, so ids are unique
        walk._add(known)
    if not names:
        walk._add(b"\xc0")


def merge(plan: Plan, ranks: list[int], answers: list[Any], info: Cut | None, mesh_dp: dict[int, int]) -> Any:
    """Merges the answers of a call in a mode that joins rows."""
    if info is not None and info.padding:
        answers = [_trim(a, mesh_dp[r], r, info) for r, a in zip(ranks, answers, strict=True)]
    return join(answers)


def _trim(answer: Any, dp: int, rank: int, info: Cut) -> Any:
    if not has_rows(answer):
        return answer
    size = (info.rows + info.padding) // info.shards
    if len(answer) != size:
        raise _errors.InvalidError(
            f"rank {rank} answered {len(answer)} rows for its {size}: padding can be trimmed only from one row a row"
        )
    if not hasattr(type(answer), "__getitem__"):
        raise _errors.InvalidError(f"padding cannot be trimmed from a {type(answer).__name__}: it has no slices")
    return answer[: min(max(info.rows - size * dp, 0), size)]


def join(answers: list[Any]) -> Any:
    """Concatenates rows; None counts as no rows. If no answer has rows, returns the list of answers."""
    with_rows = [a for a in answers if _joins(a)]
    without = [a for a in answers if a is not None and not _joins(a)]
    if not with_rows:
        return answers if without else None
    if without:
        raise _errors.InvalidError(
            f"{len(with_rows)} answers are rows ({type(with_rows[0]).__name__}) and {len(without)} are not "
            f"({type(without[0]).__name__}): they cannot be joined"
        )
    kinds = {type(a) for a in with_rows}
    if len(kinds) > 1:
        raise _errors.InvalidError(
            f"rows of different types cannot be joined: {', '.join(sorted(k.__name__ for k in kinds))}"
        )
    first = with_rows[0]
    if isinstance(first, list):
        return [row for a in with_rows for row in a]
    if len(with_rows) == 1:
        return first
    return _concat(with_rows)


def _concat(parts: list[Any]) -> Any:
    first = parts[0]
    if _codec.is_array(first):
        return join_arrays(parts)
    if not is_tensordict(first):
        if not callable(getattr(type(first), "concat", None)):
            raise _errors.InvalidError(_not_joined(first, "the type has no concat"))
        return type(first).concat(parts)
    try:
        return first.cat(parts)
    except Exception as err:  # torch does not join nested tensors
        raise _errors.InvalidError(_not_joined(first, _errors.text_of(err))) from err


def _not_joined(value: object, why: str) -> str:
    return (
        f"values of type {type(value).__name__} cannot be joined: {why}; options(collect_all=True) gives them as a list"
    )


def _joins(value: object) -> bool:
    return has_rows(value) or callable(getattr(type(value), "concat", None)) or isinstance(value, Batch)
