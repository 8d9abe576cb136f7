"""A driver that runs with the Python package of both versions: `driver.py once|create|call|destroy|steady ROLE`.

create leaves a detached role, which call calls and destroy destroys; once creates a role, calls and destroys it; steady
calls its role until its standard input is closed."""

import sys
import threading
import time

import numpy

import troupe


class Counter(troupe.Worker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = 0

    @troupe.register(dispatch_mode=troupe.Dispatch.ONE_TO_ALL)
    def add(self, array):
        self.count += 1
        return self.count, float(array.sum())


def steady(cluster: troupe.Cluster) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        print(cluster.add(numpy.ones(4, numpy.float32)), flush=True)
        time.sleep(0.1)


def main() -> None:
    what, role = sys.argv[1:]
    troupe.init(namespace="run")
    if what not in ("call", "destroy"):
        config = troupe.WorkerConfig(world_size=2, num_gpus_per_worker=1, detached=what == "create")
        cluster = troupe.Cluster(role, Counter, worker_config=config)
    else:
        cluster = troupe.Cluster.attach(role)
    if what == "destroy":
        cluster.shutdown()
    else:
        print(cluster.add(numpy.ones(1 << 20, numpy.float32)), flush=True)  # 4 MiB: more than a message
    if what == "steady":
        steady(cluster)
    if what in ("once", "steady"):
        cluster.shutdown()
    troupe.shutdown()


if __name__ == "__main__":
    main()
