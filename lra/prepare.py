"""``lra data``: what is there, build it, prove it."""

import argparse
from pathlib import Path

from tqdm import tqdm

import lra.tasks
from lra.config import RunConfig, compose_run
from lra.errors import UserError


def main(arguments: list[str]) -> int:
    """Run ``lra data list|prepare|verify``."""
    parser = argparse.ArgumentParser(prog="lra data", description="Prepared data: list, build, prove.")
    parser.add_argument("action", choices=("list", "prepare", "verify"))
    parser.add_argument("task", nargs="?", help=f"one of {', '.join(lra.tasks.REGISTRY)}")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, such as regime=short or task.seed=1")
    options = parser.parse_intermixed_args(arguments)
    words = [word for word in (options.task, *options.overrides) if word]
    tasks = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    for name in tasks:
        if name not in lra.tasks.REGISTRY:
            raise UserError(f"task={name} is unknown; choose {' | '.join(lra.tasks.REGISTRY)}")
    if options.action == "list":
        return _list(tasks or list(lra.tasks.REGISTRY), overrides)
    if len(tasks) != 1:
        raise UserError(f"lra data {options.action}: name one task; choose {' | '.join(lra.tasks.REGISTRY)}")
    config = compose_run([f"task={tasks[0]}", *overrides])
    return _prepare(config) if options.action == "prepare" else _verify(config)


def _prepare(config: RunConfig) -> int:
    with tqdm(unit="row", desc=f"{config.task.name}@{config.task.length}", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        folder = lra.tasks.load(config.task.name).prepare(config.task, Path(config.data_dir), progress)
    print(f"{folder}: ready")
    return 0


def _verify(config: RunConfig) -> int:
    for fact in lra.tasks.load(config.task.name).verify(config.task, Path(config.data_dir)):
        print(fact)
    return 0


def _list(names: list[str], overrides: list[str]) -> int:
    for name in names:
        config = compose_run([f"task={name}", *overrides])
        parent = lra.tasks.load(name).folder(config.task, Path(config.data_dir)).parent
        found = sorted(p.parent for p in parent.glob("[!.]*/manifest.json")) if parent.is_dir() else []
        for folder in found:
            size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
            print(f"{name:<12} {folder}  {size / 2**20:.1f} MiB")
        if not found:
            print(f"{name:<12} not prepared; run: lra data prepare {name}")
    return 0
