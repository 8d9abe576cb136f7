"""ray.job_config: JobConfig can be imported, but creating one is refused."""

from __future__ import annotations

from typing import Any

from ._options import refuse


class JobConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refuse("JobConfig", "init(namespace=…, runtime_env=…)")
