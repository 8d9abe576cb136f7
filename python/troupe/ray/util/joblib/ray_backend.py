"""The backend of joblib that register_ray registers."""

from __future__ import annotations

from typing import Any

from joblib._parallel_backends import ThreadingBackend

from ..._nodes import cluster_resources
from ..._session import init, is_initialized
from ..multiprocessing import Pool


class RayBackend(ThreadingBackend):  # type: ignore[misc]
    """joblib's backend of threads, where each thread has an actor."""

    _pool: Pool | None
    supports_sharedmem = False
    uses_threads = False

    def __init__(self, *args: object, ray_remote_args: dict[str, object] | None = None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._options = ray_remote_args

    def effective_n_jobs(self, n_jobs: int) -> int:
        if n_jobs is None or n_jobs >= 0:
            return int(super().effective_n_jobs(n_jobs))
        if not is_initialized():
            init()
        return int(cluster_resources()["CPU"])

    def configure(self, n_jobs: int = 1, parallel: object = None, **options: Any) -> int:
        self._options = options.pop("ray_remote_args", None) or self._options
        return int(super().configure(n_jobs, parallel, **options))

    def _get_pool(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(self._n_jobs, ray_remote_args=self._options)
        return self._pool
