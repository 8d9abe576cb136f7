"""Fork, interrupts and the end of the interpreter: each in a process of its own."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import troupe
import worker_classes
from conftest import said


def test_fork_leaves_the_parent_sound_and_tells_the_child_what_to_do(script):
    out = script("""
        import os, sys, threading, troupe, worker_classes
        troupe.init()
        c = troupe.Cluster("forked", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=1))
        h = c.workers[0]
        stop = False
        def busy():
            while not stop:
                h.echo(1)
        t = threading.Thread(target=busy); t.start()
        codes = []
        for i in range(8):
            pid = os.fork()
            if pid == 0:
                try:
                    h.echo(2)
                    os._exit(1)
                except troupe.ClosedError as err:
                    if "spawn" not in str(err): os._exit(2)
                sys.exit(0)  # runs the exit handlers
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        stop = True
        t.join()
        print(codes, h.echo("sound"))
        c.shutdown()
    """)
    assert out.stdout.strip() == "[0, 0, 0, 0, 0, 0, 0, 0] sound", out.stderr
    assert "Traceback" not in out.stderr


def test_multiprocessing_with_fork(script):
    out = script("""
        import multiprocessing, troupe, worker_classes
        troupe.init()
        h = troupe.actor(worker_classes.BasicWorker)
        def work(n):
            return n * n
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(work, range(5)), h.echo("sound"))
    """)
    assert out.stdout.strip() == "[0, 1, 4, 9, 16] sound"
    assert "Traceback" not in out.stderr


def test_a_forked_child_holds_nothing_of_the_parents_connection(script):
    out = script("""
        import os, socket, time, troupe
        s = troupe.init()
        pid = os.fork()
        if pid == 0:
            left = []
            for fd in os.listdir("/proc/self/fd"):
                try:
                    peer = socket.socket(fileno=os.dup(int(fd))).getpeername()
                except OSError:
                    continue
                if isinstance(peer, tuple) and peer[:2] in s._addresses:
                    left.append(fd)
            os._exit(1 if left else 0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert out.stdout.strip() == "0"


@pytest.mark.parametrize(
    "wait",
    ["h.sleep(60)", "troupe.get(h.sleep.remote(60))", "troupe.wait([h.sleep.remote(60)])", "asyncio.run(loop())", "list(troupe.as_completed([h.sleep.remote(60)]))",
     "threaded()", "served()", "queue.get()", "queue.put(2)", "troupe.get(h.sleep.remote(60), progress=True)",
     'troupe.Cluster("slow", "slow_start.Slow", worker_config=troupe.WorkerConfig(world_size=1))'],
)  # fmt: skip
def test_ctrl_c_ends_every_wait_and_the_worker_is_told(script, wait):
    p = script(
        f"""
        import asyncio, os, sys, threading, time, troupe, worker_classes
        troupe.init()
        h = troupe.actor(worker_classes.BasicWorker)
        async def loop():
            await h.sleep.remote(60)
        def threaded():
            # the main thread waits while another one reads
            t = threading.Thread(target=lambda: h.sleep.remote(60).exception(), daemon=True); t.start()
            time.sleep(0.2)
            h.sleep(60)
        def served():
            # and while it serves
            troupe.serve(worker_classes.Given(1))
            h.sleep(60)
        h.echo(1)
        queue = troupe.Queue(1) if "queue" in {wait!r} else None
        if "put" in {wait!r}: queue.put(1)
        print("waiting", flush=True)
        try:
            {wait}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        began = time.monotonic()
        if "threaded" not in sys.argv: h.echo("free") if {wait!r}.startswith("h.sleep") or {wait!r}.startswith("asyncio") else None
        print("free" if time.monotonic() - began < 30 else "late", flush=True)
        """,
        wait=False,
    )
    assert p.stdout.readline().strip() == "waiting", p.stderr.read()
    time.sleep(0.4)
    p.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = p.communicate(timeout=90)
    assert out.split() == ["interrupted", "free"], err
    assert time.monotonic() - began < 60 and p.returncode == 0, err
    own = [
        line for line in err.splitlines() if not line.startswith("slow[0] ")
    ]  # a worker that is stopped while it imports says where it was
    assert "Traceback" not in "\n".join(own)


@pytest.mark.parametrize(
    "about",
    [
        "",
        "f = h.sleep.remote(60)",
        "threading.Thread(target=h.sleep, args=(60,), daemon=True).start()",
        "threading.Thread(target=lambda: h.sleep.remote(60).exception()).start()",
        "threading.Thread(target=lambda: asyncio.run(aloop())).start()",
        "troupe.shutdown(); troupe.shutdown()",
        "sys.exit(0)",
        "keep = h.echo(numpy.zeros(100_000))",
        "troupe.serve(worker_classes.Given(1))",
        "troupe.serve(worker_classes.AsyncWorker()); f = h.sleep.remote(60)",
    ],
)
def test_the_interpreter_ends_without_a_hang_or_a_traceback(script, about):
    out = script(f"""
        import asyncio, numpy, sys, threading, time, troupe, worker_classes
        troupe.init()
        h = troupe.actor(worker_classes.BasicWorker)
        h.echo(1)
        async def aloop():
            try:
                await h.sleep.remote(60)
            except troupe.Error:
                pass
        def quiet(args): pass
        threading.excepthook = quiet  # what the threads make of the end is their own
        {about}
        time.sleep(0.1)
    """)
    assert out.returncode == 0 and said(out.stderr).strip() == "", out.stderr


def test_a_private_head_goes_with_its_driver(script):
    url = {"TROUPE_URL": "", "TROUPE_TOKEN_FILE": "", "TROUPE_FINGERPRINT": ""}
    out = script(
        """
        import troupe
        with troupe.init(gpus="none") as s:
            print(s.head.process.pid, s.head.dir)
        import os
        print(os.path.exists(s.head.dir))
        troupe.init(gpus="none")
        print(troupe.is_initialized())
        """,
        env=url,
    )
    lines = out.stdout.split()
    assert lines[2:] == ["False", "True"]
    gone(int(lines[0]))


def test_a_private_head_goes_with_a_driver_that_is_killed(script):
    p = script(
        """
        import time, troupe, worker_classes
        s = troupe.init(gpus="none")
        h = troupe.actor(worker_classes.BasicWorker)
        print(s.head.process.pid, h.pid(), flush=True)
        time.sleep(60)
        """,
        env={"TROUPE_URL": "", "TROUPE_TOKEN_FILE": "", "TROUPE_FINGERPRINT": ""},
        wait=False,
    )
    pids = [int(n) for n in p.stdout.readline().split()]
    assert len(pids) == 2, p.stderr.read()
    p.kill()
    p.wait()
    for pid in pids:
        gone(pid)


def gone(pid, patience=90.0):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_classes_of_the_script_travel_by_value_and_the_script_is_not_run_again(script, tmp_path):
    path = tmp_path / "driver.py"
    runs = tmp_path / "runs"
    path.write_text(f"""
import dataclasses, enum, os, sys
import troupe
with open({str(runs)!r}, "a") as f:
    f.write("x")

@dataclasses.dataclass
class Point:
    x: int

class Color(enum.Enum):
    RED = 1

OFFSET = 10

class Mine(troupe.Worker):
    def move(self, p, f):
        return Point(f(p.x) + OFFSET), Color.RED

def main():
    troupe.init()
    c = troupe.Cluster("mine", Mine, worker_config=troupe.WorkerConfig(world_size=1))
    p, color = c.workers[0].move(Point(1), lambda v: v * 2)
    print(type(p) is Point, p.x, color is Color.RED)
    c.shutdown()

main()
""")
    out = script(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert out.stdout.strip() == "True 12 True", out.stderr
    assert runs.read_text() == "x"


def test_pickle_false(script):
    out = script("""
        import troupe, worker_classes
        troupe.init(pickle=False)
        h = troupe.actor("worker_classes.BasicWorker")
        print(h.echo({"a": (1, {2})}))
        for bad in (lambda: h.echo(lambda: 1), lambda: troupe.Cluster("x", type("Local", (), {}), worker_config=troupe.WorkerConfig(world_size=1))):
            try:
                bad()
            except troupe.EncodeError as err:
                print("pickle=False" in str(err))
    """)
    assert out.stdout.split("\n")[:3] == ["{'a': (1, {2})}", "True", "True"], out.stderr


def test_a_working_dir_is_shipped(script, tmp_path):
    (tmp_path / "shipped.py").write_text(
        "import os\nclass Here:\n    def where(self):\n        return [os.getcwd(), open('data').read()]\n"
    )
    (tmp_path / "data").write_text("with it")
    out = script(f"""
        import troupe
        troupe.init(working_dir={str(tmp_path)!r})
        folder, data = troupe.actor("shipped.Here").where()
        print(folder != {str(tmp_path)!r}, data)
        troupe.shutdown()
        troupe.init(working_dir="/nowhere")
        try:
            troupe.actor("shipped.Here")
        except troupe.InvalidError as err:
            print("/nowhere" in str(err))
    """)
    assert out.stdout.split("\n")[:2] == ["True with it", "True"], out.stderr


def test_another_python_is_an_error_that_names_it(script):
    out = script(
        """
        import sys, troupe, worker_classes
        from troupe import _launch
        real = _launch._config
        _launch._config = lambda *a: {**real(*a), "python": "2.7"}
        troupe.init()
        try:
            troupe.actor(worker_classes.BasicWorker)
        except troupe.Error as err:
            print("2.7" in str(err), f"{sys.version_info.major}.{sys.version_info.minor}" in str(err))
        """
    )
    assert out.stdout.strip() == "True True", out.stderr


def test_init_mistakes(script):
    out = script(
        """
        import troupe
        for kwargs in ({"url": "nats://127.0.0.1:1", "timeout": 10}, {"gpus": "sim:x", "url": None}):
            try:
                troupe.init(**kwargs)
            except troupe.Error as err:
                print(type(err).__name__, str(err)[:300].replace("\\n", " "))
        """,
        env={"TROUPE_URL": "", "TROUPE_TOKEN_FILE": "", "TROUPE_FINGERPRINT": ""},
    )
    lines = out.stdout.strip().split("\n")
    assert lines[0].startswith("UnavailableError") and "127.0.0.1:1" in lines[0], out.stdout
    assert lines[1].startswith("UnavailableError") and "sim:x" in lines[1], out.stdout


def test_no_threads_of_ours_keep_the_interpreter(script):
    out = script("import troupe; print(troupe.is_initialized())")
    assert out.stdout.strip() == "False" and sys.version_info >= (3, 10) and os.name == "posix"


def test_a_bug_in_a_goroutine_of_the_core_is_an_exception_and_the_interpreter_lives(script):
    done = script(
        """
        import sys, time
        import worker_classes, troupe

        a = troupe.actor(worker_classes.BasicWorker)
        waiting = a.sleep.remote(60)
        try:
            troupe.init().core.ask(troupe._seam.Request("panic", {"name": "goroutine"})).get(90)
        except troupe.InternalError as err:
            print("asked:", "on purpose" in str(err), "goroutine" in err.remote_traceback)
        try:
            waiting.result(90)
        except troupe.InternalError as err:
            print("under way:", "on purpose" in str(err))
        for again in (lambda: a.echo(1), lambda: troupe.Cluster.attach("x"), lambda: troupe.actor(worker_classes.BasicWorker)):
            try:
                again()
            except troupe.InternalError as err:
                print("later:", "on purpose" in str(err))
        print(time.monotonic())
        """
    )
    lines = done.stdout.split("\n")
    assert lines[:5] == ["asked: True True", "under way: True", "later: True", "later: True", "later: True"]
    assert time.monotonic() - float(lines[5]) < 20, "and it ends"
    assert "a bug in the Go core: on purpose" in done.stderr


def test_a_bug_in_a_goroutine_ends_a_worker(session):
    with troupe.Cluster("broken", worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=1)) as c:
        with pytest.raises(troupe.Error):
            c.workers[0].break_core()
        with pytest.raises(troupe.WorkerLostError) as e:
            c.workers[0].echo(1)
        assert any("on purpose" in line or "goroutine" in line for line in e.value.last_lines), e.value.last_lines


def test_what_is_absent_on_a_node_is_named(tmp_path):
    from types import SimpleNamespace

    from troupe import worker

    here, gone = str(tmp_path), str(tmp_path / "gone")
    with pytest.raises(troupe.RefusedError, match=f"{gone}, which node far-away does not have"):
        worker.prepare(SimpleNamespace(config={"sys_path": [here, gone]}, node="far-away"))
    worker.prepare(SimpleNamespace(config={"sys_path": [gone], "shipped": True}, node="far-away"))
    sys.path.remove(gone)


def test_a_driver_whose_folder_is_gone(script):
    done = script(
        """
        import os, sys, tempfile
        import worker_classes, troupe
        with troupe.init():
            folder = tempfile.mkdtemp()
            os.chdir(folder)
            os.rmdir(folder)
            try:
                troupe.actor(worker_classes.BasicWorker)
            except troupe.InvalidError as err:
                print("removed" in str(err))
            real, sys.executable = sys.executable, "/nowhere/python"
            os.chdir("/")
            try:
                troupe.actor(worker_classes.BasicWorker)
            except troupe.NotFoundError as err:
                print("program /nowhere/python not found" in str(err))
        """
    )
    assert done.stdout.split() == ["True", "True"]


def test_ctrl_c_while_the_head_starts_leaves_nothing(tmp_path):
    head = tmp_path / "head"
    head.write_text("#!/bin/sh\necho $$ > $0.pid\nexec sleep 60\n")
    head.chmod(0o755)
    env = {**os.environ, "TROUPE_PROGRAM": str(head), "TMPDIR": str(tmp_path), "TROUPE_URL": ""}
    text = "import troupe\ntry:\n    troupe.init()\nexcept KeyboardInterrupt:\n    print('interrupted')"
    p = subprocess.Popen([sys.executable, "-c", text], env=env, stdout=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "head.pid").exists() and (tmp_path / "head.pid").read_text())
    until(lambda: sleeps(p.pid))  # it waits for the head's first line
    p.send_signal(signal.SIGINT)
    assert p.communicate(timeout=90)[0].strip() == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "head.pid").read_text()), 0)
    assert not list(tmp_path.glob("troupe-*"))


def sleeps(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rsplit(") ")[1][0] == "S"


def until(holds, patience=90.0):
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_that_hangs_holds_up_no_other_thread(tmp_path):
    """What is said to a server that takes nothing waits, or is refused; other Python threads go on."""
    text = """
        import os, signal, threading, time
        import worker_classes, troupe

        session = troupe.init(gpus="none")
        h = troupe.actor(worker_classes.BasicWorker)
        h.echo(1)
        gaps, over = [0.0], False

        def tick():
            last = time.monotonic()
            while not over:
                time.sleep(0.005)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        ticking = threading.Thread(target=tick)
        ticking.start()
        os.kill(session.head.process.pid, signal.SIGSTOP)
        body, refused, futures = bytes(60_000), "", []
        try:
            for _ in range(1500):  # 90 MB, more than any buffer on the way
                futures.append(h.echo.remote(body))
        except troupe.Error as err:
            refused = type(err).__name__
        over = True
        ticking.join()
        print(f"{max(gaps):.3f}", refused or "taken")
        os.kill(session.head.process.pid, signal.SIGCONT)
        for f in futures:
            try:
                f.result(60)
            except troupe.Error:
                pass
    """
    env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__)), "TROUPE_URL": ""}
    p = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], env=env, capture_output=True, text=True, timeout=60
    )
    assert p.returncode == 0, p.stderr
    gap, said = p.stdout.split("\n")[0].split()
    assert float(gap) < 2, f"the interpreter lock was held for {gap} s ({said})"


def test_large_arrays_leave_both_processes(script):
    run = script(
        """
        import gc, os, random, time
        os.environ["TROUPE_SHM_KEEP"] = "1"
        import numpy as np
        import troupe

        def resident():
            with open("/proc/self/statm") as f:
                return int(f.read().split()[1]) * 4096 >> 20

        class Worker:
            def echo(self, array):
                return array

            def fail(self, array):
                raise ValueError(array[0])

            def resident(self):
                return resident()

        size = 8 << 20

        def array(n):
            return np.full(size, n, "u1")

        gc.disable()  # nothing may wait for it
        with troupe.init():
            cluster = troupe.Cluster("leave", Worker, worker_config=troupe.WorkerConfig(world_size=2))
            began = time.monotonic()
            cluster.execute_all_sync("echo", array(0))
            whole = time.monotonic() - began
            for future in [cluster.execute_all_async("echo", array(n)) for n in range(1, 3)]:
                future.result()
            future = None  # a future keeps its result
            time.sleep(5)  # what they took has gone back, and the interpreter has what it keeps
            before = resident(), *cluster.execute_all_sync("resident")
            for n in range(1, 60):
                how = n % 5
                if how == 0:  # all is well
                    assert all((a == n).all() for a in cluster.execute_all_sync("echo", array(n)))
                elif how == 1:  # given up at any moment
                    future = cluster.execute_all_async("echo", array(n))
                    time.sleep(random.random() * whole)
                    future.cancel()
                elif how == 2:  # out of time
                    try:
                        cluster.options(timeout=0.001 + random.random() * whole).echo(array(n))
                    except troupe.TimedOutError:
                        pass
                elif how == 3:  # nobody looks
                    cluster.execute_all_async("echo", array(n))
                else:
                    try:
                        cluster.execute_all_sync("fail", array(n))
                        raise AssertionError("no failure")
                    except troupe.ApplicationError as err:
                        assert str(n) in str(err)
            future = None  # it may have been done when it was cancelled
            for _ in range(200):
                now = resident(), *cluster.execute_all_sync("resident")
                if max(n - b for n, b in zip(now, before)) < 12:
                    break
                time.sleep(0.1)
            else:
                raise AssertionError(f"{before} MiB before, {now} now")
        print("left", before, now)
        """,
        timeout=90,
    )
    assert "left" in run.stdout
