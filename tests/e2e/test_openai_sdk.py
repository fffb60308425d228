"""openai-python against the real model: the newest release and the oldest of the last year, on Trio and on asyncio.

A script (openai_client.py) runs under each interpreter, once for each combination, and says what it saw; each test here
judges one part of that. The server keeps no prefixes and only one client asks at a time, for a real model's texts are
only equal, bit for bit, where its batches have the same shape. A second model, with planned faults and one slot, stands
beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import serving
from tests.e2e.openai_client import KEY

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("openai_client.py")
PYTHONS = {"newest": Path(sys.executable), "oldest": ROOT / ".venv-openai-old" / "bin" / "python"}
CONFIG = f"""
[[auth.keys]]
name = "tests"
sha256 = "{sha256(KEY.encode()).hexdigest()}"

[models.smollm2]
engine = "llamacpp"
prefix_cache = false
slots = 2
context_length = 2048

[models.synthetic]
engine = "synthetic"
directives = true
slots = 1
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("sdk"), CONFIG) as server:
        yield server.url


@cache
def client(sdk: str, backend: str, url: str) -> Any:
    """What the script saw; it runs once for each combination."""
    command = [PYTHONS[sdk], "-W", "error", SCRIPT, url, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["newest", "oldest"])
def sdk(request: pytest.FixtureRequest) -> str:
    if not PYTHONS[request.param].exists():
        pytest.skip("run `make test`: it makes the environment with the older client")
    return str(request.param)


@pytest.fixture(scope="module", params=["trio", "asyncio"])
def seen(request: pytest.FixtureRequest, sdk: str, url: str) -> Any:
    return client(sdk, request.param, url)


def test_it_is_the_release_that_is_meant(seen: Any, sdk: str) -> None:
    assert seen["version"] == "2.9.0" if sdk == "oldest" else int(seen["version"].split(".")[0]) >= 3


@pytest.mark.parametrize("name", ["chat greedy", "chat seeded", "completion greedy", "completion stopped"])
def test_the_same_text_streamed_and_whole(seen: Any, name: str) -> None:
    whole, streamed = seen["texts"][name]
    assert streamed["texts"] == whole["texts"]
    assert whole["texts"][0].strip()
    assert streamed["reasons"] == [whole["reasons"]]
    assert whole["model"] == "smollm2"
    assert len(streamed["ids"]) == 1 and streamed["ids"][0] != whole["id"]


def test_every_client_gets_the_same_text(url: str, seen: Any) -> None:
    first = client("newest", "trio", url)
    for name, (whole, _) in seen["texts"].items():
        assert whole["texts"] == first["texts"][name][0]["texts"], name


def test_why_it_ended(seen: Any) -> None:
    for name in ("chat greedy", "completion greedy"):
        whole, streamed = seen["texts"][name]
        assert whole["reasons"] == ["length"] and whole["usage"]["completion_tokens"] == 8
        assert streamed["chunks"] >= 5
    stopped, _ = seen["texts"]["completion stopped"]
    assert stopped["reasons"] == ["stop"] and "e" not in stopped["texts"][0]


def test_the_first_chunk_of_a_chat_has_the_role(seen: Any) -> None:
    assert seen["texts"]["chat greedy"][1]["roles"] == ["assistant"]


@pytest.mark.parametrize("name", ["chat greedy", "completion stopped"])
def test_usage_is_the_same_streamed_and_whole(seen: Any, name: str) -> None:
    whole, streamed = seen["texts"][name]
    assert streamed["usages"] == [whole["usage"]]
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] > 5 and 0 < usage["completion_tokens"] <= 60


@pytest.mark.parametrize("name", ["chat seeded", "completion greedy"])
def test_no_usage_in_a_stream_that_did_not_ask(seen: Any, name: str) -> None:
    assert seen["texts"][name][1]["usages"] == []


def test_two_choices(seen: Any) -> None:
    whole, streamed = seen["choices"]["whole"], seen["choices"]["streamed"]
    assert len(whole["texts"]) == len(streamed["texts"]) == 2
    # Not compared with each other: whether two begin in one step is chance, and the batch's shape with it.
    assert whole["texts"][0] != whole["texts"][1], "each choice has its own seed"
    assert streamed["reasons"] == [["length"], ["length"]] and streamed["roles"] == ["assistant"] * 2
    assert whole["usage"]["completion_tokens"] == 8


def test_logprobs_of_a_chat(seen: Any) -> None:
    whole, streamed = seen["logprobs"]["chat"]
    entries = whole["logprobs"][0]["content"]
    assert [entry for part in streamed["logprobs"] for entry in part["content"]] == entries
    assert len(entries) == 4
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == whole["texts"][0]
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert tops[0] == entry["logprob"] < 0, "at temperature 0 the likeliest is drawn"


def test_logprobs_of_a_completion(seen: Any) -> None:
    whole, streamed = seen["logprobs"]["completion"]
    logprobs = whole["logprobs"][0]
    parts = streamed["logprobs"]
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for part in parts for value in part[key]] == logprobs[key], key
    assert "".join(logprobs["tokens"]) == whole["texts"][0]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_the_models(seen: Any) -> None:
    assert seen["models"]["listed"] == ["smollm2", "synthetic"]
    assert seen["models"]["one"]["object"] == "model"
    assert seen["models"]["one"]["owned_by"] == "tokenflow"


ERRORS = {
    "unknown model": ("NotFoundError", 404, "model_not_found", "model"),
    "unknown model streamed": ("NotFoundError", 404, "model_not_found", "model"),
    "no such model": ("NotFoundError", 404, "model_not_found", "model"),
    "temperature": ("BadRequestError", 400, "invalid_value", "temperature"),
    "temperature streamed": ("BadRequestError", 400, "invalid_value", "temperature"),
    "too long": ("BadRequestError", 400, "context_length_exceeded", "prompt"),
    "engine": ("InternalServerError", 502, "engine_error", None),
    "timeout": ("InternalServerError", 504, "prefill_timeout", None),
    "no path": ("NotFoundError", 404, "not_found", None),
    "wrong key": ("AuthenticationError", 401, "invalid_api_key", None),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_their_class_and_fields(seen: Any, name: str) -> None:
    error = seen["errors"][name]
    assert (error["class"], error["status"], error["code"], error["param"]) == ERRORS[name], error


@pytest.mark.parametrize(("name", "tokens"), [("engine", 3), ("first", 0)])
def test_a_failure_within_a_stream_is_raised(seen: Any, name: str, tokens: int) -> None:
    error = seen["failure_within_a_stream"][name]
    assert (error["class"], error["code"], error["type"]) == ("APIError", "engine_error", "server_error"), error
    assert "planned fault" in error["message"]
    assert len([piece for piece in error["pieces"] if piece]) == tokens


def test_leaving_frees_the_slot(seen: Any) -> None:
    assert seen["leaving"]["after leaving"] == [seen["leaving"]["alone"]] * 3


def test_the_request_id_is_the_id(seen: Any) -> None:
    assert seen["raw"]["request_id"] == seen["raw"]["id"]


def test_the_sync_client(sdk: str, url: str) -> None:
    seen = client(sdk, "sync", url)
    assert seen["streamed"]["texts"] == seen["whole"]["texts"]
    assert seen["whole"]["texts"] == client(sdk, "trio", url)["texts"]["chat greedy"][0]["texts"]
    assert seen["after"].strip()
    assert seen["failure"]["code"] == "model_not_found"
