"""What the samples of ``lra bench ops`` say: ratios with their spread, targets met or missed, a markdown page.

Everything here is computed from the document that is also written as JSON; no number comes from elsewhere.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from lra.bench_measure import quartiles

EQUAL = 0.03
"""A kernel counts as slower than its plain twin when all quartiles of the ratio are this far below 1."""
TWIN_LENGTHS = range(128, 16385)
FROM_LENGTH = 512
"""Targets for any length hold from here: below, starting an op costs more than what it does."""


@dataclass(frozen=True)
class Spread:
    """Quartiles of ``count`` numbers."""

    low: float
    median: float
    high: float
    count: int


def spread(values: list[float]) -> Spread | None:
    return Spread(*quartiles(values), len(values)) if values else None


def ratio(slow: list[float], fast: list[float]) -> Spread | None:
    """How many times faster ``fast`` is: quartiles of the ratios within a round, so that drift cancels."""
    return spread([a / b for a, b in zip(slow, fast)])


def over_bandwidth(result: dict, samples: list[float]) -> Spread | None:
    """Times the time in which the compulsory bytes are copied, measured in the same round."""
    rates = result["copy_bytes_per_second"]
    return spread([seconds * rate / result["compulsory_bytes"] for seconds, rate in zip(samples, rates)])


@dataclass(frozen=True)
class Target:
    """A bound on the ratio of two cases: ``slow`` over ``fast`` at least, or over the bandwidth bound at most."""

    op: str
    text: str
    bound: float
    slow: str
    """Name of a case, ``best`` for the kernel that ``auto`` takes first, ``plain`` for the plain twin."""
    fast: str
    """The same, or ``bandwidth``."""
    lengths: tuple[int, ...] = ()
    """Lengths that it is stated for; empty for any from ``FROM_LENGTH``."""
    at_most: bool = False
    dtype: str = "fp32"


TARGETS = (
    Target("wkv4", "{} x as fast as transformers", 180, "transformers", "best", (2048,)),
    Target("wkv4", "{} x as fast as kernel torch", 6, "torch", "best", (2048, 8192)),
    Target("wkv4", "within {} x of the bandwidth bound", 2.5, "best", "bandwidth", at_most=True),
    Target("selective_scan", "{} x as fast as mambapy", 10, "mambapy", "best", (2048,)),
    Target("favor_attention", "{} x as fast as performer-pytorch", 2, "performer-pytorch", "best"),
    Target("favor_attention", "{} x as fast as performer-pytorch", 3, "performer-pytorch", "best", dtype="bf16"),
    Target("linear_attention", "within {} x of the bandwidth bound", 2, "best", "bandwidth", at_most=True),
    Target("softmax_padded", "within {} x of unpadded rows", 1.1, "best", "unpadded rows", at_most=True),
    Target("softmax_padded", "{} x as fast as SDPA, L x L mask", 1.8, "SDPA, L x L mask", "best"),
    Target("wkv7", "{} x as fast as its reference", 20, "reference", "best", (2048,)),
)


def targets(document: dict) -> list[dict]:
    """Every target at every length of the run: the measured ratio, and met, missed or not measured."""
    return [*_stated(document), *_twins(document)]


def _stated(document: dict) -> Iterator[dict]:
    for target in TARGETS:
        if target.dtype != document["dtype"]:
            continue
        label = {"op": target.op, "target": target.text.format(f"{target.bound:g}")}
        results = [r for r in document["results"] if r["op"] == target.op]
        results = [r for r in results if r["length"] in (target.lengths or range(FROM_LENGTH, r["length"] + 1))]
        lengths = [r["length"] for r in results]
        for length in target.lengths:
            if length not in lengths:
                yield {**label, "length": length, "ratio": None, "verdict": "not measured (length not run)"}
        if not results and not target.lengths:
            yield {**label, "length": None, "ratio": None, "verdict": "not measured (length not run)"}
        for result in results:
            measured, why = _measured(document, result, target)
            verdict = f"not measured ({why})"
            if measured:
                met = measured.median <= target.bound if target.at_most else measured.median >= target.bound
                verdict = "met" if met else "missed"
            yield {**label, "length": result["length"], "ratio": measured and vars(measured), "verdict": verdict}


def _measured(document: dict, result: dict, target: Target) -> tuple[Spread | None, str]:
    """The ratio of a target, or None and why."""
    if document["passes"] != "train" or document["device"] != "cpu":
        return None, "stated for CPU training"
    samples = {case["name"]: case["samples"] for case in result["cases"]}
    names = {"best": best(result), "plain": result["plain"]}
    slow, fast = (names.get(name, name) for name in (target.slow, target.fast))
    if slow == fast:
        return None, f"{slow} is all there is"
    for name in (slow, fast):
        if name != "bandwidth" and not samples.get(name):
            return None, f"no {name or 'kernel'}"
    if target.fast == "bandwidth":
        return over_bandwidth(result, samples[slow]), ""
    return ratio(samples[slow], samples[fast]), ""


def best(result: dict) -> str | None:
    """The kernel that ``auto`` takes: the first that ran."""
    return next((case["name"] for case in result["cases"] if case["kind"] == "kernel" and case["samples"]), None)


def _twins(document: dict) -> Iterator[dict]:
    """No kernel that is there for its speed may be slower than the plain form of its op."""
    for result in document["results"]:
        if result["length"] not in TWIN_LENGTHS or result["op"] == "softmax_padded":
            continue
        plain = result["plain"]
        samples = {case["name"]: case["samples"] for case in result["cases"]}
        name = best(result)
        measured = ratio(samples[plain], samples[name]) if name and name != plain else None
        verdict = f"not measured ({f'{plain} is all there is' if samples[plain] else f'no {plain}'})"
        if measured:
            verdict = "missed" if measured.high < 1 - EQUAL else "met"
        text = f"{name} no slower than {plain}" if name and name != plain else f"no kernel slower than {plain}"
        yield {
            "op": result["op"],
            "target": text,
            "length": result["length"],
            "ratio": measured and vars(measured),
            "verdict": verdict,
        }


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A markdown table whose source is aligned too; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: tuple[str, ...]) -> str:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (w - 1) + ":") if i else "-" * w for i, w in enumerate(widths)]
    return [line(header), line(tuple(rule)), *map(line, rows)]


def number(value: float) -> str:
    """Three digits, never an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}" if abs(value) >= 0.01 else f"{value:.4f}"


def _range(s: Spread | None) -> str:
    return "" if s is None or s.count < 2 else f"{number(s.low)} - {number(s.high)}"


def section(document: dict, result: dict) -> list[str]:
    """One op at one length."""
    plain = next(case for case in result["cases"] if case["name"] == result["plain"])
    bandwidth = quartiles(result["copy_bytes_per_second"])[1]
    size = result["compulsory_bytes"]
    bounds = f"Compulsory traffic {size / 1e6:.1f} MB: {1e3 * size / bandwidth:.2f} ms at {bandwidth / 1e9:.1f} GB/s"
    peak = document["matmul_flops_per_second"]["median"]
    if result["flops"]:
        seconds = result["flops"] / peak
        bounds += f"; {result['flops'] / 1e9:.2f} GFLOP: {1e3 * seconds:.2f} ms at {peak / 1e9:.0f} GFLOP/s"
    header = ["case", "ms", "quartiles", "rounds", "speed-up", "quartiles", "x bytes", "x FLOP", "error"]
    if document["memory"]:
        header.append("MiB")
    rows = []
    for case in result["cases"]:
        if not case["samples"]:
            continue
        milliseconds = spread([1e3 * s for s in case["samples"]])
        faster = ratio(plain["samples"], case["samples"])
        cells = [
            case["name"],
            number(milliseconds.median),
            _range(milliseconds),
            str(milliseconds.count),
            number(faster.median) if faster else "",
            _range(faster),
            number(over_bandwidth(result, case["samples"]).median),
            number(milliseconds.median / 1e3 / (result["flops"] / peak)) if result["flops"] else "",
            "" if case["difference"] is None else f"{case['difference']:.0e}",
        ]
        if document["memory"]:
            cells.append("" if case["peak_bytes"] is None else number(case["peak_bytes"] / 2**20))
        rows.append(tuple(cells))
    lines = [f"### {result['op']}, n = {result['length']}", "", *_wrap(bounds + "."), ""]
    if result["remark"]:
        lines[2:2] = [f"{result['remark']}."]
    lines += [*table(tuple(header), rows), "", f"Speed-up is over `{result['plain']}`.", ""]
    return lines + _notes(result)


def _notes(result: dict) -> list[str]:
    notes = [f"{case['name']}: {case['note']}" for case in result["cases"] if case["note"]]
    notes += [f"{entry['name']}: {entry['reason']}" for entry in result["missing"]]
    lines = [line for note in notes for line in _wrap(note, "- ", "  ")]
    return [*lines, ""] if lines else []


def _wrap(text: str, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=later)


METHOD = (
    "Each round calls every case once in turn; a sample repeats a fast call for about 10 ms. Warm-up calls are "
    "dropped. ms is the median with its quartiles. Speed-up is the median, with quartiles, of the ratios within a "
    "round, so that drift of the machine cancels. x bytes: times the time to copy the compulsory bytes in the same "
    "round; x FLOP: times the time of the op's products at the matmul peak. error: largest difference from the "
    "reference form, outputs and gradients, as a share of the largest value."
)


def markdown(document: dict) -> str:
    """The page: how it was measured, a table per op and length, the targets."""
    d = document
    packages = ", ".join(f"{name} {version or 'absent'}" for name, version in d["packages"].items())
    facts = (
        f"{d['device_name']}. Date {d['date']}, commit {d['git']['commit']}"
        f"{' with local changes' if d['git']['dirty'] else ''}. {packages}. Allocator: {d['allocator']}."
    )
    sizes = f"B = {d['batch']}, H = {d['heads']}, E = {d['head_width']}, {d['dtype']}, {PASSES[d['passes']]}."
    lines = ["# Speed of the attention ops", "", *_wrap(facts), "", *_wrap(f"{sizes} {METHOD}"), ""]
    if d["memory"]:
        lines += [*_wrap(MEMORY), ""]
    for result in d["results"]:
        lines += section(d, result)
    lines += ["## Targets", ""]
    rows = []
    for entry in d["targets"]:
        measured = entry["ratio"]
        value = number(measured["median"]) if measured else ""
        length = "" if entry["length"] is None else str(entry["length"])
        rows.append((f"{entry['op']}: {entry['target']}", length, value, entry["verdict"]))
    return "\n".join([*lines, *table(("target", "n", "ratio", "verdict"), rows)]) + "\n"


PASSES = {"train": "forward and backward", "forward": "forward only"}
MEMORY = (
    "MiB: peak memory of one call above its inputs, each in a fresh process with the default allocator; "
    "on the CPU growth of the resident set."
)
