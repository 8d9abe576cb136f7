"""What workers print, in the driver's terminal or notebook, and how its runs are found."""

import json
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

import troupe
from conftest import said
from test_notebook import notebook

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PROGRAM = os.path.join(ROOT, "python", "troupe", "bin", "troupe")

START = """
import os, sys, time
import troupe
from troupe import Cluster, Worker, WorkerConfig

class W(Worker):
    def say(self, text, to="stdout"):
        print(text.format(rank=self.rank), file=getattr(sys, to))

    def count(self, lines):
        for i in range(lines):
            print(f"rank {self.rank} line {i} " + 50 * "x")

    def die(self, text):
        print(text, file=sys.stderr)
        os._exit(3)

def cluster(world, **settings):
    return Cluster("train", W, worker_config=WorkerConfig(world_size=world, **settings))
"""


def lines_of(text):
    return sorted(line for line in text.splitlines() if line)


def test_lines_have_role_and_rank_and_equal_ones_are_merged(script):
    p = script(
        START
        + """
c = cluster(3)
c.execute_all_sync("say", "printed by {rank}")
c.execute_all_sync("say", "the same")
c.execute_all_sync("say", "oops {rank}\\x1b[2J", "stderr")
c.shutdown()
"""
    )
    assert lines_of(p.stderr) == [f"train[{r}] oops {r}\x1b[2J" for r in range(3)]
    assert [line for line in lines_of(p.stdout) if "printed" in line] == [
        f"train[{r}] printed by {r}" for r in range(3)
    ]
    same = [line for line in lines_of(p.stdout) if "same" in line]
    assert len(same) == 2 and sum("[and 2 more ranks]" in line for line in same) == 1


@pytest.mark.parametrize(
    ("mode", "shown"),
    [("none", ["last words", "oops"]), ("errors", ["last words", "oops"]), ("all", ["hello", "last words", "oops"])],
)
def test_modes_and_the_last_words_of_a_worker(script, mode, shown):
    p = script(
        START
        + f"""
troupe.init(output={mode!r})
c = cluster(2)
c.workers[1].say("hello")
c.workers[1].say("oops", "stderr")
try:
    c.workers[1].die("last words")
except troupe.WorkerLostError:
    print("lost")
"""
    )
    assert lines_of(p.stdout + p.stderr) == ["lost"] + [f"train[1] {text}" for text in shown]


def test_a_role_and_an_actor_have_a_setting_of_their_own(script):
    p = script(
        START
        + """
c = cluster(1, output="none")
c.workers[0].say("hidden")
a = troupe.actor(W, name="one", output="raw")
a.say("as it is")
""",
        env={"TROUPE_OUTPUT": "errors"},
    )
    assert p.stdout == "as it is\n" and said(p.stderr) == ""


def test_unknown_modes_are_refused():
    for make in (lambda: troupe.init(output="erors"), lambda: troupe.WorkerConfig(output="erors")):
        with pytest.raises(
            troupe.InvalidError, match="output='erors' is none of all, errors, none, raw; did you mean 'errors'"
        ):
            make()


def test_raw_output_is_complete_also_when_the_driver_reads_slowly(script):
    p = script(
        START
        + """
import io
class Slow(io.TextIOBase):
    def __init__(self, out):
        self.out = out
    def write(self, text):
        time.sleep(0.02)
        return self.out.write(text)
    def flush(self):
        self.out.flush()
sys.stdout = Slow(sys.stdout)
troupe.init(output="raw")
c = cluster(3)
c.execute_all_sync("count", 40_000)
c.execute_all_sync("say", "\\x1b[31m\\r50%\\r100%")
troupe.shutdown()
""",
        timeout=60,
    )
    for rank in range(3):
        mine = [line for line in p.stdout.split("\n") if line.startswith(f"rank {rank} ")]
        assert mine == [f"rank {rank} line {i} " + 50 * "x" for i in range(40_000)]
    assert p.stdout.count("\x1b[31m\n50%\n100%\n") == 3  # subprocess makes \n of \r


def test_a_line_is_one_write(script):
    """Otherwise lines of processes that share a worker's stdout would mix, and printing would cost twice as much."""
    p = script("""
import multiprocessing, sys
import troupe
from troupe import Worker

def print_some(name):
    for _ in range(2000):
        print(name, "and", name)

class Parent(Worker):
    def run(self):
        children = [multiprocessing.get_context("fork").Process(target=print_some, args=(name,)) for name in ("left", "right")]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print("no end of line", end="")

troupe.init(output="raw")
troupe.actor(Parent, name="parent").run()
troupe.shutdown()
""")
    lines = p.stdout.splitlines()
    assert (lines.count("left and left"), lines.count("right and right"), lines[4000:]) == (
        2000,
        2000,
        ["no end of line"],
    )


def test_too_many_lines_are_counted(script):
    p = script(
        START
        + """
c = cluster(2)
c.execute_all_sync("count", 20_000)
c.shutdown()
"""
    )
    shown = len(re.findall(r"^train\[\d\] rank", p.stdout, re.M))
    left_out = sum(int(n) for n in re.findall(r"\[(\d+) lines left out", p.stderr))
    assert shown + left_out == 40_000 and 1000 <= shown < 10_000


def test_a_terminal_gets_colours_and_no_control_characters(session, tmp_path):
    path = tmp_path / "driver.py"
    path.write_text(
        textwrap.dedent(
            START
            + """
c = cluster(1)
c.workers[0].say("title \\x1b]0;x\\x07 done")
"""
        )
    )
    env = {
        **os.environ,
        "TROUPE_URL": session.url,
        "TROUPE_TOKEN_FILE": session.head.token_file,
        "TROUPE_NAMESPACE": "script",
        "TERM": "xterm",
    }
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, str(path)], env)
    text = b""
    while True:
        try:
            part = os.read(fd, 4096)
        except OSError:
            break
        if not part:
            break
        text += part
    assert os.waitpid(pid, 0)[1] == 0, text
    os.close(fd)
    assert re.search(rb"\x1b\[\d+mtrain\[0\]\x1b\[0m title \\x1b\]0;x\\x07 done\r\n", text), text


def test_a_notebook_shows_what_its_workers_print():
    async def main(book):
        await book.cell(START + "c = cluster(2)")
        shown = await book.cell("c.execute_all_sync('say', 'from rank {rank}'); time.sleep(0.5)")
        assert "train[0] from rank 0\n" in shown and "train[1] from rank 1\n" in shown
        await book.cell("troupe.shutdown()")

    notebook(main)


def driver(tmp_path, text, *command):
    """Runs a script with a private head, or by a command, and a state folder of its own."""
    path = tmp_path / "driver.py"
    path.write_text(textwrap.dedent(START + text))
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")},
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PROGRAM": PROGRAM,
    }
    return subprocess.run(
        [*command, sys.executable, str(path)], capture_output=True, text=True, timeout=60, env=env
    ), env


def test_launch_shows_it_too(tmp_path):
    p, _ = driver(
        tmp_path,
        "c = cluster(2)\nc.execute_all_sync('say', 'from rank {rank}')\n",
        PROGRAM,
        "launch",
        "--rank",
        "0",
        "--world",
        "1",
        "--gpus",
        "none",
        "--",
    )
    assert p.returncode == 0, p.stderr
    assert lines_of(p.stdout) == ["train[0] from rank 0", "train[1] from rank 1"]


def test_commands_find_a_private_head_and_its_logs_are_kept(tmp_path):
    p, env = driver(
        tmp_path,
        """
import subprocess
troupe.init(gpus="none", output="none")
c = cluster(2)
c.execute_all_sync("say", "from rank {rank}")
run = lambda *words: subprocess.run([os.environ["PROGRAM"], *words], capture_output=True, text=True, check=True).stdout
print(run("status"))
while run("logs", "train").count("from rank") < 2:
    time.sleep(0.02)
print(run("status", "--json", "--run", str(os.getpid())))
""",
    )
    assert p.returncode == 0, p.stderr
    assert re.search(r"RUN    \d{8}-\d{6}-\d+, a private head of \S+ driver.py\[\d+\], for \S+ \(this one\)", p.stdout)
    view = json.loads(p.stdout.strip().splitlines()[-1])
    assert [r["name"] for r in view["roles"]] == ["train"] and len(view["private_runs"]) == 1
    run = lambda *words: subprocess.run([PROGRAM, *words], capture_output=True, text=True, env=env)  # noqa: E731
    assert re.fullmatch(r"\S+ train/1  from rank 1\n", run("logs", "train/1").stdout)
    assert run("logs", "train", "--run", view["private_runs"][0]["id"]).stdout.count("from rank") == 2
    assert "no head on this machine" in run("status").stderr
    assert "is over" in run("status", "--run", view["private_runs"][0]["id"]).stderr
    assert "there is no such run" in run("status", "--run", "1").stderr
    for _ in range(6):
        assert driver(tmp_path, "c = cluster(1)\nc.workers[0].say('again')\n")[0].returncode == 0
    assert len(os.listdir(tmp_path / "state" / "troupe" / "runs")) == 6  # the last five, and the one that was just made


def test_calls_are_not_slowed_down_by_output():
    """The short version of `make bench-output`; the bound is for machines that do other things too."""
    bench = [
        sys.executable,
        os.path.join(ROOT, "benchmarks", "python", "output.py"),
        "--ranks",
        "8",
        "--rounds",
        "3",
        "--seconds",
        "0.4",
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
    for _ in range(3):  # a busy machine makes few calls, and disturbs them by chance
        p = subprocess.run(bench, capture_output=True, text=True, timeout=120, env=env)
        assert p.returncode == 0, p.stderr
        row = json.loads(p.stdout.splitlines()[-1])
        assert row["lines_per_second"] > 500, row
        # The same lines to /dev/null slow calls down too: what is measured is what showing them adds.
        if row["shown"]["fast_us"] < 1.5 * max(row["quiet"]["fast_us"], row["null"]["fast_us"]):
            return
    pytest.fail(f"calls are slower while output is shown: {row}")


def test_output_of_roles_that_workers_create_is_shown(script):
    p = script("""
import troupe

class Leaf:
    def say(self, text):
        print(text, flush=True)

class Trainer:
    def run(self):
        leaves = troupe.Cluster("leaves", Leaf, worker_config=troupe.WorkerConfig(world_size=2))
        leaves.workers[1].say("deep down")
        leaves.shutdown()

troupe.actor(Trainer, name="trainer").run()
troupe.shutdown()
""")
    assert "trainer[0] leaves[1] deep down" in p.stdout.splitlines()
