"""What may not stand side by side in a table, and what must be said below it."""

import pytest

from lra import table
from lra.cells import sections
from lra.table import aggregate
from tests.lra.test_table import make_row


def test_two_input_pipelines_are_never_averaged():
    rows = [
        make_row(attention=name, task=task, length=length, accuracy=accuracy, fidelity=fidelity)
        for name in ("softmax", "flash")
        for task, length, accuracy, fidelity in (
            ("listops", 2000, 0.3, "lra"),
            ("text", 4000, 0.5, "lra"),
            ("text", 4096, 0.9, "s4"),
        )
    ]
    found = {section.block: section for section in sections(aggregate(rows))}
    assert set(found) == {"quick", "quick, s4 input"}
    assert found["quick"].average("softmax") == pytest.approx(0.4)
    text = table.render(aggregate(rows), "md")
    assert "text 4096 (s4)" in text


def test_path_x_has_two_names_and_no_part_in_the_average():
    for task in ("pathx", "pathfinder"):
        rows = [
            make_row(task="listops"),
            make_row(task="image", length=1024),
            make_row(task=task, length=16384, accuracy=1),
        ]
        (section,) = sections(aggregate(rows))
        assert section.average("softmax") == pytest.approx(0.4)
        assert section.columns[-1].native


def test_what_a_run_warns_of_stands_below_the_table():
    rows = [make_row(attention=name, warnings=["97 % of the rows are short"]) for name in ("softmax", "flash")]
    rows[1].warnings.append("validation is the test split")
    text = table.render(aggregate(rows), "md")
    assert "! listops 2000: 97 % of the rows are short." in text
    assert "! listops 2000 flash: validation is the test split." in text


def test_how_many_rows_were_used_stands_below_the_table():
    few, all_of_it = ({"train": n, "validation": 2000, "test": 2000} for n in (200, 96_000))
    text = table.render(aggregate([make_row(rows=few)]), "md").replace("\n  ", " ")
    assert "200 / 2,000 / 2,000 rows to train, validate and test" in text
    two = aggregate([make_row(rows=all_of_it), make_row(task="image", length=1024, rows=few)])
    text = table.render(two, "md")
    assert all(f"| {n} / 2,000 / 2,000 " in text for n in ("96,000", "200"))


def test_mixed_directions_are_told():
    rows = [make_row(attention=name, direction=way) for name, way in (("flash", "bidirectional"), ("rwkv4", "causal"))]
    text = table.render(aggregate(rows), "md").replace("\n  ", " ")
    assert "! listops 2000: mixed directions between backends (bidirectional and causal)" in text
    rows[1].direction = "bidirectional"
    text = table.render(aggregate(rows), "md").replace("\n  ", " ")
    assert "mixed directions" not in text
    assert "direction bidirectional" in text
