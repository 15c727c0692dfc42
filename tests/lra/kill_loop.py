"""Run a training again and again and kill it, each time at a random moment, until it has ended by itself.

``python -m tests.lra.kill_loop SEED KILLS OVERRIDE ...`` prints how often it was killed, and how often while a
checkpoint was being written. The imports are shared by all attempts: each is a fork, killed with SIGKILL.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from lra.config import compose_run
from lra.train import log_to_terminal, run


def attempt(overrides: list[str]) -> int:
    """Start a child that runs to its end or its death."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = 0 if run(compose_run(overrides)).status in ("ok", "stuck") else 1
    finally:
        os._exit(code)


def main(seed: int, kills: int, overrides: list[str]) -> None:
    """See the module."""
    torch.set_num_threads(1)
    log_to_terminal()
    folder = compose_run(overrides).run_dir / "checkpoints"
    rng = random.Random(seed)
    killed = while_writing = 0
    while True:
        child = attempt(overrides)
        if killed < kills:
            deadline = time.monotonic() + rng.uniform(0.05, 1.5)
            wait_for_write = killed % 4 == 0
            while time.monotonic() < deadline or wait_for_write:
                if wait_for_write and writing(folder):
                    break
                if os.waitpid(child, os.WNOHANG) != (0, 0):
                    raise SystemExit("the run ended before it was killed often enough; give it more steps")
                time.sleep(0.001)
            while_writing += writing(folder)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            killed += 1
            continue
        _, status = os.waitpid(child, 0)
        print(killed, while_writing)
        raise SystemExit(os.waitstatus_to_exitcode(status))


def writing(folder: Path) -> bool:
    """Whether a temporary file of a checkpoint is there."""
    return any(folder.glob(".*.pt.*"))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
