"""ray.job_config: accepted where init takes it is nothing of it."""

from __future__ import annotations

from typing import Any

from ._options import refuse


class JobConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refuse("JobConfig", "init(namespace=…, runtime_env=…)")
