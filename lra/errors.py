"""The one exception that the commands turn into a single line and exit code 2."""


class UserError(ValueError):
    """Bad input. The message names the key or file, what was expected, what was found, and the way out."""


def describe_os(error: OSError) -> str:
    """What the operating system refused, as one line with the way out."""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}; free space, get permission, or give another data_dir=... or runs_dir=..."
