"""Attention ops without parameters: one function an op, several kernels behind it."""

from attention.kernels.dispatch import available, last_used
from attention.kernels.favor import favor_attention
from attention.kernels.linear import linear_attention
from attention.kernels.selective_scan import selective_scan
from attention.kernels.softmax import softmax_attention
from attention.kernels.wkv4 import wkv4
from attention.kernels.wkv7 import wkv7

__all__ = [
    "available",
    "favor_attention",
    "last_used",
    "linear_attention",
    "selective_scan",
    "softmax_attention",
    "wkv4",
    "wkv7",
]
