"""Values of every kind, made row by row, and a worker that returns what it gets and says what that was."""

import dataclasses
import zlib

import numpy as np

import troupe
from troupe import Batch, Worker

try:
    import torch
except ImportError:
    torch = None


def numbers(first, last, row_bytes):
    """Rows first to last of an endless array. Rows differ from each other, and are the same in every array."""
    columns = np.arange(row_bytes // 2, dtype="u2")
    return np.stack([columns * 31 + row * 257 for row in range(first, last)])


class Proto:
    """A batch object of a framework, which Troupe does not know: it is pickled."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def chunk(self, n):
        return [Proto(x) for x in np.array_split(self.x, n)]

    @staticmethod
    def concat(parts):
        return Proto(np.concatenate([p.x for p in parts]))


class Columns:
    """The interface of a TensorDict. Its chunks are those of torch: 5 rows in 4 chunks are 2, 2 and 1."""

    def __init__(self, columns):
        self.columns = columns

    @property
    def batch_size(self):
        return (len(next(iter(self.columns.values()))),)

    def __len__(self):
        return self.batch_size[0]

    def __getitem__(self, rows):
        return Columns({name: column[rows] for name, column in self.columns.items()})

    def split(self, sizes):
        ends = np.cumsum(sizes)
        return tuple(self[end - size : end] for size, end in zip(sizes, ends, strict=True))

    def chunk(self, n):
        size = -(-len(self) // n)
        return tuple(self[start : start + size] for start in range(0, len(self), size))

    @classmethod
    def cat(cls, parts):
        return cls({name: np.concatenate([p.columns[name] for p in parts]) for name in parts[0].columns})


@dataclasses.dataclass
class Sample:
    x: np.ndarray
    name: str


def make_array(first, last, row_bytes):
    return numbers(first, last, row_bytes)


def make_tensor(first, last, row_bytes):
    rows = numbers(first, last, row_bytes)
    if torch is not None:
        return torch.from_numpy(rows.view("i2")).view(torch.bfloat16)
    return troupe.Tensor("bfloat16", rows.shape, rows.tobytes())


def make_objects(first, last, row_bytes):
    rows = np.empty(last - first, dtype=object)
    for i, row in enumerate(numbers(first, last, row_bytes)):
        rows[i] = {"row": row, "name": f"row {first + i}"}
    return rows


def make_strings(first, last, row_bytes):
    return np.array([f"{row:09d} ".ljust(row_bytes // 4, "x") for row in range(first, last)])


def make_list(first, last, row_bytes):
    return list(numbers(first, last, row_bytes))


def make_texts(first, last, row_bytes):
    return [f"{row} " * (row_bytes // 2) for row in range(first, last)]


def make_batch(first, last, row_bytes):
    x = numbers(first, last, row_bytes)
    return Batch({"x": x, "uid": [f"uid {row}" for row in range(first, last)]}, {"step": 3})


def make_proto(first, last, row_bytes):
    return Proto(numbers(first, last, row_bytes))


def make_columns(first, last, row_bytes):
    return Columns({"x": numbers(first, last, row_bytes // 2), "y": numbers(first, last, row_bytes // 2)})


def make_dict(first, last, row_bytes):
    return {"x": numbers(first, last, row_bytes // 2), "y": numbers(first, last, row_bytes // 2)}


def make_dataclass(first, last, row_bytes):
    return Sample(numbers(first, last, row_bytes), f"rows {first} to {last}")


def make_nested(first, last, row_bytes):
    inner = numbers(first, last, row_bytes // 2)
    return {"deep": [(inner, {"proto": Proto(inner)})], "config": {"stop": ["a", "b"], "lr": 0.1}}


WITH_ROWS = {
    "array": make_array, "tensor": make_tensor, "objects": make_objects, "strings": make_strings, "list": make_list,
    "texts": make_texts, "batch": make_batch, "chunk_and_concat": make_proto, "tensordict": make_columns,
}  # fmt: skip
WHOLE = {"dict": make_dict, "dataclass": make_dataclass, "nested": make_nested}


def digest(value):
    """Describes a value: types, shapes, and checksums of the contents. Equal digests are equal values."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return ["objects", list(value.shape), [digest(v) for v in value.ravel()]]
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return ["array", data.dtype.str, list(data.shape), zlib.crc32(data.view("u1").reshape(-1))]
    if isinstance(value, troupe.Tensor):
        return ["tensor", value.dtype, list(value.shape), zlib.crc32(value.data)]
    if torch is not None and isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return ["tensor", str(value.dtype), list(value.shape), zlib.crc32(data)]
    if isinstance(value, str):
        return ["text", len(value), zlib.crc32(value.encode())]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [digest(v) for v in value]]
    if isinstance(value, dict):
        return ["dict", {k: digest(v) for k, v in value.items()}]
    if isinstance(value, Batch):
        return ["batch", digest(value.arrays), digest(value.meta)]
    if isinstance(value, (Proto, Columns, Sample)):
        return [type(value).__name__, digest(vars(value))]
    return value


class Echo(Worker):
    seen = None

    def echo(self, value, rows=None):
        self.seen = [digest(value), troupe.current_call().no_data]
        return value

    def take_seen(self):
        seen, self.seen = self.seen, None
        return seen
