"""Batch: arrays with one row per sample, and metadata about all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _codec, _errors

METRICS = "metrics"  # metadata key that never conflicts: the measurements of all ranks are kept


class Batch(_codec.Walked):
    """Named arrays (numpy or torch) with equally many rows, and metadata. A list becomes an array: of numbers if it
    makes one, otherwise of objects.

    The dispatch modes split and join a batch along the first axis. Ranks that are called without data get only the
    metadata.
    """

    __slots__ = ("arrays", "meta")

    def __init__(self, arrays: Mapping[str, object] | None = None, meta: Mapping[str, object] | None = None) -> None:
        self.arrays = {name: _as_array(name, a) for name, a in (arrays or {}).items()}
        self.meta = dict(meta or {})
        rows = {name: len(a) for name, a in self.arrays.items()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{name} has {n}" for name, n in sorted(rows.items()))
            raise _errors.InvalidError(f"the arrays of a batch must have the same number of rows: {counts}")

    def __len__(self) -> int:
        return next((len(a) for a in self.arrays.values()), 0)

    def __getitem__(self, key: str | slice) -> Any:
        """Returns an array by its name, or a batch with the rows of a slice."""
        if isinstance(key, slice):
            return Batch({name: a[key] for name, a in self.arrays.items()}, self.meta)
        return self.arrays[key]

    def __setitem__(self, name: str, array: Any) -> None:
        array = _as_array(name, array)
        if self.arrays and len(array) != len(self):
            raise _errors.InvalidError(f"{name} has {len(array)} rows, the batch {len(self)}")
        self.arrays[name] = array

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def keys(self) -> list[str]:
        return list(self.arrays)

    def __repr__(self) -> str:
        columns = ", ".join(f"{n}: {getattr(a, 'dtype', '?')}{tuple(a.shape)}" for n, a in self.arrays.items())
        return f"Batch({columns}; meta {sorted(self.meta)})" if self.meta else f"Batch({columns})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch) or self.meta != other.meta or self.arrays.keys() != other.arrays.keys():
            return False
        return all(_equal(a, other.arrays[n]) for n, a in self.arrays.items())

    __hash__ = None  # type: ignore[assignment]

    def split(self, parts: int) -> list[Batch]:
        """Splits the rows into parts of nearly equal size: the first ones have one row more."""
        out, start = [], 0
        for size in sizes(len(self), parts):
            out.append(self[start : start + size])
            start += size
        return out

    chunk = split

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Concatenates batches. For metadata, the first batch that has a key wins; metrics become lists."""
        batches = list(batches)
        with_rows = [b for b in batches if b.arrays]
        meta = merge_meta([b.meta for b in batches])
        if not with_rows:
            return Batch({}, meta)
        names = sorted(with_rows[0].arrays)
        for i, b in enumerate(with_rows):
            if sorted(b.arrays) != names:
                raise _errors.InvalidError(
                    f"batches with different arrays cannot be joined: {names} in the first, {sorted(b.arrays)} in "
                    f"batch {i}"
                )
        return Batch({n: join_arrays([b.arrays[n] for b in with_rows]) for n in with_rows[0].arrays}, meta)

    def select(self, names: Sequence[str]) -> Batch:
        """Returns a batch with only these columns."""
        missing = [n for n in names if n not in self.arrays]
        if missing:
            raise _errors.InvalidError(f"the batch has no {', '.join(missing)}; it has {', '.join(self.arrays)}")
        return Batch({n: self.arrays[n] for n in names}, self.meta)

    def pad(self, multiple: int) -> tuple[Batch, int]:
        """Repeats rows, starting with the first, until their number is a multiple. Returns the batch and the number of
        rows added."""
        added = -len(self) % multiple
        if not added or not len(self):
            return self, 0
        parts, left = [self], added
        while left:
            parts.append(self[: min(left, len(self))])
            left -= len(parts[-1])
        return Batch({n: join_arrays([p.arrays[n] for p in parts]) for n in self.arrays}, self.meta), added

    def trim(self, rows: int) -> Batch:
        """Removes that many rows from the end."""
        return self[: len(self) - rows] if rows else self

    def head(self) -> Batch:
        """Returns a batch with only the metadata."""
        return Batch({}, self.meta)

    def wire(self) -> tuple[int, object]:
        return _codec.BATCH, {"arrays": self.arrays, "meta": self.meta}

    def big(self) -> bool:
        return any(_nbytes(a) >= _codec.BIG for a in self.arrays.values())


def _as_array(name: str, value: Any) -> Any:
    if not _codec.is_array(value):
        if not isinstance(value, (list, tuple)):
            raise _errors.InvalidError(
                f"{name} is of type {type(value).__name__}; a batch holds arrays and lists: put what is the same "
                "for all rows into its metadata"
            )
        try:
            import numpy
        except ImportError:
            raise _errors.InvalidError(
                f"{name} is a list, and a batch holds arrays: numpy, which would make one of it, is not installed; "
                "install it, or give a troupe.Tensor"
            ) from None

        value = _array_of(numpy, value)
    if len(value.shape) == 0:
        raise _errors.InvalidError(f"{name}: an array without axes has no rows")
    return value


def _array_of(numpy: Any, rows: Sequence[Any]) -> Any:
    """Returns an array of numbers, or, of strings, objects and ragged rows, an array with one object a row."""
    try:
        numbers = numpy.asarray(rows)
        if numbers.dtype.name in _codec._SIZES:
            return numbers
    except (ValueError, TypeError, RuntimeError):  # ragged rows, or tensors that numpy cannot read
        pass
    objects = numpy.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        objects[i] = row
    return objects


def _nbytes(array: Any) -> int:
    if isinstance(array, _codec.Tensor):
        return len(array.data)
    return int(array.nbytes)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
        return False
    if getattr(a.dtype, "kind", "") == "O":
        import numpy

        return all(numpy.array_equal(x, y) for x, y in zip(a.ravel(), b.ravel(), strict=True))
    return a == b if isinstance(a, _codec.Tensor) else bool((a == b).all())


def sizes(n: int, parts: int) -> list[int]:
    """Returns the sizes of nearly equal parts: the first n mod parts have one more."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def join_arrays(arrays: Sequence[Any]) -> Any:
    first = arrays[0]
    if len(arrays) == 1:
        return first
    kinds = {type(a) for a in arrays}
    if len(kinds) > 1:
        raise _errors.InvalidError(
            f"arrays of different kinds cannot be joined: {', '.join(sorted(k.__name__ for k in kinds))}"
        )
    if isinstance(first, _codec.Tensor):
        shape = (sum(len(a) for a in arrays), *first.shape[1:])
        return _codec.Tensor(first.dtype, shape, b"".join(bytes(a.data) for a in arrays))
    dtypes = {_joined_dtype(a) for a in arrays}
    if len(dtypes) > 1:
        raise _errors.InvalidError(f"arrays of different dtypes cannot be joined: {', '.join(sorted(dtypes))}")
    if type(first).__module__.partition(".")[0] == "torch":
        import torch

        return torch.cat(list(arrays))
    import numpy

    return numpy.concatenate(list(arrays))


def _joined_dtype(array: Any) -> str:
    """Returns the name of a dtype; strings of different lengths can be joined and have one name."""
    kind = getattr(array.dtype, "kind", "")
    return {"U": "str", "S": "bytes"}.get(kind) or str(array.dtype)


def merge_meta(metas: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Merges metadata: the first value of a key wins; the values of metrics are all kept, as lists."""
    out: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for meta in metas:
        for key, value in meta.items():
            if key == METRICS and isinstance(value, dict):
                for name, measured in value.items():
                    metrics.setdefault(name, []).extend(measured if isinstance(measured, list) else [measured])
                out[key] = metrics
            elif key not in out:
                out[key] = value
    return out


_codec.set_decoder(_codec.BATCH, lambda codec, value: Batch(value.get("arrays") or {}, value.get("meta") or {}))
