"""OpenAI's own SDKs, for Python and for Node, against streams that can be come back to: ids and pings between them.

An `id:` line that a blank line ends without data has made both raise on events that no server meant; so where ids are
on, a heartbeat is one line. Each SDK reads the same bodies, in a process of its own, through a proxy that notes what
really came by.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cutproxy import cutting
from tests.e2e.conftest import Server, serving
from tests.e2e.wire import BODIES, directive

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
NODE_SDK = ROOT / ".openai-node"
OLDEST = ROOT / ".venv-openai-old" / "bin" / "python"
PATIENCE_S = 60.0
CONFIG = """
[stream]
heartbeat_s = 0.05

[models.m]
engine = "synthetic"
directives = true
"""
SAID = " amber stone river moon owl leaf sand fog oak wave"
"""A word is a token."""
PREFILL, FAST, SLOW = {"prefill_ms": 180}, {"tokens_per_s": 500}, {"tokens_per_s": 7}
CASES: list[tuple[dict[str, Any], dict[str, Any], int, str | None]] = [
    (PREFILL | FAST, {"max_tokens": 8}, 8, None),
    (PREFILL | FAST, {"max_tokens": 8, "coalesce_ms": 5}, 8, None),
    (SLOW, {"max_tokens": 2}, 2, None),
    (PREFILL | {"raise_at": 2}, {}, 2, "engine_error"),
    ({"hang_at": 2}, {"timeouts": {"idle_timeout_s": 0.18}}, 2, "idle_timeout"),
]
"""What the engine does, what is asked, how many tokens come, and the error that ends it."""


def bodies() -> list[dict[str, Any]]:
    ways = cycle({"on_disconnect": way, "include_usage": True} for way in ("pause", "continue"))
    return [
        make(directive(text=SAID, **plan), model="m", stream=True, stream_options=next(ways), **fields)
        for make in BODIES.values()
        for plan, fields, _, _ in CASES
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("resumable"), CONFIG) as server:
        yield server


def node() -> list[str | Path]:
    program = shutil.which("node")
    if program is None:
        pytest.skip("NOT TESTED: there is no node on this machine (apt-get install nodejs npm)")
    if not (NODE_SDK / "node_modules").exists():
        pytest.skip("NOT TESTED: run `make test` where there is npm: it installs the openai package for node")
    return [program, HERE / "openai_resumable.mjs", NODE_SDK]


def python(interpreter: Path) -> list[str | Path]:
    if not interpreter.exists():
        pytest.skip("run `make test`: it makes the environment with the older client")
    return [interpreter, "-W", "error", HERE / "openai_resumable.py"]


SDKS = {"node": node, "python": partial(python, Path(sys.executable)), "oldest python": partial(python, OLDEST)}


@pytest.mark.parametrize("sdk", SDKS)
async def test_ids_and_pings_disturb_no_sdk(server: Server, sdk: str) -> None:
    command = SDKS[sdk]()
    async with cutting(server.port) as proxy:
        command += [f"http://127.0.0.1:{proxy.port}", json.dumps(bodies())]
        with trio.fail_after(PATIENCE_S):
            done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        passed = b"".join(connection.down for connection in proxy.log)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    assert re.search(rb"\nid: tf-\w+:8\n", passed), "ids came"
    assert passed.count(b"\n: ping\n") >= 2 * len(CASES) * len(BODIES) and b": ping\n\n" not in passed, "and pings"
    ends = [(count, error) for *_, count, error in CASES] * len(BODIES)
    for seen, (count, error) in zip(json.loads(done.stdout), ends, strict=True):
        text = "".join(f" {word}" for word in SAID.split()[:count])
        end = {"reason": "length", "tokens": count} if error is None else {"reason": None, "tokens": None}
        assert seen == {"text": text, "error": error} | end
