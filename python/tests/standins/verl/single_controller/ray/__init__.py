from .base import RayResourcePool, RayWorkerGroup

__all__ = ["RayResourcePool", "RayWorkerGroup"]
