"""``lra presets``: the protocols in ``conf/experiment``, where they come from and what they cost here."""

import argparse

from lra.config import compose_run, conf_dir
from lra.cost import describe_cost
from lra.errors import UserError


def names() -> list[str]:
    """All presets as ``experiment=`` takes them."""
    folder = conf_dir() / "experiment"
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def notes(name: str) -> list[str]:
    """The comment at the head of a preset: source, what is kept, what is repaired."""
    lines = (conf_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()
    return [line.removeprefix("#").strip() for line in lines if line.startswith("#") and not line.startswith("# @")]


def main(arguments: list[str]) -> int:
    """Run ``lra presets``."""
    parser = argparse.ArgumentParser(
        prog="lra presets", description="Protocols for experiment=NAME: source, size, and with --cost their cost here."
    )
    parser.add_argument("names", nargs="*", help="presets, or the beginning of their names; all if none is given")
    parser.add_argument("--cost", action="store_true", help="time a few rows of each network on this machine")
    parser.add_argument("--attention", default="flash", help="backend whose cost is estimated (default: flash)")
    options = parser.parse_args(arguments)
    wanted = options.names or [""]
    chosen = [name for name in names() if any(name.startswith(prefix) for prefix in wanted)]
    if not chosen:
        raise UserError(f"there is no preset {' or '.join(wanted)}; choose {' | '.join(names())}")
    configs = {name: compose_run([f"experiment={name}", f"attention={options.attention}"]) for name in chosen}
    width = max(map(len, chosen))
    for name, config in configs.items():
        model, trainer = config.model, config.trainer
        print(
            f"{name:<{width}}  length {config.task.length:>5}  {model.num_layers} x {model.width:<3}  "
            f"{trainer.steps:>7,} steps of {trainer.batch_size:>3} rows  lr {trainer.lr:g} {trainer.schedule}"
        )
        if options.names:
            print("".join(f"    {line}\n" for line in notes(name)), end="")
    if options.cost:
        print(describe_cost(list(configs.values())))
    elif not options.names:
        print(
            "\n`lra presets NAME` tells the source of each and what was changed; --cost what it takes on this machine."
        )
    return 0
