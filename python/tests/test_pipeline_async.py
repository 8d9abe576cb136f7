"""Pipelines in an event loop: everything can be awaited, and what blocks says what to await."""

import asyncio
import time

import pytest

import pipeline_functions
import troupe
from troupe import Stage, Stream

STREAMS = {
    "in": Stream(items=4, bytes="1MiB"),
    "out": Stream(sink=True, bytes="1MiB"),
}  # of so many pipelines, none needs much


def stages(**more):
    return {"double": Stage(pipeline_functions.double, in_="in", out="out", workers=2, **more)}


@pytest.fixture(autouse=True)
def with_session(session):
    """Every pipeline needs one."""


def test_all_of_it_can_be_awaited():
    async def main():
        async with troupe.Pipeline("awaited", STREAMS, stages()) as p:
            await p.pause("double", blocking=False)
            await p.put_many("in", [troupe.Item(i, id=f"i{i}") for i in range(4)], blocking=False)
            full = asyncio.ensure_future(p.put("in", 4, blocking=False))
            stats = await p.stats(blocking=False)
            assert stats["stages"]["double"]["paused"] and not full.done()
            await p.set_version(3, blocking=False)
            await p.scale("double", 3, blocking=False)
            await p.abort("i3", blocking=False)
            await p.resume("double", blocking=False)
            await full
            async with p.taking("out", 1, timeout=90) as items:
                got = [item.value for item in items]
            with pytest.raises(KeyError):
                async with p.taking("out", 1, timeout=90) as items:
                    raise KeyError(items[0].value)
            await p.drain(timeout=90, blocking=False)
            while items := await p.take("out", 10, timeout=0, blocking=False):
                got += [item.value for item in items]
            assert sorted(got) == [0, 2, 4, 8]
            assert (
                await p.dead(blocking=False) == []
                and await p.retry_dead(blocking=False) == 0
                and await p.drop_dead(blocking=False) == 0
            )

    asyncio.run(main())


def test_methods_block_inside_a_running_loop():
    async def main():
        p = troupe.Pipeline("blocks", STREAMS, stages())
        p.put("in", 1)
        p.put_many("in", [2, 3])
        with p.taking("out", timeout=90) as items:
            assert len(items) == 1
        assert len(p.take("out", 2, timeout=90)) >= 1 and p.stats()["name"] == "blocks"
        p.pause("double")
        p.set_version(1)
        p.close()
        await p.close(blocking=False)  # it may be closed more than once
        with pytest.raises(troupe.ClosedError):
            await p.put("in", 1, blocking=False)

    asyncio.run(main())


def test_a_pipeline_is_open_when_it_has_been_awaited():
    async def main():
        p = troupe.Pipeline("early", STREAMS, stages())
        async with p, await troupe.Pipeline.attach("early") as other:
            await other.put("in", 21, blocking=False)
            assert [item.value for item in await p.take("out", timeout=90, blocking=False)] == [42]
        with pytest.raises(troupe.InvalidError, match="no stage reads"):
            await troupe.Pipeline("bad", {"lost": {}}, {})

    asyncio.run(main())


def test_a_take_that_is_given_up_takes_nothing():
    async def main():
        async with troupe.Pipeline("given-up", STREAMS, stages()) as p:
            waiting = asyncio.ensure_future(p.take("out", blocking=False))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await p.put("in", 1, blocking=False)
            assert [item.value for item in await p.take("out", timeout=90, blocking=False)] == [2]

    asyncio.run(main())


def test_futures_of_threads():
    with troupe.Pipeline("futures", STREAMS, stages()) as p:
        taken = p.take("out", 1, blocking=False)
        assert not taken.done()
        puts = [p.put("in", i, blocking=False) for i in range(10)]
        assert troupe.get(puts, timeout=90) == [None] * 10
        assert len(taken.result(90)) == 1
        with pytest.raises(troupe.NotFoundError, match="has no stage"):
            p.pause("duble", blocking=False).result(90)


def test_functions_and_the_loop_of_the_driver():
    """Functions run on threads while the loop of the driver waits; async ones on a loop of the pipeline's own."""
    import threading

    async def where(value):
        await asyncio.sleep(0)
        return threading.current_thread().name

    def slow(name):
        time.sleep(0.01)
        return [name, threading.current_thread().name]

    async def main():
        streams = {**STREAMS, "mid": Stream(bytes="1MiB")}
        line = {"where": Stage(where, in_="in", out="mid"), "slow": Stage(slow, in_="mid", out="out")}
        async with troupe.Pipeline("threads", streams, line) as p:
            await p.put("in", 1, blocking=False)
            (item,) = await p.take("out", timeout=90, blocking=False)
            assert threading.current_thread().name not in item.value

    asyncio.run(main())
