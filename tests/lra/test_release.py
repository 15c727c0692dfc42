"""The release is found in every form that people have, unpacked once, and refused when it is not whole."""

import io
import os
import tarfile
import threading
from pathlib import Path

import pytest

from lra.data import release
from lra.errors import UserError

INNER = {
    "lra_release/lra_release/tsv_data/new_aan_pairs.eval.tsv": b"inner pairs",
    "lra_release/lra_release/pathfinder32/imgs/0/a.png": b"inner image",
    "lra_release/lra_release/listops-1000/basic_val.tsv": b"inner",
}
OUTER = {
    "lra_release/listops-1000/basic_val.tsv": b"outer",
    "lra_release/pathfinder128/imgs/0/a.png": b"outer image",
}
"""As the published archive is: a second release in the release, and two tasks in both."""


def write_archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_folder(root, members):
    for name, data in members.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def visible(folder):
    return [p for p in Path(folder).rglob("*") if p.is_file()]


@pytest.mark.parametrize("members", [{**OUTER, **INNER}, {**INNER, **OUTER}], ids=["outer first", "inner first"])
def test_the_inner_copy_is_taken_from_an_archive(tmp_path, members):
    write_archive(tmp_path / "lra_release.gz", members)
    assert release.find(tmp_path) == release.find(tmp_path, "tsv_data") == tmp_path / "lra_release.gz"
    found = release.folder("release", "listops-1000", tmp_path)
    assert tmp_path in found.parents
    assert [(p.name, p.read_bytes()) for p in found.rglob("*")] == [("basic_val.tsv", b"inner")]
    # and what is only outside is found there
    outer = release.folder(tmp_path / "lra_release.gz", "pathfinder128", tmp_path)
    assert (outer / "imgs/0/a.png").read_bytes() == b"outer image"
    # only what was asked for, without leavings
    assert len(visible(tmp_path)) == 3


@pytest.mark.parametrize("prefix", ["", "./", "lra_release/"])
def test_an_archive_of_one_nesting_or_of_the_tasks_alone_is_read(tmp_path, prefix):
    archive = write_archive(tmp_path / "mine.tar.gz", {f"{prefix}tsv_data/x.tsv": b"pairs"})
    assert (release.folder(str(archive), "tsv_data", tmp_path / "data") / "x.tsv").read_bytes() == b"pairs"


@pytest.mark.parametrize("place", ["", "lra_release", "lra_release/lra_release"])
def test_the_inner_copy_is_taken_from_a_folder_given_at_any_level(tmp_path, place):
    write_folder(tmp_path, OUTER | INNER)
    found = release.folder(tmp_path / place, "listops-1000", tmp_path)
    assert (found / "basic_val.tsv").read_bytes() == b"inner"
    assert release.find(tmp_path) == tmp_path / "lra_release"


def test_an_archive_unpacked_into_a_folder_of_its_name_is_found(tmp_path):
    write_folder(tmp_path / "lra_release", OUTER | INNER)
    found = release.folder("release", "tsv_data", tmp_path)
    assert (found / "new_aan_pairs.eval.tsv").read_bytes() == b"inner pairs"


def test_the_folder_of_the_task_itself_is_taken(tmp_path):
    write_folder(tmp_path, {"aan/new_aan_pairs.eval.tsv": b""})
    assert release.folder(str(tmp_path / "aan"), "tsv_data", tmp_path) == tmp_path / "aan"


def test_an_archive_is_used_for_what_a_partly_unpacked_folder_lacks(tmp_path):
    write_folder(tmp_path, {"lra_release/lra_release/listops-1000/basic_val.tsv": b"unpacked"})
    write_archive(tmp_path / "lra_release.tar.gz", INNER)
    assert release.find(tmp_path, "listops-1000") == tmp_path / "lra_release"
    assert release.find(tmp_path, "tsv_data") == tmp_path / "lra_release.tar.gz"
    assert (release.folder("release", "tsv_data", tmp_path) / "new_aan_pairs.eval.tsv").is_file()
    assert (release.folder("release", "listops-1000", tmp_path) / "basic_val.tsv").read_bytes() == b"unpacked"


def test_an_archive_is_unpacked_once_and_another_of_its_name_anew(tmp_path, monkeypatch):
    archive = write_archive(tmp_path / "lra_release.gz", INNER)
    found = release.folder(archive, "tsv_data", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(release, "_unpack", lambda *_: pytest.fail("unpacked twice"))
        assert release.folder(archive, "tsv_data", tmp_path) == found
    write_archive(archive, {"lra_release/tsv_data/new.tsv": b"other"})
    assert [p.name for p in release.folder(archive, "tsv_data", tmp_path).iterdir()] == ["new.tsv"]


def test_two_at_once_share_one_copy(tmp_path, monkeypatch):
    archive = write_archive(tmp_path / "lra_release.gz", INNER)
    calls, original = [], release._unpack
    monkeypatch.setattr(release, "_unpack", lambda *a: (calls.append(1), original(*a)))
    threads = [threading.Thread(target=release.folder, args=(archive, "tsv_data", tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
def test_an_archive_that_was_cut_leaves_nothing(tmp_path, share):
    noise = {f"lra_release/tsv_data/{i}": os.urandom(30_000) for i in range(10)}
    archive = write_archive(tmp_path / "lra_release.gz", noise)
    data = archive.read_bytes()
    archive.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=r"lra_release.gz: expected a complete tar.gz of .* bytes, found .*; download"):
        release.folder("release", "tsv_data", tmp_path)
    assert visible(tmp_path) == [archive]


def test_an_archive_with_a_changed_byte_is_refused(tmp_path):
    # stored, not deflated, so that only the checksum at the end can tell
    members = {"lra_release/tsv_data/a": bytes(100_000), "lra_release/zzz": bytes(100_000)}
    with tarfile.open(tmp_path / "lra_release.gz", "w:gz", compresslevel=0) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = bytearray((tmp_path / "lra_release.gz").read_bytes())
    data[150_000] ^= 1
    (tmp_path / "lra_release.gz").write_bytes(data)
    with pytest.raises(UserError, match="damaged or cut short .CRC check failed"):
        release.folder("release", "tsv_data", tmp_path)
    assert len(visible(tmp_path)) == 1


def test_a_file_that_is_no_archive_is_named(tmp_path):
    (tmp_path / "lra_release.gz").write_text("<html>403</html>")
    with pytest.raises(UserError, match=r"lra_release.gz: expected a complete tar.gz of 16 bytes, found .*Not a gzip"):
        release.folder("release", "tsv_data", tmp_path)


@pytest.mark.parametrize(
    "name", ["lra_release/tsv_data/../../../../evil", "lra_release/tsv_data/../evil", "lra_release/tsv_data/x/../../y"]
)
def test_a_member_that_leaves_the_folder_is_refused(tmp_path, name):
    archive = write_archive(tmp_path / "a.gz", {name: b""})
    with pytest.raises(UserError, match=r"a.gz: expected files below tsv_data, found .*; do not use this file"):
        release.folder(archive, "tsv_data", tmp_path / "data")
    assert visible(tmp_path) == [archive]


def test_links_and_members_elsewhere_are_not_written(tmp_path):
    archive = tmp_path / "lra_release.gz"
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("lra_release/tsv_data/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
        for name in ("lra_release/tsv_data/link/passwd", "/etc/evil", "../evil", "lra_release/tsv_data"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    found = release.folder("release", "tsv_data", tmp_path)
    assert [p.name for p in found.rglob("*")] == ["link", "passwd"]
    assert not (found / "link").is_symlink()


def test_what_is_missing_is_said(tmp_path):
    assert release.find(tmp_path) is None
    with pytest.raises(UserError, match=r"found none; put the file lra_release.gz .*long-range-arena .about 8 GB."):
        release.folder("release", "tsv_data", tmp_path)
    with pytest.raises(UserError, match=r"task.source=.*/nowhere: expected a folder or lra_release.gz, found neither"):
        release.folder(tmp_path / "nowhere", "tsv_data", tmp_path)
    write_folder(tmp_path, {"lra_release/listops-1000/basic_val.tsv": b""})
    with pytest.raises(UserError, match=r"lra_release: expected the folder tsv_data of LRA.s release in it, found"):
        release.folder("release", "tsv_data", tmp_path)
    archive = write_archive(tmp_path / "lra_release.gz", INNER)
    with pytest.raises(UserError, match=r"lra_release.gz: expected the folder pathfinder64 .* found none"):
        release.folder(archive, "pathfinder64", tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    archive = write_archive(tmp_path / "lra_release.gz", INNER)

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "makefile", refuse)
    with pytest.raises(UserError, match=r"cannot unpack .*lra_release.gz to .*tsv_data: No space left on device; free"):
        release.folder("release", "tsv_data", tmp_path)
    assert visible(tmp_path) == [archive]
