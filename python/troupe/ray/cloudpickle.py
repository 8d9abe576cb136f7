"""cloudpickle under Ray's name."""

from cloudpickle import *  # noqa: F403
from cloudpickle import CloudPickler, dump, dumps, load, loads, register_pickle_by_value

__all__ = ["CloudPickler", "dump", "dumps", "load", "loads", "register_pickle_by_value"]
