"""The line of ``lra data prepare`` and ``lra data list`` that tells where rows are from: the same for every task."""

import pytest

import lra.tasks
from lra import prepare
from tests.lra import retrieval_files, reviews
from tests.lra import test_image as image
from tests.lra.test_listops_source import write_source
from tests.lra.test_pathfinder import release_folder


def listops(folder):
    return write_source(folder / "listops", "\r\n".join(f"[MAX {i} {i} ]\t{i}" for i in range(10))).source


def retrieval(folder):
    lines = [f"{i % 2}\ta\tb\tfirst {i}\tsecond {i}".encode() for i in range(10)]
    return retrieval_files.write_source(folder / "retrieval", lines).source


def text(folder):
    return reviews.write_hub(folder / "text", {"train": reviews.some(60), "test": reviews.some(20, start=100)})


def pathfinder(folder):
    return release_folder(folder / "pathfinder")


def pathx(folder):
    return release_folder(folder / "pathx", side=64)


FILES = {
    "listops": (listops, ()),
    "retrieval": (retrieval, ("task.fidelity=s4",)),
    "text": (text, ()),
    "image": (lambda folder: image.write(folder / "image"), ("task.length=256",)),
    "pathfinder": (pathfinder, ("task.length=1024",)),
    "pathx": (pathx, ("task.length=4096",)),
}


def origins(tmp_path, capsys, name, *options):
    """What the two commands say of the rows of ``name`` with these options, and the folder of the rows."""
    capsys.readouterr()
    assert prepare.main(["prepare", name, f"data_dir={tmp_path / 'data'}", *options]) == 0
    folder, origin = capsys.readouterr().out.splitlines()
    assert prepare.main(["list", name, f"data_dir={tmp_path / 'data'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("  " + folder.split(": ready")[0].split("/")[-1]))
    assert lines[at + 1].strip() == origin
    return origin


@pytest.mark.parametrize("name", FILES)
def test_a_choice_of_the_rows_of_files_is_told(tmp_path, capsys, name):
    make, options = FILES[name]
    options = (*options, f"task.source={make(tmp_path)}")
    whole = origins(tmp_path, capsys, name, *options)
    assert "choice of rows" not in whole
    some = origins(tmp_path, capsys, name, *options, "task.test_rows=2", "task.train_rows=3")
    assert some == f"{whole}; a fixed choice of rows by task.train_rows=3, task.test_rows=2"


@pytest.mark.parametrize("name", [name for name in lra.tasks.REGISTRY if name not in ("retrieval", "text", "image")])
def test_a_number_of_generated_rows_is_told(tmp_path, capsys, name):
    rows = [f"task.{split}_rows=10" for split in ("train", "validation", "test")]
    length = {"pathfinder": 256, "pathx": 4096}.get(name, 64)
    origin = origins(tmp_path, capsys, name, f"task.length={length}", *rows)
    assert origin.startswith("generated with seed 0; ")
    assert origin.endswith(f"; as many rows as {', '.join(rows)}")


def test_every_task_has_its_line_checked():
    assert {*FILES, "copying", "recall"} == set(lra.tasks.REGISTRY)
