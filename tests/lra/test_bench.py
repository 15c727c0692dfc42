"""The speed benchmark: what it makes of known times, what it refuses, and one tiny real run."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from attention import kernels
from lra import bench, bench_cases, bench_measure, bench_memory, bench_peers, bench_report, bench_targets, cli
from lra.bench_workload import Case, Setting, Workload, parse_setting
from lra.errors import UserError
from lra.meter import timed

CPU = torch.device("cpu")
SETTING = Setting(1, 1, 4, 8, "train", torch.float32, CPU)


class Clock:
    """Replaces the timer: a case tells how long it took by adding to ``now``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def timed(self, device: torch.device, run) -> float:
        start = self.now
        run()
        return self.now - start

    def case(self, name: str, seconds, value: float = 1.0, **options) -> Case:
        """A case whose calls take ``seconds`` in turn, the last for ever."""
        steps = list(seconds)

        def run():
            self.now += steps.pop(0) if len(steps) > 1 else steps[0]
            self.order.append(name)
            return (torch.tensor([value]),)

        return Case(name, options.pop("kind", "kernel"), run, [], [], train=False, **options)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bench_measure, "timed", clock.timed)
    return clock


def measure(monkeypatch, cases: list[Case], rounds: int = 3, probe: list[Case] | None = None) -> dict:
    """The result of fake cases; the copy runs at 100 bytes per second and 1000 bytes are compulsory."""

    def build(setting: Setting) -> Workload:
        chosen = cases if setting.length == SETTING.length or probe is None else probe
        return Workload("fake", chosen, "plain", bytes=1000)

    monkeypatch.setitem(bench_cases.BUILDERS, "fake", build)
    return bench_measure.measure("fake", SETTING, rounds, SimpleNamespace(bytes_per_second=lambda: 100.0))


def by_name(result: dict) -> dict[str, dict]:
    return {case["name"]: case for case in result["cases"]}


def test_samples_ratios_and_spread_by_hand(monkeypatch, clock):
    # per case: probe, two warm-up calls, three rounds; the machine halves its speed in the last round
    result = measure(
        monkeypatch,
        [
            clock.case("fast", [0.5, 0.5, 0.5, 0.1, 0.1, 0.2]),
            clock.case("plain", [0.5, 0.5, 0.5, 0.3, 0.4, 0.6]),
        ],
    )
    cases = by_name(result)
    assert cases["fast"]["samples"] == pytest.approx([0.1, 0.1, 0.2])
    assert cases["plain"]["samples"] == pytest.approx([0.3, 0.4, 0.6])
    assert cases["fast"]["warmup_calls"] == 2
    assert clock.order[-6:] == ["fast", "plain"] * 3
    faster = bench_targets.ratio(cases["plain"]["samples"], cases["fast"]["samples"])
    # 3, 4, 3: quartiles of three numbers are the middles of the gaps
    assert (faster.low, faster.median, faster.high, faster.count) == pytest.approx((3.0, 3.0, 3.5, 3))
    # 1000 bytes at 100 B/s take 10 s
    assert bench_targets.over_bandwidth(result, cases["plain"]["samples"]).median == pytest.approx(0.04)


def test_fast_calls_are_repeated_within_a_sample(monkeypatch, clock):
    cases = by_name(measure(monkeypatch, [clock.case("plain", [0.001])]))
    assert cases["plain"]["calls_per_sample"] == 10
    assert cases["plain"]["samples"] == pytest.approx([0.001] * 3)


def test_a_slow_case_gets_fewer_rounds(monkeypatch, clock):
    result = measure(monkeypatch, [clock.case("plain", [0.1]), clock.case("slow", [3.0])], rounds=5)
    cases = by_name(result)
    assert len(cases["plain"]["samples"]) == 5
    assert cases["slow"]["samples"] == pytest.approx([3.0, 3.0])
    assert "budget" in cases["slow"]["note"]


@pytest.mark.parametrize(
    ("options", "seconds", "note"),
    [({"growth": 2}, 2.0, "about 32 s a call"), ({"scratch": 9 << 30}, 0.1, "about 9 GiB")],
)
def test_what_is_too_slow_or_too_large_is_skipped(monkeypatch, clock, options, seconds, note):
    big = clock.case("big", [0.1], **options)
    probe = [clock.case("plain", [0.1]), clock.case("big", [seconds], **options)]
    case = by_name(measure(monkeypatch, [clock.case("plain", [0.1]), big], probe=probe))["big"]
    assert case["samples"] == []
    assert note in case["note"]


def test_a_first_call_that_compiles_does_not_count_as_slow(monkeypatch, clock):
    probe = [clock.case("plain", [40.0, 0.1])]
    assert by_name(measure(monkeypatch, [clock.case("plain", [0.1])], probe=probe))["plain"]["samples"]


@pytest.mark.parametrize("wrong", [1.1, float("nan"), float("inf")])
def test_a_kernel_that_disagrees_is_an_error(monkeypatch, clock, wrong):
    with pytest.raises(UserError, match="broken differs from plain"):
        measure(monkeypatch, [clock.case("plain", [0.1]), clock.case("broken", [0.1], value=wrong)])


def test_a_peer_that_disagrees_or_fails_is_told(monkeypatch, clock):
    def fail():
        raise RuntimeError("no such layout\nmore")

    failing = Case("failing", "peer", fail, [], [], train=False)
    off = clock.case("off", [0.1], value=1.5, kind="peer")
    cases = by_name(measure(monkeypatch, [clock.case("plain", [0.1]), off, failing]))
    assert cases["off"]["difference"] == pytest.approx(0.5)
    assert cases["failing"]["note"] == "skipped: RuntimeError: no such layout"


def document(op: str, length: int, cases: dict[str, tuple[str, list[float]]], plain: str, **changes) -> dict:
    """A document with one result; the copy runs at 1 kB/s and the op must move 1 kB."""
    listed = [{"name": name, "kind": kind, "samples": samples} for name, (kind, samples) in cases.items()]
    result = {
        "op": op,
        "length": length,
        "plain": plain,
        "compulsory_bytes": 1000,
        "copy_bytes_per_second": [1000.0] * 2,
        "cases": listed,
    }
    return {"passes": "train", "device": "cpu", "dtype": "fp32", "memory": False, "results": [result], **changes}


def verdicts(document: dict, op: str) -> dict[tuple[str, int], tuple]:
    return {
        (t["target"], t["length"]): (t["ratio"] and t["ratio"]["median"], t["verdict"])
        for t in bench_targets.targets(document)
        if t["op"] == op
    }


def test_met_and_missed_by_hand():
    cases = {
        "native": ("kernel", [1.0, 2.0]),
        "torch": ("kernel", [5.0, 10.0]),
        "reference": ("kernel", [30.0, 60.0]),
        "transformers": ("peer", [200.0, 400.0]),
    }
    found = verdicts(document("wkv4", 2048, cases, "torch"), "wkv4")
    assert found == {
        ("180 x as fast as transformers", 2048): (200.0, "met"),
        ("6 x as fast as kernel torch", 2048): (5.0, "missed"),
        ("6 x as fast as kernel torch", 8192): (None, "not measured (length not run)"),
        ("within 2.5 x of the bandwidth bound", 2048): (1.5, "met"),
        ("native no slower than torch", 2048): (5.0, "met"),
    }


def test_what_cannot_be_judged_is_not_measured():
    alone = {"torch": ("kernel", [1.0]), "transformers": ("peer", [])}
    found = verdicts(document("wkv4", 2048, alone, "torch"), "wkv4")
    assert found["180 x as fast as transformers", 2048] == (None, "not measured (no transformers)")
    assert found["6 x as fast as kernel torch", 2048] == (None, "not measured (torch is all there is)")
    assert found["no kernel slower than torch", 2048] == (None, "not measured (torch is all there is)")
    forward = document("wkv4", 2048, alone, "torch", passes="forward")
    assert verdicts(forward, "wkv4")["180 x as fast as transformers", 2048][1].endswith("(stated for CPU training)")


@pytest.mark.parametrize(
    ("length", "seconds", "verdict"),
    [(512, [1.5, 1.5], "missed"), (512, [0.9, 1.5], "met"), (512, [1.01, 1.01], "met"), (64, [9.0, 9.0], None)],
)
def test_slower_than_the_plain_twin_needs_more_than_noise(length, seconds, verdict):
    cases = {"torch": ("kernel", seconds), "plain": ("baseline", [1.0, 1.0])}
    found = verdicts(document("linear_attention", length, cases, "plain"), "linear_attention")
    twin = found.get(("torch no slower than plain", length))
    assert (twin and twin[1]) == verdict


def test_the_targets_follow_the_dtype():
    cases = {"torch": ("kernel", [1.0]), "plain": ("baseline", [2.0]), "performer-pytorch": ("peer", [2.5])}
    for dtype, target in (("fp32", ("2 x", "met")), ("bf16", ("3 x", "missed"))):
        found = verdicts(document("favor_attention", 512, cases, "plain", dtype=dtype), "favor_attention")
        assert found[f"{target[0]} as fast as performer-pytorch", 512] == (2.5, target[1])


@pytest.mark.parametrize(
    ("own", "peer", "expected"),
    [
        (20, 100, (0.2, "met")),
        (30, 100, (0.3, "missed")),
        (None, 100, (None, "not measured (a peak is missing)")),
        (20, 0, (None, "not measured (a peak is missing)")),
    ],
)
def test_memory_of_favor_against_its_peer(own, peer, expected):
    cases = {"torch": ("kernel", [1.0]), "plain": ("baseline", [2.0]), "performer-pytorch": ("peer", [2.5])}
    page = document("favor_attention", 512, cases, "plain", memory=True)
    for case, peak in zip(page["results"][0]["cases"], (own, 50, peer)):
        case["peak_bytes"] = peak
    assert verdicts(page, "favor_attention")["at most 0.25 of performer-pytorch's memory", 512] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "lra bench ops"),
        (["ops", "--ops", "wkv9"], "op 'wkv9' is unknown; choose from softmax_attention"),
        (["ops", "--lengths", "0"], "'0' is no whole number above 0"),
        (["ops", "--lengths", "512,"], "'' is no whole number above 0"),
        (["ops", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["ops", "--rounds", "0"], "'0' is no whole number above 0"),
        (["ops", "--colour"], "unrecognized arguments: --colour"),
        (["ops", "--out", "/proc/none/x"], "--out /proc/none/x: cannot write"),
    ],
)
def test_bad_arguments_are_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["lra", "bench", *arguments])
    assert cli.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_trying_the_output_leaves_what_is_there(tmp_path):
    old = tmp_path / "ops.md"
    old.write_text("old")
    assert [path.name for path in bench._output_files(tmp_path / "ops")] == ["ops.md", "ops.json"]
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


def test_absent_peers_are_named(monkeypatch):
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    for op in ("favor_attention", "wkv4"):
        workload = bench_cases.BUILDERS[op](SETTING)
        (missing,) = workload.missing
        assert missing.name == bench_peers.PEERS[op][0]
        assert "not installed; pip install" in missing.reason
        assert all(case.kind != "peer" for case in workload.cases)


def test_the_setting_survives_the_way_to_another_process():
    assert parse_setting(SETTING.encode()) == SETTING


@pytest.mark.slow
def test_memory_is_the_growth_above_the_inputs():
    setting = Setting(1, 4, 16, 1024, "forward", torch.float32, CPU)
    peak = bench_measure.peak_bytes("softmax_attention", "reference", setting)
    if peak is None:
        pytest.skip("this system has no resettable resident-set peak")
    # two 4 x 1024 x 1024 matrices of 16 MiB at least
    assert 30 << 20 < peak < 80 << 20
    assert bench_memory.growth("softmax_attention", "flash", setting) < 16 << 20


def test_the_timer_times_one_call():
    calls = []
    assert timed(CPU, lambda: calls.append(1)) >= 0
    assert calls == [1]


def test_a_tiny_run_of_all_ops(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("lra.peak.WIDTH", {"cpu": 64})
    monkeypatch.setattr(bench, "tune_allocator", lambda: "default")  # other tests measure the resident set
    prefix = tmp_path / "results" / "ops"
    sizes = ["--batch", "2", "--heads", "2", "--head-width", "8"]
    assert bench.main(["ops", "--lengths", "32", "--rounds", "2", *sizes, "--out", str(prefix)]) == 0
    page = capsys.readouterr().out
    assert page == prefix.with_suffix(".md").read_text()
    assert max(map(len, page.splitlines())) <= 110
    found = json.loads(prefix.with_suffix(".json").read_text())
    assert [result["op"] for result in found["results"]] == bench_cases.present()
    for key in ("date", "device_name", "threads", "allocator", "environment", "git", "packages"):
        assert found[key], key
    assert len(found["matmul_flops_per_second"]["samples"]) == 5
    for result in found["results"]:
        assert len(result["copy_bytes_per_second"]) == 2
        ours = [case for case in result["cases"] if case["kind"] != "peer"]
        assert all(len(case["samples"]) == 2 and min(case["samples"]) > 0 for case in ours)
        if result["op"] != "softmax_padded":
            assert set(kernels.available(result["op"], "cpu")) <= {case["name"] for case in ours}
    assert {entry["verdict"].partition(" (")[0] for entry in found["targets"]} <= {"met", "missed", "not measured"}
    assert bench_report.markdown(found) == page


def test_a_page_with_long_numbers_fits():
    case = {
        "name": "performer-pytorch",
        "kind": "peer",
        "note": "budget of 8 s spent",
        "samples": [12.3456, 23.4567],
        "difference": 1e-2,
        "peak_bytes": 7 << 30,
    }
    result = {
        "op": "favor_attention",
        "length": 16384,
        "plain": case["name"],
        "remark": "",
        "compulsory_bytes": 10**8,
        "flops": 10**10,
        "copy_bytes_per_second": [1e10, 1e10],
        "missing": [],
        "cases": [case],
    }
    shared = {"memory": True, "matmul_flops_per_second": {"median": 1e11}}
    assert max(map(len, bench_report.section(shared, result))) <= 110


def test_kernels_that_are_not_exported_are_left_out(monkeypatch):
    monkeypatch.delattr(kernels, "wkv4")
    assert "wkv4" not in bench_cases.present()
    assert "softmax_padded" in bench_cases.present()
