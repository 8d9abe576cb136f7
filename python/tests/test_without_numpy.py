"""numpy and torch are optional: everything else works without them."""

WITHOUT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_without_numpy_and_torch(script, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    done = script(
        """
        import datetime, os, sys
        import worker_classes, troupe
        try:
            import numpy
        except ImportError:
            print("absent")
        with troupe.init(namespace="bare"):
            c = troupe.Cluster("bare", "worker_classes.BasicWorker", worker_config=troupe.WorkerConfig(world_size=2))
            value = {1: (2, {3}), "t": datetime.date(2020, 1, 1), "e": [None, 1.5, b"x"]}
            assert c.workers[0].echo(value) == value and c.rows([1, 2, 3], factor=2) == [2, 4, 6]
            assert c.workers[0].type_name(lambda: 1) == "function"
            tensor = troupe.Tensor("float32", (4,), bytes(range(16)))
            assert c.workers[0].echo(tensor) == tensor and c.workers[0].type_name(tensor) == "Tensor"
            whole = c.rows(troupe.Tensor("uint8", (40_000, 2), bytes(80_000)))
            assert whole.shape == (40_000, 2), whole
            batch = troupe.Batch({"x": tensor}, {"metrics": {"loss": 1.0}})
            parts = batch.split(3)
            assert [len(p) for p in parts] == [2, 1, 1] and troupe.Batch.concat(parts)["x"] == tensor
            try:
                troupe.Batch({"x": [1, 2]})
            except troupe.InvalidError as err:
                print("numpy" in str(err))
            w, room = troupe.weights("bare"), bytearray(16)
            w.bind({"x": tensor}, use="publish")
            w.bind({"x": troupe.Tensor("float32", (4,), room)}, use="take")
            w.commit(w.stage(w.publish(1)))
            assert room == tensor.data
            got = {}
            w.bind(load=lambda pairs: got.update(pairs))
            w.commit(w.stage())
            assert got["x"] == tensor, got
            q = troupe.Queue(2)
            q.put((1, 2))
            print(q.get())
        """,
        env={"PYTHONPATH": f"{tmp_path}:{__file__.rpartition('/')[0]}"},
    )
    assert done.stdout.split("\n")[:3] == ["absent", "True", "(1, 2)"]
