"""Images per second of the Pathfinder generator: compiled on one and on all cores, beside its plain Python twin."""

import argparse
import time

from lra.tasks.pathfinder_generator import Parameters, available, generate, parameters

SIZES = (16, 32, 64, 128, 256)
SECONDS = 3.0
"""What one figure takes at least."""


def rate(settings: Parameters, kernel: str, workers: int, seconds: float) -> float:
    """Images a second of the wall clock over calls of growing size, tables and compilation excluded."""
    generate(settings, 1, 0, 1, workers=workers, kernel=kernel)
    done, count, start = 0, 1, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        generate(settings, 1, done, count, workers=workers, kernel=kernel)
        done += count
        # so large that starting threads does not count, so small that the last call does not run on for long
        count = min(2 * count, 1024)
    return done / passed


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=[32, 64, 128])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of threads of the C++ kernel")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at least, for each figure")
    options = parser.parse_args()
    missing = available()["cpp"]
    if missing:
        print(f"no C++ kernel here: {missing}")
    threads = [] if missing else options.workers
    print("| size | " + "".join(f"C++, {n} thread{'s' * (n > 1)} | " for n in threads) + "Python | C++ / Python |")
    print("| ---: |" + " ---: |" * (len(threads) + 2))
    for size in options.sizes:
        settings = parameters(size)
        compiled = [rate(settings, "cpp", n, options.seconds) for n in threads]
        plain = rate(settings, "python", 1, options.seconds)
        ratio = f"{compiled[0] / plain:,.0f}" if compiled else "-"
        print(f"| {size} | " + "".join(f"{r:,.0f} | " for r in compiled) + f"{plain:,.2f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
