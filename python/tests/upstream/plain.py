"""A pytest plugin without effect: the framework's tests as they are."""
