"""``scripts/gpu_check`` where there is no GPU: its message, and the whole path with tiny sizes on the CPU."""

import json
import subprocess

import pytest
import torch

from attention import kernels
from attention.kernels import dispatch
from lra import gpu_check


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no CUDA device" in line


def test_the_whole_path_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "golden_tests", lambda: {"exit_code": 0, "summary": "3 passed", "failed": []})
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gpu-cpu-*.json")
    result = json.loads(path.read_text())
    ran = {(row["op"], row["kernel"]) for row in result["rows"] if row.get("train_s")}
    assert {(op, kernel) for op in dispatch.ops() for kernel in kernels.available(op, "cpu")} <= ran
    assert all(row["bound_forward_s"] > 0 for row in result["rows"])
    text = path.with_suffix(".md").read_text()
    assert "3 passed" in text
    assert text.count("| softmax_attention | flash |") == 2


def test_failures_and_refusals_are_rows(tmp_path):
    size = gpu_check.CPU_SIZES[0]
    rates = {"bytes_per_s": 1.0, "flop_per_s": 1.0}
    for error, key in ((ValueError("no mask"), "refused"), (RuntimeError("boom\nmore"), "error")):

        def run(*_, error=error):
            raise error

        case = gpu_check.Case("op", "kernel", size, False, run, [torch.zeros(2, requires_grad=True)], 1.0)
        row = gpu_check.measure(case, "cpu", rates)
        assert str(error).splitlines()[0] in row[key]
        assert row[key] in "\n".join(gpu_check.table([row]))


def test_what_has_no_time_left_is_told(monkeypatch):
    case = gpu_check.Case("op", "kernel", gpu_check.CPU_SIZES[0], False, None, [torch.zeros(2)], 1.0)
    row = gpu_check.measure(case, "cpu", {"bytes_per_s": 1.0, "flop_per_s": 1.0}, deadline=0.0)
    assert "left out, 200 s had passed" in row["error"]

    def late(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", late)
    tests = gpu_check.golden_tests()
    assert tests["exit_code"] == 124
    assert "not done after 240 s" in tests["summary"]
