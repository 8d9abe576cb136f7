"""The configuration of workers, and a rank's place in the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _check, _errors, _output


class WorkerConfig:
    """The settings of a cluster's workers; docs/python.md has a table of them. Any other object with some of these
    attributes works too."""

    def __init__(
        self,
        name: str = "",
        *,
        world_size: int | None = None,
        device_mapping: Sequence[int] | str | None = None,
        num_gpus_per_worker: float | None = None,
        num_cpus_per_worker: float | None = None,
        memory_per_worker: int | str | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        strategy: str = "",
        bundles: Sequence[int] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        max_concurrency: int = 1000,
        start_timeout: float = 0.0,
        stop_grace: float = 0.0,
        queue_limit: int = 0,
        ordered: bool = False,
        detached: bool = False,
        lifetime: str = "",
        policy: str = "",
        restarts: int = 0,
        spares: int = 0,
        stall_after: float = 0.0,
        replicas: tuple[int, int] | None = None,
        min_replicas: int = 0,
        late_rendezvous: bool = False,
        own_variables: bool = False,
        warm: Sequence[str] | None = None,
        output: str = "",
        **unknown: object,
    ) -> None:
        for field in unknown:
            known = [f for f in FIELDS if f != "self"]
            raise _errors.InvalidError(
                f"WorkerConfig has no field {field!r}{_check.suggestion(field, known)}; an object of a class of your "
                "own may have other fields too"
            )
        self.name = name
        self.world_size = world_size
        self.device_mapping = device_mapping
        self.num_gpus_per_worker = num_gpus_per_worker
        self.num_cpus_per_worker = num_cpus_per_worker
        self.memory_per_worker = memory_per_worker
        self.resources_per_worker = resources_per_worker
        self.strategy = strategy
        self.bundles = bundles
        self.tensor_parallel_size = tensor_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self.context_parallel_size = context_parallel_size
        self.env = dict(env or {}) if env is None or isinstance(env, Mapping) else list(env)
        self.max_concurrency = max_concurrency
        self.start_timeout = start_timeout
        self.stop_grace = stop_grace
        self.queue_limit = queue_limit
        self.ordered = ordered
        self.detached = detached
        self.lifetime = lifetime
        self.policy = policy
        self.restarts = restarts
        self.spares = spares
        self.stall_after = stall_after
        self.replicas = replicas
        self.min_replicas = min_replicas
        self.late_rendezvous = late_rendezvous
        self.own_variables = own_variables
        self.warm = warm
        self.output = output
        check(self)

    def __repr__(self) -> str:
        return f"WorkerConfig({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items() if v)})"


FIELDS = tuple(WorkerConfig.__init__.__code__.co_varnames[1 : 2 + WorkerConfig.__init__.__code__.co_kwonlyargcount])
LIFETIMES = ("creator", "run")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def check(config: object) -> None:
    """Raises InvalidError, naming the field, if a configuration of any class has an invalid value."""
    least = {"world_size": 1, "max_concurrency": 1, "queue_limit": 0, "restarts": 0, "spares": 0, "min_replicas": 0}
    least |= dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"), 1)
    for name, lower in least.items():
        if (value := setting(config, name, None)) is not None:
            _check.integer(name, value, lower)
    for name in ("start_timeout", "stop_grace", "stall_after"):
        _check.number(name, setting(config, name, 0.0), unit="seconds")
    for name in ("ordered", "detached", "late_rendezvous", "own_variables"):
        _check.flag(name, setting(config, name, False))
    _check.modules("warm", setting(config, "warm", ()))
    _check.devices("num_gpus_per_worker", setting(config, "num_gpus_per_worker", 0))
    _check.thousandths("num_cpus_per_worker", setting(config, "num_cpus_per_worker", 0))
    _check.memory("memory_per_worker", setting(config, "memory_per_worker", 0))
    _check.resources("resources_per_worker", setting(config, "resources_per_worker", None))
    replica_range(config)
    lifetime = setting(config, "lifetime", "")
    if lifetime and lifetime not in LIFETIMES:
        raise _errors.InvalidError(
            f"lifetime={lifetime!r} is none of {', '.join(LIFETIMES)}; detached=True outlives the run"
        )
    strategy = setting(config, "strategy", "")
    if shown := setting(config, "output", ""):
        _output.mode(shown)
    if strategy and strategy not in STRATEGIES:
        raise _errors.InvalidError(f"strategy={strategy!r} is none of {', '.join(STRATEGIES)}")


def replica_range(config: object) -> tuple[int, int]:
    """Returns the least and the most replicas of a configuration of any class; 0: not given."""
    given, least = setting(config, "replicas", None), setting(config, "min_replicas", 0)
    if given is None:
        return least, 0
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise _errors.InvalidError(f"replicas={given!r} is not (least, most), as in replicas=(2, 8)")
    for value in given:
        _check.integer("replicas", value, 1)
    if given[0] > given[1] or least:
        raise _errors.InvalidError(
            f"replicas={given!r}: the first number is the least, the second the most; leave min_replicas out"
        )
    return given[0], given[1]


def setting(config: object, name: str, default: object) -> Any:
    """Returns a field of a configuration of any class, or default if it is missing or None."""
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return default if value is None else value


class RankInfo:
    """A rank's place in the mesh."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    pp_rank: int
    pp_size: int

    def __init__(self, rank: int = 0, world_size: int = 1, **places: int) -> None:
        self.rank, self.world_size = rank, world_size
        for axis in ("tp", "cp", "dp", "pp"):
            setattr(self, f"{axis}_size", places.pop(f"{axis}_size", 1))
            setattr(self, f"{axis}_rank", places.pop(f"{axis}_rank", 0))
        if places:
            raise _errors.InvalidError(f"a rank has no {', '.join(places)}")

    @classmethod
    def of(cls, rank: int, mesh: dict[str, int]) -> RankInfo:
        """Returns the place of a rank; tp varies fastest, then cp, dp and pp."""
        places, left = {}, rank
        for axis in ("tp", "cp", "dp", "pp"):
            places[f"{axis}_size"] = mesh[axis]
            places[f"{axis}_rank"] = left % mesh[axis]
            left //= mesh[axis]
        return cls(rank, mesh["tp"] * mesh["cp"] * mesh["dp"] * mesh["pp"], **places)

    @property
    def is_pipeline_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def __repr__(self) -> str:
        return f"RankInfo({', '.join(f'{n}={v}' for n, v in self.__dict__.items())})"
