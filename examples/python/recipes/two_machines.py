"""Two machines. On the first:

    troupe up --listen 0.0.0.0:7422         # prints the URL, where the token is, and the fingerprint
    python two_machines.py                  # finds the head of this machine

and on the second, with the token of the first in TROUPE_TOKEN:

    troupe join tls://FIRST:7422 --fingerprint …
"""

import troupe
from troupe import Cluster, Worker, WorkerConfig


class Hello(Worker):
    def where(self):
        return self.rank


def main():
    with troupe.init("auto"):
        print("nodes", sorted(n["name"] for n in troupe.nodes() if n["alive"]))
        workers = Cluster(
            "hello", Hello, worker_config=WorkerConfig(world_size=2, num_gpus_per_worker=1, strategy="STRICT_SPREAD")
        )
        print("ranks", workers.execute_all_sync("where"), "on", sorted(workers.worker2nodes.values()))


if __name__ == "__main__":
    main()
