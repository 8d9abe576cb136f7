"""A start that takes longer than a second says how far it is: on a terminal, in a notebook and in the log."""

import asyncio
import re
import subprocess
import sys
import time

from test_notebook import HERE, START, Terminal, notebook

# Rank 1 is not ready before the file exists.
SLOW = """
class Slow(troupe.Worker):
    def __init__(self, config=None):
        while self.rank == 1 and not os.path.exists({path!r}):
            print("loads")
            time.sleep(0.1)  # loads the model

slow = troupe.Cluster{create}("slow", Slow, worker_config=troupe.WorkerConfig(world_size=3, start_timeout=600))
{then}
"""
SHOWN = r"slow starts \(\d+ s\): 2 of 3 ranks ready; rank 1 on \S+ is in (Slow\.)?__init__: time.sleep\(0.1\)  # loads"


def screen(text):
    """The lines that a terminal shows after it was sent the text."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.rstrip("\r").split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_a_screen_shows_what_was_written_last():
    assert screen("abc\rd\n one\r    \rx") == ["dbc", "x"]


def test_a_notebook_shows_a_start_and_erases_the_line(tmp_path):
    path = tmp_path / "end"

    async def main(book):
        await book.cell(START)
        cell = asyncio.ensure_future(book.cell(SLOW.format(path=str(path), create="", then="")))
        end = time.monotonic() + 60
        while not re.search(SHOWN, "".join(o.get("text", "") for o in book.book.cells[-1].outputs)):
            assert not cell.done() and time.monotonic() < end, book.book.cells[-1].outputs
            await asyncio.sleep(0.05)
        path.touch()
        shown = screen(await cell)
        assert not [line for line in shown if "ranks ready" in line], shown
        assert "slow[1] loads" in shown, "what workers print stands above the line"
        await book.cell("troupe.shutdown()")

    notebook(main)


def test_a_terminal_shows_a_start_and_erases_the_line(tmp_path):
    for create, then in (("", ""), (".create", "slow.wait_ready()")):
        path = tmp_path / f"end{create}"
        program = "import os, time, troupe\n" + SLOW.format(
            path=str(path), create=create, then=then + '\nprint("ready")'
        )
        (tmp_path / "program.py").write_text(program)
        t = Terminal(sys.executable, str(tmp_path / "program.py"), COLUMNS="200")
        try:
            t.expect(SHOWN, 60)
            path.touch()
            rest = t.expect(r"[\s\S]*\bready\r\n", 60).group()
            assert screen(rest)[-2:] == ["ready", ""] and "ranks ready" not in "".join(screen(rest)[1:]), rest
        finally:
            t.close()


def test_a_program_without_a_terminal_is_quiet_unless_it_logs(tmp_path):
    program = """
import os, sys, time, troupe
if {logs}:
    import logging

    class Ends(logging.StreamHandler):
        def emit(self, record):
            super().emit(record)
            open({path!r}, "w").close()

    logging.basicConfig(level=logging.INFO, handlers=[Ends()])
else:
    import threading
    threading.Timer(3, lambda: open({path!r}, "w").close()).start()
troupe.init(output="none")
"""
    for logs in (True, False):
        path = str(tmp_path / f"end-{logs}")
        ran = subprocess.run(
            [sys.executable, "-c", program.format(logs=logs, path=path) + SLOW.format(path=path, create="", then="")],
            capture_output=True, text=True, timeout=90, cwd=HERE,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert bool(re.search("troupe: slow starts", ran.stderr)) == logs, ran.stderr
