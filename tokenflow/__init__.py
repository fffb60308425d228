"""tokenflow: a token's way from an engine to a reader, done right."""

__version__ = "0.1.0"
