"""The debugger of a worker: pdb over a socket whose other end is `troupe debug`."""

from __future__ import annotations

import pdb
import socket


class Debugger(pdb.Pdb):
    """pdb over a socket. When the client leaves, the program continues."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._file = peer.makefile("rw")
        super().__init__(stdin=self._file, stdout=self._file, nosigint=True, readrc=False)
        self.use_rawinput = False

    def do_continue(self, arg: str) -> bool | None:
        done = super().do_continue(arg)
        if not self.breaks:
            self._hang_up()
        return done

    do_c = do_cont = do_continue

    def do_EOF(self, arg: str) -> bool | None:
        self.clear_all_breaks()
        return self.do_continue(arg)

    def do_quit(self, arg: str) -> bool | None:
        done = super().do_quit(arg)
        self._hang_up()
        return done

    do_q = do_exit = do_quit

    def _hang_up(self) -> None:
        try:
            self._file.flush()
            self._peer.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            pass
