"""The package's modules: each can be imported alone, the graph of their imports has no cycle, few signatures say Any."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import troupe

FOLDER = os.path.dirname(troupe.__file__)
MODULES = sorted(name[:-3] for name in os.listdir(FOLDER) if name.endswith(".py") and name != "__init__.py")

# Imports one module of the package without its __init__, which imports the others.
ALONE = """
import sys, types
package = types.ModuleType("troupe")
package.__path__ = [{folder!r}]
sys.modules["troupe"] = package
import troupe.{module}
"""


def sources():
    """The source of each module of the package and its subpackages, by dotted name; packages end in `.__init__`."""
    root = pathlib.Path(FOLDER)
    return {
        ".".join(("troupe", *path.relative_to(root).with_suffix("").parts)): path.read_text()
        for path in sorted(root.rglob("*.py"))
    }


def imported(module, source, modules):
    """The modules that a module imports at any depth of its code: in functions and under `if TYPE_CHECKING` too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import name` imports a module of that name, or takes an attribute of the package.
            names = {f"{base}.{alias.name}" for alias in node.names}
            found.update(names if names & {*modules, *(m.removesuffix(".__init__") for m in modules)} else {base})
    resolved = {name if name in modules else f"{name}.__init__" for name in found}
    return (resolved & modules) - {module}


def cycle(graph):
    """The modules of one import cycle in order, or None."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        for other in sorted(graph[module]):
            if (found := visit(other)) is not None:
                return found
        done.add(path.pop())
        return None

    return next((found for module in graph if (found := visit(module))), None)


def test_modules_do_not_import_each_other_in_a_circle():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"], "the check itself"
    nested = "def f():\n    from . import b\nif TYPE_CHECKING:\n    from .c import C\n"
    assert imported("troupe.ray.a", nested, {"troupe.ray.b", "troupe.ray.c"}) == {"troupe.ray.b", "troupe.ray.c"}
    found = sources()
    graph = {module: imported(module, source, set(found)) for module, source in found.items()}
    assert sum(map(len, graph.values())) > 300, "the imports are found"
    assert (circle := cycle(graph)) is None, " → ".join(circle)


def says_any(function):
    """Whether the annotation of a parameter or of the result contains Any."""
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    annotations = [p.annotation for p in parameters if p is not None] + [function.returns]
    names = [node for a in annotations if a is not None for node in ast.walk(_parsed(a))]
    return any(getattr(node, "id", getattr(node, "attr", None)) == "Any" for node in names)


def _parsed(annotation):
    quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return ast.parse(annotation.value, mode="eval") if quoted else annotation


def test_fewer_than_a_fifth_of_the_signatures_say_any():
    example = ast.parse("def a(x: int) -> 'list[Any]': ...\ndef b(x: str) -> int: ...\ndef c(*x: Any): ...")
    assert [says_any(f) for f in example.body] == [True, False, True], "the check itself"
    functions = [
        (module, node)
        for module, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    found = [f"{module}:{node.lineno} {node.name}" for module, node in functions if says_any(node)]
    assert len(functions) > 1000
    assert len(found) < len(functions) / 5, f"{len(found)} of {len(functions)}:\n" + "\n".join(found)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_can_be_imported_alone(module):
    p = subprocess.run(
        [sys.executable, "-c", ALONE.format(folder=FOLDER, module=module)], capture_output=True, text=True, timeout=90
    )
    assert p.returncode == 0, p.stderr
