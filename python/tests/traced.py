"""Workers for the tests of traces."""

import asyncio

import troupe
from troupe import Worker


class Leaf(Worker):
    def in_run(self): ...
    def in_span(self): ...
    def after_span(self): ...
    def in_task(self): ...
    def in_their_span(self): ...
    def in_our_span(self): ...


class Branch(Worker):
    def step(self):
        leaves = troupe.Cluster.attach("leaves")
        leaves.in_run()
        with troupe.span("outer"), troupe.span("inner"):
            leaves.in_span()
        leaves.after_span()
        return troupe.current_call().trace


class AsyncBranch(Worker):
    async def step(self):
        leaves = await asyncio.to_thread(troupe.Cluster.attach, "leaves")
        with troupe.span("async"):
            await leaves.in_task.remote()
        return troupe.current_call().trace


class Telemetry(Worker):
    """Its process uses opentelemetry-api."""

    def __init__(self, worker_config=None):
        from opentelemetry import trace

        self.trace = trace

    def step(self):
        trace, leaves = self.trace, troupe.Cluster.attach("leaves")
        run = trace.get_current_span().get_span_context()
        theirs = trace.SpanContext(run.trace_id, 0x77, is_remote=False, trace_flags=trace.TraceFlags(1))
        with trace.use_span(trace.NonRecordingSpan(theirs)):
            leaves.in_their_span()
            with troupe.span("ours"):
                leaves.in_our_span()
                inside = trace.get_current_span().get_span_context()
            assert trace.get_current_span().get_span_context() == theirs
        return [
            f"00-{c.trace_id:032x}-{c.span_id:016x}-{c.trace_flags:02x}" for c in (run, inside)
        ], troupe.current_call().trace


class Passing(Worker):
    def trace(self):
        return troupe.current_call().trace

    @troupe.register(concurrency=1)
    def relay(self):
        return troupe.Cluster.attach("passing").workers[0].trace()
