"""The loader of native kernels: what it does where it cannot build, and with a damaged cache."""

import os
import shutil
import subprocess
import sys

import pytest

SOURCE = """
#include <torch/library.h>
TORCH_LIBRARY(lra_probe, m) { m.def("same(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(lra_probe, CPU, m) { m.impl("same", [](const at::Tensor& x) { return x; }); }
"""

LOAD = """
import sys
from pathlib import Path
import torch
from attention.kernels import native
native.SOURCES = Path(sys.argv[1])
native.FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in native.FLAGS)
reason = native.missing("probe")
print(reason or torch.ops.lra_probe.same(torch.ones(2)).tolist())
"""

CALL = """
import torch
from attention.kernels import dispatch
from attention.kernels.wkv4 import wkv4
inputs = [torch.zeros(2), torch.zeros(2), torch.zeros(1, 3, 2), torch.ones(1, 3, 2)]
wkv4(*inputs)
print(dispatch.last_used("wkv4"))
try:
    wkv4(*inputs, kernel="cpp")
except ValueError as error:
    print(error)
"""

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="there is no C++ compiler"
)


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "probe.cpp").write_text(SOURCE)
    return folder


def start(script, *arguments, cache, **environment):
    env = os.environ | {"LRA_NATIVE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process):
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return out.strip()


@needs_compiler
@pytest.mark.slow
def test_processes_share_one_build_and_a_damaged_one_is_built_again(sources, tmp_path):
    cache = tmp_path / "cache"
    processes = [start(LOAD, sources, cache=cache) for _ in range(3)]
    assert [output(process) for process in processes] == ["[1.0, 1.0]"] * 3
    (library,) = cache.glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    assert output(start(LOAD, sources, cache=cache)) == "[1.0, 1.0]"
    assert len(library.read_bytes()) == len(whole)
    assert not list(cache.glob(".probe-*"))
    built = library.stat().st_mtime_ns
    assert output(start(LOAD, sources, cache=cache)) == "[1.0, 1.0]"
    assert library.stat().st_mtime_ns == built


@needs_compiler
def test_a_source_that_does_not_compile_says_where(sources, tmp_path):
    (sources / "probe.cpp").write_text("int main() { return x; }")
    reason = output(start(LOAD, sources, cache=tmp_path / "cache"))
    assert "cannot build csrc/probe.cpp" in reason
    assert "error" in reason


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "/bin/false"}, "install a working g++"),
        ({"PATH": ""}, "install g++"),
        ({"LRA_NATIVE": "0"}, "LRA_NATIVE=0"),
        pytest.param({}, "set LRA_NATIVE_DIR to a folder that can be written", marks=needs_compiler),
    ],
    ids=["broken compiler", "no compiler", "off", "unwritable cache"],
)
def test_the_plain_kernel_runs_where_none_can_be_built(environment, reason, tmp_path):
    file = tmp_path / "file"
    file.touch()
    environment = {"CXX": "c++"} | environment
    used, error = output(start(CALL, cache=file / "cache", **environment)).split("\n", 1)
    assert used == "torch"
    assert "kernel 'cpp' of wkv4 cannot run on cpu" in error
    assert reason in error
