"""Data sets in the Hub's layout: where they are looked for, and what is said of files that are not right."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lra.data import sources
from lra.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
REPO, REVISION = "someone/reviews", "e6281661ce1c48d982bc483cf8a173c1bbeb5d31"
COLUMNS = {"text": "text", "label": "label"}
TEXTS = {
    "train": ["naïve", "", "nul\0byte", "日本語 😀", "five", "six", "seven"],
    "test": ["one", "two"],
}


def write(path, texts, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"text": texts, "label": pyarrow.array([i % 2 for i in range(len(texts))], "int64"), **columns}
    pyarrow.parquet.write_table(pyarrow.table(table), path, row_group_size=3)


def fill(folder):
    for split, texts in TEXTS.items():
        write(folder / f"{split}-00000-of-00001.parquet", texts)


def load(data_dir, source="hub", columns=COLUMNS, **options):
    return sources.load(REPO, REVISION, columns, source=str(source), data_dir=data_dir, **options)


def rows(table, column="text", size=2):
    batches = list(table.batches(size))
    assert [len(batch[column]) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    return [value for batch in batches for value in batch[column]]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    """What is in the user's own mirror and cache must not decide a test."""
    monkeypatch.delenv("LRA_HUB_DIR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("below", ["", "data", "plain_text"])
def test_reads_a_folder_exactly_and_in_order(tmp_path, below):
    fill(tmp_path / "a [b]*" / below)
    tables = load(tmp_path, source=tmp_path / "a [b]*")
    assert {name: (table.rows, rows(table)) for name, table in tables.items()} == {
        "train": (7, TEXTS["train"]),
        "test": (2, TEXTS["test"]),
    }
    assert rows(tables["train"], "label") == [0, 1, 0, 1, 0, 1, 0]
    name = f"{below}/train-00000-of-00001.parquet".lstrip("/")
    assert tables["train"].files == {name: tmp_path / "a [b]*" / name}


@pytest.mark.parametrize("named", ["data/hub/someone", "data/hub", "data"])
def test_a_folder_above_the_data_set_is_told_which_one_below_it_to_name(tmp_path, named):
    folder = tmp_path / "data/hub/someone/reviews"
    fill(folder / "plain_text")
    with pytest.raises(UserError) as error:
        load(tmp_path, source=tmp_path / named)
    words = f"{tmp_path / named}: someone/reviews lies deeper in it; name its own folder: task.source="
    assert str(error.value) == f"{words}{folder}"
    assert load(tmp_path, source=str(error.value).split("task.source=")[1])["test"].rows == 2
    # what is not whole there is no advice
    (folder / "plain_text/test-00000-of-00001.parquet").unlink()
    with pytest.raises(UserError, match=r": expected train-\*.parquet in it, in data/ or in plain_text/, found"):
        load(tmp_path, source=tmp_path / named)


def test_reads_shards_in_order_and_other_file_names(tmp_path):
    for i in range(12):
        write(tmp_path / "data" / f"train-{i:05}-of-00012.parquet", [f"{i}a", f"{i}b"])
    write(tmp_path / "data" / "test" / "0000.parquet", ["t"])
    tables = load(tmp_path, source=tmp_path)
    assert rows(tables["train"], size=5) == [f"{i}{c}" for i in range(12) for c in "ab"]
    assert rows(tables["test"]) == ["t"]
    write(tmp_path / "train.parquet", ["flat"])
    assert rows(load(tmp_path, source=tmp_path, splits=["train"])["train"]) == ["flat"]


def test_images_come_as_the_bytes_of_the_file(tmp_path):
    images = [{"bytes": b"\x89PNG not decoded", "path": "1.png"}, {"bytes": b"\0", "path": None}]
    write(tmp_path / "train.parquet", ["a", "b"], img=images)
    table = load(tmp_path, source=tmp_path, columns={"img": "image", "label": "label"}, splits=["train"])["train"]
    assert list(table.batches(9)) == [{"img": [b"\x89PNG not decoded", b"\0"], "label": [0, 1]}]


def test_the_mirror_named_by_the_environment_comes_before_the_data_folder(tmp_path, monkeypatch):
    fill(tmp_path / "data" / "hub" / REPO / "plain_text")
    assert load(tmp_path / "data")["test"].root == tmp_path / "data/hub/someone/reviews"
    monkeypatch.setenv("LRA_HUB_DIR", str(tmp_path / "mirror"))
    assert load(tmp_path / "data")["test"].root == tmp_path / "data/hub/someone/reviews"
    fill(tmp_path / "mirror" / REPO)
    assert load(tmp_path / "data")["test"].root == tmp_path / "mirror/someone/reviews"


def test_the_cache_of_the_hubs_library_is_used_if_it_has_every_split(tmp_path):
    snapshot = tmp_path / "cache/datasets--someone--reviews/snapshots" / REVISION
    write(snapshot / "plain_text/train-00000-of-00001.parquet", ["a"])
    assert sources.locate(REPO, REVISION, source="hub", data_dir=tmp_path) is None
    write(snapshot / "plain_text/test-00000-of-00001.parquet", ["b"])
    assert rows(load(tmp_path)["test"]) == ["b"]
    assert sources.locate(REPO, "0" * 40, source="hub", data_dir=tmp_path) is None


def test_without_a_network_one_message_says_what_to_put_where(tmp_path):
    started = time.monotonic()
    with pytest.raises(UserError) as error:
        load(tmp_path)
    assert time.monotonic() - started < 5
    folder = tmp_path / "hub/someone/reviews"
    for part in ("offline", f"train-*.parquet and test-*.parquet into {folder}", "$LRA_HUB_DIR", "task.source=FOLDER"):
        assert part in str(error.value)
    assert f"`hf download {REPO} --repo-type dataset --revision {REVISION} --local-dir {folder}`" in str(error.value)


HUB = """
import sys
from pathlib import Path
from lra.data import sources
tables = sources.load("someone/reviews", sys.argv[1], {"text": "text"}, source="hub", data_dir=Path(sys.argv[2]))
for split, table in tables.items():
    print(split, table.rows, *table.files, *table.files.values())
"""


def python(endpoint, tmp_path):
    """Load from the Hub at ``endpoint`` in a process of its own, since the library reads settings once."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", HUB, REVISION, str(tmp_path)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


class FakeHub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a download of the pinned revision asks for."""

    files: dict[str, bytes] = {}
    asked: list[str] = []

    def log_message(self, *_):
        """Silence."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        self.asked.append(path)
        name = path.partition(f"/resolve/{REVISION}/")[2]
        if path == f"/api/datasets/{REPO}/revision/{REVISION}":
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": REPO, "sha": REVISION, "siblings": siblings}).encode()
        elif path.startswith(f"/api/datasets/{REPO}/tree/{REVISION}"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in self.files.items()
            ]
            body = json.dumps(entries).encode()
        elif name in self.files:
            body = self.files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{len(body):040}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_downloads_the_pinned_revision_and_only_the_splits(tmp_path):
    fill(tmp_path / "source/plain_text")
    files = {f"plain_text/{path.name}": path.read_bytes() for path in (tmp_path / "source/plain_text").iterdir()}
    FakeHub.files = {**files, "README.md": b"x", "plain_text/unsupervised-00000-of-00001.parquet": b"not wanted"}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = python(f"http://127.0.0.1:{server.server_port}", tmp_path)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in found] == [["train", "7"], ["test", "2"]]
    assert {name: Path(path).read_bytes() for _, _, name, path in found} == files
    assert not [path for path in FakeHub.asked if "unsupervised" in path or "README" in path]
    # and again without the Hub, from the cache
    assert python("http://127.0.0.1:9", tmp_path).stdout == done.stdout


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://unknown.invalid"])
def test_a_hub_out_of_reach_is_given_up_soon(tmp_path, endpoint):
    started = time.monotonic()
    done = python(endpoint, tmp_path)
    assert "UserError: someone/reviews is not on this machine" in done.stderr
    # the start of the interpreter included; the library's own retries take 23 s
    assert time.monotonic() - started < 15


def damage(tmp_path, case):
    path = tmp_path / "train-00000-of-00001.parquet"
    if case == "missing":
        path.unlink()
    elif case == "text":
        path.write_text("not parquet")
    elif case == "lfs":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif case == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif case == "empty":
        write(path, pyarrow.array([], "string"))
    elif case == "column":
        pyarrow.parquet.write_table(pyarrow.table({"content": ["a"], "label": [0]}), path)
    elif case == "twice":
        table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
        pyarrow.parquet.write_table(table, path)
    elif case == "kind":
        write(path, [1, 2])
    elif case == "shard":
        path.rename(tmp_path / "train-00000-of-00002.parquet")
    elif case == "mixed":
        write(tmp_path / "train-00000-of-00002.parquet", ["a"])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", r"expected train-\*.parquet in it, .* found test-00000-of-00001.parquet; put"),
        ("text", "train-00000-of-00001.parquet: expected a parquet file, found none"),
        ("lfs", "Git LFS pointer: run `git lfs pull`"),
        ("cut", "train-00000-of-00001.parquet: expected a parquet file, found none"),
        ("empty", "expected rows in split train, found none"),
        ("column", "expected a column text of kind text, found content, label"),
        ("twice", "expected one column text, found 2; get the file again"),
        ("kind", "expected a column text of kind text, found text of type int64"),
        ("shard", r"expected 2 files train-\*.parquet, .* found train-00000-of-00002.parquet; get all"),
        ("mixed", r"expected 1 files train-\*.parquet, .* found train-00000-of-00001.parquet, train-00000-of-00002"),
    ],
)
def test_files_that_are_not_right_are_one_error(tmp_path, case, message):
    fill(tmp_path)
    damage(tmp_path, case)
    with pytest.raises(UserError, match=message) as error:
        load(tmp_path, source=tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="nowhere: expected train.* found no such folder"):
        load(tmp_path, source=tmp_path / "nowhere")


def test_damage_inside_a_file_and_missing_values_name_the_file(tmp_path):
    fill(tmp_path)
    path = tmp_path / "train-00000-of-00001.parquet"
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)  # the pages of the first column; footer and schema stay whole
    path.write_bytes(data)
    with pytest.raises(UserError, match="train-00000-of-00001.parquet: cannot read the rows after 0 of 7"):
        rows(load(tmp_path, source=tmp_path)["train"])
    write(path, ["a", "b", "c", None])
    with pytest.raises(UserError, match="expected a value in column text of every row, found none in row 3"):
        rows(load(tmp_path, source=tmp_path)["train"])


def test_text_that_is_no_utf8_is_refused(tmp_path):
    fill(tmp_path)
    binary = pyarrow.array([b"fine", b"broken \xff"], "binary")
    text = pyarrow.StringArray.from_buffers(2, binary.buffers()[1], binary.buffers()[2])
    write(tmp_path / "train-00000-of-00001.parquet", text)
    with pytest.raises(UserError, match="train-00000-of-00001.parquet: cannot read the rows after 0 of 2"):
        rows(load(tmp_path, source=tmp_path)["train"])


def test_a_label_beyond_64_bits_is_told_once(tmp_path, capfd):
    fill(tmp_path)
    write(tmp_path / "train-00000-of-00001.parquet", ["a"], label=pyarrow.array([2**64 - 1], "uint64"))
    with pytest.raises(UserError, match="cannot read the rows after 0 of 1"):
        rows(load(tmp_path, source=tmp_path)["train"])
    assert capfd.readouterr().err == ""
