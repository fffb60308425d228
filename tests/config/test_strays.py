"""Variables that look like ours: which are told, and what may have been meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenflow.config import strays
from tokenflow.config.strays import OTHERS

MEANT = {
    "SERVER_PORT": "did you mean TOKENFLOW_SERVER__PORT?",
    "PORT": "did you mean TOKENFLOW_SERVER__PORT?",
    "LIMITS_MAX_TOKENS": "did you mean TOKENFLOW_LIMITS__MAX_TOKENS?",
    "TIMEOUTS_IDLE_TIMOUT_S": "did you mean TOKENFLOW_TIMEOUTS__IDLE_TIMEOUT_S?",
    "MODELS_QWEN_ENGINE": "did you mean TOKENFLOW_MODELS__<NAME>__<KEY>?",
    "SINKS_LEDGER_PATH": "did you mean TOKENFLOW_SINKS__<NAME>__<KEY>?",
    "CONFG": "did you mean TOKENFLOW_CONFIG?",
    "config": "did you mean TOKENFLOW_CONFIG?",
    "XYZZY": "unset it, or write TOKENFLOW_<SECTION>__<KEY>",
}


@pytest.mark.parametrize(("name", "way_out"), MEANT.items(), ids=MEANT)
def test_a_near_miss(name: str, way_out: str) -> None:
    assert list(strays({f"TOKENFLOW_{name}": "9"})) == [
        f"environment TOKENFLOW_{name}: no variable of tokenflow's, so it is ignored; {way_out}"
    ]


def test_others_are_none_of_ours() -> None:
    assert not list(strays({"PORT": "9", "TOKENFLOWER_PORT": "9", "TOKENFLOW": "9", "TOKENFLOW_SERVER__PROT": "9"}))


def test_what_kubernetes_sets_for_services_is_left_alone() -> None:
    port = "tcp://10.0.0.1:8000"
    env = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "8000", "SERVICE_PORT_HTTP": "8000", "PORT": port}
    env |= {"PORT_8000_TCP": port, "PORT_8000_TCP_ADDR": "10.0.0.1", "SERVER_PORT": port}
    assert not list(strays({f"TOKENFLOW_{name}": value for name, value in env.items()}))


def test_every_variable_that_is_read_is_ours() -> None:
    root = Path(__file__).parents[2]
    files = [*(root / "tokenflow").rglob("*.py"), root / "setup.py"]
    read = {name for file in files for name in re.findall(r"\bTOKENFLOW_([A-Z]+)\b", file.read_text(encoding="utf-8"))}
    assert read == OTHERS
