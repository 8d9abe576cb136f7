"""Rollouts: groups of samples of one prompt, each of several turns, that train together. The engine is in Go; see
docs/rollouts.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from . import _check, _codec, _errors, _seam, _session, _weights
from ._future import Asked
from ._pipeline import Held, settle

_Got = dict[str, Any]  # an answer of the core

_WHY_NOT = "a part of a rollout may have been stored by anybody and is never pickled"


class Turn:
    """A turn to make: index counts from 0; sample.prompt and sample.turns are what came before."""

    def __init__(self, sample: Sample, index: int) -> None:
        self.sample, self.index = sample, index
        self._made_by = sample._rollouts._committed()  # now: a commit may come before the turn is finished

    def finish(self, *, last: bool = False, version: float | None = None, **fields: object) -> bool:
        """Stores the fields of the turn, such as tokens and logprobs. When it returns they are on disk, and the turn is
        never made again. Returns False if they were dropped, because another worker makes the sample by now.

        - last: no turn follows.
        - version: of the weights that made it; omitted: what this process had committed of weights= when the turn
          began, without weights= the current version when the sample was taken.
        """
        version = self._made_by if version is None else version
        return self.sample._finish(self.index, last, version, fields)


class Sample:
    """One of the siblings of a group, from take, scoring or batch. Iterate over it to make its turns.

    - group, index, attempt: its lineage.
    - prompt: the value that was put; siblings: their number.
    - turns: the finished turns, each a dict of its fields; versions: of the weights that made them.
    - fields: what was set beside the turns, such as a reward.
    """

    def __init__(self, rollouts: Rollouts, got: _Got, loan: int = 0) -> None:
        self._rollouts, self._loan, self._over = rollouts, loan, False
        self._limit, self._name, self._current = got["limit"], got["name"], got["version"]
        self.group: int = got["group"]
        self.index: int = got["index"]
        self.attempt: int = got["attempt"]
        self.siblings: int = got["of"]
        self.prompt: Any = rollouts._decode(got["prompt"]).get("prompt")
        self.turns: list[dict[str, Any]] = [rollouts._decode(turn["fields"]) for turn in got["turns"] or []]
        self.versions: list[float] = [turn["version"] for turn in got["turns"] or []]
        self.fields: dict[str, Any] = rollouts._decode(got["fields"])

    def __iter__(self) -> Iterator[Turn]:
        """Yields the turns that are not finished, until the last one is, or somebody else makes the sample. If the loop
        is left before, the sample goes to another worker, which goes on after the last finished turn."""
        try:
            while not self._over:
                turn = Turn(self, len(self.turns))
                yield turn
                if not self._over and len(self.turns) == turn.index:
                    raise _errors.InvalidError(f"turn {turn.index} was not finished; call turn.finish(…)")
        finally:
            self.release()

    def _finish(self, index: int, last: bool, version: float | None, fields: Mapping[str, object]) -> bool:
        last = last or index + 1 >= self._limit
        version = self._current if version is None else float(version)
        r = self._rollouts
        encoded = r._encode(fields)
        stored: bool = r._now(
            _seam.rollouts_finish, loan=self._loan, turn=index, last=last, version=version, fields=encoded
        )
        if stored and index == len(self.turns):
            self.turns.append(dict(fields))
            self.versions.append(version)
        self._over = self._over or last or not stored
        return stored

    def release(self) -> None:
        """Gives the sample back, if it is not finished. Its finished turns stay."""
        if not self._loan:
            return
        loan, self._loan = self._loan, 0
        self._rollouts._release(loan)

    def __repr__(self) -> str:
        return f"<Sample {self.group}/{self.index} attempt {self.attempt}, {len(self.turns)} turns>"


class Group:
    """A complete group: its prompt, its samples, and the version of the oldest weights that made a part of it."""

    def __init__(self, rollouts: Rollouts, got: _Got) -> None:
        self.id: int = got["id"]
        self.version: float = got["version"]
        self.prompt: Any = rollouts._decode(got["prompt"]).get("prompt")
        self.samples: list[Sample] = [Sample(rollouts, one) for one in got["samples"] or []]
        for sample in self.samples:
            sample.prompt = self.prompt


class RolloutBatch:
    """Complete groups to train. done() ends them; if this process dies before, another trainer gets them. Used as a
    block, `with r.batch(16) as batch`, it is done at the end, and given back if the block raises."""

    def __init__(self, rollouts: Rollouts, got: _Got) -> None:
        self._rollouts, self._loan = rollouts, got["loan"]
        self.groups = [Group(rollouts, one) for one in got["groups"]]

    def done(self) -> None:
        """Marks the groups as trained, all or none. Raises FencedError if another trainer got one of them, because this
        process did not answer for some seconds: then this training step must not count."""
        loan, self._loan = self._loan, 0
        if not loan:
            raise _errors.InvalidError("this batch is done, or was given back")
        try:
            self._rollouts._now(_seam.rollouts_done, loan=loan)
        except BaseException:
            self._rollouts._release(loan)  # unless it is done
            raise

    def release(self) -> None:
        """Gives the groups back, for any trainer, unless they are done."""
        loan, self._loan = self._loan, 0
        if loan:
            self._rollouts._release(loan)

    def __enter__(self) -> RolloutBatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._loan:
            self.done()
        self.release()

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


class Scoring:
    """Samples that lack a field, for a block that sets it. What it does not set goes to another worker."""

    def __init__(self, rollouts: Rollouts, got: _Got) -> None:
        self._rollouts, self._loan = rollouts, got["loan"]
        self.samples = [Sample(rollouts, one) for one in got["samples"] or []]

    def __enter__(self) -> list[Sample]:
        return self.samples

    def __exit__(self, *_: object) -> None:
        if self._loan:
            self._rollouts._release(self._loan)


class Rollouts(Held):
    """Groups of rollouts, durable: each prompt has siblings, each sibling turns, and a group trains as a whole, once.

        r = troupe.Rollouts("grpo", siblings=8, turns=4, fields=["reward"])       # the driver; it runs in this process
        r.put("why?")

        r = troupe.Rollouts.attach("grpo")                                       # a rollout worker
        for sample in r.samples():
            for turn in sample:
                turn.finish(tokens=[1, 2, 3], logprobs=[-0.1, -0.2, -0.3])

        with r.scoring("reward", 16) as samples:                                 # a reward worker
            for sample in samples:
                r.set(sample, reward=1.0)

        with r.batch(groups=16) as batch:                                        # a trainer
            train(batch.groups)

    Several processes may create rollouts of one name: the first one runs them, the others stand by, and one of them
    takes over when it dies.

    - siblings, turns: samples of a prompt, and turns of a sample, at most.
    - fields: names of fields that each sample needs beside its turns before its group is complete.
    - open, bytes: groups that are not trained, and bytes of their parts, at most. A put waits while there are as many
      groups, or half as many bytes: the groups grow.
    - at_least, after: so many complete siblings are enough, `after` seconds after the first take of the group.
    - timeout: seconds for one turn; then the sample goes to another worker.
    - stale: drops a complete group whose oldest part is more than so much behind the current version.
    - replicas: number of servers of a NATS cluster that store the data.
    - weights: a name of troupe.weights. Turns are marked with the step that this process has committed of it, and the
      current version follows what is published: nobody has to call set_version.
    - max_lag: with weights=, versions that this process may be behind. A take that finds it further behind, or without
      any version, first stages and commits the newest one.

    Methods block until they are done; in an event loop, call them in threads (asyncio.to_thread).
    """

    def __init__(
        self,
        name: str,
        *,
        siblings: int,
        turns: int = 1,
        fields: list[str] | tuple[str, ...] = (),
        open: int = 1000,
        bytes: int = 256 << 20,
        at_least: int = 0,
        after: float | None = None,
        timeout: float | None = None,
        stale: float | None = None,
        replicas: int = 1,
        weights: str | None = None,
        max_lag: int | None = None,
    ) -> None:
        if isinstance(fields, str):
            raise _errors.InvalidError(f"fields={fields!r} is a string; give a list of names")
        spec = {
            "siblings": siblings, "turns": turns, "fields": list(fields), "open": open, "bytes": bytes,
            "at_least": at_least,
        }  # fmt: skip
        session = self._begin(name, weights, max_lag)
        request = _seam.rollouts_open(
            runtime=session.id,
            name=name,
            by=_session._who(),
            spec=spec,
            after=_check.seconds("after", after) or 0.0,
            turn_timeout=_check.seconds("timeout", timeout) or 0.0,
            stale=float(stale or 0.0),
            replicas=replicas,
        )
        self._open(session, Asked(session.core, request))

    def _begin(self, name: str, weights: str | None, max_lag: int | None) -> _session.Session:
        if max_lag is not None and (weights is None or _check.integer("max_lag", max_lag) < 0):
            raise _errors.InvalidError(f"max_lag={max_lag}: give a number of versions from 0, and weights=, their name")
        self.name = name
        self._weights = None if weights is None else _weights.weights(weights)
        self._max_lag, self._told = max_lag, float("-inf")
        self._codec = _codec.Codec(why_not=_WHY_NOT, handles=True)
        return _session.current()

    @classmethod
    def attach(cls, name: str, *, weights: str | None = None, max_lag: int | None = None) -> Rollouts:
        """Returns rollouts that another process runs, now or later: requests wait for it. weights and max_lag are of
        this process, as for Rollouts."""
        rollouts = cls.__new__(cls)
        session = rollouts._begin(name, weights, max_lag)
        rollouts._open(session, Asked(session.core, _seam.rollouts_attach(runtime=session.id, name=name)))
        return rollouts

    def _committed(self) -> float | None:
        version = None if self._weights is None else self._weights.version
        return None if version is None else float(version.step)

    def _follow(self, take: bool) -> None:
        """Tells the engine of the newest version of the weights, and takes it if this process is too far behind."""
        if (w := self._weights) is None or not (available := w.available()):
            return
        if take and self._max_lag is not None and (w.version is None or w.lag > self._max_lag):
            w.commit(w.stage())
        if (step := float(available[-1].step)) > self._told:
            self.set_version(step)

    @staticmethod
    def remove(name: str) -> None:
        """Deletes everything that rollouts which are not running have stored."""
        session = _session.current()
        Asked(session.core, _seam.rollouts_remove(runtime=session.id, name=name)).now()

    def _now(self, make: Callable[..., _seam.Request], **fields: object) -> Any:
        return Asked(self._session.core, make(id=self._id, **fields)).now()

    def _release(self, loan: int) -> None:
        """Gives back without waiting: if the answer is lost, the engine asks."""
        if not self._session.closed and self._number is not None:
            Asked(self._session.core, _seam.rollouts_release(id=self._id, loan=loan))

    def _encode(self, fields: Mapping[str, object]) -> list[dict[str, object]]:
        out: list[dict[str, object]] = []
        for name, value in fields.items():
            body = self._codec.encode(value)
            out.append({"name": name, "body": body if isinstance(body, bytes) else body.join()})
        return out

    def _decode(self, fields: list[_Got] | None) -> _Got:
        return {one["name"]: self._codec.decode(bytearray(one["body"])) for one in fields or []}

    def put(
        self,
        prompt: object,
        *,
        number: int = 0,
        source: str = "",
        timeout: float | None = None,
    ) -> None:
        """Stores a prompt. Waits while too many groups are open, through restarts of the head and of the engine.

        - number: of the prompt in its data, from 1. One that is not above the last number of its source was put before,
          and is not stored again. stats()["numbers"] has the last ones: a driver that was restarted goes on from there.
        """
        self._now(
            _seam.rollouts_put,
            number=_check.integer("number", number),
            source=source,
            fields=self._encode({"prompt": prompt}),
            timeout=_check.seconds("timeout", timeout),
        )

    def take(self, timeout: float | None = None) -> Sample | None:
        """Waits for a sample to make. Returns None if there is none in time."""
        self._follow(take=True)
        got = self._now(_seam.rollouts_take, timeout=_check.seconds("timeout", timeout))
        return Sample(self, got["samples"][0], got["loan"]) if got["loan"] else None

    def samples(self) -> Generator[Sample, None, None]:
        """Yields samples to make, without end."""
        while True:
            sample = self.take()
            assert sample is not None  # without a timeout it waits
            yield sample

    def scoring(self, field: str, count: int = 1, timeout: float | None = None) -> Scoring:
        """Waits for finished samples that lack a field, up to count, for a `with` block that sets it. Nobody else gets
        them meanwhile. Without any in time, the block gets an empty list."""
        got = self._now(_seam.rollouts_scoring, field=field, count=count, timeout=_check.seconds("timeout", timeout))
        return Scoring(self, got)

    def set(self, sample: Sample | tuple[int, int], **fields: object) -> bool:
        """Sets fields of a finished sample, given as a Sample or as (group, index). The first value of a field stays.
        Returns False if the group has ended."""
        group, index = (sample.group, sample.index) if isinstance(sample, Sample) else sample
        name = sample._name if isinstance(sample, Sample) else ""
        return bool(self._now(_seam.rollouts_set, group=group, index=index, name=name, fields=self._encode(fields)))

    def batch(self, groups: int = 1, timeout: float | None = None) -> RolloutBatch | None:
        """Waits for so many complete groups, and gives each to one trainer. Returns None if there are too few in
        time."""
        self._follow(take=False)
        got = self._now(_seam.rollouts_batch, count=groups, timeout=_check.seconds("timeout", timeout))
        return RolloutBatch(self, got) if got["loan"] else None

    def redispatch(self, group: int = 0) -> int:
        """Takes the unfinished samples of a group, or of all groups, from their workers: others go on with them.
        Returns their number."""
        return int(self._now(_seam.rollouts_redispatch, group=group))

    def set_version(self, version: float) -> None:
        """Sets the current version of the weights. It can only grow."""
        self._now(_seam.rollouts_version, version=float(version))
        self._told = max(self._told, float(version))

    def stats(self) -> dict[str, object]:
        """Returns the state: put, open, complete, loaned, trained and stale groups; free, held and unscored samples;
        finished turns, redispatched samples, late answers; bytes; version; numbers; and by, the process that runs
        them."""
        stats: dict[str, object] = json.loads(self._now(_seam.rollouts_stats))
        return stats

    def close(self, *, blocking: bool = True) -> Any:
        """Ends what runs here, and gives back what this process holds. What is stored stays."""
        if blocking and self._session.closed:
            return None
        return settle(Asked(self._session.core, _seam.rollouts_close(id=self._id)), blocking)

    def __repr__(self) -> str:
        return f"<Rollouts {self.name}>"
