"""Workers that find each other by the store of their role."""

import os
import signal
import time

import troupe
from troupe import Dispatch, register


class Meeting(troupe.Worker):
    found = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def addresses(self):
        """Returns what all ranks have set, as this one sees it, and the sum of what they have added."""
        self.found = found = troupe.rendezvous("meeting", timeout=60)
        assert found.rank == self.rank
        found.set(f"rank {self.rank}", f"address {self.rank} of {os.getpid()}")
        got = found.get_many([f"rank {n}" for n in range(found.world_size)])
        found.add("sum", self.rank + 1)
        found.append("letters", "x")
        found.set(f"added {self.rank}", b"")
        found.wait([f"added {n}" for n in range(found.world_size)])
        return [g.decode() for g in got], found.add("sum", 0), found.get("letters"), found.epoch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for(self, key, timeout):
        if self.found is None:
            self.found = troupe.rendezvous("meeting")
        begun = time.monotonic()
        try:
            return self.found.get(key, timeout)
        except troupe.Error as err:
            return type(err).__name__, getattr(err, "left", None), str(err), time.monotonic() - begun

    def changes(self):
        found = troupe.rendezvous("alone")
        got = [
            found.compare_set("k", "other", "a"),
            found.compare_set("k", "", "a"),
            found.compare_set("k", b"a", b"b"),
        ]
        return [*got, found.check(["k"]), found.delete("k"), found.delete("k"), found.check(["k"]), found.check([])]

    def large(self, size):
        troupe.rendezvous("alone").set("k", bytes(size))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def many(self, size):
        """Sets a value of the size, and returns the sizes of all."""
        found = troupe.rendezvous("many")
        found.set(str(self.rank), bytes(size))
        return [len(value) for value in found.get_many([str(n) for n in range(self.world_size)])]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_reduce(self):
        """The sum of the ranks by gloo, twice: the group is formed again in the same epoch."""
        import torch
        import torch.distributed as dist

        sums = []
        for _ in range(2):
            dist.init_process_group("gloo", init_method="troupe://")
            half = dist.new_group(list(range(0, self.world_size, 2)))
            tensor = torch.tensor([float(self.rank)])
            dist.all_reduce(tensor)
            dist.barrier()
            sums.append(float(tensor))
            if self.rank % 2 == 0:
                dist.all_reduce(tensor, group=half)
            dist.destroy_process_group()
        return sums

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def of_another_size(self):
        import torch.distributed as dist

        try:
            dist.init_process_group("gloo", init_method="troupe://", rank=self.rank, world_size=self.world_size + 1)
        except troupe.InvalidError as err:
            return str(err)

    def pid(self):
        return os.getpid()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
