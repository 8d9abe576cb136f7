"""Sessions of the module under test (raytest.py)."""

import atexit
import os
import shutil
import tempfile

import pytest

from ray_api.raytest import REAL, ray

if "RAY_TMPDIR" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:  # sessions of other processes are not found
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-test-")
    atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], True)


@pytest.fixture(scope="module")
def session():
    """One node with four CPUs, two devices and resources of other names."""
    ray.init(
        address="local", num_cpus=4, num_gpus=2, resources={"a": 1, "cpu": 3}, include_dashboard=REAL
    )  # Ray answers ray.util.state there
    yield ray
    ray.shutdown()


@pytest.fixture
def nodes():
    """A cluster; tests add nodes."""
    from ray_api.raytest import module

    cluster = module("cluster_utils").Cluster()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def frameworks():
    """Stand-ins of frameworks can be imported, and `ray` is troupe.ray, here and in workers."""
    import sys

    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:0] = [os.path.join(os.path.dirname(tests), "troupe", "ray", "_resolver"), os.path.join(tests, "standins")]
