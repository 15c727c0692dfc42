"""torch.compile: its seconds are in no other account, its steps in no median, its graphs and breaks are counted."""

import time

import pytest
import torch
from torch import nn

from lra.compilation import CompileWatch
from lra.meter import Meter

CPU = torch.device("cpu")
SLOW = 0.2


def slow_backend(graph, inputs):
    """A compiler that takes its time and changes nothing."""
    time.sleep(SLOW)
    return graph.forward


class Broken(nn.Module):
    """Cannot be captured in one piece."""

    def forward(self, x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps(meter, model, lengths):
    for length in lengths:
        with meter.step(real_tokens=length, padded_tokens=length):
            model(torch.ones(length))


def test_compiling_has_an_account_of_its_own():
    meter = Meter(CPU, warmup_steps=0, compiled=True)
    model = torch.compile(nn.Tanh(), backend=slow_backend, dynamic=False)
    start = time.perf_counter()
    steps(meter, model, (3, 3, 3, 5, 5))
    total = time.perf_counter() - start
    report = meter.report()
    assert report["compiled_graphs"] == 2  # a second one for the second length
    assert report["graph_breaks"] == 0
    assert report["compiling_steps_dropped"] == 2
    assert report["warmup_steps_dropped"] == 0
    assert meter.timed_steps == 3
    seconds = report["seconds"]
    assert seconds.compile >= 2 * SLOW
    assert seconds.compile + seconds.compute <= total
    assert report["step_ms"] < 1e3 * SLOW / 2
    assert report["steps"] == 5
    meter.close()


def test_compiling_during_evaluation_is_not_evaluation():
    meter = Meter(CPU, warmup_steps=0, compiled=True)
    model = torch.compile(nn.Tanh(), backend=slow_backend)
    with meter.evaluation():
        model(torch.ones(3))
    seconds = meter.report()["seconds"]
    assert seconds.compile >= SLOW
    assert seconds.evaluation < seconds.compile
    meter.close()


def test_graph_breaks_are_counted():
    watch = CompileWatch()
    torch.compile(Broken(), backend="eager")(torch.ones(3))
    assert watch.graph_breaks == 1
    assert watch.graphs == 2
    watch.close()


def test_earlier_and_later_compilations_do_not_count():
    torch.compile(nn.Tanh(), backend=slow_backend)(torch.ones(3))
    watch = CompileWatch()
    assert (watch.graphs, watch.seconds) == (0, 0.0)
    watch.close()
    torch.compile(nn.Sigmoid(), backend=slow_backend)(torch.ones(3))
    assert watch.seconds == 0.0


def test_without_torch_compile_nothing_is_claimed():
    report = Meter(CPU, warmup_steps=0).report()
    for key in ("compiled_graphs", "graph_breaks", "compiling_steps_dropped"):
        assert report[key] is None, key
    assert report["seconds"].compile is None


def test_a_resumed_run_keeps_what_was_compiled_before():
    first = Meter(CPU, warmup_steps=0, compiled=True)
    steps(first, torch.compile(nn.Tanh(), backend=slow_backend), (3, 3))
    first.close()
    second = Meter(CPU, warmup_steps=0, compiled=True)
    second.restore(first.state())
    report = second.report()
    assert report["compiled_graphs"] == 1
    assert report["seconds"].compile >= SLOW
    second.close()
