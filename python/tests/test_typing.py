"""What a type checker knows of handles: mypy over a program, plain and with the package's plugin."""

import re
import subprocess
import sys

import pytest

PROGRAM = """
import troupe

class Judge:
    def __init__(self, name: str) -> None: ...

    def score(self, text: str, scale: float = 1.0) -> float:
        return 0.0

    async def think(self, n: int) -> bytes:
        return b""

    @troupe.register(troupe.Dispatch.RANK_ZERO)
    def first(self, n: int) -> str:
        return ""

judge = troupe.actor(Judge, "name")
judges = troupe.Cluster("judges", Judge)
attached: troupe.Cluster[Judge] = troupe.Cluster.attach("judges")
"""
KNOWN = {  # expressions and their types
    "judge": "troupe._cluster.WorkerHandle[program.Judge]",
    "judge.cluster": "troupe._cluster.Cluster[program.Judge]",
    "judges": "troupe._cluster.Cluster[program.Judge]",
    "attached.workers[0]": "troupe._cluster.WorkerHandle[program.Judge]",
    'judge[Judge.score]("a")': "float",
    'judge[Judge.score].remote("a", scale=2)': "troupe._future.Future[float]",
    "judge[Judge.think](1)": "bytes",
    'troupe.get(judge[Judge.score].remote("a"))': "float",
    'troupe.get([judge[Judge.score].remote("a")])': "list[float]",
    'troupe.put("a").result()': "str",
    "judges[Judge.first](1)": "Any",
    'troupe.actor("package.Class")': "troupe._cluster.WorkerHandle[Any]",
}
KNOWN_TO_PLUGIN = {
    'judge.score("a")': "float",
    'judge.score.remote(troupe.put("a"))': "troupe._future.Future[float]",
    "judge.think.remote(1).result()": "bytes",
    "judge.rank": "int",
    "judges.first(1, timeout=3)": "Any",
    "judges.first([1, 2], blocking=False)": "Any",
    "judges.first(troupe.Scatter([1, 2]))": "Any",
}
WRONG = {  # expressions and what their errors say
    "judge[Judge.score](3)": 'incompatible type "int"; expected "str"',
    'judge[Judge.score].remote("a", scal=2)': 'Unexpected keyword argument "scal"',
    "judge[str.upper]()": "Invalid index type",
    'judges[Judge.first]("x")': 'incompatible type "str"; expected "int"',
}
WRONG_TO_PLUGIN = {
    "judge.scoer": '"Judge" has no method "scoer"',
    "judge.score(3)": 'incompatible type "int"; expected "str',
    "judge.score.remote()": "Missing positional argument",
    'judges.first("x")': 'incompatible type "str"; expected "int',
}


def checked(tmp_path, expressions, plugin):
    """What mypy says of each expression."""
    lines = PROGRAM.splitlines()
    path, settings = tmp_path / "program.py", tmp_path / "mypy.ini"
    path.write_text("\n".join(lines + [f"reveal_type({e})" for e in expressions]) + "\n")
    settings.write_text("[mypy]\nstrict = true\n" + ("plugins = troupe.mypy\n" if plugin else ""))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", path],
        capture_output=True, text=True, timeout=600, cwd=tmp_path,
    )  # fmt: skip
    said = {e: [] for e in expressions}
    for number, text in re.findall(r"^program\.py:(\d+): (?:note|error): (.*)$", done.stdout, re.M):
        assert int(number) > len(lines), done.stdout
        said[expressions[int(number) - len(lines) - 1]].append(text)
    assert all(said.values()), done.stdout + done.stderr
    return said


@pytest.mark.parametrize("plugin", [False, True])
def test_a_checker_knows_the_methods_of_a_handle_s_class(tmp_path, plugin):
    known = KNOWN | KNOWN_TO_PLUGIN if plugin else KNOWN
    wrong = WRONG | WRONG_TO_PLUGIN if plugin else WRONG
    said = checked(tmp_path, [*known, *wrong], plugin)
    assert {e: said[e] for e in known} == {e: [f'Revealed type is "{t}"'] for e, t in known.items()}
    for expression, error in wrong.items():
        assert any(error in text for text in said[expression]), (expression, said[expression])


def test_without_the_plugin_attributes_are_not_checked(tmp_path):
    said = checked(tmp_path, ['judge.score("a")', "judge.anything(1).more", "judges.first(1)"], False)
    assert {text for texts in said.values() for text in texts} == {'Revealed type is "Any"'}
