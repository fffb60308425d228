"""Autobahn's fuzzing client, all of it but compression, which we decline.

It needs Python 2.7: where there is one with pip, `make stress` installs it. Without it, `test_websocket.py` asks most
of the same questions by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

FOLDER = Path(__file__).parents[3] / ".autobahn"
WSTEST = FOLDER / "bin" / "wstest"
PASSED = {"OK", "NON-STRICT", "INFORMATIONAL"}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "bytes": message["bytes"], "text": message["text"]})


@pytest.mark.stress
@pytest.mark.skipif(not WSTEST.exists(), reason="NOT TESTED: no Python 2.7 with pip, which Autobahn's suite needs")
async def test_autobahn_finds_nothing(serving: Any, config: Any, tmp_path: Path) -> None:
    config.websocket_max_message_size = 32 * 1024 * 1024
    host, port = await serving(echo)
    (tmp_path / "spec.json").write_text(
        json.dumps(
            {
                "outdir": str(tmp_path / "report"),
                "servers": [{"agent": "tokenflow", "url": f"ws://{host}:{port}"}],
                "cases": ["*"],
                "exclude-cases": ["12.*", "13.*"],
                "exclude-agent-cases": {},
            }
        )
    )
    command = [WSTEST, "-m", "fuzzingclient", "-s", str(tmp_path / "spec.json")]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONUSERBASE": str(FOLDER)}
    with trio.fail_after(1800):
        await trio.run_process(command, env=env, stdout=subprocess.DEVNULL)
    results = json.loads((tmp_path / "report" / "index.json").read_text())["tokenflow"]
    wrong = {
        case: (result["behavior"], result["behaviorClose"])
        for case, result in results.items()
        if not {result["behavior"], result["behaviorClose"]} <= PASSED
    }
    assert len(results) > 240 and wrong == {}
