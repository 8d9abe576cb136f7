"""The nodes of a graph: what bind returns, and how a graph is executed without being compiled."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import cloudpickle

from .._objects import ObjectRef
from .._refused import refuse

_uids = itertools.count()

_compile: Callable[..., Any]


def set_compiler(compile: Callable[..., Any]) -> None:
    """Sets the class of compiled graphs. The package calls it: that class is made of nodes."""
    global _compile
    _compile = compile


class DAGNode:
    """A node of a graph, with the arguments that it is bound to, some of which are nodes."""

    def __init__(self, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> None:
        self._uid = next(_uids)  # a node has a larger one than the nodes among its arguments
        self._args, self._kwargs = tuple(args), dict(kwargs or {})
        self._downstream: list[DAGNode] = []
        self._compiled: DAGNode | None = None  # the node at which a graph with this one was compiled
        for value in (*self._args, *self._kwargs.values()):
            if isinstance(value, DAGNode):
                value._downstream.append(self)

    def _upstream(self) -> list[DAGNode]:
        """Returns the nodes among the arguments, not those inside of other arguments."""
        return [v for v in (*self._args, *self._kwargs.values()) if isinstance(v, DAGNode)]

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph up to this node once, as calls whose arguments are references."""
        return self._executed(_Execution(args, kwargs))

    def _executed(self, execution: _Execution) -> Any:
        if self not in execution.values:
            args, kwargs = replace((self._args, self._kwargs), lambda node: node._executed(execution))
            execution.values[self] = self._run(execution, args, kwargs)
        return execution.values[self]

    def _run(self, execution: _Execution, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def experimental_compile(self, **options: Any) -> Any:
        """Prepares the graph up to this node for repeated execution, in which values go from actor to actor."""
        return _compile(self, **options)

    def with_tensor_transport(self, transport: object = "auto", **options: object) -> DAGNode:
        """Has no effect: tensors always go by the shortest way there is."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} of a graph cannot be pickled")


class _Execution:
    """One execution of a graph that is not compiled."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.values: dict[DAGNode, Any] = {}


class InputNode(DAGNode):
    """The arguments of execute: all of them, or, by an index or an attribute, one of them."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __enter__(self) -> InputNode:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _run(self, execution: _Execution, args: object, kwargs: object) -> Any:
        if execution.kwargs or len(execution.args) != 1:
            return DAGInputData(*execution.args, **execution.kwargs)
        return execution.args[0]

    def __getitem__(self, key: int | str) -> InputAttributeNode:
        return InputAttributeNode(self, key)

    def __getattr__(self, name: str) -> InputAttributeNode:
        if name.startswith("__"):
            raise AttributeError(name)
        return InputAttributeNode(self, name)


class InputAttributeNode(DAGNode):
    """One argument of execute, or one item or attribute of its only argument."""

    def __init__(self, source: InputNode, key: int | str) -> None:
        super().__init__((source,))
        self._key = key

    def _run(self, execution: _Execution, args: Sequence[Any], kwargs: object) -> Any:
        whole = args[0]
        if isinstance(whole, DAGInputData):
            return whole[self._key]
        try:
            return whole[self._key]
        except (TypeError, KeyError):
            return getattr(whole, str(self._key))


class DAGInputData:
    """Several arguments of execute, for a node that takes all of them."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._args, self._kwargs = args, kwargs

    def __getitem__(self, key: int | str) -> Any:
        return self._args[key] if isinstance(key, int) else self._kwargs[key]


class FunctionNode(DAGNode):
    """A call of a remote function."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__(args, kwargs)
        self._function = function

    def _run(self, execution: _Execution, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._function.remote(*args, **kwargs)


class ClassNode(DAGNode):
    """An actor that an execution creates. The next ones use the same actor."""

    def __init__(self, create: Callable[..., Any], methods: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__(args, kwargs)
        self._create, self._methods = create, methods
        self._handle: Any = None

    def _run(self, execution: _Execution, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._handle is None:
            self._handle = self._create(*args, **kwargs)
        return self._handle

    def __getattr__(self, name: str) -> _UnboundMethod:
        if name.startswith("_") or not hasattr(self._methods, name):
            raise AttributeError(name)
        return _UnboundMethod(self, name)


class _UnboundMethod:
    """A method of an actor that an execution will create."""

    def __init__(self, owner: ClassNode, name: str) -> None:
        self._owner, self._name = owner, name

    def bind(self, *args: object, **kwargs: object) -> ClassMethodNode:
        return ClassMethodNode(self._owner, self._name, {}, 1, args, kwargs)


class ClassMethodNode(DAGNode):
    """A call of an actor's method, or, with an index, one of the values that such a call returns."""

    def __init__(
        self, owner: Any, name: str, options: dict[str, Any], returns: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        super().__init__((owner, *args) if isinstance(owner, ClassNode) else args, kwargs)
        self._owner, self._name, self._options, self._returns = owner, name, options, returns
        self._index: int | None = None

    def _run(self, execution: _Execution, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._index is not None:
            return args[0][self._index]
        handle = self._owner
        if isinstance(handle, ClassNode):
            handle, args = args[0], args[1:]
        method = getattr(handle, self._name)
        return (method.options(**self._options) if self._options else method).remote(*args, **kwargs)

    def _outputs(self) -> ClassMethodNode | tuple[ClassMethodNode, ...]:
        """Returns what bind returns: the node, or a node for each value."""
        if self._returns == 1:
            return self
        found = []
        for i in range(self._returns):
            one = ClassMethodNode(self._owner, self._name, {}, 1, (self,), {})
            one._index = i
            found.append(one)
        return tuple(found)

    def __repr__(self) -> str:
        return f"ClassMethodNode({self._name})"


class MultiOutputNode(DAGNode):
    """The results of a graph that has several."""

    def __init__(self, args: Sequence[DAGNode], **_: object) -> None:
        if isinstance(args, DAGNode) or not isinstance(args, (list, tuple, Iterator)):
            raise ValueError(f"Invalid input type for `args`, {type(args)}.")
        super().__init__(list(args))

    def _run(self, execution: _Execution, args: Sequence[Any], kwargs: object) -> Any:
        return list(args)


def bind_method(method: Any, returns: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the node of a call of an actor's method."""
    if returns < 1:
        raise refuse("bind of a method that yields or returns nothing", "a method with one result")
    return ClassMethodNode(method._handle, method._name, method._options, returns, args, kwargs)._outputs()


class _Found(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a value, and leaves out the nodes and references in it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.left_out: list[Any] = []

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, (DAGNode, ObjectRef)):
            return None
        self.left_out.append(value)
        return len(self.left_out) - 1


def nodes_in(value: object) -> Iterator[DAGNode]:
    """Yields the nodes inside of a value."""
    found = _Found(io.BytesIO())
    found.dump(value)
    return (v for v in found.left_out if isinstance(v, DAGNode))


def replace(value: Any, by: Callable[[DAGNode], Any]) -> Any:
    """Returns a copy of a value in which each node is replaced."""
    data = io.BytesIO()
    found = _Found(data)
    found.dump(value)
    data.seek(0)
    loaded = pickle.Unpickler(data)
    chosen = [by(v) if isinstance(v, DAGNode) else v for v in found.left_out]
    loaded.persistent_load = chosen.__getitem__  # type: ignore[method-assign]
    return loaded.load()
