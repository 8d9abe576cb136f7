"""`python -m troupe.ray._process`: what agents start for an actor, or for tasks. The module runs nothing of its own, so that _host is imported once."""

import sys

from .. import worker
from . import _host

if __name__ == "__main__":
    if sys.argv[1:]:
        from .. import _forkserver

        _forkserver.serve()  # returns in workers
    worker._exit(_host.main())
