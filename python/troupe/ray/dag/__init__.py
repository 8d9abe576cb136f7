"""ray.dag: names for imports only; graphs are not supported."""

from __future__ import annotations

from typing import Any

from .._options import refuse

_INSTEAD = "troupe.Pipeline, or calls whose arguments are futures"


class _Refused:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refuse(f"ray.dag.{type(self).__name__}", _INSTEAD)


class CompiledDAG(_Refused):
    pass


class InputNode(_Refused):
    pass


class MultiOutputNode(_Refused):
    pass


class DAGNode(_Refused):
    pass


class ClassNode(_Refused):
    pass


class FunctionNode(_Refused):
    pass
