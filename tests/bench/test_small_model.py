"""The model that is made of a GGUF file says what llama.cpp says of that file.

Its weights are run here by a Llama of forty lines, in full precision; llama.cpp computes with numbers of eight bits and
less, so log-probabilities are near each other, not equal.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenflow_llamacpp import SMOLLM2, LlamaConfig
from tokenflow_llamacpp.stepper import LlamaStepper

from tokenflow.api import Sampling, Send, Sequence, SequenceRequest
from tokenflow.testing.conformance.texts import HARD_TEXTS

torch = pytest.importorskip("torch", reason="tests/bench/test_small_model.py: no PyTorch")
pytest.importorskip("gguf", reason="tests/bench/test_small_model.py: no gguf")

pytestmark = [
    pytest.mark.stress,
    pytest.mark.model,
    pytest.mark.skipif(not SMOLLM2.path.is_file(), reason=f"run `tokenflow pull {SMOLLM2.name}`"),
]

PROMPT = "<|im_start|>user\nName three rivers, and the seas they end in.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bench.small_model import write

    path = tmp_path_factory.mktemp("small") / "model"
    write(SMOLLM2.path, path)
    return path


@pytest.fixture(scope="module")
def llama() -> Any:
    stepper = LlamaStepper(LlamaConfig(slots=1, context_length=512))
    stepper.open()
    yield stepper
    stepper.close()


def test_the_tokens_are_the_same(directory: Path, llama: LlamaStepper) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain.encode_special_tokens = True
    for text in (*HARD_TEXTS, PROMPT, "In 1984 and 12345.67, it's ANOTHER day—isn't it?"):
        assert tokenizer.encode(text).ids == llama.vocabulary.tokenize(text, special=True), text
        assert plain.encode(text).ids == llama.vocabulary.tokenize(text), text


def test_it_says_the_same(directory: Path, llama: LlamaStepper) -> None:
    """Nearly always the same token is the likeliest, and is as likely."""
    prompt = tuple(llama.vocabulary.tokenize(PROMPT, special=True))
    request = SequenceRequest(
        prompt=prompt, max_tokens=40, sampling=Sampling(temperature=0), logprobs=1, ignore_eos=True
    )
    seq = Sequence(request, Send(lambda event: None, window=1))
    assert llama.add(seq)
    said = []
    while len(said) < 40:
        said += [logprob for _, step in llama.step([seq]) for logprob in step.logprobs]
    llama.remove(seq)
    tokens = [llama.vocabulary.texts.index(one.bytes) for one in said]
    logprobs = torch.log_softmax(run(directory, [*prompt, *tokens]), dim=-1)[len(prompt) - 1 : -1]
    same = [int(row.argmax()) == token for row, token in zip(logprobs, tokens, strict=True)]
    apart = [abs(float(row[t]) - one.logprob) for row, t, one in zip(logprobs, tokens, said, strict=True)]
    assert sum(same) >= 36, same
    assert sum(apart) / len(apart) < 0.1, apart


@torch.inference_mode()
def run(directory: Path, tokens: list[int]) -> Any:
    """Logits at each position."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    weights = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    at = torch.arange(len(tokens))[:, None] * config["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    cos, sin = torch.cat([at, at], -1).cos(), torch.cat([at, at], -1).sin()

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T

    def split(x: Any, count: int) -> Any:
        return x.view(len(tokens), count, size).transpose(0, 1)

    def rotate(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    x = weights["model.embed_tokens.weight"][tokens]
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        h = norm(x, f"{layer}.input_layernorm")
        q = rotate(split(linear(h, f"{layer}.self_attn.q_proj"), heads))
        k = rotate(split(linear(h, f"{layer}.self_attn.k_proj"), shared)).repeat_interleave(heads // shared, 0)
        v = split(linear(h, f"{layer}.self_attn.v_proj"), shared).repeat_interleave(heads // shared, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        future = torch.full_like(scores[0], -math.inf).triu(1)
        h = (torch.softmax(scores + future, -1) @ v).transpose(0, 1).reshape(len(tokens), -1)
        x = x + linear(h, f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(h, f"{layer}.mlp.gate_proj"))
        x = x + linear(gate * linear(h, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")
