"""Exceptions of ray.util.state."""


class RayStateApiException(Exception):
    """A table cannot be read."""


class ServerUnavailable(RayStateApiException):
    """The head does not answer."""
