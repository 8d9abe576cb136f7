"""Kernels of Triton that copy weights, where it is installed."""

# mypy: ignore-errors

try:
    import torch
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    int64, int32, int16, int8 = tl.int64, tl.int32, tl.int16, tl.int8

    @triton.jit
    def copy(
        table,
        arena,
        PACK: tl.constexpr,
        APART: tl.constexpr,
        TYPE: tl.constexpr,
        WORDS: tl.constexpr,
    ):
        """Copies a tile of words between a tensor and the arena; see _Tiles."""
        row = table + tl.program_id(0).to(tl.int64) * 8
        memory, offset = tl.load(row), tl.load(row + 1)
        start, end = tl.load(row + 2), tl.load(row + 3)
        words = start.to(tl.int32) + tl.arange(0, WORDS)
        mask = words < end.to(tl.int32)
        place = words.to(tl.int64)
        if APART:
            length, n = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
            run = words // length
            place = (words % length) + (run % n) * tl.load(row + 6) + (run // n) * tl.load(row + 7)
        tensor = memory.to(tl.pointer_type(TYPE)) + place
        bucket = (arena + offset).to(tl.pointer_type(TYPE)) + words
        if PACK:
            tl.store(bucket, tl.load(tensor, mask), mask)
        else:
            tl.store(tensor, tl.load(bucket, mask), mask)

    @triton.jit
    def digest(source, target, count, position, sums, number, COPY: tl.constexpr, WORDS: tl.constexpr):
        """Copies words, and adds the products of weights/pack/digest.go to a sum."""
        at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        mask = at < count
        words = tl.load(source.to(tl.pointer_type(tl.int64)) + at, mask, other=0)
        if COPY:
            tl.store(target.to(tl.pointer_type(tl.int64)) + at, words, mask)
        place = (position + at).to(tl.uint32)
        low = words.to(tl.uint32) + place * 0x9E3779B1 + 0x243F6A88
        high = (words >> 32).to(tl.uint32) + place * 0x85EBCA6B + 0xB7E15162
        products = tl.where(mask, low.to(tl.uint64) * high.to(tl.uint64), 0)
        tl.atomic_add(sums + number, tl.sum(products, 0).to(tl.int64))


def check():
    """Compiles a kernel, which fails where there is no compiler for its launcher."""
    if triton is None:
        raise ImportError("Triton is not installed")
    sums = torch.zeros(1, dtype=torch.int64, device="cuda")
    words = torch.zeros(16, dtype=torch.int64, device="cuda")
    digest[(1,)](words.data_ptr(), words.data_ptr(), 16, 0, sums, 0, COPY=False, WORDS=2048, num_warps=8)
