"""Runs of the ``matched`` protocol, each mixer with the learning rate that validation prefers: ``scripts/matched``."""

import argparse
import logging
from pathlib import Path

from lra import results
from lra.config import RunConfig, compose_run
from lra.errors import UserError
from lra.sweep import main as sweep
from lra.train import log_to_terminal

MIXERS = "softmax,flash,performer,linear,rwkv4,rwkv7,mamba"
TRIALS = "trials"
"""Folder of the trials below ``runs_dir``, so that the table holds the chosen runs only."""

log = logging.getLogger("lra.matched")


def main() -> int:
    """Try, choose, run; the exit code of the last sweep."""
    parser = argparse.ArgumentParser(prog="scripts/matched", description=__doc__)
    parser.add_argument("task", help="one of those in conf/experiment/matched")
    parser.add_argument("overrides", nargs="*", help="attention=..., seed=..., and overrides of lra train")
    options = parser.parse_args()
    log_to_terminal()
    given = dict(o.split("=", 1) for o in options.overrides if o.split("=")[0] in ("attention", "seed"))
    rest = [o for o in options.overrides if o.split("=")[0] not in ("attention", "seed")]
    mixers, seeds = given.get("attention", MIXERS).split(","), given.get("seed", "0").split(",")
    common = [f"experiment=matched/{options.task}", *rest]
    rates = compose_run(common).trainer.lr_tried
    if not rates:
        raise UserError("trainer.lr_tried is empty: name the rates to try, such as trainer.lr_tried=[0.001,0.003]")
    trials = Path(compose_run(common).runs_dir) / TRIALS
    listed = ",".join(map(str, rates))
    trial = [*common, f"seed={seeds[0]}", f"runs_dir={trials}"]
    sweep([*trial, f"attention={','.join(mixers)}", f"trainer.lr={listed}"])
    code = 0
    for mixer in mixers:
        scores = {
            rate: _validation(compose_run([*trial, f"attention={mixer}", f"trainer.lr={rate}"])) for rate in rates
        }
        if (best := choose(scores)) is None:
            log.error("%s: no rate gave a result; see %s", mixer, trials)
            code = 1
            continue
        shown = ", ".join(f"{rate:g}: {'none' if s is None else f'{100 * s:.2f} %'}" for rate, s in scores.items())
        log.info("%s: lr %g by validation (%s)", mixer, best, shown)
        code = max(code, sweep([*common, f"attention={mixer}", f"trainer.lr={best}", f"seed={','.join(seeds)}"]))
    return code


def choose(scores: dict[float, float | None]) -> float | None:
    """The rate of the highest validation accuracy, of equal ones the smallest; ``None`` if no run has any."""
    known = {rate: score for rate, score in scores.items() if score is not None}
    return min(known, key=lambda rate: (-known[rate], rate), default=None)


def _validation(config: RunConfig) -> float | None:
    try:
        return results.load(config.run_dir / results.RESULT_FILE).validation_accuracy
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    import sys

    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
