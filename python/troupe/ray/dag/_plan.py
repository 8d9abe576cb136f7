"""Who does what in a compiled graph, as plain values: the steps of each actor, and to whom each value goes.

A value has a key: "in" for the whole input, "in.KEY" for one of its arguments, "N.I" for output I of step N.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ._nodes import ClassMethodNode, ClassNode, DAGNode, FunctionNode, InputAttributeNode, InputNode, MultiOutputNode
from ._nodes import nodes_in as _nodes_in

DRIVER = ""  # the driver among the readers, which are actors otherwise


@dataclass
class Step:
    """One call of a method in every execution. A slot is the key of an argument that is another step's output."""

    number: int
    actor: str
    method: str
    returns: int
    args: list[Any]
    slots: dict[int, str]  # by position in args
    kwargs: dict[str, Any]

    def outputs(self) -> list[str]:
        return [f"{self.number}.{i}" for i in range(self.returns)]


@dataclass
class Plan:
    """A compiled graph."""

    steps: dict[str, list[Step]] = field(default_factory=dict)  # by actor, in the order in which it runs them
    readers: dict[str, list[str]] = field(default_factory=dict)  # by key: the actors that take the value, and DRIVER
    outputs: list[str] = field(default_factory=list)  # the keys of the results
    has_several: bool = False  # whether the graph ends in a MultiOutputNode
    handles: dict[str, Any] = field(default_factory=dict)  # by actor
    positional: int = 1  # positional arguments of execute
    keywords: list[str] = field(default_factory=list)  # keyword arguments that execute needs


def plan_of(root: DAGNode) -> Plan:
    """Returns the plan of the graph that ends in a node, or raises the error of a graph that cannot be compiled."""
    outputs = root._upstream() if isinstance(root, MultiOutputNode) else [root]
    nodes = _connected(root)
    _check(root, nodes, outputs)
    for node in nodes:
        node._compiled = root
    plan = Plan(has_several=isinstance(root, MultiOutputNode))
    _plan_inputs(plan, nodes)
    keys: dict[DAGNode, str] = {}
    for node in nodes:
        if isinstance(node, InputNode):
            keys[node] = "in"
        elif isinstance(node, InputAttributeNode):
            keys[node] = f"in.{node._key}"
        elif isinstance(node, ClassMethodNode):
            if node._index is not None:
                keys[node] = f"{node._args[0]._uid}.{node._index}"
            else:
                keys[node] = f"{node._uid}.0"
                _add_step(plan, node, keys)
    for output in outputs:
        key = keys[output]
        plan.outputs.append(key)
        _add_reader(plan, key, DRIVER)
    return plan


def _connected(root: DAGNode) -> list[DAGNode]:
    """Returns the nodes that are connected with one, in the order of their creation."""
    found, left = {root}, [root]
    while left:
        node = left.pop()
        for other in (*node._upstream(), *(d for d in node._downstream if not isinstance(d, MultiOutputNode))):
            if other not in found:
                found.add(other)
                left.append(other)
    return sorted(found, key=lambda n: n._uid)


def _check(root: DAGNode, nodes: list[DAGNode], outputs: list[DAGNode]) -> None:
    if root._compiled is root:
        raise ValueError(
            "It is not allowed to call `experimental_compile` on the same DAG object multiple times no matter whether "
            "`teardown` is called or not. Please reuse the existing compiled DAG or create a new one."
        )
    for node in nodes:
        if node._compiled is not None:
            raise ValueError(
                "The DAG was compiled more than once. The following two nodes call `experimental_compile`: "
                f"(1) {node._compiled}, (2) {root}"
            )
    _check_calls(nodes)
    inputs = [n for n in nodes if isinstance(n, InputNode)]
    if not inputs:
        raise ValueError(
            f"No InputNode found in the DAG: when traversing upwards, no upstream node was found for {nodes[0]}."
        )
    if len(inputs) > 1:
        raise ValueError("The DAG has more than one InputNode.")
    if any(isinstance(d, InputAttributeNode) for d in inputs[0]._downstream) and any(
        isinstance(d, ClassMethodNode) for d in inputs[0]._downstream
    ):
        raise ValueError(
            "All tasks must either use InputNode() directly, or they must index to specific args or kwargs."
        )
    if any(isinstance(o, (InputNode, InputAttributeNode)) for o in outputs):
        raise ValueError("Compiled DAGs do not support the InputNode as an output: bind it to a method of an actor.")
    _check_attributes(root, inputs[0])
    leaves = [n for n in nodes if isinstance(n, ClassMethodNode) and not n._downstream and n not in outputs]
    if leaves:
        raise ValueError(
            "Compiled DAG doesn't support leaf nodes, i.e., nodes that don't have downstream nodes and are not output "
            f"nodes. There are {len(leaves)} leaf nodes in the DAG. Please add the outputs of "
            f"{[n._name for n in leaves]} to the MultiOutputNode."
        )


def _check_attributes(root: DAGNode, given: InputNode) -> None:
    used: set[DAGNode] = set()
    left = [root]
    while left:
        node = left.pop()
        used.add(node)
        left += [u for u in node._upstream() if u not in used]
    attributes = [d for d in given._downstream if isinstance(d, InputAttributeNode)]
    unused = {str(a._key) for a in attributes if a not in used} - {str(a._key) for a in attributes if a in used}
    if unused:
        raise ValueError(
            "Compiled Graph expects input to be accessed using all of attributes "
            f"{', '.join(sorted({str(a._key) for a in attributes}))}, but {', '.join(sorted(unused))} is unused. "
            "Ensure all input attributes are used and contribute to the computation of the Compiled Graph output."
        )


def _check_calls(nodes: list[DAGNode]) -> None:
    for node in nodes:
        if isinstance(node, (FunctionNode, ClassNode)):
            raise NotImplementedError(
                "Compiled DAGs currently only support actor method nodes, of actors that Class.remote() has created."
            )
        if not isinstance(node, ClassMethodNode):
            continue
        for value in node._args:
            inside = 0 if isinstance(value, DAGNode) else sum(1 for _ in _nodes_in(value))
            if inside:
                raise ValueError(
                    f"Found {inside} DAGNodes from the arg {value!r} in {node}. Please ensure that the argument is a "
                    "single DAGNode and that a DAGNode is not allowed to be placed inside any type of container."
                )
        if any(isinstance(v, DAGNode) for v in node._kwargs.values()):
            raise ValueError("Compiled DAG currently does not support binding to other DAG nodes as kwargs")
        if not node._upstream() and len(nodes) > 1:
            raise ValueError(
                "Compiled DAGs require each task to take a ray.dag.InputNode or at least one other DAGNode as an input"
            )


def _plan_inputs(plan: Plan, nodes: list[DAGNode]) -> None:
    keys = [n._key for n in nodes if isinstance(n, InputAttributeNode)]
    if keys:
        plan.positional = max((k + 1 for k in keys if isinstance(k, int)), default=0)
        plan.keywords = sorted({k for k in keys if isinstance(k, str)})


def _add_step(plan: Plan, node: ClassMethodNode, keys: dict[DAGNode, str]) -> None:
    actor = node._owner._info.actor_id
    args = list(node._args)
    slots = {i: keys[a] for i, a in enumerate(args) if isinstance(a, DAGNode)}
    for i, key in slots.items():
        args[i] = None
        _add_reader(plan, key, actor)
    step = Step(node._uid, actor, node._name, node._returns, args, slots, node._kwargs)
    plan.steps.setdefault(actor, []).append(step)
    plan.handles.setdefault(actor, node._owner)


def _add_reader(plan: Plan, key: str, reader: str) -> None:
    readers = plan.readers.setdefault(key, [])
    if reader not in readers:
        readers.append(reader)
