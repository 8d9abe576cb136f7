"""Blocking calls where an event loop already runs: Jupyter notebooks, the asyncio REPL, asyncio programs, async
workers."""

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

import conftest
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
[item.value for item in p.take("out", timeout=90)]
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

    def __init__(self, config):
        self.book = nbformat.v4.new_notebook()
        self.client = nbclient.NotebookClient(
            self.book, timeout=120, kernel_name="python3", resources={"metadata": {"path": HERE}}, config=config
        )

    async def cell(self, source):
        """Runs a cell; its output, standard error included."""
        cell = nbformat.v4.new_code_cell(source)
        self.book.cells.append(cell)
        await self.client.async_execute_cell(cell, len(self.book.cells) - 1)
        return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)

    async def settled(self, source):
        """Runs a cell; its output without the progress of slow starts, which ends with a carriage return."""
        return (await self.cell(source)).rpartition("\r")[2]

    async def fails(self, source):
        """Runs a cell that raises; the traceback that the notebook shows, without colours."""
        with pytest.raises(nbclient.exceptions.CellExecutionError):
            await self.cell(source)
        (shown,) = [o["traceback"] for o in self.book.cells[-1].outputs if o.output_type == "error"]
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(shown))

    async def completions(self, code):
        """The names that the Tab key offers after the code."""
        return set((await self._reply(self.client.kc.complete(code)))["matches"])

    async def question_mark(self, code):
        """What `code?` shows, without colours."""
        shown = (await self._reply(self.client.kc.inspect(code)))["data"]["text/plain"]
        return re.sub(r"\x1b\[[\d;]*m", "", shown)

    async def _reply(self, request):
        while True:
            message = await self.client.kc.get_shell_msg(timeout=60)
            if message["parent_header"].get("msg_id") == request:
                return message["content"]


def notebook(main):
    """Runs main(notebook) with a kernel that ends afterwards."""

    async def run():
        with conftest.kernel_config() as config:
            book = Notebook(config)
            async with book.client.async_setup_kernel():
                await main(book)

    asyncio.run(asyncio.wait_for(run(), 300))


async def file_exists(path):
    end = time.monotonic() + 90
    while not os.path.exists(path):
        assert time.monotonic() < end, "the method did not start"
        await asyncio.sleep(0.01)


def test_cells_of_a_notebook_make_blocking_calls():
    async def main(book):
        await book.cell(START)
        assert await book.settled('c.execute_all_sync("hello", 1)') == "[1, 2, 3]"
        assert await book.settled("troupe.get(c.workers[2].hello.remote(5))") == "7"
        assert await book.settled("await c.workers[1].hello.remote(5)") == "6"
        assert await book.settled("len(c.health()), len(c.info())") == "(3, 3)"
        assert await book.settled("q = troupe.Queue(2)\nq.put(4)\nq.get(90)") == "4"
        assert await book.settled(PIPELINE) == "[14]"
        assert "Warning" not in await book.cell("c.shutdown()\ntroupe.shutdown()")

    notebook(main)


JUDGE = """
import troupe

def check(answer):
    raise ValueError("no verdict")  # in a helper

class Judge(troupe.Worker):
    def score(self, answer: str, strict: bool = False) -> float:
        \"\"\"Scores an answer.\"\"\"
        return check(answer)

    @troupe.register(dispatch_mode="DP_MP_COMPUTE")
    def rows(self, batch):
        return batch

    def _load(self):
        pass

troupe.init()
c = troupe.Cluster("judge", Judge, worker_config=troupe.WorkerConfig(world_size=2))
w, o, f, q = c.workers[0], c.options(timeout=30), c.rows.remote([1, 2]), troupe.Queue()
part, served = f[0], troupe.serve(Judge())
"""

# What jedi, which other editors use, offers after a name.
JEDI = "import jedi\nprint(*[c.name for c in jedi.Interpreter({code!r}, [globals()]).complete()])"


def test_completion_offers_the_methods_of_the_class_and_no_internals():
    async def main(book):
        await book.cell(JUDGE)
        for code, others in (
            ("c.", {"workers", "shutdown", "interrupt", "execute_all_sync"}),
            ("w.", {"rank", "cluster", "name"}),
            ("c.workers[1].", {"rank", "cluster", "name"}),
            ("o.", {"execute_all_sync"}),
            ("served.", {"rank", "cluster", "name"}),
        ):
            offered = await book.completions(code)
            assert {"score", "rows"} | others <= offered, (code, offered)
            assert not {"wire", "big", "mesh"} & offered, (code, offered)
            assert not [n for n in offered if n.startswith("_")], (code, offered)
            if "[" not in code:
                assert set((await book.cell(JEDI.format(code=code))).split()) == offered
        assert await book.completions("w.") == {"score", "rows", "rank", "cluster", "name"}
        assert await book.completions("c.score.") == {"remote", "options"}
        assert await book.completions("c._") == set()
        waits = {"add_done_callback", "cancel", "cancelled", "done", "exception", "result"}
        assert await book.completions("f.") == {*waits, "progress", "count", "index"}
        assert await book.completions("part.") == {*waits, "parent", "rank"}
        assert await book.completions("q.") == {"aget", "aput", "close", "empty", "get", "put", "qsize", "shutdown"}
        await book.cell("troupe.shutdown()")

    notebook(main)


def test_help_and_the_question_mark_show_the_signature_and_docstring_of_the_class():
    async def main(book):
        await book.cell(JUDGE)
        for code in ("c.score", "w.score", "served.score"):
            shown = await book.question_mark(code)
            assert f"{code}(answer: str, strict: bool = False) -> float" in shown and "Scores an answer." in shown
            shown = await book.cell(f"help({code})")
            assert "score(answer: str, strict: bool = False) -> float\n    Scores an answer." in shown, shown
        await book.cell("troupe.shutdown()")

    notebook(main)


def test_help_of_a_method_whose_class_is_in_a_module_or_in_another_program(session, workers):
    import inspect
    import pydoc

    path = f"{worker_classes.BasicWorker.__module__}.BasicWorker"
    with troupe.Cluster("by-path", path, worker_config=troupe.WorkerConfig(world_size=1)) as named:
        for method in (workers.fail, workers.workers[0].fail, named.fail):
            assert str(inspect.signature(method)) == "(message='bad luck')"
            assert "\nfail(message='bad luck')\n" in pydoc.render_doc(method, renderer=pydoc.plaintext)
        attached = troupe.Cluster.attach("by-path")
        assert "fail" in dir(attached), "its methods are known, their parameters are not"
        assert "blocking" in inspect.signature(attached.fail).parameters and "cluster" in attached.fail.__doc__
    assert "settings" in inspect.signature(type(workers.echo)).parameters, "the class itself"
    assert type(workers.echo).__doc__.startswith("A cluster's method")


def test_help_runs_no_code_of_the_class(session):
    import inspect

    ran = []

    class Loaded:
        @property
        def model(self):
            ran.append(self)

        @classmethod
        def load(cls, path):
            """Loads."""

        @staticmethod
        def check(path):
            pass

    handle = troupe.serve(Loaded())
    assert "blocks" in handle.model.__doc__ and not ran
    assert handle.load.__doc__ == "Loads."
    assert [str(inspect.signature(m)) for m in (handle.load, handle.check)] == ["(path)", "(path)"]
    handle.cluster.shutdown()


def test_the_source_lines_of_cells_are_in_tracebacks_of_workers():
    async def main(book):
        await book.cell(JUDGE)
        shown = await book.fails("c.score(3)")
        assert "return check(answer)" in shown, "the line of the class"
        assert 'raise ValueError("no verdict")  # in a helper' in shown, "of a function that it refers to"
        await book.cell("@troupe.remote\ndef half(x):\n    return x / 0  # of a function")
        assert "return x / 0  # of a function" in await book.fails("troupe.get(half.remote(1))")
        await book.cell("troupe.shutdown()")

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


HELPER = """
def wait_for(*futures):
    return troupe.get(list(futures))

def judge_all(started, end):
    return {call}
"""

# What an interrupted cell waits for, what it says of the call, and how to interrupt the workers.
INTERRUPTED = [
    ("c.compute(started, end)", "the call was cancelled", "cluster.interrupt()"),
    ("c.workers[0].compute(started, end)", "the call was cancelled", "handle.cluster.interrupt(0)"),
    ("c.compute.remote(started, end).result()", "the call goes on", "cluster.interrupt()"),
    ("wait_for(*[w.compute.remote(started, end) for w in c.workers])", "the call goes on", "interrupt(0)"),
]


def test_an_interrupt_shows_the_frames_of_the_user_and_how_to_interrupt_the_workers(tmp_path):
    async def main(book):
        await book.cell(START)
        for i, (call, state, remedy) in enumerate(INTERRUPTED):
            await book.cell(HELPER.format(call=call))
            for attempt in range(5):  # on a busy machine the cell may not wait yet when it is interrupted
                started, end = str(tmp_path / f"started-{i}-{attempt}"), tmp_path / f"end-{i}-{attempt}"
                cell = asyncio.ensure_future(book.fails(f"judge_all({started!r}, {str(end)!r})"))
                await file_exists(started)
                while not cell.done():
                    await book.client.km.interrupt_kernel()
                    await asyncio.wait({cell}, timeout=30)
                shown = await cell
                if "while waiting" in shown:
                    break
                end.touch()
                await book.cell("c.hello(1)")
            assert "judge_all(" in shown and call in shown, "the user's frames"
            assert "_cluster.py" not in shown and "_core.py" not in shown and "_future.py" not in shown, shown
            said = rf"KeyboardInterrupt: while waiting for hello.compute; {state}.*{re.escape(remedy)}"
            assert re.search(said, shown), shown
            assert "'compute'" in await book.cell("c.interrupt()")
            assert await book.cell("c.hello(1)") == "[1, 2, 3]", "the workers are free, and nothing ended their method"
        await book.cell("troupe.shutdown()")

    notebook(main)


def test_an_interrupt_of_a_program_shows_its_own_frames(tmp_path):
    started = str(tmp_path / "started")
    program = (
        "import troupe, worker_classes\n"
        "def main():\n"
        "    c = troupe.actor(worker_classes.BasicWorker)\n"
        f"    c.compute({started!r}, {str(tmp_path / 'end')!r})\n"
        "main()\n"
    )
    (tmp_path / "program.py").write_text(program)
    t = Terminal(sys.executable, str(tmp_path / "program.py"), PYTHONPATH=HERE)
    try:
        asyncio.run(file_exists(started))
        t.send("\x03")
        shown = t.expect(r"Traceback[\s\S]*KeyboardInterrupt: while waiting for .*compute.*interrupt\(\)").group()
        assert "in main" in shown and "c.compute(" in shown and "_cluster.py" not in shown, shown
    finally:
        t.close()


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *command, **env):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(HERE)
            os.environ.update(TERM="dumb", PYTHON_BASIC_REPL="1", **env)
            os.execv(command[0], command)
        self.seen = ""

    def send(self, text):
        os.write(self.fd, text.encode())

    def expect(self, pattern, timeout=90):
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
        t.send(
            'c = troupe.Cluster("repl", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=3))\n'
        )
        t.send('print("all", c.execute_all_sync("echo", 1))\n')
        t.expect(r"all \[1, 1, 1\]")
        t.send(
            'print("got", troupe.get(c.workers[2].echo.remote(5)), "awaited", await c.workers[2].echo.remote(6), '
            "len(c.health()))\n"
        )
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
    with troupe.Cluster(
        "looping", worker_classes.AsyncWorker, worker_config=troupe.WorkerConfig(world_size=1)
    ) as loops:
        h = loops.workers[0]
        h.initialize()
        other = h.block_in_thread.remote(workers.workers[0], 0.3)
        assert h.block_in_loop(workers.workers[1], 2.0) == 1, "it waits, and another worker answers"
        assert other.result(90) < 1.5, "a thread of the worker has its answer while the loop is blocked"
        assert h.block_in_loop(workers.workers[1], 0.0) == 1
        warned = h.warned()
        assert len(warned) == 1 and "`await handle.method.remote(…)`" in warned[0], warned
        with pytest.raises(troupe.RefusedError, match="own rank would wait for itself"):
            h.block_on_itself(h)
        assert h.note("alive") is True
