"""Model weights on disk."""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from lra.errors import UserError


def save(path: Path, model: nn.Module, *, step: int) -> None:
    """Write the weights so that ``path`` always holds a whole checkpoint, the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save({"step": step, "model": model.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path, model: nn.Module) -> int:
    """Load the weights into ``model`` and return their step; nothing but tensors is ever unpickled."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        return int(state["step"])
    except FileNotFoundError:
        raise UserError(f"{path}: there is no checkpoint; train first") from None
    except Exception as error:
        # torch raises a different type for every way in which a file can be broken
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a checkpoint of this model ({reason}); delete it and train again") from None
