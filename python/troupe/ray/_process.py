"""The program that agents start for an actor or for tasks: `python -m troupe.ray._process`. It contains no code of its
own, so that _host is imported only once."""

import sys

from .. import worker
from . import _host

if __name__ == "__main__":
    if sys.argv[1:]:
        from .. import _forkserver

        _forkserver.serve()  # returns in the forked workers
    worker._exit(_host.main())
