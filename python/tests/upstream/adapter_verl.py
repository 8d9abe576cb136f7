"""A pytest plugin: verl's tests meet troupe.adapters.verl in place of RayWorkerGroup and RayResourcePool, with `ray` as
troupe.ray."""

from troupe.ray.__main__ import prepare

prepare(["verl"])


def pytest_collection_finish():
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

    assert (RayWorkerGroup.__name__, RayResourcePool.__name__) == ("TroupeWorkerGroup", "TroupeResourcePool")
