"""Rollouts: groups of samples that train once, workers that take turns, and what dies in between."""

import time
import uuid

import numpy as np
import pytest

import troupe


@pytest.fixture
def rollouts(request, session):
    """Makes rollouts with names of their own, and closes them."""
    made = []

    def make(**settings):
        made.append(troupe.Rollouts(request.node.name[:60], **settings))
        return made[-1]

    yield make
    for r in made:
        r.close()
    for name in {r.name for r in made}:
        troupe.Rollouts.remove(name)


def make_sample(sample, value=0):
    for turn in sample:
        assert turn.finish(tokens=np.full(8, turn.index + value), logprobs=[-0.5] * 8)


def test_a_group_trains_when_its_siblings_have_their_fields(rollouts):
    r = rollouts(siblings=3, turns=2, fields=["reward"])
    r.put({"text": "why?"}, number=1)
    r.put({"text": "again"}, number=1)  # a repeat
    for _ in range(3):
        sample = r.take(timeout=60)
        assert sample.prompt == {"text": "why?"} and sample.attempt == 1 and sample.siblings == 3
        make_sample(sample)
    assert r.take(timeout=0.01) is None and r.batch(1, timeout=0.01) is None
    with r.scoring("reward", 10, timeout=60) as samples:
        assert [(s.group, s.index) for s in samples] == [(1, 0), (1, 1), (1, 2)]
        for sample in samples:
            assert len(sample.turns) == 2
            assert r.set(sample, reward=float(sample.index))
            assert r.set(sample, reward=99.0), "the first value stays"
    assert r.set((1, 0), advantage=np.ones(20_000)), "any other field; a large one"
    with r.scoring("reward", 10, timeout=0.01) as samples:
        assert samples == []
    with r.batch(groups=1, timeout=60) as batch:
        (group,) = batch
        assert group.prompt == {"text": "why?"} and group.version == 0
        assert [s.fields["reward"] for s in group.samples] == [0.0, 1.0, 2.0]
        assert group.samples[0].fields["advantage"].sum() == 20_000
        for sample in group.samples:
            assert [t["tokens"].tolist() for t in sample.turns] == [[0] * 8, [1] * 8]
    stats = r.stats()
    assert stats["trained"] == stats["put"] == 1 and stats["turns"] == 6 and stats["open"] == 0
    assert stats["numbers"] == {"": 1} and stats["late"] == 0
    assert not r.set((1, 0), reward=1.0), "the group has ended"


def test_a_sample_that_is_left_goes_on_after_its_last_turn(rollouts):
    r = rollouts(siblings=1, turns=3)
    r.put("p")
    first = r.take(timeout=60)
    with pytest.raises(RuntimeError):
        for turn in first:
            if turn.index == 1:
                raise RuntimeError("the engine crashed")
            turn.finish(tokens=[7], version=4)
    second = r.take(timeout=60)
    assert second.attempt == 2 and second.turns == [{"tokens": [7]}] and second.versions == [4.0]
    assert r.redispatch() == 1
    third = r.take(timeout=60)
    assert third.attempt == 3
    for turn in second:
        assert turn.finish(tokens=["late"]) is False
    for turn in third:
        assert turn.finish(tokens=[turn.index], version=5, last=turn.index == 1)
    with pytest.raises(troupe.InvalidError, match="not finished"):
        r.put("q")
        for _ in r.take(timeout=60):
            pass
    batch = r.batch(timeout=60)
    assert batch.groups[0].version == 4.0
    assert [t["tokens"] for t in batch.groups[0].samples[0].turns] == [[7], [1]]
    batch.done()
    assert r.stats()["late"] == 1


def test_groups_that_are_too_old_are_dropped(rollouts):
    r = rollouts(siblings=1, stale=1.5)
    for number in range(1, 4):
        r.put(number, number=number)
        r.set_version(number)
        make_sample(r.take(timeout=60))
    r.set_version(4)
    with r.batch(1, timeout=60) as batch:  # the first two are older than 2.5
        assert batch.groups[0].prompt == 3
    assert r.stats()["stale"] == 2
    with pytest.raises(troupe.InvalidError):
        r.set_version(1)


def test_a_batch_that_fails_is_given_to_another(rollouts):
    r = rollouts(siblings=1)
    r.put("p")
    make_sample(r.take(timeout=60))
    with pytest.raises(ZeroDivisionError), r.batch(1, timeout=60):
        raise ZeroDivisionError
    with r.batch(1, timeout=60):
        pass
    assert r.stats()["trained"] == 1


def test_mistakes_are_told(rollouts, session):
    for settings in ({"siblings": 0}, {"siblings": 2, "at_least": 1}, {"siblings": 1, "fields": ["a", "a"]}):
        with pytest.raises(troupe.InvalidError):
            troupe.Rollouts("mistakes", **settings)
    with pytest.raises(troupe.InvalidError, match="list"):
        troupe.Rollouts("mistakes", siblings=1, fields="reward")
    r = rollouts(siblings=1)
    with pytest.raises(troupe.EncodeError):
        r.put(object())
    with pytest.raises(troupe.InvalidError):
        r.batch(1000)
    r.close()
    with pytest.raises(troupe.ClosedError):
        r.put("p")


def test_turns_follow_the_weights(rollouts):
    w = troupe.weights(f"policy-{uuid.uuid4().hex[:8]}")
    with pytest.raises(troupe.InvalidError, match="max_lag"):
        rollouts(siblings=1, max_lag=0)
    r = rollouts(siblings=1, turns=2, weights=w.name, max_lag=1)
    trained, used = np.zeros(4, "f4"), np.zeros(4, "f4")
    w.bind({"x": trained}, use="publish")
    w.bind({"x": used}, use="take")

    def publish(step):
        trained[:] = step
        version = w.publish(step)
        end = time.monotonic() + 60
        while version not in w.available():
            assert time.monotonic() < end

    publish(1)
    r.put("p")
    sample = r.take(timeout=60)
    assert used[0] == 1, "it had no version, so it took the newest before the sample"
    publish(2)
    for turn in sample:
        if turn.index == 1:
            publish(3)
            assert w.commit(w.stage()).step == 3, "in the middle of a turn"
        turn.finish(tokens=[used[0]])
    assert sample.versions == [1, 1], "a turn is of the weights with which it began"
    (group,) = r.batch(1, timeout=60)
    assert group.version == 1 and r.stats()["version"] == 3, "nobody has called set_version"
    for step, newest in ((4, 3), (5, 5)):
        publish(step)
        r.put("q")
        make_sample(r.take(timeout=60))
        assert used[0] == newest, "one version behind is near enough, two are not"
