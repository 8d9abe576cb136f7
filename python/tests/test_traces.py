"""OpenTelemetry traces through Python methods, at a receiver of OTLP."""

import http.server
import json
import threading
import time

import pytest


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in body.get("resourceSpans", []):
            for scope in resource["scopeSpans"]:
                self.server.spans += scope["spans"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.spans = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def kind_of(span):
    return next(a["value"]["stringValue"] for a in span["attributes"] if a["key"] == "troupe.kind")


def traceparent(span):
    return f"00-{span['traceId']}-{span['spanId']}-01"


def drive(script, receiver, text, expected):
    """What a driver prints, and a function that finds a span; expected is the names of the spans that must arrive."""
    url = f"http://127.0.0.1:{receiver.server_address[1]}"
    done = script(text.replace("RECEIVER", repr(url)), env={"OTEL_EXPORTER_OTLP_ENDPOINT": url}, timeout=60)

    def find(name):
        kind, name = name.split()
        found = [s for s in list(receiver.spans) if kind_of(s) == kind and s["name"] == name]
        assert len(found) <= 1, found
        return found[0] if found else None

    late = time.monotonic() + 30
    while missing := [name for name in expected if find(name) is None]:
        assert time.monotonic() < late, (
            f"missing: {missing}; there are {[(kind_of(s), s['name']) for s in receiver.spans]}"
        )
        time.sleep(0.02)
    return json.loads(done.stdout.splitlines()[-1]), find


def assert_child(parent, *children):
    for child in children:
        assert (child["traceId"], child["parentSpanId"]) == (parent["traceId"], parent["spanId"]), (parent, child)


def test_calls_and_spans_of_a_method_are_children_of_its_run(script, receiver):
    text = """
        import json, troupe, traced
        config = troupe.WorkerConfig(world_size=1, env={"OTEL_EXPORTER_OTLP_ENDPOINT": RECEIVER})
        troupe.init()
        with troupe.Cluster("leaves", traced.Leaf, worker_config=config), troupe.Cluster("branch", traced.Branch, worker_config=config) as branch:
            with troupe.Cluster("abranch", traced.AsyncBranch, worker_config=config) as abranch, troupe.span("train"):
                print(json.dumps([branch.workers[0].step(), abranch.workers[0].step()]))
        troupe.shutdown()
    """
    leaves = [f"call leaves.{m}" for m in ("in_run", "in_span", "after_span", "in_task")]
    expected = [
        "span train",
        "call branch.step",
        "run branch.step",
        "run abranch.step",
        "span outer",
        "span inner",
        "span async",
        "run leaves.in_span",
        *leaves,
    ]
    traces, find = drive(script, receiver, text, expected)
    train, run, arun = find("span train"), find("run branch.step"), find("run abranch.step")
    assert "parentSpanId" not in train
    assert_child(train, find("call branch.step"), find("call abranch.step"))
    assert_child(find("call branch.step"), run)
    assert_child(run, find("call leaves.in_run"), find("span outer"), find("call leaves.after_span"))
    assert_child(find("span outer"), find("span inner"))
    assert_child(find("span inner"), find("call leaves.in_span"))
    assert_child(find("call leaves.in_span"), find("run leaves.in_span"))
    assert_child(arun, find("span async"))
    assert_child(find("span async"), find("call leaves.in_task"))
    assert traces == [traceparent(run), traceparent(arun)]


def test_spans_of_opentelemetry_are_parents_and_children(script, receiver):
    text = """
        import json, troupe, traced
        from opentelemetry import trace
        config = troupe.WorkerConfig(world_size=1, env={"OTEL_EXPORTER_OTLP_ENDPOINT": RECEIVER})
        troupe.init()
        with troupe.Cluster("leaves", traced.Leaf, worker_config=config), troupe.Cluster("branch", traced.Telemetry, worker_config=config) as branch:
            theirs = trace.SpanContext(0x0af7651916cd43dd8448eb211c80319c, 0x99, is_remote=False, trace_flags=trace.TraceFlags(1))
            with trace.use_span(trace.NonRecordingSpan(theirs)):
                print(json.dumps(branch.workers[0].step()))
        troupe.shutdown()
    """
    expected = [
        "call branch.step",
        "run branch.step",
        "span ours",
        "call leaves.in_their_span",
        "call leaves.in_our_span",
    ]
    (seen, current), find = drive(script, receiver, text, expected)
    call, run, ours = find("call branch.step"), find("run branch.step"), find("span ours")
    assert (call["traceId"], call["parentSpanId"]) == ("0af7651916cd43dd8448eb211c80319c", "0000000000000099")
    assert_child(call, run)
    assert seen == [traceparent(run), traceparent(ours)] and current == traceparent(run)
    for child in (ours, find("call leaves.in_their_span")):
        assert (child["traceId"], child["parentSpanId"]) == (run["traceId"], "0000000000000077")
    assert_child(ours, find("call leaves.in_our_span"))


def test_a_trace_passes_through_processes_that_export_nothing(script):
    text = """
        import troupe, traced
        from opentelemetry import trace
        troupe.init()
        config = troupe.WorkerConfig(world_size=1)
        with troupe.Cluster("passing", traced.Passing, worker_config=config) as branch:
            print(repr(branch.workers[0].trace()))
            theirs = trace.SpanContext(0x0af7651916cd43dd8448eb211c80319c, 0x99, is_remote=False, trace_flags=trace.TraceFlags(1))
            with trace.use_span(trace.NonRecordingSpan(theirs)), troupe.span("not exported"):
                print(branch.workers[0].relay())
                assert trace.get_current_span().get_span_context() == theirs
    """
    assert script(text).stdout.splitlines() == ["''", "00-0af7651916cd43dd8448eb211c80319c-0000000000000099-01"]
