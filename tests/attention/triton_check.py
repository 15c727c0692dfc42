"""Runs one Triton kernel through Triton's interpreter and prints its errors as JSON; a program for ``test_triton``.

A process of its own, because TRITON_INTERPRET is read when Triton is imported. Usage: OP GOLDEN DTYPE MODE CHUNKS
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from attention.kernels import dispatch, favor_attention, favor_triton, wkv4, wkv4_triton
from tests import golden


def check_wkv4(want, dtype, mode, chunks):
    length = want["k"].shape[1]
    wkv4_triton.MIN_STEPS, wkv4_triton.FILL = -(-length // chunks), 2**40
    inputs = [want[key].to(dtype if key in "kv" else torch.float32) for key in ("time_decay", "u", "k", "v")]
    inputs = [x.clone().requires_grad_() for x in inputs]
    mask = want["key_mask"] if mode == "mask" else None
    if mode == "halves":
        half = length // 2
        first, state = wkv4(*inputs[:2], *(x[:, :half] for x in inputs[2:]), kernel="triton")
        second, state = wkv4(*inputs[:2], *(x[:, half:] for x in inputs[2:]), state=state, kernel="triton")
        y = torch.cat([first, second], 1)
    else:
        y, state = wkv4(*inputs, key_mask=mask, kernel="triton")
    errors = {"forward": golden.error(y, want["y_mask" if mode == "mask" else "y"])}
    if mode != "mask":
        num, den, scale = state
        factor = torch.exp(scale.double() - want["state_max"])
        errors["num"] = golden.error(num * factor, want["state_num"])
        errors["den"] = golden.error(den * factor, want["state_den"])
        (y * want["gy"]).sum().backward()
        for key, x in zip(("time_decay", "u", "k", "v"), inputs):
            errors[f"g_{key}"] = golden.error(x.grad, want[f"g_{key}"])
    return errors


def check_favor_attention(want, dtype, mode, chunks):
    favor_triton.TOKENS = 16 if chunks > 1 else 64
    favor_triton.FEATURES = 32
    q, k, v = (want[x].to(dtype).requires_grad_() for x in "qkv")
    mask = want["key_mask"] if mode == "mask" else None
    out = favor_attention(q, k, v, want["W"], key_mask=mask, kernel="triton")
    errors = {"forward": golden.error(out, want[f"out_{mode}"])}
    if f"g_q_{mode}" in want:
        out.backward(want["gy"].to(dtype))
        for x, tensor in zip("qkv", (q, k, v), strict=True):
            errors[f"g_{x}"] = golden.error(tensor.grad, want[f"g_{x}_{mode}"])
    return errors


if __name__ == "__main__":
    op, name, dtype, mode, chunks = sys.argv[1:]
    torch.set_num_threads(1)
    check = {"wkv4": check_wkv4, "favor_attention": check_favor_attention}[op]
    print(json.dumps(check(golden.load(name), getattr(torch, dtype), mode, int(chunks))))
    assert dispatch.last_used(op) == "triton"
