"""The file of published numbers: damage to it is told by row."""

import pytest

from lra import table
from lra.errors import UserError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"\xff\xfe" + data, "expected CSV in UTF-8, found other bytes"),
        (lambda data: b"", "expected the columns model, .* found nothing"),
        (lambda data: data.replace(b"length", b"n", 1), "expected the columns model, .* found model, backend, task, n"),
        (lambda data: data + b"a,b,c,long,,,,V,,\n", "row .*: expected 10 values with a number as length"),
        (lambda data: data + b"a,b\n", "row .*: expected 10 values"),
        (lambda data: data + b"a,b,c,1,,,,X,,\n", "row .*: expected .* V or T as trust"),
        (lambda data: data + b'a,"b\n', "expected CSV in UTF-8"),
    ],
)
def test_published_numbers_that_are_damaged(tmp_path, change, message):
    path = tmp_path / "published.csv"
    path.write_bytes(table.PUBLISHED.read_bytes())
    assert len(table.read_published(path)) > 100
    path.write_bytes(change(table.PUBLISHED.read_bytes()))
    with pytest.raises(UserError, match=f"published.csv: {message}"):
        table.read_published(path)
