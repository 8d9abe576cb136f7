"""`python -m troupe.ray._process`: what agents start for an actor, or for tasks. The module runs nothing of its own, so that _host is imported once."""

from .. import worker
from . import _host

if __name__ == "__main__":
    worker._exit(_host.main())
