"""Calls to all actors of troupe.ray: by one call of their role, as the adapters of verl and ROLL make it, and by a call
to each; in turns.

.venv/bin/python benchmarks/python/group_calls.py [ACTORS]
"""

import statistics
import sys
import time

import numpy as np

import troupe.ray as ray
from troupe.ray import _forming, _group_call

ROUNDS = 9


class Actor:
    def small(self, x):
        return x

    def large(self, x):
        return len(x)


def main(count):
    ray.init(address="local", num_cpus=count)
    cls = ray.remote(Actor).options(num_cpus=0)
    with _forming.forming():
        together = [cls.remote() for _ in range(count)]
    single = [cls.remote() for _ in range(count)]

    def as_one(method, value):
        ray.get(_group_call.call(together, method, [((value,), {})] * count))

    def each(method, value):
        ray.get([getattr(a, method).remote(value) for a in single])

    for name, method, value, calls in (
        ("small argument", "small", 1, 50),
        ("256 KiB to all", "large", np.ones(64 << 10, dtype=np.float32), 30),
        ("16 MiB to all", "large", np.ones(4 << 20, dtype=np.float32), 5),
    ):
        times = {each: [], as_one: []}
        for do in times:
            do(method, value)
        for _ in range(ROUNDS):
            for do, found in times.items():
                start = time.perf_counter()
                for _ in range(calls):
                    do(method, value)
                found.append((time.perf_counter() - start) / calls * 1e3)
        apart, one = (statistics.median(found) for found in times.values())
        print(
            f"{count} actors, {name}: a call to each {apart:.2f} ms, one call {one:.2f} ms: {apart / one:.1f} times "
            "as long",
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
