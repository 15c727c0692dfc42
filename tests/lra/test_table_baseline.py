"""Speed relative to softmax is shown where there is a softmax run, and its absence is told in a line."""

from lra.results import Accounts
from tests.lra.test_table import make_row, parse_tables, render

RELATIVE = "Throughput relative to softmax, ×"


def notes(text):
    return " ".join(text.split())


def test_one_column_without_softmax():
    text = render([make_row("flash"), make_row("rwkv4", tokens_per_second=2500.0)])
    (lines,) = [lines for caption, lines in parse_tables(text).items() if caption.startswith("listops 2000")]
    assert list(lines[0]) == ["backend", "accuracy %", "train s", "tokens/s", "peak MiB", "params", "kernel"]
    assert [line["tokens/s"] for line in lines] == ["1,000", "2,500", ""]
    assert "- No × softmax for listops 2000: no softmax run here has a speed to compare with." in notes(text)
    assert "; tokens/s are medians of the real tokens" in notes(text)


def test_a_softmax_run_without_speed_is_none():
    failed = make_row("softmax", status="oom", tokens_per_second=None, seconds=Accounts())
    text = render([failed, make_row("flash")])
    assert "| × softmax" not in text
    assert "No × softmax for listops 2000:" in text


def test_several_columns_of_which_one_has_softmax():
    rows = [make_row(name) for name in ("flash", "rwkv4")]
    rows += [
        make_row(name, task="text", length=4000, tokens_per_second=speed)
        for name, speed in (("softmax", 1000.0), ("flash", 1500.0), ("rwkv4", 500.0))
    ]
    text = render(rows)
    tables = parse_tables(text)
    assert tables[RELATIVE] == [
        {"backend": "softmax", "text 4000": "1.00"},
        {"backend": "flash", "text 4000": "1.50"},
        {"backend": "rwkv4", "text 4000": "0.50"},
    ]
    assert list(tables["Throughput, tokens/s"][0]) == ["backend", "listops 2000", "text 4000"]
    assert "No × softmax for listops 2000: no softmax run" in notes(text)
    assert "tokens/s and × softmax are medians" in notes(text)


def test_several_columns_without_softmax_have_no_such_table():
    columns = (("listops", 2000), ("text", 4000))
    rows = [make_row(name, task=task, length=length) for task, length in columns for name in ("flash", "mamba")]
    text = render(rows)
    assert RELATIVE not in text
    assert text.count("No × softmax for") == 1
    assert "No × softmax for listops 2000, text 4000: no softmax run" in notes(text)


def test_with_softmax_everywhere_nothing_is_said():
    text = render([make_row(name) for name in ("softmax", "flash")])
    assert parse_tables(text)["listops 2000 (regime long)"][1]["× softmax"] == "1.00"
    assert "No × softmax" not in text
