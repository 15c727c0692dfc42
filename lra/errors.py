"""The one exception that the commands turn into a single line and exit code 2."""


class UserError(ValueError):
    """Bad input. The message names the key or file, what was expected, what was found, and the way out."""
