"""A deadline, and the end of a call, are inherited by the calls that a method makes."""

import time

import pytest

import deadlines
import troupe


@pytest.fixture
def nodes(session):
    made = [troupe.actor(deadlines.Node) for _ in range(2)]
    yield made
    for handle in made:
        troupe.kill(handle)


def until(what, condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def time_out(method, *args, until):
    """Makes a call that reaches its deadline, and again with a longer one until the condition holds: on a busy machine
    the call may not have come far enough before."""
    for timeout in (1, 5, 25, 60):
        with pytest.raises(troupe.TimedOutError):
            method.options(timeout=timeout)(*args)
        if until():
            return
    raise AssertionError("the deadlines were over before the condition held")


def test_a_circle_ends_with_the_deadline_of_its_first_call(nodes):
    a, b = nodes

    def back_has_timed_out():
        assert a.echo.remote("free").result(60) == "free"
        assert b.echo.remote("free").result(60) == "free"
        return "the deadline of back, which made the call" in b.state()[1].get("back", "")

    time_out(a.circle, b, a, until=back_has_timed_out)
    assert a.state()[1]["circle"].startswith("TimedOutError"), a.state()


def test_a_cancelled_call_cancels_those_that_its_method_made(nodes):
    a, b = nodes
    call = a.circle.remote(b, a)
    until("b calls a", lambda: b.state()[0] == ["back"])
    call.cancel()
    with pytest.raises(troupe.CancelledError):
        call.result(60)
    assert a.echo.remote("free").result(60) == "free"
    assert b.echo.remote("free").result(60) == "free"
    assert a.state()[1]["circle"].startswith("CancelledError")


def test_an_async_method_ends_with_the_call_that_made_its_call(session, nodes):
    a, b = nodes[0], troupe.actor(deadlines.AsyncNode)
    time_out(a.circle, b, a, until=lambda: b.state()[0])
    assert a.echo.remote("free").result(60) == "free"
    until("its clean-up has made a call", lambda: "back" in b.state()[1])
    troupe.kill(b)


@pytest.mark.parametrize(
    "outer, own, least, most",
    [(None, None, None, None), (600, None, 500, 600), (600, 60, 1, 60), (600, 6000, 500, 600), (None, 60, 1, 60)],
)
def test_the_lesser_of_two_timeouts(nodes, outer, own, least, most):
    a, b = nodes
    method = a.remaining_of if outer is None else a.remaining_of.options(timeout=outer)
    left = method(b, own)
    assert left is None if most is None else least < left <= most, left


def test_a_request_through_a_router_inherits_too(nodes):
    a, b = nodes
    assert 500 < a.routed.options(timeout=600)(b.cluster) <= 600


def test_a_call_that_outlives_its_method_is_not_cancelled(nodes):
    a, b = nodes
    assert a.leave_behind(b) == "returned"
    until("the call runs", lambda: "when_told" in b.state()[0])
    b.tell()
    assert a.behind_result() == "told"


def test_calls_after_the_caller_has_given_up(nodes):
    a, b = nodes
    time_out(a.after_the_end, b, until=lambda: a.state()[0])
    until("its clean-up is done", lambda: "with" in a.state()[1])
    left = a.state()[1]
    assert left["with"] == "with a timeout"
    assert left["without"].startswith("TimedOutError")
    assert "the caller of 'after_the_end'" in left["without"].replace('"', "'"), left
