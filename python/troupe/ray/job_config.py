"""ray.job_config: JobConfig can be imported, but creating one is refused."""

from __future__ import annotations

from ._refused import refuse


class JobConfig:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise refuse("JobConfig", "init(namespace=…, runtime_env=…)")
