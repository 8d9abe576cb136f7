"""docs/ray.md is made from the code, names what there is, and what is refused says what to use instead."""

import os
import subprocess
import sys

import pytest

from ray_api.raytest import REAL

pytestmark = pytest.mark.skipif(REAL, reason="about the page of troupe.ray, not about Ray")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def test_page_is_current():
    from troupe.ray import _names

    with open(os.path.join(ROOT, "docs", "ray.md")) as f:
        assert f.read() == _names.document(), "run `python -m troupe.ray._names > docs/ray.md`"


def test_names_exist():
    from troupe.ray import _names

    missing = []
    for module, name, _, _ in _names.rows():
        try:
            _names.resolve(module, name)
        except (ImportError, AttributeError) as err:
            missing.append(f"{module}.{name}: {err}")
    assert not missing


def test_public_names_are_listed():
    import troupe.ray
    from troupe.ray import _names, util

    listed = {(module, name) for module, name, _, _ in _names.rows()}
    modules = {"accelerators", "scheduling_strategies", "actor", "exceptions", "runtime_context", "ObjectID"}
    for module, package in (("ray", troupe.ray), ("ray.util", util)):
        assert [n for n in package.__all__ if (module, n) not in listed and n not in modules] == []


@pytest.mark.parametrize("use", [
    "ray.util.collective.init_collective_group(1, 0)", "ray.util.state.get_log", "ray._private.gcs_utils.GcsClient()", "ray._private.utils.DeferSigint()", "ray.init('ray://x:1')",
    "ray.init(local_mode=True)", "ray.remote(accelerator_type='H100')(object)",
    "ray.cluster_utils.AutoscalingCluster()",
])  # fmt: skip
def test_refusals(use):
    import troupe.ray._private.gcs_utils

    import troupe.ray as ray
    import troupe.ray._private.utils
    import troupe.ray.cluster_utils
    import troupe.ray.util.collective
    import troupe.ray.util.state  # noqa: F401

    with pytest.raises(NotImplementedError, match="nearest in Troupe"):
        found = eval(use, {"ray": ray})
        if isinstance(found, type):
            found()
    ray.shutdown()


ABSENT = (
    "ray.data",
    "ray.train",
    "ray.train.torch",
    "ray.tune",
    "ray.serve",
    "ray.rllib.algorithms",
    "ray.util.dask",
    "ray.util.xgboost",
    "ray._private.conftest_utils",
    "ray.experimental.tqdm_ray",
    "ray.autoscaler.sdk",
    "ray.no_such_module",
)


@pytest.mark.parametrize("own", [False, True], ids=["ray", "troupe.ray"])
def test_absent_names(tmp_path, own):
    """An absent name is a NotImplementedError that names the nearest thing, and what code takes an optional module to
    raise."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import importlib, importlib.util
root = {"troupe.ray" if own else "ray"!r}
ray = importlib.import_module(root)
def refused(do, kind):
    try:
        do()
    except NotImplementedError as err:
        assert isinstance(err, kind) and "not in troupe.ray; nearest in Troupe: " in str(err), (type(err), err)
        return str(err)
    raise AssertionError("not refused")
for name in {ABSENT!r}:
    module = root + name[3:]
    parent, _, child = module.rpartition(".")
    for kind in (ImportError, ModuleNotFoundError):
        refused(lambda: importlib.import_module(module), kind)
        refused(lambda: exec("import " + module), kind)
        refused(lambda: exec(f"from {{module}} import something"), kind)
        refused(lambda: exec(f"from {{parent}} import {{child}}"), kind)
for name in ("data", "train", "tune", "util.dask", "_private.no_such_module"):
    assert importlib.util.find_spec(f"{{root}}.{{name}}") is None
assert "torch.distributed" in refused(lambda: ray.train, AttributeError)
refused(lambda: ray.util.pdb, AttributeError)
assert not hasattr(ray, "data") and getattr(ray, "serve", 1) == 1 and not hasattr(ray.util, "dask")
from {"troupe.ray" if own else "ray"}.util import ActorPool
try:
    import no_such_package
except ModuleNotFoundError as err:
    assert err.name == "no_such_package" and not isinstance(err, NotImplementedError)
print("all refused")
""")
    command = [sys.executable, str(program)] if own else [sys.executable, "-m", "troupe.ray", str(program)]
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path), "PYTHONPATH": os.path.join(ROOT, "python")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "all refused" in done.stdout, done.stdout + done.stderr


def test_the_command_is_installed_on_request(tmp_path):
    """install-cli makes `ray` a command of the shell, in the interpreter's folder or another, and replaces no other
    program."""
    with open(os.path.join(ROOT, "python", "pyproject.toml")) as f:
        scripts = f.read().partition("[project.scripts]")[2].partition("[")[0]
    assert "ray" not in scripts, "the wheel brings no ray command"
    folder = tmp_path / "bin"
    folder.mkdir()
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path), "PYTHONPATH": os.path.join(ROOT, "python"), "PATH": path}

    def run(*command, code=0):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    install = (sys.executable, "-m", "troupe.ray", "install-cli")
    assert f"installed {folder}/ray" in run(*install, str(folder))
    assert "troupe.ray" in run("ray", "--version")
    assert "Could not find any running Ray instance" in run("sh", "-c", "ray status", code=1)
    run(*install, str(folder))  # again
    (folder / "ray").write_text("#!/bin/sh\n")
    assert "is another program" in run(*install, str(folder), code=1)
    assert "is no folder" in run(*install, str(folder / "none"), code=1)
    assert "usage" in run(*install, "--help", code=2)
    assert "install-cli" in run(sys.executable, "-m", "troupe.ray", "--help")


def test_command(tmp_path):
    """start, status, a second node, two drivers, stop."""
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path), "PYTHONPATH": os.path.join(ROOT, "python")}

    def run(*command, code=0):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def ray(*arguments, code=0):
        return run(sys.executable, "-m", "troupe.ray.scripts", *arguments, code=code)

    assert "Could not find any running Ray instance" in ray("status", code=1)
    assert "nearest in Troupe" in ray("job", "submit", code=2)
    said = ray("start", "--head", "--port=0", "--num-cpus=3", "--num-gpus=2", "--node-name=first", "--dashboard-port=1")
    try:
        address = said.partition('address="')[2].partition('"')[0]
        assert "0/3 CPU" in ray("status") and "0/2 GPU" in ray("status", "--address", address)
        ray("start", "--address", address, "--num-cpus=1", "--resources", '{"x": 2}')
        script = "import troupe.ray as ray; ray.init(%s); print(ray.cluster_resources()); ray.shutdown()"
        for where in ("'auto'", repr(address), ""):
            out = run(sys.executable, "-c", script % where)
            assert "'CPU': 4.0" in out and "'x': 2.0" in out and "'GPU': 2.0" in out
    finally:
        assert "Stopped all" in ray("stop", "--force")
    assert "Did not find any" in ray("stop")
    ray("status", code=1)


def test_program_that_imports_ray(tmp_path):
    """python -m troupe.ray SCRIPT: `ray` is troupe.ray in the program and in its actors, which inherit TROUPE_RAY."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, ray\n"
        "@ray.remote\n"
        "class A:\n"
        "    def where(self):\n"
        "        import ray\n"
        "        return ray.__commit__, os.environ['TROUPE_RAY']\n"
        "print(ray.get(A.remote().where.remote()))\n"
    )
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path), "PYTHONPATH": os.path.join(ROOT, "python")}
    done = subprocess.run(
        [sys.executable, "-m", "troupe.ray", str(script)], env=env, capture_output=True, text=True, timeout=60
    )
    assert "('troupe', '1')" in done.stdout, done.stdout + done.stderr
