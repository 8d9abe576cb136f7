"""Ctrl-C ends the process soon, or the process says what it waits for."""

import signal
import time

import pytest

START = """
import signal, sys, threading, time, troupe
class W:
    def polite(self):
        while not troupe.current_call().cancelled:
            time.sleep(0.01)
    def deaf(self):
        time.sleep(600)
class Hangs:
    def __init__(self):
        print("constructing", flush=True)
        time.sleep(600)
class NeverCloses(W):
    def close(self):
        time.sleep(600)
def go():
    print("go", flush=True)
def busy(cls=W, method="deaf", grace=0):
    w = troupe.Cluster("busy", cls, worker_config=troupe.WorkerConfig(world_size=1, stop_grace=grace)).workers[0]
    future = w[method].remote()
    while not any(rank["calls"] for rank in w.cluster.health()):
        time.sleep(0.01)
    return w, future
troupe.init()
"""

GRACE = 60  # seconds that running calls have in programs that must not wait for them

# What the program waits for, and the words of the message if that takes long; None: it ends without one.
WAITS = {
    "in a call that can be cancelled": (f"w, f = busy(W, 'polite', {GRACE}); go(); f.result()", None),
    "in a call that goes on": ("w, f = busy(); go(); f.result()", "runs deaf for "),
    "in a call of its own thread": (
        "w, f = busy(); t = threading.Thread(target=w.polite); t.start(); go(); t.join()",
        "runs deaf for ",
    ),
    "in a creation": ("go(); troupe.actor(Hangs)", None),
    "in shutdown of a role": ("w, f = busy(); go(); w.cluster.shutdown()", "runs deaf for "),
    "while a worker closes": ("w, f = busy(NeverCloses, 'polite'); go(); f.result()", " stops"),
    "in shutdown": (f"w, f = busy(grace={GRACE}); go(); troupe.shutdown()", None),
    "at the end of the program": (f"w, f = busy(grace={GRACE}); go()", None),
}


@pytest.mark.parametrize("way", WAITS)
def test_an_interrupt_ends_the_process_or_says_what_it_waits_for(script, way):
    do, says = WAITS[way]
    p = script(START + do + "\n", wait=False)
    try:
        assert p.stdout.readline() == "go\n"
        if way == "in a creation":
            assert "constructing" in p.stdout.readline()
        p.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = p.communicate(timeout=3 * GRACE)
        took = time.monotonic() - began
    finally:
        p.kill()
    assert "KeyboardInterrupt" in err or way == "in shutdown", err
    told = [line for line in err.splitlines() if line.startswith("troupe: the session ends, and waits for workers: ")]
    if says is None:
        assert took < GRACE - 5 or "in go\n" in err, err  # unless the interrupt came before the program got there
    else:
        assert told and says in told[0], err


def test_a_second_interrupt_kills_what_is_waited_for(script):
    p = script(START + f"w, f = busy(grace={GRACE}); go(); f.result()\n", wait=False)
    try:
        assert p.stdout.readline() == "go\n"
        p.send_signal(signal.SIGINT)
        while "waits for workers" not in p.stderr.readline():
            assert p.poll() is None
        began = time.monotonic()
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=3 * GRACE)
        assert time.monotonic() - began < GRACE - 10
    finally:
        p.kill()
