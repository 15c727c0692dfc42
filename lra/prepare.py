"""``lra data``: what is there, build it, prove it."""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

import lra.tasks
from lra.config import RunConfig, compose_run
from lra.data.arrays import FORMAT, MANIFEST, SPLITS
from lra.errors import UserError

LINE_EVERY_SECONDS = 10
"""Where stderr is no terminal, one line of progress in this interval replaces the bar."""
TASK_WIDTH = 12
LINE = f"{{:<{TASK_WIDTH}}}{{:>10}} {{:>10}} {{:>10}} {{:>9}}  {{}}"
"""Task, rows of each split, size, folder; that is last, as its name may be long."""


def main(arguments: list[str]) -> int:
    """Run ``lra data list|prepare|verify``."""
    parser = argparse.ArgumentParser(prog="lra data", description="Prepared data: list, build, prove.")
    parser.add_argument("action", choices=("list", "prepare", "verify"))
    parser.add_argument("task", nargs="?", help=f"one of {', '.join(lra.tasks.REGISTRY)}")
    parser.add_argument(
        "overrides", nargs="*", help="Hydra overrides, such as regime=short or task.seed=1; list: data_dir="
    )
    options = parser.parse_intermixed_args(arguments)
    words = [word for word in (options.task, *options.overrides) if word]
    tasks = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    for name in tasks:
        if name not in lra.tasks.REGISTRY:
            raise UserError(f"task={name} is unknown; choose {' | '.join(lra.tasks.REGISTRY)}")
    if options.action == "list":
        if unused := [word for word in overrides if word.split("=")[0] != "data_dir"]:
            raise UserError(
                f"{' '.join(unused)}: lra data list takes names of tasks and data_dir=FOLDER, as it shows all that is "
                f"there; leave it out"
            )
        return _list(tasks or list(lra.tasks.REGISTRY), overrides)
    if len(tasks) != 1:
        raise UserError(f"lra data {options.action}: name one task; choose {' | '.join(lra.tasks.REGISTRY)}")
    config = compose_run([f"task={tasks[0]}", *overrides])
    return _prepare(config) if options.action == "prepare" else _verify(config)


def _prepare(config: RunConfig) -> int:
    last = time.monotonic()
    with tqdm(unit="row", desc=f"{config.task.name}@{config.task.length}", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            nonlocal last
            bar.total = total
            bar.update(done - bar.n)
            if bar.disable and time.monotonic() - last > LINE_EVERY_SECONDS:
                last = time.monotonic()
                print(f"{config.task.name}: {done:,} of {total:,} rows", file=sys.stderr, flush=True)

        try:
            folder = lra.tasks.load(config.task.name).prepare(config.task, Path(config.data_dir), progress)
        except KeyboardInterrupt:
            bar.close()
            print("interrupted: nothing was left half-written; the same command starts again", file=sys.stderr)
            return 130
    print(f"{folder}: ready\n{_origin(config.task.name, json.loads((folder / MANIFEST).read_text()))}")
    return 0


def _verify(config: RunConfig) -> int:
    for fact in lra.tasks.load(config.task.name).verify(config.task, Path(config.data_dir)):
        print(fact)
    return 0


def _list(names: list[str], overrides: list[str]) -> int:
    data_dir = Path(compose_run(overrides).data_dir)
    print(f"in {data_dir}\n\n" + LINE.format("task", *SPLITS, "MiB", "prepared"))
    for name in names:
        found = sorted(path for path in (data_dir / name).glob("[!.]*") if path.is_dir())
        for folder in found:
            print(_prepared(name, folder))
        if not found:
            print(_unprepared(name, overrides))
    return 0


def _prepared(name: str, folder: Path) -> str:
    """Rows, size and origin of a prepared data set, on two lines."""
    size, rows, version = "?", ["?"] * len(SPLITS), None
    try:
        size = f"{sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 2**20:.1f}"
        if not (folder / MANIFEST).is_file():
            raise ValueError("no manifest")
        manifest = json.loads((folder / MANIFEST).read_text())
        rows = [f"{manifest['splits'][split]['rows']:,}" for split in SPLITS]
        origin = _origin(name, manifest)
        version = manifest["version"]
        if manifest["format"] != FORMAT:
            origin = f"of format {manifest['format']}, where this program reads {FORMAT}: delete it"
    except PermissionError as error:
        origin = f"cannot be read ({error.strerror}): fix its permissions"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        rows, origin = ["?"] * len(SPLITS), "damaged: delete it and prepare it again"
    if version not in (None, lra.tasks.load(name).VERSION):
        origin = f"of version {version}, which is no longer read: delete it"
    return LINE.format(name, *rows, size, folder.name) + f"\n{'':<{TASK_WIDTH}}{origin}"


def _origin(name: str, manifest: dict[str, Any]) -> str:
    """Where the rows are from, how near to the original they are, and which options took a part of them."""
    parameters, details = manifest["parameters"], manifest["details"]
    usual = lra.tasks.load(name).Config()
    options = {f"{split}_rows": parameters.get(f"{split}_rows") for split in SPLITS}
    asked = [f"task.{key}={rows}" for key, rows in options.items() if rows and rows != getattr(usual, key)]
    choice = "as many rows as" if parameters["source"] == "generated" else "a fixed choice of rows by"
    return "; ".join([details["source"], details["exact"], *([f"{choice} {', '.join(asked)}"] if asked else [])])


def _unprepared(name: str, overrides: list[str]) -> str:
    """The command that prepares the data set of a task, and what it needs that is not here."""
    try:
        config = compose_run([f"task={name}", *overrides])
        lacking = lra.tasks.load(name).lacking(config.task, Path(config.data_dir))
    except UserError as error:
        lacking = str(error)
    command = f"`{' '.join(['lra data prepare', name, *map(shlex.quote, overrides)])}`"
    needs = f"needs\n{'':<{TASK_WIDTH}}{lacking}" if lacking else "needs nothing that is not here"
    return f"{name:<{TASK_WIDTH}}not prepared; {command} {needs}"
