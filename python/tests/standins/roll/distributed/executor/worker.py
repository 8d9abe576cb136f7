import os
import socket


class Worker:
    """Rank 0 finds an address for the group; the others have it in their environment when they are constructed."""

    def __init__(self, worker_config):
        self.worker_config = worker_config
        self.rank = int(os.environ["RANK"])
        if self.rank == 0:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(s.getsockname()[1])
        self.master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def get_master_addr_and_port(self):
        return self.master
