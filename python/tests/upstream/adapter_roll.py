"""A pytest plugin: ROLL's tests meet troupe.adapters.roll in place of Cluster and ResourceManager, with `ray` as
troupe.ray."""

from troupe.ray.__main__ import prepare

prepare(["roll"])


def pytest_collection_finish():
    from roll.distributed.executor.cluster import Cluster
    from roll.distributed.scheduler.resource_manager import ResourceManager

    assert (Cluster.__name__, ResourceManager.__name__) == ("TroupeCluster", "TroupeResourceManager")
