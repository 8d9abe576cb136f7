"""ray.dag: graphs of calls. A compiled graph of actor methods runs again and again without a call for each method:
values go from actor to actor, through shared memory on one host and through CUDA IPC on one device.

    _nodes      the nodes that bind makes; execution of a graph that is not compiled
    _plan       who does what in a compiled graph, as plain values
    _compiled   CompiledDAG: its driver
    .._graphs   the steps of a compiled graph in the process of an actor
"""

from __future__ import annotations

from .._refused import absent
from ._compiled import CompiledDAG
from ._context import DAGContext
from ._nodes import (
    ClassMethodNode,
    ClassNode,
    DAGInputData,
    DAGNode,
    FunctionNode,
    InputAttributeNode,
    InputNode,
    MultiOutputNode,
    set_compiler,
)

__all__ = [
    "ClassMethodNode",
    "ClassNode",
    "CompiledDAG",
    "DAGContext",
    "DAGInputData",
    "DAGNode",
    "FunctionNode",
    "InputAttributeNode",
    "InputNode",
    "MultiOutputNode",
]

set_compiler(CompiledDAG)


def __getattr__(name: str) -> object:
    raise absent(__name__, name)
