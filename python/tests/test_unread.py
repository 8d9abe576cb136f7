"""The error of a call that the program never reads is logged, once."""

import pytest

START = """
import asyncio, gc, logging, sys, time, troupe
class W:
    def boom(self, text="bad luck"):
        raise ValueError(text)
    def fine(self):
        return 1
    def wait(self):
        while not troupe.current_call().cancelled:
            time.sleep(0.01)
    def drop(self, other):
        other.boom.remote("dropped in a worker")
        other.fine()
w = troupe.actor(W)
logging.basicConfig(format="LOG %(name)s %(message)s", force=True)
def failed(f):
    while not f.done():
        time.sleep(0.01)
    return f
"""

# What the program does with a future whose error nothing reads.
WAYS = {
    "dropped": "w.boom.remote(); w.fine()",
    "dropped when it is over": "f = failed(w.boom.remote()); del f",
    "kept until the end of the program": "f = w.boom.remote(); w.fine(); keep = [f]",
    "kept, and the session is closed": "keep = [failed(w.boom.remote())]; troupe.shutdown()",
    "in a future of several ranks": "f = w.cluster.execute_all_async('boom'); w.fine(); del f",
    "waited for and not read": "troupe.wait([w.boom.remote()])",
    "dropped by a worker": "w.drop(troupe.actor(W))",
    "a request through a router": (
        "r = troupe.Router(w.cluster, method='boom'); f = failed(r.call(blocking=False)); del f; r.close()"
    ),
}  # fmt: skip

# What reads the error, or has none.
QUIET = {
    "read": "try: w.boom.remote().result()\nexcept ValueError: pass",
    "read by a blocking call": "try: w.boom()\nexcept ValueError: pass",
    "read as an exception": "assert w.boom.remote().exception() is not None",
    "awaited": "async def f(): await w.boom.remote()\ntry: asyncio.run(f())\nexcept ValueError: pass",
    "read from a part": "try: w.boom.remote()[0].result()\nexcept ValueError: pass",
    "read from an element": "try: w.boom.options(num_returns=2).remote()[1].result()\nexcept ValueError: pass",
    "read with get": "try: troupe.get([w.boom.remote()])\nexcept ValueError: pass",
    "among all results": "w.cluster.options(collect_all=True).boom(blocking=False).result()",
    "passed on": "try: w.boom(w.boom.remote())\nexcept ValueError: pass",
    "cancelled": "f = w.wait.remote(); f.cancel(); troupe.wait([f]); del f",
    "good": "w.fine.remote(); w.fine()",
    "pending at the end": "w.wait.remote()",
}  # fmt: skip


def logged_by(script, text):
    done = script(START + text + "\ngc.collect()\n")
    return [line for line in done.stderr.splitlines() if "its future was never read" in line], done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_an_unread_error_is_logged_once(script, way):
    logged, shown = logged_by(script, WAYS[way])
    assert len(logged) == 1, shown
    if "worker" not in way:
        assert logged[0].startswith("LOG troupe "), logged
        assert "ValueError: bad luck" in logged[0] and "line 5, in boom" in shown, shown


def test_no_other_error_is_logged(script):
    logged, shown = logged_by(
        script, "\n".join(f"print({way!r}, file=sys.stderr)\n{do}\ngc.collect()" for way, do in QUIET.items())
    )
    assert not logged, shown
