"""``lra resume``: go on with a run that did not end."""

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path

import lra.tasks
from lra import checkpoint, results
from lra.checkpoint import Checkpoints
from lra.config import RunConfig, from_yaml
from lra.errors import UserError
from lra.meter import tune_allocator
from lra.paths import absolute
from lra.run_dir import CHECKPOINTS, fresh_dir, only_process
from lra.tracking import METRICS_FILE
from lra.train import EXIT_CODES, log_to_terminal, run
from models import build_model

FREE = ("tracking", "data_dir", "runs_dir", "resume")
"""Settings that change no number and may differ."""


def main(arguments: list[str]) -> int:
    """Run ``lra resume``; the exit code is that of ``lra train``."""
    parser = argparse.ArgumentParser(
        prog="lra resume",
        description="Go on with an interrupted or killed run from its last checkpoint.",
        epilog="Example: lra resume results/runs/listops-2000-flash-s0-0123abcd",
    )
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("overrides", nargs="*", help="key=value, such as data_dir=... or tracking.mode=offline")
    parser.add_argument(
        "--force", action="store_true", help="accept settings that change numbers: a new run continues from this one"
    )
    options = parser.parse_intermixed_args(arguments)
    log_to_terminal()
    tune_allocator()
    folder = absolute(options.run_dir, "RUN_DIR")
    before, after = from_yaml(folder / "config.yaml", [*options.overrides, f"runs_dir={folder.parent}"])
    if before.run_id != folder.name:
        raise UserError(
            f"{folder}: its config.yaml belongs to a run called {before.run_id}; restore the name of the folder, "
            f"or its config.yaml"
        )
    changed = differences(before, after)
    if changed and not options.force:
        raise UserError(
            f"{folder}: {'; '.join(changed)}: a run cannot change its settings on the way; leave them out, start a "
            f"new run with `lra train`, or add --force to continue as a new run that says where it comes from"
        )
    if not any((folder / CHECKPOINTS).glob("step-*.pt")):
        raise UserError(f"{folder}: it has no checkpoint to go on from; start it again with `lra train`")
    if changed:
        _fork(folder, before, after, changed)
    elif _status(folder) in results.SCORED:
        print(f"{folder}: finished already, nothing to do")
        return 0
    after.resume = "auto"
    return EXIT_CODES[run(after).status]


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """The settings that differ and change numbers, as ``key: old -> new``."""
    old, new = _flat(asdict(before)), _flat(asdict(after))
    keys = [key for key in old | new if old.get(key) != new.get(key) and key.split(".")[0] not in FREE]
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys]


def _flat(values: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _status(folder: Path) -> str | None:
    try:
        return results.load(folder / results.RESULT_FILE).status
    except (OSError, ValueError):
        return None


def _fork(folder: Path, before: RunConfig, after: RunConfig, changed: list[str]) -> None:
    """Give ``after`` a directory of its own that begins with the checkpoint and the metrics of ``folder``."""
    state = Checkpoints(folder / CHECKPOINTS, before.fingerprint()).latest()
    state.pop("format")
    state["config_hash"] = after.fingerprint()
    origin = f"continued from {folder.name} at step {state['step']} with {'; '.join(changed)}"
    state["notes"] = [*state["notes"], origin]
    _check_weights(after, state, changed)
    with only_process(after):
        target = fresh_dir(after)
        try:
            (target / CHECKPOINTS).mkdir()
            for best in (folder / CHECKPOINTS).glob("best-*.pt"):
                shutil.copy2(best, target / CHECKPOINTS / best.name)
            if (folder / METRICS_FILE).exists():
                shutil.copy2(folder / METRICS_FILE, target / METRICS_FILE)
            path = target / CHECKPOINTS / f"step-{state['step']:08d}.pt"
            checkpoint.save(path, {"format": checkpoint.FORMAT, **state})
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise


def _check_weights(after: RunConfig, state: dict, changed: list[str]) -> None:
    """Raise ``UserError`` if the data of ``after`` is not there or the weights do not fit its network."""
    info, _ = lra.tasks.load(after.task.name).load(after.task, Path(after.data_dir))
    try:
        build_model(after.model, after.attention, **info.network()).load_state_dict(state["model"])
    except RuntimeError:
        raise UserError(
            f"{'; '.join(changed)}: the weights of the checkpoint do not fit that network; start a run with `lra train`"
        ) from None
