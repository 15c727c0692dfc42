"""Documents of pairs as tokens: to the byte as LRA's, to the character as S4's; sources of every form."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from lra.data.subset import choose
from lra.errors import UserError
from lra.tasks import load
from lra.tasks.retrieval import Config, Retrieval
from lra.tasks.text_tokens import Bytes, Characters, characters_of
from tests.lra.retrieval_files import ignore, manifest, prepared, write_source

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data" / "retrieval" / "lra_format_sample"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"no real pairs in {REAL}")
NASTY = [
    '"quoted',
    'a "b" c"',
    "nul\0nul",
    "smile \U0001f600 end",
    "\u4e2d\u6587 \u05e9\u05dc\u05d5\u05dd",
    "cr\rinside",
    "x",
]


def documents(split):
    """Tokens of both documents of each row."""
    for i in range(len(split)):
        tokens, lengths = split.rows(np.array([i]))
        yield [row[:n].tolist() for row, n in zip(tokens, lengths)]


def test_bytes_are_counted_from_one_and_cut_at_the_length(tmp_path):
    rows = [f"{float(i % 2)}\tA{i}\tB{i}\t{text}\t{text[::-1]}".encode() for i, text in enumerate(NASTY)]
    config = write_source(tmp_path / "in", rows, length=7)
    info, splits = prepared(config, tmp_path)
    assert (info.vocab_size, info.num_classes, info.length, info.documents) == (257, 2, 7, 2)
    for split in splits.values():
        wanted = [[[byte + 1 for byte in part.encode()][:7] for part in (text, text[::-1])] for text in NASTY]
        assert list(documents(split)) == wanted
        assert split.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_a_quote_does_not_swallow_rows(tmp_path):
    rows = ['0.0\ta\tb\t"never closed\ttext', '1.0\tc\td\tsecond\t"third', '1.0\te\tf\tlast\ttext"']
    info, splits = prepared(write_source(tmp_path / "in", [row.encode() for row in rows]), tmp_path)
    assert info.splits == {"train": 3, "validation": 3, "test": 3}
    assert [bytes(b - 1 for b in pair[0]).decode() for pair in documents(splits["test"])] == [
        '"never closed',
        "second",
        "last",
    ]
    assert [bytes(b - 1 for b in pair[1]).decode() for pair in documents(splits["test"])] == ["text", '"third', 'text"']


def test_line_ends_are_no_part_of_the_text(tmp_path):
    write_source(tmp_path / "unix", [b"0.0\ta\tb\tone\ttwo", b"1\tc\td\tthree\tfour"])
    config = Config(source=str(tmp_path / "unix"))
    _, unix = prepared(config, tmp_path / "u")
    for file in (tmp_path / "unix").iterdir():
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    _, windows = prepared(config, tmp_path / "w")
    assert list(documents(unix["test"])) == list(documents(windows["test"]))
    assert [len(doc) for pair in documents(windows["test"]) for doc in pair] == [3, 3, 5, 4]


def test_characters_of_the_training_split_and_eos(tmp_path):
    config = write_source(tmp_path / "in", ["0.0\ta\tb\tbab\t\u00e9a\U0001f600cut".encode()], length=4, fidelity="s4")
    (tmp_path / "in" / "new_aan_pairs.test.tsv").write_bytes("1.0\ta\tb\tazb\tb\u00e9".encode() + b"\xff\n")
    info, splits = prepared(config, tmp_path)
    # pad, unk, eos, then a, b, e acute, smile; what lies behind the cut has no id
    assert info.vocab_size == 7
    assert list(documents(splits["train"])) == [[[4, 3, 4, 2], [5, 3, 6, 2]]]
    assert list(documents(splits["test"])) == [[[3, 1, 4, 2], [4, 5, 1, 2]]]
    assert manifest(config, tmp_path)["details"]["characters"] == "ab\u00e9\U0001f600"
    assert "exact" in manifest(config, tmp_path)["details"]
    assert "1 labels and pairs of texts equal" in Retrieval.verify(config, tmp_path)[3]


@pytest.mark.parametrize("fidelity", ["lra", "s4"])
def test_an_empty_document_is_one_token(tmp_path, fidelity):
    config = write_source(
        tmp_path / "in", [b"0.0\ta\tb\t\t", b"1.0\ta\tb\tab\t", b"1.0\ta\tb\t\tab"], fidelity=fidelity
    )
    _, splits = prepared(config, tmp_path)
    nothing, ab = {"lra": ([0], [98, 99]), "s4": ([2], [3, 4, 2])}[fidelity]
    assert list(documents(splits["train"])) == [[nothing, nothing], [ab, nothing], [nothing, ab]]
    assert manifest(config, tmp_path)["details"]["empty_documents"] == {"train": 4, "validation": 4, "test": 4}
    assert "3 labels and pairs" in Retrieval.verify(config, tmp_path)[1]


def test_both_tokenisations_agree_with_a_loop_over_symbols():
    rng = random.Random(0)
    alphabet = 'ab"\0\u00e9\u4e2d\U0001f600'
    texts = [bytes(rng.choices(range(256), k=rng.randrange(40))) for _ in range(50)]
    texts += ["".join(rng.choices(alphabet, k=rng.randrange(40))).encode() for _ in range(200)] + [b""]
    tokens, lengths = Bytes(16).encode(texts)
    assert tokens.tolist() == [i for text in texts for i in [b + 1 for b in text[:16]] or [0]]
    assert lengths.tolist() == [max(1, min(16, len(text))) for text in texts]
    known = characters_of(texts[:100], 16)
    decoded = [text.decode("utf-8", "surrogateescape")[:15] for text in texts]
    assert known == "".join(sorted(set("".join(decoded[:100]))))
    characters = Characters(16, known)
    tokens, lengths = characters.encode(texts)
    assert tokens.tolist() == [
        i for text in decoded for i in [*(known.find(c) + 3 if c in known else 1 for c in text), 2]
    ]
    assert lengths.tolist() == [len(text) + 1 for text in decoded]
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    assert [characters.decode(part) for part in parts] == [characters.wanted(text) for text in texts]


@pytest.mark.parametrize("tokens", [[0], [2, 2], [3], [3, 0, 2], [5, 2], [1]])
def test_tokens_that_no_document_has_are_told(tokens):
    assert Characters(16, "ab").decode(np.array(tokens, np.uint16)) is None
    assert Characters(16, "ab").decode(np.array([3, 4, 2], np.uint16)) == b"ab"
    assert Bytes(16).decode(np.array([257], np.uint16)) is None
    assert Bytes(16).decode(np.array([0, 5], np.uint16)) is None


def test_the_folder_is_found_in_a_release(tmp_path):
    write_source(tmp_path / "data/lra_release/lra_release/tsv_data", [b"1.0\ta\tb\tone\ttwo"])
    info, _ = prepared(Config(), tmp_path / "data")
    assert info.source.endswith("lra_release/lra_release/tsv_data")
    assert Retrieval.folder(Config(), tmp_path / "data").name == "length4000-release-v1"


def test_a_missing_release_is_told(tmp_path):
    with pytest.raises(
        UserError, match=r"task.source=release: expected LRA's release in .*put the file lra_release.gz"
    ):
        Retrieval.prepare(Config(), tmp_path, ignore)
    assert not list((tmp_path / "retrieval").glob("length*"))


@pytest.mark.parametrize("place", ["in/papers_text", "data/papers_text"])
def test_ids_are_joined_with_papers(tmp_path, place):
    config = write_source(tmp_path / "in", [b"0.0\tP1\tP2", b"1.0\tP2\tP1"])
    with pytest.raises(
        UserError, match=r"found ids without texts; put the texts .* as <id>.txt into .*papers_text or .*"
    ):
        Retrieval.prepare(config, tmp_path / "data", ignore)
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "P1.txt").write_bytes(b"one\r\n\xfftwo\tthree\n")
    with pytest.raises(
        UserError, match=r"train.tsv:1: expected the text of paper P2 in .*papers_text, found none of P2"
    ):
        Retrieval.prepare(config, tmp_path / "data", ignore)
    (tmp_path / place / "P2.txt").write_bytes(b"x")
    _, splits = prepared(config, tmp_path / "data")
    one, two = [b + 1 for b in b"one  \xfftwo three "], [b"x"[0] + 1]
    assert list(documents(splits["validation"])) == [[one, two], [two, one]]
    found = manifest(config, tmp_path / "data")["details"]
    assert "texts are joined from papers" in found["exact"]
    assert {"papers_text/P1.txt", "papers_text/P2.txt"} < set(found["source_files"])
    assert "2 labels and pairs" in Retrieval.verify(config, tmp_path / "data")[1]
    (tmp_path / place / "P2.txt").write_bytes(b"y")
    with pytest.raises(
        UserError, match=r"expected row 0 of train to hold the texts of .*train.tsv:1, found other tokens"
    ):
        Retrieval.verify(config, tmp_path / "data")
    with pytest.raises(UserError, match=r"P2.txt: expected sha256"):
        Retrieval.prepare(config, tmp_path / "data", ignore)


def test_a_choice_of_rows_is_the_same_everywhere(tmp_path):
    rows = [f"{i % 2}\ta\tb\tfirst {i}\tsecond {i}".encode() for i in range(50)]
    config = write_source(tmp_path / "in", rows, train_rows=20, validation_rows=50)
    info, splits = prepared(config, tmp_path)
    assert info.splits == {"train": 20, "validation": 50, "test": 50}
    numbers = [int(bytes(b - 1 for b in pair[0]).split()[1]) for pair in documents(splits["train"])]
    assert numbers == sorted(set(numbers))
    assert splits["train"].labels.tolist() == [n % 2 for n in numbers]
    assert numbers != list(range(20))
    assert set(choose(50, 7, "")) < set(numbers) == set(choose(50, 20, ""))
    found = manifest(config, tmp_path)["details"]["exact"]
    assert "not the published data: 50 / 50 / 50 rows" in found
    assert "20 labels and pairs" in Retrieval.verify(config, tmp_path)[1]
    with pytest.raises(UserError, match=r"task.test_rows=51: the source has 50 rows; ask for at most as many"):
        Retrieval.prepare(Config(source=config.source, test_rows=51), tmp_path, ignore)


@needs_real
@pytest.mark.parametrize("length", [4000, 16_384])
def test_real_pairs_to_the_byte(tmp_path, length):
    config = Config(source=str(REAL), length=length)
    info, splits = prepared(config, tmp_path)
    assert info.splits == {"train": 24, "validation": 8, "test": 8}
    for name, file in (("train", "train"), ("validation", "eval"), ("test", "test")):
        raw = (REAL / f"new_aan_pairs.{file}.tsv").read_bytes()
        found = re.findall(rb"([01])\.0\t[^\t\n]*\t[^\t\n]*\t([^\t\n]*)\t([^\t\n]*)\n", raw)
        assert splits[name].labels.tolist() == [int(label) for label, _, _ in found]
        assert Counter(splits[name].labels.tolist()) == {0: len(found) // 2, 1: len(found) // 2}
        assert list(documents(splits[name])) == [[[b + 1 for b in t[:length]] for t in texts] for _, *texts in found]
    assert all("equal those of" in fact for fact in Retrieval.verify(config, tmp_path)[1:4])
    assert ("no more than 10,000 bytes" in manifest(config, tmp_path)["details"]["exact"]) == (length > 10_000)


@needs_real
def test_real_pairs_to_the_character(tmp_path):
    config = Config(source=str(REAL), fidelity="s4")
    info, splits = prepared(config, tmp_path)
    raw = {s: (REAL / f"new_aan_pairs.{s}.tsv").read_bytes().decode().split("\n")[:-1] for s in ("train", "eval")}
    known = sorted({c for row in raw["train"] for text in row.split("\t")[3:] for c in text[:3999]})
    assert info.vocab_size == len(known) + 3
    ids = {c: i for i, c in enumerate(known, start=3)}
    wanted = [[[*(ids.get(c, 1) for c in text[:3999]), 2] for text in row.split("\t")[3:]] for row in raw["eval"]]
    assert list(documents(splits["validation"])) == wanted


MEMORY = """
import sys, pathlib
from lra.tasks.retrieval import Config, Retrieval
Retrieval.prepare(Config(source=sys.argv[1], fidelity="s4"), pathlib.Path(sys.argv[2]), lambda done, total: None)
print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for rows in (400, 4000):
        text = b"a document of some length. " * 400
        write_source(tmp_path / str(rows), [b"0.0\ta\tb\t%s\t%s" % (text, text)] * rows)
        for name in ("eval", "test"):
            (tmp_path / str(rows) / f"new_aan_pairs.{name}.tsv").write_bytes(b"0.0\ta\tb\tx\ty\n")
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path / str(rows)), str(tmp_path / f"out{rows}")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(done.stdout))
    # the larger file is 86 MB, and 58 MB of tokens are made of it
    assert peaks[1] - peaks[0] < 8000


def test_yaml_registry_and_folders(tmp_path):
    text = OmegaConf.load(ROOT / "conf" / "task" / "retrieval.yaml")
    assert text.pop("defaults") == ["retrieval_schema", "_self_"]
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), text)) == Config()
    assert load("retrieval") is Retrieval
    for options, message in (
        ({"length": 0}, "task.length=0: retrieval takes 1..65536"),
        ({"length": 1, "fidelity": "s4"}, "task.length=1: retrieval takes 2..65536"),
        ({"fidelity": "nys"}, "task.fidelity='nys': retrieval takes lra | s4"),
        ({"source": "hub"}, "task.source=hub: retrieval takes auto | release or a folder"),
        ({"train_rows": -1}, "task.train_rows=-1"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            Retrieval.load(Config(**options), tmp_path)
    assert json.dumps(Retrieval.parameters(Config()))
