"""Graphs of calls, and compiled graphs, whose values go from actor to actor."""

import asyncio
import os
import signal

import numpy as np
import pytest

from ray_api.raytest import module, ray

DAGContext, InputNode, MultiOutputNode = (
    getattr(module("dag"), name) for name in ("DAGContext", "InputNode", "MultiOutputNode")
)


@ray.remote
class Stage:
    def __init__(self, start=0):
        self.total = start

    def add(self, x):
        self.total += x
        return self.total

    def echo(self, x):
        return x

    def where(self, x):
        return x.ctypes.data, x.flags.writeable

    def both(self, x, y, by=1):
        return [x, y * by]

    @ray.method(num_returns=2)
    def split(self, x):
        return x, x + 1

    def fails(self, x):
        raise LookupError(f"no {x}")

    def waits(self, x):
        signal.pause()

    def pid(self):
        return os.getpid()


@pytest.fixture
def stages(session):
    return [Stage.remote() for _ in range(2)]


def test_a_graph_runs_as_calls(session):
    @ray.remote
    def double(x):
        return 2 * x

    with InputNode() as given:
        stage = Stage.bind(double.bind(given.start))
        graph = MultiOutputNode([stage.add.bind(given.step), double.bind([given.start])])
    assert ray.get(graph.execute(start=5, step=1)) == [11, [5, 5]]


def test_values_go_through_all_actors(stages):
    a, b = stages
    with InputNode() as given:
        graph = b.both.bind(a.add.bind(given[0]), given.y, by=10).experimental_compile()
    assert [ray.get(graph.execute(i, y=i)) for i in range(4)] == [[0, 0], [1, 10], [3, 20], [6, 30]]
    assert ray.get(a.add.remote(0)) == 6  # the actors take other calls too
    graph.teardown()
    with pytest.raises(ray.exceptions.RayChannelError, match=r"Channel closed\."):
        graph.execute(1, y=1)
    assert ray.get(b.echo.remote(7)) == 7


def test_several_results(stages):
    a, b = stages
    with InputNode() as given:
        low, high = a.split.bind(given)
        graph = MultiOutputNode([b.echo.bind(low), high, a.add.bind(high)]).experimental_compile()
    refs = [graph.execute(i) for i in range(3)]  # three executions under way, taken last to first
    assert [ray.get(r) for r in reversed(refs)] == [[2, 3, 6], [1, 2, 3], [0, 1, 1]]
    with pytest.raises(ValueError, match="once"):
        ray.get(refs[0])


def test_large_arrays_arrive_whole_and_read_only(stages):
    a, b = stages
    with InputNode() as given:
        graph = MultiOutputNode([b.echo.bind(a.echo.bind(given)), b.where.bind(given)]).experimental_compile()
    for size in (4096, 1 << 20, 8 << 20):
        value = np.arange(size, dtype=np.uint8)
        got, (_, writeable) = ray.get(graph.execute(value))
        assert (got == value).all() and not writeable


def test_execute_async(stages):
    a, b = stages
    with InputNode() as given:
        graph = MultiOutputNode([a.echo.bind(given), b.echo.bind(given)])
        graph = graph.experimental_compile(enable_asyncio=True)

    async def one(i):
        return await asyncio.gather(*await graph.execute_async(i))

    async def main():
        return await asyncio.gather(*[one(i) for i in range(10)])

    assert asyncio.run(main()) == [[i, i] for i in range(10)]


def test_the_error_of_a_step_is_that_of_its_execution(stages):
    a, b = stages
    with InputNode() as given:
        graph = b.echo.bind(a.add.bind(given)).experimental_compile()
    with pytest.raises(TypeError, match=r"self\.total \+= x"):
        ray.get(graph.execute("text"))
    assert ray.get(graph.execute(1)) == 1
    with InputNode() as given:
        graph = MultiOutputNode([a.echo.bind(given), b.fails.bind(given)]).experimental_compile()
    for ref in graph.execute(3):
        with pytest.raises(LookupError, match="no 3"):
            ray.get(ref)


def test_the_end_of_an_actor_fails_its_graph(stages):
    a, b = stages
    pid = ray.get(b.pid.remote())
    with InputNode() as given:
        graph = b.waits.bind(a.echo.bind(given)).experimental_compile()
    ref = graph.execute(1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.ActorDiedError, match="graph has ended"):
        ray.get(ref, timeout=60)
    with pytest.raises(ray.exceptions.ActorDiedError):
        graph.execute(1)
    assert ray.get(a.echo.remote(7)) == 7


def test_executions_under_way_are_bounded(stages):
    a, _ = stages
    with InputNode() as given:
        graph = a.echo.bind(given).experimental_compile(_max_inflight_executions=2)
    refs = [graph.execute(i) for i in range(2)]
    with pytest.raises(ray.exceptions.RayCgraphCapacityExceeded, match="more than 2 in-flight"):
        graph.execute(3)
    assert [ray.get(r) for r in refs] == [0, 1]
    for i in range(20):
        graph.execute(i)  # whose references are dropped
    assert ray.get(graph.execute(7)) == 7 and not graph._results


def test_a_result_that_does_not_come_times_out(stages, monkeypatch):
    a, _ = stages
    monkeypatch.setattr(DAGContext.get_current(), "get_timeout", 0.2)
    with InputNode() as given:
        graph = a.waits.bind(given).experimental_compile()
    with pytest.raises(ray.exceptions.RayChannelTimeoutError, match=r"0\.2 s"):
        ray.get(graph.execute(1))
    graph.teardown(kill_actors=True)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda a, given: a.echo.bind(1), "No InputNode"),
        (lambda a, given: a.echo.bind([given]), "any type of container"),
        (lambda a, given: a.echo.bind(x=given), "as kwargs"),
        (lambda a, given: MultiOutputNode([a.both.bind(given[0], given[1]), a.echo.bind(given)]), "All tasks must"),
        (lambda a, given: [a.echo.bind(given), a.echo.bind(given)][1], "leaf nodes"),
        (lambda a, given: [given[1], a.echo.bind(given[0])][1], "1 is unused"),
    ],
)
def test_graphs_that_cannot_be_compiled_say_why(stages, make, error):
    with InputNode() as given:
        graph = make(stages[0], given)
    with pytest.raises(ValueError, match=error):
        graph.experimental_compile()


def test_arguments_are_checked(stages):
    a, _ = stages
    with pytest.raises(TypeError, match="doesn't match"), InputNode() as given:
        a.echo.bind(given, 2)
    with InputNode() as given:
        graph = a.both.bind(given[0], given.y).experimental_compile()
    with pytest.raises(ValueError, match="1 positional args, got 2"):
        graph.execute(1, 2)
    with pytest.raises(ValueError, match="kwarg `y`"):
        graph.execute(1)
