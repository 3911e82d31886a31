"""Stand-in."""


def sha256(value):
    """Not one, and equal for equal values."""
    return repr(value).encode()
