"""A configuration as text: every key, its value, where it came from."""

from __future__ import annotations

from tokenflow.config.keys import dotted, shown
from tokenflow.config.load import Loaded, flatten


def show(loaded: Loaded) -> str:
    """One line a key, `key = value  # where`; secrets as ***, hashes cut short."""
    rows = [
        (f"{dotted(path)} = {shown(path, value)}", loaded.provenance[dotted(path)])
        for path, value in flatten(loaded.config)
    ]
    width = min(max(len(left) for left, _ in rows), 72)
    return "".join(f"{left:<{width}}  # {where}\n" for left, where in rows)
