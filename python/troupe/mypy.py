"""A plugin of mypy: `plugins = ["troupe.mypy"]` in its settings.

With it, the attributes of a WorkerHandle[Judge] and a Cluster[Judge] are the methods of Judge: a name that Judge does
not have and an argument of a wrong type are errors, and a worker's result has its type. Arguments may be futures and
references, and, for a cluster, values for each rank. The result of a cluster's method depends on its dispatch mode, and
is Any.
"""

from __future__ import annotations

from collections.abc import Callable

import mypy.types  # noqa: F401 - before mypy.expandtype, whose import of it is circular
from mypy.expandtype import expand_type_by_instance
from mypy.maptype import map_instance_to_supertype
from mypy.nodes import ARG_NAMED_OPT, ARG_STAR2, Decorator, FuncDef, TypeInfo
from mypy.plugin import AttributeContext, Plugin
from mypy.typeops import bind_self
from mypy.types import AnyType, CallableType, Instance, Parameters, Type, TypeOfAny, UnionType, get_proper_type

_HANDLE, _CLUSTER = "troupe._cluster.WorkerHandle", "troupe._cluster.Cluster"
_SETTINGS = ("blocking", "timeout", "wait")  # keywords of a cluster's methods beside those of the class


class HandlePlugin(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        return (lambda context: _attribute(context, name, self._instance)) if owner in (_HANDLE, _CLUSTER) else None

    def _instance(self, fullname: str, *args: Type) -> Instance:
        symbol = self.lookup_fully_qualified(fullname)
        assert symbol is not None and isinstance(symbol.node, TypeInfo)
        return Instance(symbol.node, args)


def _attribute(context: AttributeContext, name: str, instance: Callable[..., Instance]) -> Type:
    """Returns the type of a handle's attribute."""
    handle, method = get_proper_type(context.type), get_proper_type(context.default_attr_type)
    if not isinstance(handle, Instance) or handle.type.get(name) is not None or not isinstance(method, Instance):
        return context.default_attr_type
    worker = get_proper_type(handle.args[0])
    if not isinstance(worker, Instance) or worker.type.get("__getattr__") or worker.type.fallback_to_any:
        return context.default_attr_type
    if worker.type.get(name) is None:
        context.api.fail(f'"{worker.type.name}" has no method "{name}"', context.context)
        return AnyType(TypeOfAny.from_error)
    bound = _bound(worker, name)
    if bound is None:
        return context.default_attr_type
    result = get_proper_type(bound.ret_type)
    if isinstance(result, Instance) and result.type.fullname == "typing.Coroutine":
        result = get_proper_type(result.args[2])
    cluster = handle.type.fullname == _CLUSTER
    parameters = _parameters(bound, cluster, instance)
    return method.copy_modified(args=[parameters, AnyType(TypeOfAny.explicit) if cluster else result])


def _bound(worker: Instance, name: str) -> CallableType | None:
    """Returns the method of a worker without self; None if it is something else or has several signatures."""
    symbol = worker.type.get(name)
    node = symbol.node if symbol is not None else None
    if not isinstance(node, (FuncDef, Decorator)):
        return None
    function = node.func if isinstance(node, Decorator) else node
    found = get_proper_type(node.type)
    if not isinstance(found, CallableType) or function.is_property:
        return None
    expanded = get_proper_type(expand_type_by_instance(found, map_instance_to_supertype(worker, function.info)))
    assert isinstance(expanded, CallableType)
    return expanded if function.is_static else bind_self(expanded, worker, is_classmethod=function.is_class)


def _parameters(bound: CallableType, cluster: bool, instance: Callable[..., Instance]) -> Parameters:
    """Returns the parameters of a call: those of the method, as values or what stands for one."""

    def accepted(wanted: Type) -> Type:
        others = [instance("troupe._future.Waitable", wanted)]
        if cluster:
            others += [instance(f"troupe._register.{mark}") for mark in ("Scatter", "Split", "Broadcast")]
            others.append(instance("builtins.list", wanted))
        return UnionType.make_union([wanted, *others])

    types, kinds, names = [accepted(t) for t in bound.arg_types], list(bound.arg_kinds), list(bound.arg_names)
    for setting in _SETTINGS if cluster else ():
        if setting not in names:
            at = kinds.index(ARG_STAR2) if ARG_STAR2 in kinds else len(kinds)
            types.insert(at, AnyType(TypeOfAny.explicit))
            kinds.insert(at, ARG_NAMED_OPT)
            names.insert(at, setting)
    return Parameters(types, kinds, names)


def plugin(version: str) -> type[Plugin]:
    return HandlePlugin
