"""What a task or actor knows of itself, texts of errors, groups in functions that are shipped by value. Also passes
against Ray."""

import asyncio
import builtins
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from ray_api.raytest import REAL, eventually, module, ray

strategies = module("util.scheduling_strategies")


def test_context_of_tasks_and_actors(session):
    @ray.remote(num_cpus=0)
    def task():
        context = ray.get_runtime_context()
        return (
            context.get_task_name(),
            context.get_task_function_name(),
            context.get()["task_id"].hex() == context.get_task_id(),
            "actor_id" in context.get(),
        )

    name, function, same, actor = ray.get(task.options(name="other").remote())
    assert (name, same, actor) == ("other", True, False)
    assert function == f"{__name__}.task"
    ref = task.remote()
    assert ray.get(ref)[0] == "task"

    @ray.remote(num_cpus=0)
    class Actor:
        def names(self):
            context = ray.get_runtime_context()
            return (
                context.get_task_name(),
                context.get_task_function_name(),
                context.get_task_id(),
                context.get()["actor_id"].hex(),
            )

    handle = Actor.remote()
    ref = handle.names.remote()
    name, function, task_id, actor_id = ray.get(ref)
    assert name == "Actor.names"
    assert function == f"{__name__}.Actor.names"
    assert task_id == ref.task_id().hex()
    assert actor_id == handle._actor_id.hex()


def test_the_function_name_of_an_async_method_is_qualified(session):
    @ray.remote(num_cpus=0)
    class Async:
        async def name(self):
            return ray.get_runtime_context().get_task_function_name()

    where = test_the_function_name_of_an_async_method_is_qualified.__name__
    assert ray.get(Async.remote().name.remote()) == f"{__name__}.{where}.<locals>.Async.name"


def test_session_name_is_the_same_in_all_processes(session):
    @ray.remote(num_cpus=0)
    def name():
        return ray.get_runtime_context().get_session_name()

    own = ray.get_runtime_context().get_session_name()
    assert own.startswith("session_")
    assert ray.get(name.remote()) == own


def test_deprecated_ids_warn(session):
    context = ray.get_runtime_context()
    with pytest.warns(DeprecationWarning, match=r"Use get_node_id\(\) instead"):
        assert context.node_id.hex() == context.get_node_id()
    with pytest.warns(DeprecationWarning, match=r"Use get_job_id\(\) instead"):
        assert context.job_id.hex() == context.get_job_id()


def test_title_of_an_actor_says_what_it_does(session):
    def title_of(pid):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").decode()

    @ray.remote(num_cpus=0)
    class Titled:
        def busy(self):
            return os.getpid(), title_of(os.getpid())

        def other(self):
            return title_of(os.getpid())

    actor = Titled.remote()
    pid, title = ray.get(actor.busy.remote())
    assert title == "ray::Titled.busy"
    assert ray.get(actor.other.remote()) == "ray::Titled.other"
    assert ray.get(actor.busy.remote())[1] == "ray::Titled.busy"
    end = time.monotonic() + 20
    while title_of(pid) != "ray::Titled":
        assert time.monotonic() < end, title_of(pid)
        time.sleep(0.01)


def test_the_text_of_an_error_names_its_place(session):
    @ray.remote(num_cpus=0)
    class Actor:
        def fail(self):
            raise ValueError("inner")

        def __repr__(self):
            return "Shown"

    @ray.remote(num_cpus=0)
    def outer(actor):
        return ray.get(actor.fail.remote())

    actor = Actor.remote()
    with pytest.raises(ValueError) as caught:
        ray.get(actor.fail.remote())
    first = str(caught.value).splitlines()[0].replace("\x1b[36m", "").replace("\x1b[39m", "")
    assert first.startswith("ray::Actor.fail() (pid=")
    assert first.endswith(f"actor_id={actor._actor_id.hex()}, repr=Shown)")
    with pytest.raises(ValueError) as caught:
        ray.get(outer.remote(actor))
    text = str(caught.value).replace("\x1b[36m", "").replace("\x1b[39m", "")
    assert text.startswith("ray::outer() (pid=")
    assert "ray.exceptions.RayTaskError(ValueError): ray::Actor.fail() (pid=" in text
    assert text.endswith("ValueError: inner")


def test_groups_in_tasks(session):
    @ray.remote(num_cpus=0)
    def ready():
        group = ray.util.placement_group([{"CPU": 1}])
        ray.get(group.ready(), timeout=90)
        return group.bundle_specs

    assert ray.get(ready.remote()) == [{"CPU": 1}]
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready(), timeout=90)

    @ray.remote(num_cpus=0)
    def current():
        found = ray.util.get_current_placement_group()
        return None if found is None else found.id.hex()

    @ray.remote(num_cpus=0)
    def nested(**options):
        return ray.get(current.options(**options).remote())

    captured = nested.options(
        scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    )
    assert ray.get(captured.remote()) == group.id.hex()
    numbered = current.options(scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, np.int64(0)))
    assert ray.get(numbered.remote()) == group.id.hex()
    assert ray.get(captured.remote(placement_group=None)) is None
    with pytest.raises(ValueError, match="bundle index must be -1"):
        current.options(placement_group_bundle_index=0).remote()
    ray.util.remove_placement_group(group)


def test_groups_of_exceptions(session):
    group = getattr(builtins, "ExceptionGroup", None)
    if group is None:  # Python 3.10
        return

    @ray.remote(num_cpus=0)
    def fail():
        raise group("several", [ValueError(1), TypeError(2)])

    with pytest.raises(group) as caught:
        ray.get(fail.remote())
    assert isinstance(caught.value, ray.exceptions.RayTaskError)
    assert [type(e) for e in caught.value.exceptions] == [ValueError, TypeError]


def test_class_of_the_main_program_belongs_to_its_file(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import ray\n"
        "class Base:\n"
        "    pass\n"
        "@ray.remote(num_cpus=0)\n"
        "class Actor(Base):\n"
        "    def modules(self):\n"
        "        return [c.__module__ for c in type(self).__mro__], type(self).__qualname__, Base(), "
        "ray.get_runtime_context().get_task_function_name()\n"
        "@ray.remote(num_cpus=0)\n"
        "def task():\n"
        "    return ray.get_runtime_context().get_task_function_name()\n"
        "ray.init(num_cpus=1)\n"
        "modules, name, base, method = ray.get(Actor.remote().modules.remote())\n"
        "assert type(base) is Base, type(base)\n"
        "print(modules, name, method, ray.get(task.remote()))\n"
    )
    command = [sys.executable, str(script)] if REAL else [sys.executable, "-m", "troupe.ray", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "['program', '__main__', '__main__', 'builtins'] Actor program.Actor.modules program.task" in done.stdout, (
        done.stdout + done.stderr
    )


@ray.remote(num_cpus=0)
def timed(seconds):
    time.sleep(seconds)


@ray.remote(num_cpus=0)
class Timed:
    def work(self, seconds):
        with module("_private.profiling").profile("a section"):
            time.sleep(seconds)


@ray.remote(num_cpus=0)
class AsyncTimed:
    async def work_async(self, seconds):
        await asyncio.sleep(seconds)


def test_timeline(session, tmp_path):
    """The executions of tasks and methods as events of the Chrome trace format, returned or in a file."""
    actors = [Timed.remote(), Timed.options(max_concurrency=2).remote(), AsyncTimed.remote()]
    before = time.time()
    ray.get([timed.remote(0.2), *(a.work.remote(0.2) for a in actors[:2]), actors[2].work_async.remote(0.2)])
    after = time.time()

    def seen(category):
        return [e for e in ray.timeline() if e["cat"].endswith(category)]

    for category, name, least in (
        ("timed", "timed", 1),
        ("::Timed.work", "work", 2),
        ("AsyncTimed.work_async", "work_async", 1),
        ("Timed.__init__", "__init__", 3),
        *((("a section", "a section", 2),) if not REAL else ()),  # Ray has them with RAY_PROFILING=1 alone
    ):
        eventually(lambda category=category, least=least: len(seen(category)) >= least, category, 60)
        for event in seen(category):
            assert event["ph"] == "X" and event["name"].endswith(name) and event["pid"] and event["tid"], event
            if name != "__init__":
                assert 0.15e6 <= event["dur"] <= (after - before) * 1e6 + 0.1e6, event
                assert (before - 1) * 1e6 <= event["ts"] <= after * 1e6, event
    path = tmp_path / "trace.json"
    assert ray.timeline(str(path)) is None
    assert "Timed.work" in {e["cat"].removeprefix("task::") for e in json.loads(path.read_text())}
