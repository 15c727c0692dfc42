"""Images per second of the Pathfinder generator: compiled on one and on all cores, beside its plain Python twin."""

import argparse
import time

from lra.tasks.pathfinder_generator import Parameters, available, generate, parameters

SIZES = (16, 32, 64, 128, 256)
SECONDS = 3.0
"""What one figure takes at least."""


def rate(settings: Parameters, kernel: str, workers: int, seconds: float) -> tuple[float, float]:
    """Images a second of the wall clock and of the CPUs over calls of growing size, without tables and compilation."""
    generate(settings, 1, 0, 1, workers=workers, kernel=kernel)
    done, count = 0, 1
    start, cpu = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - start) < seconds:
        generate(settings, 1, done, count, workers=workers, kernel=kernel)
        done += count
        # so large that starting threads does not count, so small that the last call does not run on for long
        count = min(2 * count, 1024)
    return done / passed, done / (time.process_time() - cpu)


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
    runs = [("python", 1)] + [("cpp", n) for n in options.workers if not missing]
    print("Pathfinder images a second; a CPU second is free of what else runs on the machine\n")
    print("| size | kernel | threads | of the clock | of the CPUs | over Python's |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for size in options.sizes:
        plain = None
        for kernel, workers in runs:
            clock, cpu = rate(parameters(size), kernel, workers, options.seconds)
            plain = plain or cpu
            print(f"| {size} | {kernel} | {workers} | {clock:,.1f} | {cpu:,.1f} | {cpu / plain:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
