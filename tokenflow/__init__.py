"""tokenflow: a token's way from an engine to a reader, done right."""

__version__ = "0.1.0"


def compiled() -> bool:
    """The modules that a token goes through are machine code, and not Python (docs/decisions/0015)."""
    from tokenflow.core import replay

    return not replay.__file__.endswith(".py")
