"""Reads every body-*.bin and frame-*.bin in this folder with nothing but Python's msgpack, and compares each with its
.json.

    python read_fixtures.py

The JSON says what is in a body: {"type": "nil" | "bool" | "int" | "float" | "str" | "bytes" | "list" | "map" | "time" |
"tensor", …}. A float is compared by its bits, bytes by their hex form, a tensor by dtype, shape, bytes, elements, and
the place in the body where they begin. For a frame it says major version, kind, the envelope as such a map, whose keys
are the numbers of docs/wire.md, and the body in hex. The frames inside a bundle and a sequence are read as well.
"""

import json
import pathlib
import struct
import sys
from collections.abc import Iterable

import msgpack

EXT_TENSOR = 1


class Tensor:
    """The payload of ext 1: a byte that says how much padding follows, [dtype, shape], the elements."""

    def __init__(self, payload: bytes) -> None:
        rest = payload[1 + payload[0] :]
        head = msgpack.Unpacker()
        head.feed(rest)
        self.dtype, self.shape = head.unpack()
        self.data = rest[head.tell() :]

    def values(self) -> list[str]:
        """The elements, little-endian, printed so that they can be compared."""
        if self.dtype == "bfloat16":  # the upper half of a float32
            return [printed(x) for (x,) in struct.iter_unpack("<f", widened(self.data, 2))]
        if self.dtype == "float8_e5m2":  # the upper half of a float16
            return [printed(x) for (x,) in struct.iter_unpack("<e", widened(self.data, 1))]
        if self.dtype == "float8_e4m3fn":
            return [printed(float8_e4m3fn(q)) for q in self.data]
        return [printed(x) for (x,) in struct.iter_unpack("<" + FORMATS[self.dtype], self.data)]


FORMATS = {
    "float64": "d", "float32": "f", "float16": "e", "bool": "?",
    "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
}  # fmt: skip


def widened(data: bytes, size: int) -> bytes:
    """Puts as many zero bytes before each element as it has itself."""
    return b"".join(bytes(size) + data[i : i + size] for i in range(0, len(data), size))


def float8_e4m3fn(q: int) -> float:
    sign, exponent, fraction = (-1.0 if q & 0x80 else 1.0), q >> 3 & 0xF, q & 7
    if q & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def printed(x: object) -> str:
    return str(x).lower()


def element(dtype: str, text: str) -> str:
    """An element of a JSON file as Python prints it."""
    return printed(float(text)) if "float" in dtype else text


def ext_hook(code: int, payload: bytes) -> Tensor:
    if code != EXT_TENSOR:
        raise ValueError(f"ext type {code} is not in the fixtures")
    return Tensor(payload)


def describe(value: object) -> dict:
    """Says what a decoded value is, in the words of the JSON files."""
    if value is None:
        return {"type": "nil"}
    if isinstance(value, bool):
        return {"type": "bool", "value": value}
    if isinstance(value, int):
        return {"type": "int", "value": value}
    if isinstance(value, float):
        return {"type": "float", "bits": "nan" if value != value else struct.pack(">d", value).hex()}
    if isinstance(value, str):
        return {"type": "str", "value": value}
    if isinstance(value, bytes):
        return {"type": "bytes", "hex": value.hex()}
    if isinstance(value, msgpack.Timestamp):
        return {"type": "time", "seconds": value.seconds, "nanoseconds": value.nanoseconds}
    if isinstance(value, Tensor):
        return {
            "type": "tensor",
            "dtype": value.dtype,
            "shape": value.shape,
            "hex": value.data.hex(),
            "values": value.values(),
        }
    if isinstance(value, list):
        return {"type": "list", "items": [describe(v) for v in value]}
    if isinstance(value, dict):
        return {"type": "map", "entries": in_order([describe(k), describe(v)] for k, v in value.items())}
    raise TypeError(f"{type(value)} is not in the fixtures")


def in_order(entries: Iterable[list]) -> list:
    """Sorts the entries of a map, so that two of them can be compared."""
    return sorted(entries, key=json.dumps)


def expected(words: dict, body: bytes) -> dict:
    """Fills in what the JSON leaves out because it is empty, and checks where tensors lie."""
    kind = words["type"]
    if kind == "float":
        value = float(words["value"])
        return {"type": kind, "bits": "nan" if value != value else words["bits"]}
    if kind == "bytes":
        return {"type": kind, "hex": words.get("hex", "")}
    if kind == "time":
        return {"type": kind, "seconds": words["seconds"], "nanoseconds": words.get("nanoseconds", 0)}
    if kind == "list":
        return {"type": kind, "items": [expected(w, body) for w in words.get("items", [])]}
    if kind == "map":
        entries = in_order([expected(k, body), expected(v, body)] for k, v in words.get("entries", []))
        return {"type": kind, "entries": entries}
    if kind == "tensor":
        data, at = words.get("hex", ""), words.get("data_at", 0)
        assert at % 64 == 0 and body[at : at + len(data) // 2].hex() == data, "the tensor is not where it should be"
        values = [element(words["dtype"], text) for text in words.get("values", [])]
        return {"type": kind, "dtype": words["dtype"], "shape": words.get("shape", []), "hex": data, "values": values}
    return words


def read_body(body: bytes, words: dict) -> tuple[dict, dict]:
    value = msgpack.unpackb(body, ext_hook=ext_hook, strict_map_key=False)
    return describe(value), expected(words, body)


class Frame:
    """Two bytes of magic, the major version, the kind, the length of the envelope, the envelope, the body."""

    def __init__(self, message: bytes) -> None:
        magic, self.major, self.kind, length = struct.unpack_from(">2sBBI", message)
        assert magic == b"Tp" and 8 + length <= len(message), "not a frame"
        self.envelope = msgpack.unpackb(message[8 : 8 + length], strict_map_key=False)
        self.body = message[8 + length :]


KIND_CALL, KIND_ANSWER, KIND_SEQUENCE, KIND_BUNDLE = 1, 2, 14, 16


def inner_frames(frame: Frame) -> list[Frame]:
    """The frames inside a bundle, each behind its length, or inside a sequence, each a str and a bin in msgpack."""
    inner, rest = [], frame.body
    while frame.kind == KIND_BUNDLE and rest:
        (length,) = struct.unpack_from(">I", rest)
        inner.append(Frame(rest[4 : 4 + length]))
        rest = rest[4 + length :]
    if frame.kind == KIND_SEQUENCE:
        values = msgpack.Unpacker()
        values.feed(rest)
        parts = list(values)
        assert all(subject.startswith("troupe.") for subject in parts[::2]), "not a subject"
        inner = [Frame(part) for part in parts[1::2]]
    return inner


def read_frame(message: bytes, words: dict) -> tuple[dict, dict]:
    frame = Frame(message)
    inside = {KIND_BUNDLE: KIND_ANSWER, KIND_SEQUENCE: KIND_CALL}
    inner = inner_frames(frame)
    assert bool(inner) == (frame.kind in inside), "nothing inside"
    assert all(f.kind == inside[frame.kind] for f in inner), "something else inside"
    got = {"major": frame.major, "kind": frame.kind, "envelope": describe(frame.envelope), "body": frame.body.hex()}
    want = {
        "major": words["major"],
        "kind": words["kind"],
        "envelope": expected(words["envelope"], b""),
        "body": words.get("body", ""),
    }
    return got, want


def main() -> int:
    wrong = total = 0
    for pattern, read in (("body-*.bin", read_body), ("frame-*.bin", read_frame)):
        files = sorted(pathlib.Path(__file__).parent.glob(pattern))
        total += len(files)
        for file in files:
            words = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            got, want = read(file.read_bytes(), words)
            if got != want:
                wrong += 1
                print(f"{file.name}: read {got}, expected {want}")
        if not files:
            wrong += 1
            print(f"no {pattern}")
    print(f"{total} fixtures read, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
