"""The shared golden vectors: expected outputs of an independent float64 reference."""

from pathlib import Path

import numpy
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "golden"


def load(name: str) -> dict[str, torch.Tensor]:
    """The arrays of one golden file; skips the test where the files are not there."""
    path = FOLDER / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"golden vectors are not beside this checkout: {path} is missing")
    with numpy.load(path) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``max|got - want| / max|want|``: element-wise relative error says nothing where outputs cross zero."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30)).item()
