"""Ranks of one training run under ``torchrun``; a single process is the case of one rank.

The batch of a step is the same for any number of ranks: it is cut among them, and so are the rows of an evaluation.
"""

import atexit
import os
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process writes: run directory, tracker, checkpoints, terminal."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over the ranks, in place."""
        if self.world > 1:
            distributed.all_reduce(tensor)
        return tensor

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set in any rank; all ranks get the same answer."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=device)) > 0)

    def of_first(self, number: float, device: torch.device) -> float:
        """The number that the first rank has."""
        if self.world == 1:
            return number
        tensor = torch.tensor(number, dtype=torch.float64, device=device)
        distributed.broadcast(tensor, 0)
        return tensor.item()

    def gather(self, value: object) -> list:
        """The values of all ranks in order, on the first; elsewhere only this rank's."""
        if self.world == 1:
            return [value]
        found = [None] * self.world if self.first else None
        distributed.gather_object(value, found)
        return found or [value]

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            distributed.barrier()


ALONE = Ranks()


def ranks() -> Ranks:
    """As ``torchrun`` set them in the environment, else one rank."""
    return Ranks(*(int(os.environ.get(k, d)) for k, d in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))))


def join(device: str) -> Ranks:
    """Join the ranks of ``torchrun``, NCCL between GPUs and gloo between CPU processes; alone otherwise.

    Once for all runs of a process: under ``torchrun`` a group cannot be left and founded anew.
    """
    mine = ranks()
    if mine.world > 1 and not distributed.is_initialized():
        if device.startswith("cuda"):
            torch.cuda.set_device(mine.local_rank)
        distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        atexit.register(distributed.destroy_process_group)
    return mine
