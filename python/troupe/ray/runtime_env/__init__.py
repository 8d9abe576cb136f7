"""ray.runtime_env: RuntimeEnv."""

from __future__ import annotations

from typing import Any

from .. import _options


class RuntimeEnvConfig(dict[str, Any]):
    """Settings for the setup of environments. They have no effect, since nothing is set up."""


class RuntimeEnv(dict[str, Any]):
    """A runtime environment: a dict of env_vars, working_dir and py_executable. _options.environment refuses other
    fields."""

    def __init__(
        self,
        *,
        env_vars: dict[str, str] | None = None,
        working_dir: str | None = None,
        py_executable: str | None = None,
        **others: object,
    ) -> None:
        fields = {"env_vars": env_vars, "working_dir": working_dir, "py_executable": py_executable, **others}
        super().__init__({k: v for k, v in fields.items() if v is not None})
        _options.environment(self)

    def env_vars(self) -> dict[str, str]:
        return dict(self.get("env_vars", {}))

    def has_working_dir(self) -> bool:
        return bool(self.get("working_dir"))

    def working_dir(self) -> str | None:
        return self.get("working_dir")

    def to_dict(self) -> dict[str, object]:
        return dict(self)


__all__ = ["RuntimeEnv", "RuntimeEnvConfig"]
