"""Blocking calls where an event loop already runs: Jupyter notebooks, the asyncio REPL, asyncio programs, async workers."""

import asyncio
import os
import pty
import re
import select
import signal
import sys
import time

import nbclient
import nbformat
import pytest

import troupe
import worker_classes

HERE = os.path.dirname(os.path.abspath(__file__))

START = """
import os
import time
import troupe
from troupe import Cluster, Worker, WorkerConfig

class W(Worker):
    def hello(self, x):
        return x + self.rank

    def say(self, line):
        print(line)

    def compute(self, started, end):
        open(started, "w").close()
        while not os.path.exists(end):
            time.sleep(0.01)

troupe.init()
c = Cluster("hello", W, worker_config=WorkerConfig(world_size=3))
"""

PIPELINE = """
streams = {"in": troupe.Stream(), "out": troupe.Stream(sink=True)}
p = troupe.Pipeline("p", streams, {"double": troupe.Stage(lambda x: x * 2, in_="in", out="out")})
p.put("in", 7)
[item.value for item in p.take("out", timeout=10)]
"""


# The file is made once a warning was shown.
WHEN_WARNED = """
import warnings
show = warnings.showwarning

def show_and_end(*args):
    show(*args)
    open({end!r}, "w").close()

warnings.showwarning = show_and_end
"""


class Notebook:
    """A notebook whose cells run in a real kernel."""

    def __init__(self):
        self.book = nbformat.v4.new_notebook()
        self.client = nbclient.NotebookClient(self.book, timeout=60, kernel_name="python3", resources={"metadata": {"path": HERE}})

    async def cell(self, source):
        """Runs a cell; its output, standard error included."""
        cell = nbformat.v4.new_code_cell(source)
        self.book.cells.append(cell)
        await self.client.async_execute_cell(cell, len(self.book.cells) - 1)
        return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def notebook(main):
    """Runs main(notebook) with a kernel that ends afterwards."""

    async def run():
        book = Notebook()
        async with book.client.async_setup_kernel():
            await main(book)

    asyncio.run(asyncio.wait_for(run(), 120))


async def file_exists(path):
    end = time.monotonic() + 20
    while not os.path.exists(path):
        assert time.monotonic() < end, "the method did not start"
        await asyncio.sleep(0.01)


def test_cells_of_a_notebook_make_blocking_calls():
    async def main(book):
        await book.cell(START)
        assert await book.cell('c.execute_all_sync("hello", 1)') == "[1, 2, 3]"
        assert await book.cell("troupe.get(c.workers[2].hello.remote(5))") == "7"
        assert await book.cell("await c.workers[1].hello.remote(5)") == "6"
        assert await book.cell("len(c.health()), len(c.info())") == "(3, 3)"
        assert await book.cell("q = troupe.Queue(2)\nq.put(4)\nq.get(5)") == "4"
        assert await book.cell(PIPELINE) == "[14]"
        assert "Warning" not in await book.cell("c.shutdown()\ntroupe.shutdown()")

    notebook(main)


def test_what_workers_print_is_shown_before_the_cell_ends():
    async def main(book):
        await book.cell(START)
        for n in range(5):
            shown = await book.cell(f'c.execute_all_sync("say", "line {n}")\nNone')
            assert re.search(rf"hello\[\d\] line {n}\n(.*\n)*hello\[.*\] line {n} \[and 2 more ranks\]", shown), shown
        await book.cell("troupe.shutdown()")

    notebook(main)


def test_an_interrupted_cell_cancels_its_call_and_the_next_one_says_what_still_runs(tmp_path):
    started, end = str(tmp_path / "started"), str(tmp_path / "end")

    async def main(book):
        await book.cell(START)
        await book.cell(WHEN_WARNED.format(end=end))
        cell = asyncio.ensure_future(book.cell(f"c.workers[0].compute({started!r}, {end!r})"))
        await file_exists(started)
        await book.client.km.interrupt_kernel()
        with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
            await cell
        assert await book.cell("c.workers[1].hello(1)") == "2", "another worker is not busy"
        shown = await book.cell("print(c.workers[0].hello(1))")
        assert re.search(r"busy with an earlier call: rank 0 runs 'compute' for [\d.]+ s \(cancelled\)", shown), shown
        assert "\n1\n" in "\n" + shown, "the call is made when the method has ended"
        assert await book.cell("print(c.workers[0].hello(2))") == "2\n"
        await book.cell("troupe.shutdown()")

    notebook(main)


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *command):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(HERE)
            os.environ.update(TERM="dumb", PYTHON_BASIC_REPL="1")
            os.execv(command[0], command)
        self.seen = ""

    def send(self, text):
        os.write(self.fd, text.encode())

    def expect(self, pattern, timeout=30.0):
        """Reads until the pattern appears after what earlier calls have matched."""
        end = time.monotonic() + timeout
        while not (found := re.search(pattern, self.seen)):
            ready = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"{pattern!r} did not appear in {self.seen!r}"
            self.seen += os.read(self.fd, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found

    def close(self):
        try:
            os.kill(self.pid, signal.SIGKILL)
        finally:
            os.waitpid(self.pid, 0)
            os.close(self.fd)


def test_the_asyncio_repl(tmp_path):
    started, end = str(tmp_path / "started"), tmp_path / "end"
    t = Terminal(sys.executable, "-m", "asyncio")
    try:
        t.expect(">>> ")
        t.send("import troupe, worker_classes\n")
        t.send("troupe.init() and None\n")
        t.send('c = troupe.Cluster("repl", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=3))\n')
        t.send('print("all", c.execute_all_sync("echo", 1))\n')
        t.expect(r"all \[1, 1, 1\]")
        t.send('print("got", troupe.get(c.workers[2].echo.remote(5)), "awaited", await c.workers[2].echo.remote(6), len(c.health()))\n')
        t.expect("got 5 awaited 6 3")
        t.send(f"c.workers[0].compute({started!r}, {str(end)!r})\n")
        asyncio.run(file_exists(started))
        t.send("\x03")
        t.expect("KeyboardInterrupt")
        t.send('print("next", c.workers[0].echo(7))\n')
        t.expect("busy with an earlier call: rank 0 runs 'compute'")
        end.touch()
        t.expect("next 7")
        t.send('c.shutdown(); troupe.shutdown(); print("clo" + "sed")\n')
        t.expect("closed")
    finally:
        t.close()


def test_a_blocking_call_in_a_program_with_a_loop_delivers_what_other_tasks_wait_for(workers):
    async def main():
        slow = asyncio.ensure_future(asyncio.wait_for(workers.workers[1].sleep.remote(0.2), 10))
        await asyncio.sleep(0)
        assert workers.workers[0].echo(1) == 1
        assert workers.workers[1].echo(2) == 2, "behind the other task's call, whose answer this wait reads"
        assert await slow == 1

    asyncio.run(main())


def test_a_blocking_call_in_an_async_worker_blocks_its_loop_alone_and_warns_once(session, workers):
    with troupe.Cluster("looping", worker_classes.AsyncWorker, worker_config=troupe.WorkerConfig(world_size=1)) as loops:
        h = loops.workers[0]
        h.initialize()
        other = h.block_in_thread.remote(workers.workers[0], 0.3)
        assert h.block_in_loop(workers.workers[1], 2.0) == 1, "it waits, and another worker answers"
        assert other.result(10) < 1.5, "a thread of the worker has its answer while the loop is blocked"
        assert h.block_in_loop(workers.workers[1], 0.0) == 1
        warned = h.warned()
        assert len(warned) == 1 and "`await handle.method.remote(…)`" in warned[0], warned
        with pytest.raises(troupe.RefusedError, match="own rank would wait for itself"):
            h.block_on_itself(h)
        assert h.note("alive") is True
