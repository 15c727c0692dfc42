"""The markdown page of ``lra bench ops``, made from the document that is also written as JSON."""

import textwrap

from lra.bench_measure import quartiles
from lra.bench_targets import EQUAL, Spread, over_bandwidth, ratio, spread

METHOD = (
    "Each round calls every case once in turn; a sample repeats a fast call for about 10 ms. Warm-up calls are "
    "dropped. ms is the median with its quartiles. Speed-up is the median, with quartiles, of the ratios within a "
    "round, so that drift of the machine cancels. x bytes: times the time to copy the compulsory bytes in the same "
    "round; x FLOP: times the time of the op's products at the matmul peak. error: largest difference from the "
    "reference form, outputs and gradients, as a share of the largest value."
)
JUDGED = (
    "Met or missed is the median ratio against the bound. A kernel is slower than the plain form of its op only if "
    f"the upper quartile of the ratio is below {1 - EQUAL:g}."
)
PASSES = {"train": "forward and backward", "forward": "forward only"}
MEMORY = (
    "MiB: peak memory of one call above its inputs, each in a fresh process with the default allocator; "
    "on the CPU growth of the resident set."
)


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A markdown table whose source is aligned too; the first column is text, the others are numbers."""
    widths = [max(3, *(len(row[i]) for row in [header, *rows])) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (w - 1) + ":") if i else "-" * w for i, w in enumerate(widths)]
    return [line(header), line(rule), *map(line, rows)]


def number(value: float) -> str:
    """Three digits, never an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}" if abs(value) >= 0.01 else f"{value:.4f}"


def _range(s: Spread | None) -> str:
    return "" if s is None or s.count < 2 else f"{number(s.low)}-{number(s.high)}"


def section(document: dict, result: dict) -> list[str]:
    """One op at one length."""
    plain = next(case["samples"] for case in result["cases"] if case["name"] == result["plain"])
    bandwidth = quartiles(result["copy_bytes_per_second"])[1]
    size = result["compulsory_bytes"]
    bounds = f"Compulsory traffic {size / 1e6:.1f} MB: {1e3 * size / bandwidth:.2f} ms at {bandwidth / 1e9:.1f} GB/s"
    if result["flops"]:
        peak = document["matmul_flops_per_second"]["median"]
        seconds = result["flops"] / peak
        bounds += f"; {result['flops'] / 1e9:.2f} GFLOP: {1e3 * seconds:.2f} ms at {peak / 1e9:.0f} GFLOP/s"
    header = ["case", "ms", "quartiles", "runs", "speed-up", "quartiles", "x bytes", "x FLOP", "error"]
    if document["memory"]:
        header.append("MiB")
    rows = [_row(document, result, case, plain) for case in result["cases"] if case["samples"]]
    lines = [f"### {result['op']}, n = {result['length']}", "", *_wrap(bounds + "."), ""]
    if result["remark"]:
        lines[2:2] = [f"{result['remark']}."]
    lines += [*table(header, rows), "", f"Speed-up is over `{result['plain']}`.", ""]
    return lines + _notes(result)


def _row(document: dict, result: dict, case: dict, plain: list[float]) -> list[str]:
    """What one case took, against the plain case and against what the machine can move and multiply."""
    seconds = spread(case["samples"])
    faster = ratio(plain, case["samples"])
    cells = [
        case["name"],
        number(1e3 * seconds.median),
        _range(spread([1e3 * s for s in case["samples"]])),
        str(seconds.count),
        number(faster.median) if faster else "",
        _range(faster),
        number(over_bandwidth(result, case["samples"]).median),
        "",
        "" if case["difference"] is None else f"{case['difference']:.0e}",
    ]
    if result["flops"]:
        cells[7] = number(seconds.median * document["matmul_flops_per_second"]["median"] / result["flops"])
    if document["memory"]:
        cells.append("" if case["peak_bytes"] is None else number(case["peak_bytes"] / 2**20))
    return cells


def _notes(result: dict) -> list[str]:
    notes = [f"{case['name']}: {case['note']}" for case in result["cases"] if case["note"]]
    notes += [f"{entry['name']}: {entry['reason']}" for entry in result["missing"]]
    lines = [line for note in notes for line in _wrap(note, "- ", "  ")]
    return [*lines, ""] if lines else []


def _wrap(text: str, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=later)


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
    lines += ["## Targets", "", *_wrap(JUDGED), ""]
    rows = []
    for entry in d["targets"]:
        measured = entry["ratio"]
        value = number(measured["median"]) if measured else ""
        length = "" if entry["length"] is None else str(entry["length"])
        rows.append([f"{entry['op']}: {entry['target']}", length, value, entry["verdict"]])
    return "\n".join([*lines, *table(["target", "n", "ratio", "verdict"], rows)]) + "\n"
