"""ray.util.multiprocessing: multiprocessing.Pool with actors in place of processes."""

from multiprocessing import JoinableQueue, TimeoutError

from .pool import Pool

__all__ = ["JoinableQueue", "Pool", "TimeoutError"]
