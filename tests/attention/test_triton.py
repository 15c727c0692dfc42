"""The Triton kernels against golden vectors, without a GPU: through Triton's interpreter, one process a case."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention import kernels
from attention.kernels import favor_triton, wkv4_triton
from tests import golden

pytestmark = pytest.mark.slow  # an interpreted kernel takes seconds
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; pip install triton"
)
ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "wkv4": {"float32": (5e-5, 3e-4), "bfloat16": (1e-2, 2e-2)},
    "favor_attention": {"float32": (2e-5, 2e-5), "bfloat16": (1e-2, 2e-2)},
}


def check(op, name, dtype="float32", mode="bidir", chunks=1):
    golden.load(name)  # skips where the vectors are not there
    command = [sys.executable, "-m", "tests.attention.triton_check", op, name, dtype, mode, str(chunks)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    forward, backward = LIMITS[op][dtype]
    for key, error in json.loads(done.stdout).items():
        assert error < (backward if key.startswith("g_") else forward), key


@needs_triton
@pytest.mark.parametrize(
    ("name", "dtype", "mode", "chunks"),
    [
        ("a", "float32", "whole", 1),
        ("a", "bfloat16", "whole", 3),
        ("a", "float32", "mask", 3),
        ("a", "float32", "halves", 3),
        ("b_holes", "float32", "whole", 4),
        ("b_holes", "float32", "mask", 1),
        ("c_overflow100", "float32", "whole", 1),
        ("c_overflow100", "float32", "whole", 5),
        ("d_ramp", "float32", "whole", 3),
        ("f_extreme_decay", "float32", "whole", 3),
        ("e_n4096", "float32", "whole", 7),
    ],
)
def test_wkv4(name, dtype, mode, chunks):
    check("wkv4", f"wkv4_{name}", dtype, mode, chunks)


@needs_triton
@pytest.mark.parametrize(
    ("name", "dtype", "mode", "chunks"),
    [
        ("b_m_not_multiple", "float32", "mask", 1),
        ("a", "float32", "bidir", 3),
        ("a", "bfloat16", "mask", 1),
        ("b_m_not_multiple", "float32", "bidir", 3),
        ("c_large_norm", "float32", "bidir", 1),
        ("c_large_norm", "float32", "mask", 3),
    ],
)
def test_favor(name, dtype, mode, chunks):
    check("favor_attention", f"favor_{name}", dtype, mode, chunks)


def test_chunks_fill_the_device():
    # enough channels: one chunk, no second pass
    assert wkv4_triton.chunk_steps(512, 4096, 512) == 4096
    # few: as many chunks as it takes, never too short
    assert -(-16384 // wkv4_triton.chunk_steps(8, 16384, 512)) >= 64
    assert wkv4_triton.chunk_steps(1, 100, 8) >= 25
    assert wkv4_triton.chunk_steps(1, 1, 8) == 1


@pytest.mark.skipif(wkv4_triton.INTERPRETED, reason="the interpreter offers the kernels on the CPU")
@pytest.mark.parametrize("op", ["wkv4", "favor_attention"])
def test_cpu_tensors_never_reach_triton(op):
    assert "triton" not in kernels.available(op, "cpu")


def test_what_they_refuse():
    x = torch.zeros(1, 4, 8)
    wkv4 = {"key_mask": None, "state": None}
    assert "one direction" in wkv4_triton.KERNEL.refuses(x[0, 0], x[0, 0], x, x, bidirectional=True, **wkv4)
    assert "fp32" in wkv4_triton.KERNEL.refuses(x[0, 0], x[0, 0], x.double(), x.double(), bidirectional=False, **wkv4)
    q, w = torch.zeros(1, 1, 4, 8), torch.zeros(3, 8)
    refuses = favor_triton.KERNEL.refuses
    options = {"features": "positive", "causal": False, "key_mask": None}
    assert refuses(q, q, q, w, **options) is None
    assert "bidirectional" in refuses(q, q, q, w, **options | {"causal": True})
    assert "positive" in refuses(q, q, q, w, **options | {"features": "trig"})
    assert "128" in refuses(q, q, q.expand(1, 1, 4, 8).repeat(1, 1, 1, 20), w, **options)
    assert "gradient" in refuses(q, q, q, w.clone().requires_grad_(), **options)
