"""Paths as a user gives them, and files that are not what their names say."""

from pathlib import Path

from lra.errors import UserError


def absolute(path: str | Path, key: str) -> Path:
    """``path`` from the root, ``~`` replaced; ``UserError`` names ``key`` if it cannot be the name of a file."""
    if "\0" in str(path):
        raise UserError(f"{key}: expected a path, found one with a NUL character, which no file has; correct it")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise UserError(f"{key}={path}: expected a path, found a user without a home; write it out") from None


def refuse_gzip(path: Path) -> None:
    """Raise ``UserError`` if ``path``, which should be text, is compressed."""
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise UserError(f"{path}: expected text, found gzip under the name {path.name}; unpack it with gunzip")
