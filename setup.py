"""With TOKENFLOW_COMPILE=1 the modules that a token goes through are compiled (docs/decisions/0015).

Everything else about this package is in pyproject.toml. To compile wants a C compiler and, in the environment that
builds, mypy and all that tokenflow imports: so without build isolation, as the Makefile does it.
"""

import os

from setuptools import setup

COMPILED = {
    "core": ("admission", "credit", "deadlines", "deltas", "logstore", "replay", "states", "stopping", "timings"),
    "api": ("loop", "send"),
    "chat": ("marking",),
    "dialects": (
        *("encoder", "fields", "named", "openai_chat", "openai_common", "openai_completions", "openai_frames"),
        *("openai_messages", "openai_refused", "small"),
    ),
    "service": ("account", "choice", "plan", "reader", "stream", "watch"),
    "http": ("events",),
    "http/transport": ("at_once", "writer", "ws"),
}
"""By room. What inherits from a class in one of these is here too: it could not, if it were not compiled."""


def extensions():
    from mypyc.build import mypycify  # only here is it needed

    files = [f"tokenflow/{room}/{name}.py" for room, names in COMPILED.items() for name in names]
    return mypycify(files, opt_level="3", debug_level="1", group_name="tokenflow")


setup(ext_modules=extensions() if os.environ.get("TOKENFLOW_COMPILE") == "1" else [])
