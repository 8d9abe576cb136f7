"""The recipes of docs/recipes.md, as users run them."""

import json
import os
import subprocess
import sys

import pytest

import conftest
from troupe import _core

RECIPES = os.path.join(conftest.ROOT, "examples", "python", "recipes")
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}


def run(*command, env=None):
    p = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=RECIPES,
        env={**ENV, **(env or {})},
        check=False,
    )
    assert p.returncode == 0, f"{p.stdout}\n{p.stderr}"
    return p.stdout


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("reward_cluster.py", ["rewards [1.0, 0.0, 0.0, 1.0, 0.0, 1.0] failed ['there is no answer']"]),
        ("ddp.py", ["ranks agree: True weights [1.0, 2.0, 3.0]"]),
        ("colocation.py", ["step 2 weights [3.0, 3.0]"]),
        ("recovery.py", ["back at step 5", "step 12 weight rose: True"]),
        ("rollout_pool.py", ["beside the trainer 3, after a kill 3, alone 8", "complete True"]),
        ("pipeline.py", ["60 samples, 0 lost, 0 dead letters"]),
    ],
)
def test_recipe(script, says):
    out = run(script)
    for line in says:
        assert line in out, out


def test_a_ray_script_and_its_port_print_the_same(tmp_path):
    port = run("ray_port.py")
    assert port.splitlines() == ["norm 12.0 of 2", "server [3.0, 3.0, 3.0, 3.0]", "error True"]
    assert run("-m", "troupe.ray", "ray_script.py", env={"RAY_TMPDIR": str(tmp_path)}) == port


def test_the_notebook():
    import nbclient
    import nbformat

    with open(os.path.join(RECIPES, "notebook.ipynb")) as f:
        book = nbformat.read(f, as_version=4)
    with conftest.kernel_config() as config:
        nbclient.NotebookClient(
            book, timeout=120, kernel_name="python3", resources={"metadata": {"path": RECIPES}}, config=config
        ).execute()
    shown = [str(cell.get("outputs")) for cell in book.cells]
    assert "[0, 2, 4, 6, 8, 10, 12, 14]" in shown[2] and "rows 4" in shown[2]
    assert "[2, 4]" in shown[3] and "rows 1" in shown[3]


def test_two_machines(tmp_path):
    env = {**ENV, "XDG_STATE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    up = [
        _core.program_path(),
        "up",
        "--json",
        "--listen",
        "127.0.0.1:0",
        "--store",
        str(tmp_path / "store"),
        "--gpus",
        "sim:1x1",
        "--name",
        "first",
        "--with-stdin",
    ]
    head = subprocess.Popen(
        up, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    joined = None
    try:
        said = json.loads(head.stdout.readline())
        second = {**env, "XDG_STATE_HOME": str(tmp_path / "second"), "TROUPE_TOKEN_FILE": said["token_file"]}
        join = [_core.program_path(), "join", said["url"], "--gpus", "sim:1x1", "--name", "second"]
        joined = subprocess.Popen(
            join, env=second, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        subprocess.run(
            [_core.program_path(), "wait", "--nodes", "2", "--timeout", "60s"], env=env, check=True, capture_output=True
        )
        out = run("two_machines.py", env={"XDG_STATE_HOME": str(tmp_path)})
        assert out.splitlines() == ["nodes ['first', 'second']", "ranks [0, 1] on ['first', 'second']"]
    finally:
        if joined is not None:
            joined.terminate()
            joined.wait(90)
        head.stdin.close()
        head.wait(90)
