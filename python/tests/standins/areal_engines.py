"""Engines of the tests of troupe.adapters.areal, and a server that a worker runs as a command."""

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
from areal.api import TrainEngine


class Engine(TrainEngine):
    def __init__(self, config=None):
        self.config = config

    def environment(self, name):
        return os.environ.get(name)

    def double(self, rows):
        return [{"y": row["x"] * 2} for row in rows]

    def shown(self, value):
        return repr(value)

    def total(self, array):
        return float(np.sum(array))

    def fail(self):
        raise ValueError("bad batch")

    def exit(self):
        print("out of memory, so to say", file=sys.stderr, flush=True)
        os._exit(7)


class Unimportable:
    """No engine."""


def serve(arguments):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(" ".join(arguments).encode())

        def log_message(self, *args):
            pass

    HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1:])
