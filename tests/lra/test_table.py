"""The comparison table: figures computed by hand, every mark, nothing mixed that may not be."""

import io
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict

import pandas as pd
import pytest

from lra import results, table
from lra.cells import NATIVE, sections
from lra.errors import UserError
from lra.regimes import regime_of
from lra.results import Accounts, ResultRow
from lra.table import aggregate, read_published

MIB = 2**20


def make_row(attention="softmax", seed=0, task="listops", length=2000, status="ok", accuracy=0.4, **changes):
    scored = status in ("ok", "stuck")
    values = {
        "run_id": f"{task}-{length}-{attention}-s{seed}",
        "status": status,
        "task": task,
        "attention": attention,
        "seed": seed,
        "length": length,
        "regime": regime_of(length),
        "config_hash": f"c{attention}{seed}",
        "protocol_hash": f"p-{task}-{length}",
        "protocol": "quick",
        "task_version": "1",
        "steps": 600,
        "batch_size": 32,
        "test_accuracy": accuracy if scored else None,
        "majority_baseline": 0.17,
        "seconds": Accounts(data=1.0, compute=99.0, evaluation=7.0),
        "tokens_per_second": 1000.0,
        "peak_memory_bytes": 100 * MIB,
        "memory_kind": "process peak",
        "parameters": 100_000,
        "kernel": f"{attention}-reference",
        "dtype": "float32",
        "device": "cpu",
        "device_name": "CPU A",
        "finished": "2026-01-01T00:00:00+00:00",
    }
    return ResultRow(**{**values, **changes})


def render(rows, fmt="md"):
    return table.render(aggregate(rows), fmt)


def parse_tables(text):
    """Markdown tables back into ``{caption: [row as dict]}``."""
    found, caption, header = defaultdict(list), None, None
    for line in text.splitlines():
        if line.startswith("**"):
            caption, header = line.strip("*"), None
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if header is None:
                header = cells
            elif not set(line) <= set("|-: "):
                found[caption].append(dict(zip(header, cells, strict=True)))
    return found


def one_column(rows):
    lines = parse_tables(render(rows))["listops 2000 (regime long)"]
    return {line["backend"]: line for line in lines}


def test_mean_and_sample_deviation_over_seeds():
    seeds = [(0.30, 10.0, 100.0), (0.40, 20.0, 110.0), (0.50, 60.0, 300.0)]
    rows = [
        make_row(seed=at, accuracy=accuracy, seconds=Accounts(data=0.0, compute=time), tokens_per_second=speed)
        for at, (accuracy, time, speed) in enumerate(seeds)
    ]
    (cell,) = aggregate(rows)
    # mean 0.4, deviations -0.1, 0, 0.1: sqrt(0.02 / 2) = 0.1
    assert cell.accuracy == pytest.approx(0.4)
    assert cell.accuracy_std == pytest.approx(0.1)
    assert cell.train_seconds == pytest.approx(30.0)
    assert cell.tokens_per_second == pytest.approx(110.0)
    assert one_column(rows)["softmax"]["accuracy %"] == "40.00 ±10.00"
    assert "over 3 seeds" in " ".join(render(rows).split())


def test_one_seed_has_no_deviation_but_its_interval():
    line = one_column([make_row(test_interval=[0.38, 0.42])])["softmax"]
    assert (line["accuracy %"], line["95 % CI"]) == ("40.00", "38.0–42.0")
    assert aggregate([make_row()])[0].accuracy_std is None


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([make_row("flash", status="failed")], "FAIL"),
        ([make_row("flash", status="oom")], "OOM"),
        ([make_row("flash", status="interrupted")], "INT"),
        ([make_row("flash", status="stuck", accuracy=0.17)], "17.00 STUCK"),
        ([make_row("flash", accuracy=None)], "no test"),
        ([make_row("flash", s, status="oom") for s in range(2)], "2 OOM"),
        ([make_row("flash", 0, status="oom"), make_row("flash", 1, status="failed")], "1 FAIL, 1 OOM"),
        ([make_row("flash", 0), make_row("flash", 1, status="failed")], "40.00 (n=1, 1 FAIL)"),
        (
            [make_row("flash", 0), make_row("flash", 1, status="stuck", accuracy=0.2)],
            "30.00 ±14.14 (n=2, 1 STUCK)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_marks(rows, text):
    lines = one_column([make_row(), *rows])
    assert lines["flash"]["accuracy %"] == text


def test_a_missing_cell_and_a_smaller_n_are_shown():
    rows = [make_row(seed=s) for s in range(3)] + [make_row(task="image", length=1024, seed=s) for s in range(3)]
    rows += [make_row("flash", 0), make_row("flash", 1), make_row("flash", 2, status="failed")]
    lines = {line["backend"]: line for line in parse_tables(render(rows))["Test accuracy, %"]}
    assert lines["flash"]["image 1024"] == "–"
    assert lines["flash"]["listops 2000"] == "40.00 ±0.00 (n=2, 1 FAIL)"


def test_speed_is_relative_to_softmax_in_the_same_column():
    rows = [make_row(), make_row("flash", tokens_per_second=2500.0)]
    assert one_column(rows)["flash"]["× softmax"] == "2.50"
    assert "× softmax" not in one_column(rows[1:])["flash"]


def test_speeds_of_two_devices_are_not_compared():
    rows = [make_row(), make_row("flash", device_name="GPU B")]
    text = render(rows)
    assert one_column(rows)["flash"]["× softmax"] == "–"
    assert "CPU A and GPU B: speeds across devices are not compared" in text


def test_memory_time_size_kernel_and_device():
    line = one_column([make_row(), make_row("flash", dtype="bfloat16", parameters=111_000)])["flash"]
    assert (line["peak MiB"], line["train s"], line["kernel"], line["dtype"]) == (
        "100", "100", "flash-reference", "bfloat16")  # fmt: skip
    assert line["params"] == "111k †"
    text = render([make_row(), make_row("flash", parameters=109_000)])
    assert "†" not in text
    assert "measured as: process peak" in text
    assert "device CPU A" in text.replace("\n ", "")


def test_unknown_figures_are_blank_never_zero():
    row = make_row(tokens_per_second=None, peak_memory_bytes=None, parameters=None, seconds=Accounts())
    frame = pd.read_csv(io.StringIO(render([row], "csv")))
    assert frame[["tokens_per_second", "peak_memory_bytes", "parameters", "train_seconds"]].isna().all(axis=None)
    line = one_column([row])["softmax"]
    assert {line[name] for name in ("train s", "tokens/s", "peak MiB", "params")} == {"–"}


def test_the_majority_class_has_its_own_row():
    assert one_column([make_row()])["majority class"]["accuracy %"] == "17.00"


def native_rows(attention, shift=0.0, **status):
    """The five tasks with accuracies 0.1, 0.2, ... 0.5, plus ``shift``."""
    return [
        make_row(attention, 0, task, length, status.get(task, "ok"), 0.1 * at + shift)
        for at, (task, length) in enumerate(NATIVE.items(), 1)
    ]


def averages(rows):
    lines = parse_tables(render(rows))["Test accuracy, %"]
    return {line["backend"]: line.get("avg") for line in lines}


def test_the_average_of_the_five_tasks_leaves_path_x_out():
    path_x = make_row(task="pathfinder", length=16384, accuracy=0.99)
    assert averages([*native_rows("softmax"), path_x])["softmax"] == "30.00"


def test_a_failed_cell_makes_the_average_blank():
    found = averages(native_rows("softmax") + native_rows("flash", 0.1, text="oom"))
    assert found == {"softmax": "30.00", "flash": "", "majority class": ""}


def test_the_average_covers_only_what_every_backend_has_run():
    # without image, 0.1, 0.2, 0.3 and 0.5 are left
    found = averages(native_rows("softmax") + [row for row in native_rows("flash") if row.task != "image"])
    assert found["softmax"] == found["flash"] == "27.50"


def test_two_hashes_of_one_preset_are_never_in_one_column():
    rows = [*native_rows("softmax"), make_row("flash", accuracy=0.9, protocol_hash="changed")]
    found = sections(aggregate(rows))
    columns = [column for section in found for column in section.columns if column.task == "listops"]
    assert len(found) == len(columns) + 1 == 3
    assert all(len(section.of(column)) <= 1 for section in found for column in section.columns)
    assert all(cell.speed_vs_softmax is None for cell in aggregate(rows) if cell.backend == "flash")
    assert "Protocol quick [changed, task version 1]" in render(rows)


def test_two_task_versions_are_never_averaged():
    cells = aggregate([make_row(accuracy=0.2), make_row(seed=1, accuracy=0.4, task_version="2")])
    assert sorted(cell.accuracy for cell in cells) == [0.2, 0.4]
    assert len(sections(cells)) == 2


def test_two_presets_are_two_blocks():
    text = render([make_row(), make_row(protocol="paper", protocol_hash="other")])
    assert "## Protocol quick" in text
    assert "## Protocol paper" in text


def test_two_settings_of_one_mixer_are_two_backends():
    rows = [make_row("performer", seed, attention_hash=name) for seed, name in enumerate(("aaaaaaaa", "bbbbbbbb"))]
    assert [cell.backend for cell in aggregate(rows)] == ["performer#aaaaaa", "performer#bbbbbb"]


def test_the_newest_of_two_equal_runs_counts(caplog):
    old = make_row(accuracy=0.2, run_id="old", finished="2026-01-01T12:00:00+00:00")
    new = make_row(accuracy=0.4, run_id="new", finished="2026-01-01T12:00:00-05:00")
    (cell,) = aggregate([new, old])
    assert (cell.accuracy, cell.run_ids) == (0.4, ["new"])
    assert "old and new are the same cell and seed" in caplog.text


def test_regimes_are_shown_apart():
    rows = [make_row(task=task, length=length) for task in ("listops", "image") for length in (256, 1024, 4096)]
    titles = [section.title for section in sections(aggregate(rows))]
    assert titles == [f"Protocol quick: regime {name}" for name in ("short", "medium", "long")]


def test_csv_has_every_figure_and_the_runs_behind_it():
    rows = [make_row(seed=s) for s in range(2)] + [make_row("flash", status="oom")]
    frame = pd.read_csv(io.StringIO(render(rows, "csv"))).set_index("backend")
    assert len(frame) == 2
    assert frame.loc["softmax", "run_ids"].split() == ["listops-2000-softmax-s0", "listops-2000-softmax-s1"]
    assert frame.loc["softmax", "peak_memory_bytes"] == 100 * MIB
    assert frame.loc["softmax", "runs_ok"] == 2
    assert frame.loc["flash", "runs_oom"] == 1
    assert pd.isna(frame.loc["flash", "accuracy"])


def test_markdown_is_aligned_and_fits_a_terminal():
    backends = ("softmax", "flash", "performer", "rwkv4")
    text = render([make_row(name, test_interval=[0.3, 0.5]) for name in backends])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert max(map(len, text.splitlines())) <= 120
    for block in text.split("\n\n"):
        assert len({len(line) for line in block.splitlines() if line.startswith("|")}) <= 1
    assert len(lines) > 8


def test_latex_and_html_are_complete_and_escaped():
    rows = [make_row(protocol="a_b & <c>", kernel="x|y_z"), make_row("flash", status="failed")]
    latex, page = render(rows, "latex"), render(rows, "html")
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") > 0
    assert r"\toprule" in latex
    assert r"a\_b \& \textless{}c\textgreater{}" in latex
    assert not set("±×–†") & set(latex)
    assert "a_b &amp; &lt;c&gt;" in page
    assert '<span class="mark">FAIL</span>' in page
    assert not any(word in page for word in ("http:", "https:", "src=", "<link", "@import"))
    assert r"x\|y_z" in render(rows)


def test_published_numbers_are_of_native_lengths_and_say_so():
    text = render([make_row("performer"), make_row("mamba"), make_row("performer", length=256)])
    lines = parse_tables(text)["Test accuracy, %, at LRA's own lengths"]
    assert {"model": "performer", "source": "ours: quick", "listops 2000": "40.00"} in lines
    assert {"model": "Performer", "source": "cited: LRA paper", "listops 2000": "18.01"} in lines
    assert "No published number for listops 256" in text
    assert "No verified published number for mamba" in text
    # a run at another length never shares a column with a published number
    shorter = parse_tables(render([make_row("performer", length=256)]))["Test accuracy, %, at LRA's own lengths"]
    assert {line["source"].split(":")[0] for line in shorter} == {"cited"}


def test_published_means_agree_with_the_printed_averages():
    # the paper prints 51.39 for Sinkhorn and the repository 51.29; the mean of its five scores is 51.48
    printed = {
        "Transformer": 54.39,
        "Local": 46.06,
        "Sparse Transformer": 51.24,
        "Longformer": 53.46,
        "Linformer": 51.36,
        "Reformer": 50.67,
        "Sinkhorn": 51.48,
        "Synthesizer": 52.88,
        "BigBird": 55.01,
        "Linear Transformer": 50.55,
        "Performer": 51.41,
    }
    means = five_task_means("LRA paper")
    assert means == pytest.approx(printed, abs=0.011)
    assert five_task_means("Nystromformer rerun")["Nystromformer"] == pytest.approx(58.95, abs=0.01)
    assert five_task_means("RWKV app. J.2")["RWKV-4"] == pytest.approx(71.84, abs=0.01)


def five_task_means(source):
    scores = defaultdict(list)
    for line in read_published():
        if line["source"] == source and NATIVE[line["task"]] == int(line["length"]):
            scores[line["model"]].append(float(line["accuracy"]))
    assert all(len(values) == 5 for values in scores.values())
    return {model: sum(values) / 5 for model, values in scores.items()}


def test_published_lines_are_complete():
    lines = read_published()
    keys = [(line["model"], line["source"], line["task"], line["length"]) for line in lines]
    assert len(keys) == len(set(keys)) > 150
    for line in lines:
        assert line["trust"] in ("V", "T")
        assert line["citation"]
        assert line["protocol_family"]
        assert line["accuracy"] or line["note"], "a failure says so in its note"
        assert line["backend"] in ("", "softmax", "flash", "performer", "linear", "rwkv4")


def run_main(tmp_path, rows, *options):
    for row in rows:
        results.save(row, tmp_path / "runs" / row.run_id)
    return table.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out" / "table"), *options])


@pytest.mark.parametrize("fmt", ["md", "latex"])
def test_main_writes_three_files_and_prints_one_format(tmp_path, capsys, fmt):
    rows = [make_row(), make_row("flash")]
    assert run_main(tmp_path, rows, "--format", fmt) == 0
    assert capsys.readouterr().out == render(rows, fmt)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "table.csv",
        "table.md",
        "table.png",
    ]
    assert (tmp_path / "out" / "table.md").read_text(encoding="utf-8") == render(rows)
    assert (tmp_path / "out" / "table.csv").read_text(encoding="utf-8").startswith("backend,protocol,")


def test_corrupt_rows_are_skipped_and_the_rest_tabled(tmp_path, capsys, caplog):
    good = asdict(make_row())
    bad = {
        "truncated": json.dumps(good)[:50],
        "wrong-type": json.dumps({**good, "seed": "0"}),
        "unknown-key": json.dumps({**good, "surprise": 1}),
        "nan": json.dumps({**good, "step_ms": float("nan")}),
        "range": json.dumps({**good, "test_accuracy": 40.0}),
        "missing-key": json.dumps({k: v for k, v in good.items() if k != "task"}),
    }
    for name, text in bad.items():
        results.write_atomic(tmp_path / "runs" / name / "result.json", text)
    assert run_main(tmp_path, [make_row("flash")]) == 0
    assert "flash" in capsys.readouterr().out
    for name in bad:
        assert str(tmp_path / "runs" / name / "result.json") in caplog.text


def test_warnings_reach_stderr(tmp_path):
    results.save(make_row(), tmp_path / "good")
    results.write_atomic(tmp_path / "bad" / "result.json", "{")
    code = "import sys; from lra.table import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--runs", tmp_path, "--out", tmp_path / "table"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "WARNING: skipped" in done.stderr
    assert "WARNING" not in done.stdout


def test_without_runs_the_way_out_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder; make runs with `lra train`"):
        table.main(["--runs", str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="holds no finished run"):
        table.main(["--runs", str(tmp_path)])
    results.write_atomic(tmp_path / "bad" / "result.json", "{")
    with pytest.raises(UserError, match="no readable result.json"):
        table.main(["--runs", str(tmp_path)])


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "out").write_text("a file where a folder is needed")
    with pytest.raises(UserError, match=r"--out .*cannot write"):
        run_main(tmp_path, [make_row()])
    for folder in ("/", "."):
        with pytest.raises(UserError, match="--out .: expected the beginning of file names, found a folder"):
            table.main(["--runs", str(tmp_path / "runs"), "--out", folder])


def test_the_table_needs_neither_torch_nor_hydra():
    code = "import lra.table, sys; assert 'torch' not in sys.modules and 'hydra' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
