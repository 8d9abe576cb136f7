"""Data-parallel training: each rank has its rows, and the gradients are averaged over the rendezvous that Troupe sets.

With torch the ranks are a process group of gloo (nccl on GPUs); without, a few lines of sockets do the same sum.
"""

import os
import socket
import struct
import time

import numpy as np

import troupe
from troupe import Cluster, Dispatch, Worker, WorkerConfig, register


class SocketSum:
    """The mean of arrays over all ranks: rank 0 listens at MASTER_ADDR:MASTER_PORT, adds up and answers."""

    def __init__(self, rank, world):
        self.rank, self.world, at = rank, world, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank == 0:
            listening = socket.create_server(at)
            self.peers = [listening.accept()[0] for _ in range(world - 1)]
            listening.close()
            return
        end = time.monotonic() + 30
        while True:
            try:
                self.peers = [socket.create_connection(at, timeout=30)]
                return
            except ConnectionRefusedError:  # rank 0 does not listen yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def mean(self, array):
        if self.rank:
            self._send(self.peers[0], array)
            return self._receive(self.peers[0], array)
        total = array + sum(self._receive(p, array) for p in self.peers)
        for p in self.peers:
            self._send(p, total / self.world)
        return total / self.world

    def _send(self, peer, array):
        peer.sendall(struct.pack("<I", array.nbytes) + array.tobytes())

    def _receive(self, peer, like):
        size = struct.unpack("<I", peer.recv(4, socket.MSG_WAITALL))[0]
        return np.frombuffer(peer.recv(size, socket.MSG_WAITALL), like.dtype).reshape(like.shape)


class TorchSum:
    def __init__(self, rank, world):
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=rank, world_size=world)

    def mean(self, array):
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(array.copy())
        dist.all_reduce(tensor)
        return tensor.numpy() / dist.get_world_size()


class Trainer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, lr):
        try:
            import torch  # noqa: F401

            self.group = TorchSum(self.rank, self.world_size)
        except ImportError:
            self.group = SocketSum(self.rank, self.world_size)
        self.lr, self.w = lr, np.zeros(3)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def train_step(self, x, y):
        error = x @ self.w - y
        self.w = self.w - self.lr * self.group.mean(x.T @ error / len(x))
        return [(float((error**2).mean()), self.w.round(6).tolist())]


def main():
    rng = np.random.default_rng(0)
    with troupe.init(gpus="none"):
        trainers = Cluster("actor_train", Trainer, worker_config=WorkerConfig(world_size=2))
        trainers.initialize(0.2)
        for _ in range(60):
            x = rng.standard_normal((64, 3))
            answers = trainers.train_step(x, x @ [1.0, 2.0, 3.0])
    weights = [w for _, w in answers]
    print("ranks agree:", weights[0] == weights[1], "weights", np.round(weights[0], 2).tolist())


if __name__ == "__main__":
    main()
