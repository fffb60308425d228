"""Environment variables that look like ours and are none: a misspelt name would be passed over in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from tokenflow.config.load import SECTIONS
from tokenflow.config.raw import PREFIX

OTHERS = frozenset({"CACHE", "COMPILE", "CONFIG", "KEY", "URL"})
"""Variables of ours that are no key: of the cache, the build, `-c` and `tokenflow chat`."""
KEYS = tuple(f"{section}__{field.name}".upper() for section, cls in SECTIONS.items() for field in fields(cls))
_TABLES = re.compile(r"(MODELS|SINKS)_")
_SERVICE = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)$|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")


def strays(env: Mapping[str, str]) -> Iterator[str]:
    """A line for people for each that is ignored, with what may have been meant."""
    for name in sorted(env):
        rest = name.removeprefix(PREFIX)
        if rest == name or "__" in name or rest in OTHERS or _is_a_services(rest, env[name]):
            continue
        meant = _meant(rest.upper())
        way_out = f"did you mean {PREFIX}{meant}?" if meant else "unset it, or write TOKENFLOW_<SECTION>__<KEY>"
        yield f"environment {name}: no variable of tokenflow's, so it is ignored; {way_out}"


def _is_a_services(rest: str, value: str) -> bool:
    """Kubernetes tells every pod of the services beside it, of one named tokenflow too."""
    return _SERVICE.search(rest) is not None or (rest.endswith("PORT") and "://" in value)


def _meant(rest: str) -> str:
    if table := _TABLES.match(rest):
        return f"{table[1]}__<NAME>__<KEY>"
    alone = [key for key in KEYS if key.endswith(f"__{rest}")]
    return next(iter(alone or difflib.get_close_matches(rest, [*KEYS, *OTHERS], n=1, cutoff=0.75)), "")
