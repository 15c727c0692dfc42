"""Small retrieval files for tests."""

import json

from lra.tasks.retrieval import Config, Retrieval


def ignore(done, total):
    """Progress that nobody watches."""


def write_source(folder, rows, **options):
    """Three equal files of these lines; the configuration that reads them."""
    folder.mkdir(parents=True)
    for name in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{name}.tsv").write_bytes(b"".join(row + b"\n" for row in rows))
    return Config(source=str(folder), **options)


def prepared(config, data):
    """Info and splits after preparing."""
    Retrieval.prepare(config, data, ignore)
    return Retrieval.load(config, data)


def manifest(config, data):
    return json.loads((Retrieval.folder(config, data) / "manifest.json").read_text())
