"""A pytest plugin: AReaL's tests of LocalScheduler meet troupe.adapters.areal.TroupeScheduler under that name, and its
tests of TrainController have eight workers of Troupe behind their scheduler."""

from typing import ClassVar

import areal.infra.scheduler.local as local
import pytest
from areal.infra.scheduler.exceptions import WorkerNotFoundError
from unmarked import pytest_collection_modifyitems  # noqa: F401

import troupe
from troupe.adapters.areal import TroupeScheduler


class Scheduler(TroupeScheduler):
    """What these tests reach into LocalScheduler for, and that has no part in the interface."""

    def _configure_worker(self, *args):
        raise AssertionError("the tests replace it")

    _is_worker_ready = _cleanup_workers = _configure_worker

    def _find_worker_by_id(self, worker_id):
        try:
            return self._find(worker_id)
        except WorkerNotFoundError:
            return None


class Recorder:
    """The interface that tests of TrainController look into, over workers that all tests share."""

    scheduler = None
    with_engine: ClassVar[set[str]] = set()

    def __init__(self):
        self.call_count, self.engine_calls, self.deleted_roles, self.env_settings = 0, [], [], {}

    def create_workers(self, job):
        if Recorder.scheduler is None:
            Recorder.scheduler = TroupeScheduler(experiment_name="check", trial_name="t")
            Recorder.scheduler.create_workers(job)
        return [w.worker.id for w in Recorder.scheduler._workers[job.role]]

    def get_workers(self, role, timeout=None):
        return list(Recorder.scheduler.get_workers(role, timeout))

    async def set_worker_env(self, worker_id, env):
        self.env_settings[worker_id] = env
        await Recorder.scheduler.set_worker_env(worker_id, env)

    async def create_engine(self, worker_id, engine, engine_name, **kwargs):
        if worker_id not in Recorder.with_engine:
            Recorder.with_engine.add(worker_id)
            await Recorder.scheduler.create_engine(worker_id, "areal_check_engine.CheckEngine", engine_name, **kwargs)

    async def async_call_engine(self, worker_id, method, *args, **kwargs):
        self.engine_calls.append((worker_id, method, args, kwargs))
        self.call_count += 1
        return await Recorder.scheduler.async_call_engine(worker_id, method, *args, **kwargs)

    def delete_workers(self, role, reverse_order=False):
        self.deleted_roles.append(role)
        self.delete_reverse_order = reverse_order


local.LocalScheduler = Scheduler


@pytest.fixture(scope="session", autouse=True)
def troupe_session():
    with troupe.init(gpus="sim:1x8", output="none"):
        yield


@pytest.fixture(autouse=True)
def recorded(request, monkeypatch):
    if hasattr(request.module, "MockScheduler"):
        monkeypatch.setattr(request.module, "MockScheduler", Recorder)
