"""What the samples of ``lra bench ops`` say: ratios with their spread, targets met or missed.

Everything is computed from the document that is also written as JSON; no number comes from elsewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lra.bench_measure import quartiles

EQUAL = 0.03
"""A kernel counts as slower than its plain twin when the upper quartile of the ratio is this far below 1."""
MOST_MEMORY = 0.25
"""Of performer-pytorch's peak, for FAVOR+: its features are never held over the whole length."""
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
    return [*_stated(document), *_memory(document), *_twins(document)]


def _stated(document: dict) -> Iterator[dict]:
    measured_ops = {result["op"] for result in document["results"]}
    for target in TARGETS:
        if target.dtype != document["dtype"] or target.op not in measured_ops:
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


def _memory(document: dict) -> Iterator[dict]:
    """FAVOR+ against its peer, where memory was measured; a peak is one number without a spread."""
    if not document["memory"]:
        return
    for result in document["results"]:
        if result["op"] != "favor_attention" or result["length"] < FROM_LENGTH:
            continue
        peaks = {case["name"]: case["peak_bytes"] for case in result["cases"]}
        own, peer = peaks.get(best(result)), peaks.get("performer-pytorch")
        share = spread([own / peer]) if own is not None and peer else None
        verdict = "not measured (a peak is missing)"
        if share:
            verdict = "met" if share.median <= MOST_MEMORY else "missed"
        yield {
            "op": result["op"],
            "target": f"at most {MOST_MEMORY:g} of performer-pytorch's memory",
            "length": result["length"],
            "ratio": share and vars(share),
            "verdict": verdict,
        }


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
