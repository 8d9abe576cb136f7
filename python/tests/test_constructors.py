"""Which constructors are given the configuration of the workers, and which are refused before a process starts."""

import pytest

import troupe
from troupe import Worker, WorkerConfig


class OwnConfig:
    world_size = 1


class Base(Worker):
    def what(self):
        return {k: type(v).__name__ if k != "lr" else v for k, v in self.__dict__.items() if k in ("given", "lr")}


class Named(Base):
    def __init__(self, worker_config):
        self.given = worker_config


class Last(Base):
    def __init__(self, lr=0.1, *, config=None):
        self.lr, self.given = lr, config


class Annotated(Base):
    def __init__(self, settings: WorkerConfig, /):
        self.given = settings


class Defaults(Base):
    def __init__(self, lr=0.1, name: str = "x"):
        self.lr = lr


class Plain:
    def __init__(self, lr=0.1, worker_config=None):
        self.lr, self.given = lr, worker_config

    what = Base.what


class Needs(Base):
    def __init__(self, model_path, lr=0.1):
        self.lr = lr


class NeedsBoth(Base):
    def __init__(self, config, model_path):
        self.lr = 1


class ConfigIsText(Base):
    def __init__(self, config: str):
        self.lr = 1


class PlainNeeds:
    def __init__(self, model_path):
        self.model_path = model_path


@pytest.mark.parametrize(
    "cls, what",
    [
        (Named, {"given": "WorkerConfig"}),
        (Last, {"lr": 0.1, "given": "WorkerConfig"}),
        (Annotated, {"given": "WorkerConfig"}),
        (Defaults, {"lr": 0.1}),
        (Plain, {"lr": 0.1, "given": "WorkerConfig"}),
    ],
)
def test_the_configuration_goes_to_the_parameter_that_is_for_it(session, cls, what):
    handle = troupe.actor(cls)
    assert handle.what() == what
    troupe.kill(handle)


@pytest.mark.parametrize("cls", [Needs, NeedsBoth, ConfigIsText, PlainNeeds])
def test_a_constructor_with_other_parameters_is_refused_with_the_remedy(session, cls):
    before = len(session.clusters)
    for create in (
        lambda: troupe.Cluster("needs", cls, worker_config=WorkerConfig(world_size=2)),
        lambda: troupe.Cluster("needs", cls, worker_config=OwnConfig()),
        lambda: troupe.actor(cls),
    ):
        with pytest.raises(troupe.InvalidError, match=r"worker_kwargs=\{.*'(model_path|config)': …\}") as caught:
            create()
        assert cls.__name__ in str(caught.value)
        assert not caught.value.node, "no process was started"
    assert len(session.clusters) == before


def test_arguments_that_do_not_fit_are_refused_by_the_driver(session):
    for args, kwargs in (((), {"path": 1}), ((1, 2, 3), {}), ((1,), {"model_path": 2})):
        with pytest.raises(troupe.InvalidError, match="does not take the arguments that it is given: Needs") as caught:
            troupe.actor(Needs, *args, **kwargs)
        assert not caught.value.node
    handle = troupe.actor(Needs, "path", lr=3)
    assert handle.what() == {"lr": 3}
    troupe.kill(handle)


def test_a_class_given_by_its_path_is_refused_by_its_worker(session):
    with pytest.raises(troupe.Error, match="worker_kwargs=.*'model_path': …"):
        troupe.Cluster("needs", "test_constructors.Needs", worker_config=WorkerConfig(world_size=1))
