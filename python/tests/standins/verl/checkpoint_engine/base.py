_ENGINES = {}


class CheckpointEngineRegistry:
    @staticmethod
    def register(backend):
        def wrapper(engine):
            _ENGINES[backend] = engine
            return engine

        return wrapper

    @staticmethod
    def new(backend, *args, **kwargs):
        return _ENGINES[backend](*args, **kwargs)


class CheckpointEngine:
    wire_format = "named_tensors"
