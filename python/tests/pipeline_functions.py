"""Functions that are stages of pipelines, in the driver's process and in roles of a file."""

import asyncio
import os
import threading
import time

import pipeline_workers
import troupe


def double(value):
    return value * 2


def tag(item):
    return [
        troupe.Item([item.value, item.key, item.attempt, item.version], to="left"),
        troupe.Item(item.id, key="other", to="right"),
    ]


def fail(value):
    if value == "bad":
        raise ValueError(f"{value} luck")
    return value


begun = threading.Event()  # one of the next two runs


def begin(item):
    """Says that it runs, also to another process: an item that is aborted before it runs gives nothing."""
    begun.set()
    if os.path.isabs(item.value):
        open(item.value, "w").close()


def until_aborted(item):
    """Works until it is told to end, and gives what it has."""
    call = troupe.current_call()
    begin(item)
    while not call.cancelled:
        time.sleep(0.002)
    return f"part of {item.value}"


async def until_cancelled(item):
    begin(item)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return f"part of {item.value}"


def die_once(value):
    return pipeline_workers.ItemWorker.die_once(None, troupe.Item(value))
