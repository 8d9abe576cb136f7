"""ray_script.py, ported."""

import numpy as np

import troupe


class ParameterServer:
    def __init__(self, size):
        self.weights = np.zeros(size)

    def apply(self, *gradients):
        self.weights = self.weights + np.mean(gradients, axis=0)
        return self.weights

    def get(self):
        return self.weights


class Worker:
    def __init__(self, rank):
        self.rank = rank

    def gradient(self, weights):
        if self.rank > 3:
            raise ValueError("no such rank")
        return np.full_like(weights, self.rank)


@troupe.remote
def norm(weights):
    return float(np.abs(weights).sum())


def main():
    troupe.init(resources={"CPU": 4})
    group = troupe.Reservation([{"CPU": 1}] * 3, strategy="PACK", wait=60)
    server = troupe.actor(ParameterServer, 4, name="server")
    workers = [troupe.actor(Worker, i, num_cpus=1, reservation=group, bundle=i) for i in range(3)]
    weights = server.get.remote()
    for _ in range(3):
        weights = server.apply.remote(*[w.gradient.remote(weights) for w in workers])
    shared = troupe.put(weights.result())
    norms = [norm.remote(shared) for _ in range(2)]
    ready, _ = troupe.wait(norms, num_returns=2, timeout=60)
    print("norm", ready[0].result(), "of", len(ready))
    print("server", troupe.get_actor("server").get().tolist())
    try:
        troupe.actor(Worker, 7).gradient(np.zeros(1))
    except ValueError as err:
        print("error", "no such rank" in str(err))
    troupe.shutdown()


if __name__ == "__main__":
    main()
