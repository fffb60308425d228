"""The engine as the server sees it: opened, asked, cancelled, closed; with real threads."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import trio
from tokenflow_llamacpp import SMOLLM2, LlamaConfig, LlamaEngine, open_llama
from tokenflow_llamacpp.compat import has_gpu, load_library

from tokenflow.api import InvalidRequest, SequenceRequest, StartupError
from tokenflow.testing.fakes import company, record

from .conftest import GREEDY

CONFIG = LlamaConfig(slots=2, context_length=2048, batch=512, prefill_chunk=32)


@pytest.fixture
async def engine() -> AsyncGenerator[LlamaEngine, None]:
    async with open_llama(CONFIG) as engine:
        yield engine


async def request(engine: LlamaEngine, text: str, max_tokens: int = 8) -> SequenceRequest:
    prompt = tuple(await engine.tokenize(text, special=True))
    return SequenceRequest(prompt=prompt, max_tokens=max_tokens, sampling=GREEDY)


@pytest.mark.model
async def test_it_says_what_it_is(engine: LlamaEngine) -> None:
    info = engine.info
    assert (info.context_length, info.slots, info.vocab_size, info.max_logprobs) == (2048, 2, 49_152, 20)
    assert {"prefix_cache", "pause", "stop", "logprobs", "ignore_eos", "min_p"} <= info.capabilities
    assert info.chat_template is not None
    assert "<|im_start|>" in info.chat_template
    assert (info.bos_token, info.eos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.model
@pytest.mark.parametrize(("length", "told"), [(8192, 0), (9000, 1)])
async def test_a_context_beyond_what_it_was_trained_for_is_told(
    caplog: pytest.LogCaptureFixture, length: int, told: int
) -> None:
    async with open_llama(LlamaConfig(slots=1, context_length=length)) as engine:
        assert engine.info.context_length == length
    assert [message.partition(": what")[0] for message in caplog.messages] == told * [
        f"{SMOLLM2.path}: context_length = 9000, but the model was trained for 8192 tokens"
    ]


@pytest.mark.model
async def test_a_context_that_the_cache_makes_smaller_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with open_llama(LlamaConfig(slots=1, cache_tokens=256)) as engine:
        assert engine.info.context_length == 256
    assert [message.partition(",")[0] for message in caplog.messages] == [
        f"{SMOLLM2.path}: the context is 256 tokens and not 4096"
    ]


@pytest.mark.model
@pytest.mark.parametrize(("layers", "told"), [(None, 0), (0, 0), (-1, 1), (20, 1)])
async def test_layers_for_a_gpu_that_llama_cpp_does_not_know_are_told(
    caplog: pytest.LogCaptureFixture, layers: int | None, told: int
) -> None:
    if has_gpu(load_library()):
        pytest.skip("NOT TESTED: gpu_layers without a GPU, for this build of llama.cpp knows one")
    with caplog.at_level(logging.INFO, "tokenflow.llamacpp"):
        async with open_llama(LlamaConfig(slots=1, context_length=64, gpu_layers=layers)):
            pass
    device, *warnings = [record.getMessage() for record in caplog.records if record.name == "tokenflow.llamacpp"]
    assert device.startswith("llama.cpp computes on CPU (")
    assert [warning.partition(",")[0] for warning in warnings] == told * [f"gpu_layers = {layers}"]


@pytest.mark.model
async def test_a_cancel_in_prefill_does_not_wait_for_it(engine: LlamaEngine) -> None:
    """The slot is free when the cancelled task ends, and the step in progress was cut short for it."""
    long = await request(engine, "The quick brown fox jumps over the lazy dog. " * 150)
    async with company(engine) as group:
        victim = group.start(long)
        await victim.wait_started()
        while not engine.loop.step_age_s:
            await trio.lowlevel.checkpoint()
        victim.scope.cancel()
        await victim.returned.wait()
    assert engine._stepper.interrupted == 1
    stats = await engine.stats()
    assert (stats.slots_used, stats.generated_tokens, stats.kv_tokens_used) == (0, 0, 0)
    after = await record(engine, await request(engine, "Once upon a time"))
    assert after.tokens == 8


@pytest.mark.model
async def test_numbers(engine: LlamaEngine) -> None:
    asked = await request(engine, "Once upon a time")
    await record(engine, asked)
    again = await record(engine, asked)
    assert again.started is not None
    assert again.started.cached_tokens == len(asked.prompt) - 1
    stats = await engine.stats()
    assert stats.prompt_tokens == len(asked.prompt) + 1
    assert stats.generated_tokens == 16
    assert stats.kv_tokens_capacity == 4096
    assert stats.kv_tokens_used == 2 * (len(asked.prompt) + 7)  # both are kept; the last token is never evaluated
    assert stats.kv_tokens_evicted == 0


@pytest.mark.model
async def test_a_long_text_is_tokenized_beside_the_event_loop(engine: LlamaEngine) -> None:
    text = "The quick brown fox. " * 1500
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.lowlevel.checkpoint()
            ticks += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        tokens = await engine.tokenize(text)
        nursery.cancel_scope.cancel()
    assert ticks > 1
    assert await engine.detokenize(tokens) == text


@pytest.mark.model
async def test_a_bad_request_ends_alone(engine: LlamaEngine) -> None:
    good = await request(engine, "Once upon a time", 24)
    bad = SequenceRequest(prompt=(49_152,), max_tokens=8)
    async with company(engine) as group:
        other = group.start(good)
        await other.wait_deltas(2)
        victim = group.start(bad)
        await victim.returned.wait()
        await other.returned.wait()
    assert isinstance(victim.error, InvalidRequest)
    assert other.tokens == 24


@pytest.mark.model
async def test_the_vocabulary_outlives_the_engine() -> None:
    async with open_llama(CONFIG) as engine:
        pass
    assert await engine.detokenize(await engine.tokenize("still here")) == "still here"


# --- files that are no models ---------------------------------------------------------------------------------------


async def failure(path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(StartupError) as info:
        async with open_llama(LlamaConfig(model=str(path), slots=1, context_length=64)):
            raise AssertionError("opened")
    assert capfd.readouterr() == ("", "")
    message = str(info.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert f"`tokenflow pull {SMOLLM2.name}`" in message
    return message


async def test_a_file_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "there is no such model file" in await failure(tmp_path / "x.gguf", capfd)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all, but long enough to be one" * 9], ids=len)
async def test_a_file_that_is_no_model(tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert "cannot load this model file" in await failure(path, capfd)


@pytest.mark.model
@pytest.mark.parametrize(
    ("size", "reason"),
    [(1_000_000, "failed to read key-value pairs"), (60_000_000, "tensor 'blk.2.ffn_up.weight' data is not within")],
)
async def test_half_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str], size: int, reason: str) -> None:
    path = tmp_path / "x.gguf"
    with SMOLLM2.path.open("rb") as whole:
        path.write_bytes(whole.read(size))
    assert reason in await failure(path, capfd)
