"""Data-parallel training that goes on after a rank is killed.

Four ranks train a small model, with DDP on gloo if torch is installed, and otherwise with numpy and sockets. In the
middle one of them is killed. A spare takes its place; the group is formed again over troupe:// in the next epoch of
the membership; the new rank gets the state of one that has come furthest, and training goes on from there. The losses
are those of a run that was not disturbed.
"""

import argparse
import itertools
import os
import pickle
import signal
import socket
import struct
import tempfile
import time

import numpy as np

import troupe
from troupe import Cluster, Dispatch, Worker, WorkerConfig, register

WORLD, STEPS, KILLED = 4, 40, 2


def rows(step, rank):
    """The rows of a rank in a step: the same in every run."""
    x = np.random.default_rng((step, rank)).standard_normal((32, 8)).astype(np.float32)
    return x, np.sin(x.sum(1, keepdims=True))


class SocketTrainer:
    """A linear model; gradients are averaged by rank 0, whose address the others get from the rendezvous."""

    def __init__(self):
        self.w, self.v, self.peers = np.zeros((8, 1), np.float32), np.zeros((8, 1), np.float32), []

    def form(self):
        found = troupe.rendezvous("trainers", timeout=60)
        self.rank, self.world = found.rank, found.world_size
        if self.rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                found.set("address", f"127.0.0.1:{listening.getsockname()[1]}")
                self.peers = [listening.accept()[0] for _ in range(self.world - 1)]
            self.peers = [peer for _, peer in sorted((receive(peer), peer) for peer in self.peers)]  # by rank
        else:
            host, port = found.get("address").decode().split(":")
            self.peers = [socket.create_connection((host, int(port)))]
            send(self.peers[0], self.rank)

    def leave(self):
        for peer in self.peers:
            peer.close()

    def exchange(self, value):
        """Returns the values of all ranks."""
        if self.rank:
            send(self.peers[0], value)
            return receive(self.peers[0])
        everyone = [value, *map(receive, self.peers)]
        for peer in self.peers:
            send(peer, everyone)
        return everyone

    def step(self, x, y):
        error = x @ self.w - y
        gradients, losses = zip(*self.exchange((x.T @ error / len(x), (error**2).mean())), strict=True)
        self.v = 0.9 * self.v + sum(gradients) / self.world
        self.w = self.w - 0.05 * self.v
        return float(np.mean(losses))

    def state(self):
        return self.w, self.v

    def load(self, state):
        self.w, self.v = state


def send(peer, value):
    data = pickle.dumps(value)
    peer.sendall(struct.pack("<I", len(data)) + data)


def receive(peer):
    head = peer.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        raise ConnectionError("a rank has closed its connection")
    data = peer.recv(length := struct.unpack("<I", head)[0], socket.MSG_WAITALL)
    if len(data) < length:
        raise ConnectionError("a rank has closed its connection")
    return pickle.loads(data)


class TorchTrainer:
    """A small network in DistributedDataParallel."""

    def __init__(self):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def form(self):
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method="troupe://trainers")
        self.ddp = None

    def leave(self):
        import torch.distributed as dist

        self.ddp = None
        if dist.is_initialized():
            dist.destroy_process_group()  # closes the connections: ranks that wait for this one fail too

    def exchange(self, value):
        import torch.distributed as dist

        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value)
        return everyone

    def step(self, x, y):
        import torch
        import torch.distributed as dist

        if self.ddp is None:  # find_unused_parameters: the buckets never change, so that sums are always rounded alike
            self.ddp = torch.nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)
        loss = torch.nn.functional.mse_loss(self.ddp(torch.from_numpy(x)), torch.from_numpy(y))
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()  # after all that can fail: the step is done as a whole or not at all
        return float(total) / dist.get_world_size()

    def state(self):
        return pickle.dumps((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, state):
        model, optimizer = pickle.loads(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def trainer():
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        return SocketTrainer()
    return TorchTrainer()


class Trainer(Worker):
    @classmethod
    def prepare(cls):
        """Runs in a spare, so that what is slow is done before it is needed."""
        cls.prepared = trainer()
        with open(os.environ["SPARE_IS_READY"], "w"):
            pass

    def __init__(self, config=None):
        self.trainer = getattr(self, "prepared", None) or trainer()
        self.epoch = None  # of the group
        self.done = []  # of each step: the mean loss of all ranks, and when it was done

    def form(self, epoch):
        """Forms the group of the role as it is now. All ranks get the state of the one that has done most steps."""
        self.trainer.form()
        steps = self.trainer.exchange(len(self.done))
        first = steps.index(max(steps))
        state = (self.trainer.state(), self.done) if self.rank == first else None
        state, self.done = self.trainer.exchange(state)[first]
        self.trainer.load(state)
        self.epoch = epoch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, epoch, steps, kill_at=None):
        """Trains up to a step, in a group of this epoch."""
        try:
            if self.epoch != epoch:
                self.form(epoch)
            while len(self.done) < steps:
                if self.rank == KILLED and len(self.done) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = self.trainer.step(*rows(len(self.done), self.rank))
                self.done.append((loss, time.time()))
        except Exception:
            self.epoch = None
            self.trainer.leave()
            raise
        return self.done


def run(kill_at=None):
    """Trains, and returns the losses and the longest time between two steps."""
    with tempfile.TemporaryDirectory() as folder:
        ready = os.path.join(folder, "ready")
        env = {"SPARE_IS_READY": ready, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        config = WorkerConfig(world_size=WORLD, policy="restart_rank", spares=1, env=env)
        with Cluster("trainers", Trainer, worker_config=config) as trainers:
            while not os.path.exists(ready):
                time.sleep(0.01)
            while True:
                epoch = trainers.members().epoch
                try:
                    done = trainers.train(epoch, STEPS, kill_at)[0]
                    break
                except troupe.Error as err:
                    print(f"epoch {epoch}: {type(err).__name__}; the group is formed again", flush=True)
                    kill_at = None
                    trainers.changed(epoch, timeout=60).result()  # raises if no rank was lost
    losses, times = zip(*done, strict=True)
    return losses, max(b - a for a, b in itertools.pairwise(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often a rank is killed, each time in a run of its own"
    )
    rounds = parser.parse_args().rounds
    with troupe.init(gpus="none"):
        undisturbed, _ = run()
        print(
            f"{type(trainer()).__name__}: loss {undisturbed[0]:.4f} at first, {undisturbed[-1]:.4f} after {STEPS} steps"
        )
        for _ in range(rounds):
            losses, pause = run(kill_at=STEPS // 2)
            print(f"losses equal: {losses == undisturbed}; {pause:.2f} s from one step to the next around the kill")


if __name__ == "__main__":
    main()
