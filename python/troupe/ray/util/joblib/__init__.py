"""ray.util.joblib: joblib's work in the actors of a pool."""

from __future__ import annotations


def register_ray() -> None:
    """Makes `joblib.parallel_backend("ray")` use a pool of actors."""
    from joblib.parallel import register_parallel_backend

    from .ray_backend import RayBackend

    register_parallel_backend("ray", RayBackend)


__all__ = ["register_ray"]
