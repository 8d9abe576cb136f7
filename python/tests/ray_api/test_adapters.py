"""`python -m troupe.ray --adapter NAME` with stand-ins of the frameworks."""

import os
import subprocess
import sys

import pytest

from ray_api.raytest import REAL

if REAL:
    pytest.skip("the adapters run with troupe.ray", allow_module_level=True)

STANDINS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "standins")
PROGRAM = """
import ray
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

@ray.remote
def elsewhere():
    from roll.distributed.scheduler.resource_manager import ResourceManager
    from roll.distributed.executor.cluster import Cluster
    from verl.single_controller.ray.base import RayWorkerGroup
    return [ResourceManager.__name__, Cluster.__name__, RayWorkerGroup.__name__]

ray.init(address="local", num_cpus=1, log_to_driver=False)
print(*[c.__name__ for c in (ResourceManager, Cluster, RayResourcePool, RayWorkerGroup)], *ray.get(elsewhere.remote()))
"""


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", "troupe.ray", *command],
        env={**os.environ, "PYTHONPATH": STANDINS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_an_adapter_replaces_the_frameworks_classes_in_all_processes(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run("--adapter", "verl", "--adapter", "roll", str(tmp_path / "program.py"))
    here = ["TroupeResourceManager", "TroupeCluster", "TroupeResourcePool", "TroupeWorkerGroup"]
    assert done.stdout.split() == [*here, "TroupeResourceManager", "TroupeCluster", "TroupeWorkerGroup"], done.stderr


def test_an_unknown_adapter_is_refused():
    done = run("--adapter", "nothing", "program.py")
    assert done.returncode == 2 and "there is no adapter 'nothing'; there are verl, roll" in done.stderr


def test_adapters_need_troupe_ray():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, types\nsys.modules['ray'] = types.ModuleType('ray')\nfrom troupe.adapters._workers import "
            "require_troupe_ray as r\nr('verl')",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "ImportError: the adapter for verl needs troupe.ray in place of ray" in done.stderr
