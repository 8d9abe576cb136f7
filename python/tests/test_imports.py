"""Imports of the package's modules: each works alone, and their graph, lazy imports included, has no cycle."""

import ast
import os
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


def imported(module):
    """The package's modules that a module imports at any depth of its code, except under `if TYPE_CHECKING`."""
    with open(os.path.join(FOLDER, module + ".py")) as f:
        tree = ast.parse(f.read())
    found, nodes = set(), [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes.extend(node.orelse)
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        if isinstance(node, ast.ImportFrom):
            from_package = (node.level == 1 and node.module is None) or (node.level == 0 and node.module == "troupe")
            found.update(a.name for a in node.names) if from_package else found.add((node.module or "").removeprefix("troupe."))
        elif isinstance(node, ast.Import):
            found.update(a.name.removeprefix("troupe.") for a in node.names)
        nodes.extend(ast.iter_child_nodes(node))
    return found & set(MODULES)


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
    found = cycle({module: imported(module) for module in MODULES})
    assert found is None, " → ".join(found)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_can_be_imported_alone(module):
    p = subprocess.run([sys.executable, "-c", ALONE.format(folder=FOLDER, module=module)], capture_output=True, text=True, timeout=30)
    assert p.returncode == 0, p.stderr
