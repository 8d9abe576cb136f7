"""Sessions of the module under test (raytest.py)."""

import pytest

from ray_api.raytest import REAL, ray


@pytest.fixture(scope="module")
def session():
    """One node with four CPUs, two devices and resources of other names."""
    ray.init(address="local", num_cpus=4, num_gpus=2, resources={"a": 1, "cpu": 3}, include_dashboard=REAL)  # Ray answers ray.util.state there
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
