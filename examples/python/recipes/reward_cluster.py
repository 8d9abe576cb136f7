"""A reward cluster: rows are spread over the workers, each judges many at once, and one bad row fails alone."""

import asyncio

import troupe
from troupe import Cluster, Dispatch, Worker, WorkerConfig, register


class Judge(Worker):
    async def judge(self, answer):
        """One answer. A real judge would await a model or a sandbox here."""
        await asyncio.sleep(0.01)
        if answer is None:
            raise ValueError("there is no answer")
        return float(answer == "42")

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    async def score(self, answers):
        """The rows of this worker, all at once. An exception becomes a reward of zero instead of failing the batch."""
        results = await asyncio.gather(*(self.judge(a) for a in answers), return_exceptions=True)
        return [(0.0, str(r)) if isinstance(r, Exception) else (r, "") for r in results]


def main():
    with troupe.init(gpus="none"):
        judges = Cluster("reward", Judge, worker_config=WorkerConfig(world_size=2, max_concurrency=256))
        scored = judges.score(["42", "41", None, "42", "7", "42"], timeout=60)  # rows come back in order
        print("rewards", [reward for reward, _ in scored], "failed", [why for _, why in scored if why])


if __name__ == "__main__":
    main()
