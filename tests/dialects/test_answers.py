"""The error envelope, the model list, and tokens."""

from __future__ import annotations

import json
import math

import pytest
from openai.types import Model

from tokenflow.core.types import ChatPrompt, EngineInfo, TextPrompt
from tokenflow.dialects import errors, models, openai_completions, tokens
from tokenflow.errors import (
    ContextLengthExceeded,
    Draining,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    TokenflowError,
)


def test_the_envelope():
    assert errors.envelope(InvalidRequest("No.", param="n")) == {
        "error": {"message": "No.", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    assert errors.envelope(TokenflowError("x"))["error"]["type"] == "server_error"
    exceeded = errors.envelope(ContextLengthExceeded(limit=8, prompt=9, requested=3, param="prompt"))["error"]
    assert all(count in exceeded["message"] for count in "893")
    assert exceeded["param"] == "prompt"
    assert ContextLengthExceeded(limit=8, prompt=9, requested=3).param is None  # an engine knows of no field
    assert len(errors.envelope(EngineError("x" * 100_000))["error"]["message"]) == 4001


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (InvalidRequest("x"), 400, {}),
        (ModelNotFound("x"), 404, {}),
        (TokenflowError("x"), 500, {}),
        (EngineError("x"), 502, {}),
        (QueueFull("x"), 503, {"Retry-After": "1"}),
        (QueueFull("x", retry_after_s=0.0), 503, {"Retry-After": "1"}),
        (QueueFull("x", retry_after_s=-3), 503, {"Retry-After": "1"}),
        (Draining("x", retry_after_s=2.01), 503, {"Retry-After": "3"}),
        (Draining("x", retry_after_s=math.inf), 503, {"Retry-After": "60"}),
        (EngineError("x", retry_after_s=5.0), 502, {"Retry-After": "5"}),
    ],
)
def test_status_and_headers(error, status, headers):
    assert errors.error_status(error) == status
    assert errors.error_headers(error) == headers


def test_the_model_list():
    info = EngineInfo(model="f.gguf", context_length=2048, slots=4, capabilities=frozenset({"top_p", "chat"}))
    listed = models.model_list([models.ModelEntry(id="a", created=7, info=info, defaults={"top_p": 0.9})])
    assert listed == {
        "object": "list",
        "data": [
            {
                "id": "a",
                "object": "model",
                "created": 7,
                "owned_by": "tokenflow",
                "context_length": 2048,
                "max_model_len": 2048,
                "slots": 4,
                "capabilities": ["chat", "top_p"],
                "defaults": {"top_p": 0.9},
            },
        ],
    }
    for entry in listed["data"]:
        Model.model_validate(entry)


def test_tokenize():
    empty = TextPrompt(text="", special=True)
    assert tokens.parse_tokenize({"prompt": ""}) == tokens.TokenizeRequest(model="", prompt=empty)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert tokens.parse_tokenize(json.dumps(body).encode()) == tokens.TokenizeRequest(
        model="m", prompt=ChatPrompt(messages=({"role": "user", "content": "x"},), ending="closed")
    )
    for said in ({}, {"parse_special": False}, {"add_special": False}, {"add_special_tokens": False}):
        asked = {"prompt": "x"} | said
        assert (tokens.parse_tokenize(asked).prompt,) == openai_completions.parse(asked).prompts, "counted as generated"
    assert tokens.tokenized([1, 2], 8) == {"tokens": [1, 2], "count": 2, "max_model_len": 8}


def test_detokenize():
    assert tokens.parse_detokenize(b'{"tokens":[1,2]}') == tokens.DetokenizeRequest(model="", tokens=(1, 2))
    assert tokens.parse_detokenize({"tokens": []}).tokens == ()
    assert repr(tokens.parse_detokenize({"tokens": [1, 2.0]}).tokens) == "(1, 2)"
    assert tokens.detokenized("x") == {"prompt": "x"}


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (tokens.parse_tokenize, {}, "prompt"),
        (tokens.parse_tokenize, {"prompt": 7}, "prompt"),
        (tokens.parse_tokenize, {"prompt": "x", "messages": []}, "messages"),
        (tokens.parse_tokenize, {"messages": []}, "messages"),
        (tokens.parse_tokenize, {"prompt": "x", "add_special": 1}, "add_special"),
        (tokens.parse_tokenize, {"prompt": "x", "model": 1}, "model"),
        (
            tokens.parse_tokenize,
            {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
            "messages[0].role",
        ),
        (
            tokens.parse_tokenize,
            {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"},
            "chat_template",
        ),
        (tokens.parse_detokenize, {}, "tokens"),
        (tokens.parse_detokenize, {"tokens": "x"}, "tokens"),
        (tokens.parse_detokenize, {"tokens": [1, True]}, "tokens[1]"),
        (tokens.parse_detokenize, {"tokens": [1, -1]}, "tokens[1]"),
    ],
)
def test_wrong_ones(parse, body, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.param == param
