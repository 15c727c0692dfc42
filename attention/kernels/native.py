"""C++ kernels for the CPU: built on first use with the system's compiler, see ``attention.cxx``.

``csrc/<name>.cpp`` registers its functions with ``TORCH_LIBRARY(lra_<name>, m)``; ``missing(name)`` builds it and makes
them callable as ``torch.ops.lra_<name>.<function>``.
"""

from functools import cache
from pathlib import Path

import torch

from attention import cxx

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")


@cache
def missing(name: str) -> str | None:
    """Build and load ``csrc/<name>.cpp``; why that is impossible here and what to install, or None when it worked."""
    return cxx.load(
        SOURCES / f"{name}.cpp",
        torch.ops.load_library,
        flags=FLAGS,
        against=_torch,
        version=torch.__version__,
        instead="the plain torch kernel runs instead",
    )


def _torch() -> list[str]:
    from torch.utils import cpp_extension

    arguments = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    arguments += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    arguments += [f"-L{path}" for path in cpp_extension.library_paths()]
    return [*arguments, "-ltorch", "-ltorch_cpu", "-lc10"]
