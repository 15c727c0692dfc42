"""The ``lra`` command. Each subcommand imports what it needs when it is called, so that help is instant."""

import os
import sys
from collections.abc import Callable

from lra.errors import UserError, describe_os

HELP = """\
usage: lra COMMAND [ARGUMENT ...]

  train   one run:        lra train task=listops attention=performer regime=short seed=0
  resume  go on with a run that did not end:  lra resume RUN_DIR
  sweep   many runs:      lra sweep task=listops attention=flash,performer,rwkv4 seed=0,1,2
  presets protocols with their sources:  lra presets [NAME] [--cost]
  table   compare runs:   lra table [--format md|csv|latex|html]
  bench   time the ops:   lra bench ops [--lengths 512,2048] [--ops wkv4,...] [--out PREFIX]
  data    prepare data:   lra data list | prepare TASK | verify TASK [task.KEY=VALUE regime=...]
  doctor  what this machine has: devices, compilers, kernels, data, W&B

`lra COMMAND --help` tells more. Settings are Hydra overrides; conf/ holds their choices.
"""


def _train(arguments: list[str]) -> int:
    from lra.train import main

    sys.argv = ["lra train", *arguments]
    return main()


def _resume(arguments: list[str]) -> int:
    from lra.resume import main

    return main(arguments)


def _sweep(arguments: list[str]) -> int:
    from lra.sweep import main

    return main(arguments)


def _presets(arguments: list[str]) -> int:
    from lra.presets import main

    return main(arguments)


def _table(arguments: list[str]) -> int:
    from lra.table import main

    return main(arguments)


def _data(arguments: list[str]) -> int:
    from lra.prepare import main

    return main(arguments)


def _bench(arguments: list[str]) -> int:
    from lra.bench import main

    return main(arguments)


def _doctor(arguments: list[str]) -> int:
    from lra.doctor import main

    return main(arguments)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "resume": _resume,
    "sweep": _sweep,
    "presets": _presets,
    "table": _table,
    "data": _data,
    "bench": _bench,
    "doctor": _doctor,
}


def main() -> int:
    """Dispatch; a ``UserError`` becomes one line and exit code 2."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        from lra import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        from lra.suggest import nearest

        choice = " | ".join(COMMANDS)
        print(f"error: there is no command {name!r}; choose {choice}{nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        code = COMMANDS[name](rest)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader, such as `head`, has seen enough; the interpreter must not flush into the closed pipe again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {describe_os(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
