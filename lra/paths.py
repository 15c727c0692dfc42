"""Paths as a user gives them."""

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
