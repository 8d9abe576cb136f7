"""Every dispatch mode with every kind of value, as argument and as result, at sizes around those from which on a value
travels in another way."""

import functools

import pytest

import split_values
import troupe
from troupe import Broadcast, Scatter, Split

KIB, MIB = 1 << 10, 1 << 20
# 64 KiB: larger bodies lie in shared memory. 1 MiB: larger pieces are copied by the core, larger arrays are views of
# the message. 2 MiB: larger values are shared between the processes of a remote host. 64 MiB: copies on several
# threads.
SIZES = [at + off for at in (64 * KIB, MIB, 2 * MIB) for off in (-4 * KIB, 4 * KIB)]
LARGE = {  # for these alone: the others would take minutes
    ("array", "RANK_ZERO"): [64 * MIB - 4 * KIB, 64 * MIB + 4 * KIB],
    ("chunk_and_concat", "DP_MP_DISPATCH_FIRST"): [64 * MIB + 4 * KIB],
}

TP, DP = 2, 2
WORLD = TP * DP
ROWS = 5
PARTS = [(0, 3), (3, 5)]  # rows of the two data-parallel ranks
QUARTERS = [(0, 2), (2, 3), (3, 4), (4, 5)]  # rows of the four ranks

MODES = [
    "RANK_ZERO", "ONE_TO_ALL", "ONE_TO_ALL_ONE", "ALL_TO_ALL", "DP_MP_COMPUTE", "DP_MP_DISPATCH_FIRST",
    "DP_MP_DISPATCH_FIRST_COLLECT_ALL",
]  # fmt: skip
MARKS = ["Scatter", "Split", "Broadcast"]
LARGEST_PART = {"ALL_TO_ALL": 3, "DP_MP_COMPUTE": 3, "DP_MP_DISPATCH_FIRST": 3, "Scatter": 3, "Split": 2}  # in rows


@pytest.fixture(scope="module")
def role(session):
    config = troupe.WorkerConfig(world_size=WORLD, tensor_parallel_size=TP)
    with troupe.Cluster("split-table", split_values.Echo, worker_config=config) as cluster:
        yield cluster


class Kind:
    """Makes values of one kind, and says what is expected of them. The largest value of one rank has `size` bytes."""

    def __init__(self, name, mode, size):
        self.name = name
        self.has_rows = name in split_values.WITH_ROWS
        rows = LARGEST_PART.get(mode.removesuffix("_COLLECT_ALL"), ROWS)
        self.make = functools.partial({**split_values.WITH_ROWS, **split_values.WHOLE}[name], row_bytes=size // rows)

    def digest(self, first, last):
        return split_values.digest(self.make(first, last))

    def whole(self):
        return self.make(0, ROWS)

    def without_data(self):
        """What a rank without data gets in place of rows: of a batch the metadata, of other values nothing."""
        return split_values.digest(self.whole().head()) if self.name == "batch" else None


def one_a_rank(digests):
    """The digest of a list of answers."""
    return ["list", digests]


def case_of(mode, kind):
    """Returns the mode to call in, the arguments, what each rank is to get (None: it is not called), and the result."""
    whole = kind.digest(0, ROWS)
    if mode in ("RANK_ZERO", "ONE_TO_ALL", "ONE_TO_ALL_ONE"):
        ranks = 1 if mode == "RANK_ZERO" else WORLD
        return (
            mode,
            (kind.whole(),),
            [[whole, False]] * ranks,
            one_a_rank([whole] * WORLD) if mode == "ONE_TO_ALL" else whole,
        )
    if mode == "ALL_TO_ALL":
        got = [kind.digest(r, r + 3) for r in range(WORLD)]
        return mode, ([kind.make(r, r + 3) for r in range(WORLD)],), [[g, False] for g in got], one_a_rank(got)
    if mode == "Broadcast":
        return "ALL_TO_ALL", (Broadcast(kind.whole()),), [[whole, False]] * WORLD, one_a_rank([whole] * WORLD)
    if mode == "Split":
        got = [kind.digest(*part) for part in QUARTERS]
        return "ALL_TO_ALL", (Split(kind.whole()),), [[g, False] for g in got], one_a_rank(got)
    parts = [kind.digest(*part) for part in PARTS]
    by_rank = [[parts[rank // TP], False] for rank in range(WORLD)]
    if mode == "Scatter":
        joined = whole if kind.has_rows else one_a_rank(parts)
        return "DP_MP_COMPUTE", (Scatter([kind.make(*part) for part in PARTS]),), by_rank, joined
    if kind.has_rows:
        args, joined, rest = (kind.whole(),), whole, kind.without_data()
    else:  # every rank gets it, beside rows that are split
        args, joined, rest = (Broadcast(kind.whole()), list(range(ROWS))), one_a_rank([whole] * DP), whole
        by_rank = [[whole, False]] * WORLD
    if mode != "DP_MP_COMPUTE":
        by_rank = [entry if rank % TP == 0 else [rest, True] for rank, entry in enumerate(by_rank)]
    if mode == "DP_MP_DISPATCH_FIRST_COLLECT_ALL":
        joined = one_a_rank([got for got, _ in by_rank])
    return mode, args, by_rank, joined


@pytest.mark.parametrize("mode", MODES + MARKS)
@pytest.mark.parametrize("name", [*split_values.WITH_ROWS, *split_values.WHOLE])
def test_every_mode_and_kind_of_value_at_every_size(role, mode, name):
    for size in SIZES + LARGE.get((name, mode), []):
        kind = Kind(name, mode, size)
        if mode == "Split" and not kind.has_rows:
            with pytest.raises(troupe.InvalidError, match="has no rows"):
                role.options(mode="ALL_TO_ALL").echo(Split(kind.whole()))
            continue
        called_in, args, by_rank, expected = case_of(mode, kind)
        result = role.options(mode=called_in).echo(*args)
        assert role.take_seen() == by_rank + [None] * (WORLD - len(by_rank)), (size, "arguments")
        assert split_values.digest(result) == expected, (size, "result")
