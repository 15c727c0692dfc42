"""What one rank of a test run does; start it with ``torchrun --nproc-per-node=2 -m tests.lra.rank_check OUT ...``.

Each line of the file OVERRIDES is a run; the first rank writes ``name status`` of each to OUT.
"""

import sys
from pathlib import Path

import torch

from lra.config import compose_run
from lra.distributed import ranks
from lra.train import log_to_terminal, run

if __name__ == "__main__":
    torch.set_num_threads(1)
    log_to_terminal()
    out = []
    for line in Path(sys.argv[2]).read_text().splitlines():
        row = run(compose_run(line.split()))
        out.append(f"{row.run_id} {row.status}\n")
    if ranks().first:
        Path(sys.argv[1]).write_text("".join(out))
