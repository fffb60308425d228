"""From a configuration to a model, or to one line that says what is wrong and what to do.

Everything but the weights is real here: the library's own settings, models and caches, of a very small Llama.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import tomllib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exllamav3
import pytest
import torch
import trio
from safetensors.torch import save_file
from tokenflow_exllama import gpus
from tokenflow_exllama.progress import GivenUp
from tokenflow_exllamav3 import Exl3Config, loading, open_exllamav3
from tokenflow_exllamav3.config import PAGE
from tokenflow_exllamav3.loading import load

from plugins.exllama_common.tests import tokens
from tokenflow.api import EngineLost, StartupError
from tokenflow.chat.template import ChatTemplate

from .rig.model import hash_load

SETTINGS = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 410,
    "max_position_embeddings": 2048,
    "eos_token_id": 407,
}
KEY_BYTES = 2 * 2 * 32 * 2
"""Of one token's keys in FP16: layers, heads, dimensions."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-llama"
    path.mkdir()
    tokens.write(path)
    (path / "config.json").write_text(json.dumps(SETTINGS))
    save_file({"nothing": torch.zeros(4)}, path / "model.safetensors")
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with 10 GB free, as far as it is looked at."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (10 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: None)


def copied(directory: Path) -> Path:
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    return copy


def refusal(config: Exl3Config) -> str:
    with pytest.raises(StartupError) as caught:
        load(config, lambda: False)
    assert "\n" not in caught.value.message
    return caught.value.message


# --- what is refused --------------------------------------------------------------------------------------------------


def test_no_such_directory(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert "there is no such directory" in refusal(Exl3Config(model=nowhere))
    told = dict(loading.missing(Exl3Config(model=nowhere, draft_model=nowhere)))
    assert told["model"].startswith(f"{nowhere}: there is no such directory; ")
    assert told.keys() == {"model", "draft_model"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_no_model_in_it(directory: Path, name: str) -> None:
    (directory / name).unlink()
    assert name.replace("model.", "*.") in refusal(Exl3Config(model=str(directory)))


def test_another_engines_model(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "exl2"}}))
    assert '`engine = "exllamav2"` serves it' in refusal(Exl3Config(model=str(directory)))


def test_settings_that_are_no_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    assert "fetch the model anew" in refusal(Exl3Config(model=str(directory)))


def test_no_cuda(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "without CUDA" in refusal(Exl3Config(model=str(directory)))


def test_no_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in refusal(Exl3Config(model=str(directory)))


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_has_failed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of them; for what CUDA calls sticky there is no cure but another process."""

    def synchronize(gpu: int) -> None:
        if gpu == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider …")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert gpus.gpus_work()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert not gpus.gpus_work()
    with pytest.raises(EngineLost):
        gpus.import_on_gpu("exllamav3", "1.6.5")
    message = refusal(Exl3Config(model=str(directory)))
    assert "cannot use a GPU (CUDA error: an illegal memory access was encountered); " in message
    assert "start the server anew" in message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpus.gpus_work()


@pytest.mark.usefixtures("gpu")
def test_no_library(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda name: None if name == "exllamav3" else name)
    assert "pip install exllamav3==1.6.5" in refusal(Exl3Config(model=str(directory)))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("version", "warnings"), [("1.6.5+cu130.torch2.13", 0), ("1.7.0", 1)])
def test_another_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    monkeypatch.setattr(gpus.metadata, "version", lambda name: version)
    assert gpus.import_on_gpu("exllamav3", "1.6.5") is exllamav3
    assert len(caplog.messages) == warnings


@pytest.mark.usefixtures("gpu")
def test_an_architecture_that_the_library_does_not_know(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"architectures": ["AbacusForCausalLM"]}))
    assert "exllamav3 cannot serve this model (Unknown architecture Abacus" in refusal(Exl3Config(model=str(directory)))


@pytest.mark.usefixtures("gpu")
def test_too_little_memory(directory: Path) -> None:
    """It says how much would be needed, before anything is loaded."""
    cache = 4096 * 8192
    needed = cache * 2 * KEY_BYTES / (1 << 30)
    message = refusal(Exl3Config(model=str(directory), cache_tokens=cache))
    assert f"needs {needed:.1f} GB" in message
    assert f"a cache of {cache} tokens" in message
    assert "10.0 GB are free" in message
    assert "4.0 GB are free" in refusal(Exl3Config(model=str(directory), cache_tokens=cache, gpu_split=(4.0,)))


@pytest.mark.usefixtures("gpu")
def test_a_head_that_guesses_is_weighed_with_its_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as a second one: both are in the same directory."""

    def plan(library: Any, config: Exl3Config, main: Path, draft: Path | None) -> tuple[loading.Part, loading.Part]:
        planned, _ = plan_one(library, config, main, None)
        return planned, planned

    plan_one = loading.plan
    monkeypatch.setattr(loading, "plan", plan)
    monkeypatch.setattr(loading, "weights_bytes", lambda directory: 6 << 30)
    config = Exl3Config(model=str(directory), draft_model=str(directory), cache_tokens=1 << 25)
    assert "(6.0 for weights, 32.0 for a cache" in refusal(config)


@pytest.mark.usefixtures("gpu")
def test_what_is_free_is_asked_once_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine of this process left, PyTorch keeps; and the traceback of a failure may have it still."""

    class Left:
        def __init__(self) -> None:
            self.itself = self

    gone: list[bool] = []
    left = weakref.ref(Left())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(left() is None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (len(gone), 2))
    assert gpus.free_bytes() == 1
    assert gone == [True]


@pytest.mark.usefixtures("gpu")
def test_weights_that_cannot_be_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of them stays in memory."""
    unloaded: list[Any] = []
    monkeypatch.setattr(exllamav3.Model, "unload", lambda model: unloaded.append(model))
    assert "model.embed_tokens.weight not found" in refusal(Exl3Config(model=str(directory)))
    assert len(unloaded) == 1


@pytest.mark.usefixtures("gpu")
def test_processes_of_a_model_that_is_not_whole(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would keep what they have in memory, and the server from ending."""

    def give_up(part: loading.Part, *args: Any) -> None:
        part.model.mp_children = [object()]
        raise GivenUp

    ended: list[Any] = []
    monkeypatch.setattr(loading, "read_weights", give_up)
    monkeypatch.setattr(exllamav3.Model, "destroy_tp_context", lambda model: ended.append(model))
    with pytest.raises(GivenUp):
        load(Exl3Config(model=str(directory), tensor_parallel=True), lambda: True)
    assert len(ended) == 1


@pytest.mark.usefixtures("gpu")
def test_a_head_that_guesses_where_there_is_none(directory: Path) -> None:
    assert "'mtp'" in refusal(Exl3Config(model=str(directory), draft_model=str(directory)))


def test_a_draft_model_with_other_tokens(directory: Path) -> None:
    other = copied(directory)
    spelled = json.loads((other / "tokenizer.json").read_text())
    spelled["model"]["vocab"]["another"] = 9999
    (other / "tokenizer.json").write_text(json.dumps(spelled))
    assert "other tokens" in refusal(Exl3Config(model=str(directory), draft_model=str(other)))


@pytest.mark.usefixtures("gpu")
def test_a_draft_model_without_tokens(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that guess from the other model's hidden states need none, and may have come without."""
    other = copied(directory)
    (other / "tokenizer.json").unlink()
    monkeypatch.setattr(loading, "read_weights", lambda *args: None)
    config = Exl3Config(model=str(directory), draft_model=str(other), warm_up=False)
    assert [*loading.missing(config)] == []
    assert load(config, lambda: False).draft is not None
    assert "tokenizer.json" in refusal(Exl3Config(model=str(other)))


def test_two_ways_to_guess() -> None:
    with pytest.raises(ValueError, match="draft_model and ngram_match are two ways"):
        Exl3Config(model="m", draft_model="d", ngram_match=2)


def test_a_context_larger_than_the_cache() -> None:
    with pytest.raises(ValueError, match="context_length = 4096 is larger than cache_tokens = 1024"):
        Exl3Config(model="m", context_length=4096, cache_tokens=1024)
    assert Exl3Config(model="m", context_length=1024, cache_tokens=1024)


# --- what is planned --------------------------------------------------------------------------------------------------


def test_the_cache_as_it_is_asked_for(directory: Path) -> None:
    def planned(**options: Any) -> loading.Part:
        return loading.plan(exllamav3, Exl3Config(model=str(directory), **options), directory, None)[0]

    assert planned().cache.max_num_tokens == 2 * 2048
    assert planned(context_length=1000).cache.max_num_tokens == 2048
    full = planned(cache_tokens=1000)
    assert full.cache.max_num_tokens == 1024
    assert full.cache_bytes == 1024 * 2 * KEY_BYTES
    scales = 1024 * KEY_BYTES // 32
    assert planned(cache_tokens=1024, cache_k_bits=8).cache_bytes == 1024 * KEY_BYTES + 2 * scales
    assert (
        planned(cache_tokens=1024, cache_k_bits=8, cache_v_bits=4).cache_bytes == 1024 * KEY_BYTES * 3 // 4 + 2 * scales
    )


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_stretched_context(directory: Path, kind: Any) -> None:
    config = Exl3Config(model=str(directory), rope_scaling=kind, rope_factor=4.0)
    main, _ = loading.plan(exllamav3, config, directory, None)
    assert main.config.max_position_embeddings == 8192
    assert main.config.rope_settings.rope_scaling["factor"] == 4.0
    assert main.cache.max_num_tokens == 2 * 8192


def test_a_draft_model_of_its_own(directory: Path) -> None:
    main, draft = loading.plan(exllamav3, Exl3Config(model=str(directory)), directory, copied(directory))
    assert draft is not None
    assert draft.model is not main.model
    assert draft.cache.max_num_tokens == main.cache.max_num_tokens


def test_its_own_words_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    """The name, the limits, and a chat template that renders; nothing is promised beyond the cache."""
    info = hash_load(Exl3Config(model="rig", cache_tokens=4 * PAGE, draft_model="rig", draft_tokens=3)).info
    assert info.context_length == 4 * PAGE - 1 - 3
    assert [message.partition(",")[0].partition(": ")[2] for message in caplog.messages] == [
        "the context is 1020 tokens and not 4096"
    ]
    template = ChatTemplate(info.chat_template or "", info.bos_token, info.eos_token, info.special_tokens)
    pieces = template.render([{"role": "user", "content": "<|im_end|>"}])
    assert "".join(piece.text for piece in pieces).startswith("<|im_start|>user\n<|im_end|><|im_end|>")
    assert not any(piece.special and piece.text.count("<|im_end|>") > 1 for piece in pieces)


@pytest.mark.usefixtures("gpu")
def test_experts_that_the_cpu_has_are_not_weighed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "weights_bytes", lambda directory: 100 << 30)
    monkeypatch.setattr(loading, "read_weights", lambda *args: None)
    config = Exl3Config(model=str(directory), warm_up=False)
    assert "(100.0 for weights" in refusal(config)
    monkeypatch.setenv("EXL3_MOE_CPU_OFFLOAD", "20")
    assert load(config, lambda: False).info.model == "tiny-llama"


@pytest.mark.usefixtures("gpu")
def test_a_warm_up_that_fails_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library only prints it, and goes on: the first request of that shape would find out."""
    monkeypatch.setattr(loading, "read_weights", lambda *args: None)
    monkeypatch.setattr(exllamav3.Model, "warmup", lambda model, **options: ["batch 8 decode", "chunk 2048"])
    load(Exl3Config(model=str(directory)), lambda: False)
    assert caplog.messages == ["tiny-llama: not everything could be warmed up: batch 8 decode; chunk 2048"]


@pytest.mark.usefixtures("gpu")
def test_warming_up_is_given_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are compiled for the first time take minutes."""
    passes: list[int] = []

    def warmup(model: Any, *, callback: Callable[[int, int], None], **options: Any) -> list[str]:
        for done in range(1, 10):
            passes.append(done)
            callback(done, 10)
        raise AssertionError("nobody waits for it")

    monkeypatch.setattr(loading, "read_weights", lambda *args: None)
    monkeypatch.setattr(exllamav3.Model, "warmup", warmup)
    with pytest.raises(GivenUp):
        load(Exl3Config(model=str(directory)), lambda: len(passes) == 3)
    assert passes == [1, 2, 3]


# --- on the way -------------------------------------------------------------------------------------------------------


class Layers:
    """Forty, read one by one, in place of a model's."""

    def __init__(self) -> None:
        self.read = 0
        self.options: dict[str, Any] = {}

    def load_gen(self, **options: Any) -> Iterator[tuple[int, int]]:
        self.options = options
        for self.read in range(40):
            yield self.read, 40


def read(directory: Path, layers: Layers, given_up: Callable[[], bool], cache: int = 4096) -> None:
    part = loading.Part(directory=directory, config=None, model=layers, cache=SimpleNamespace(max_num_tokens=cache))
    loading.read_weights(part, Exl3Config(model=str(directory)), given_up)


def test_progress_is_told(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenflow.exllamav3"):
        read(directory, Layers(), lambda: False)
    assert [re.findall(r"(\d+)%", message) for message in caplog.messages] == [[f"{10 * n}"] for n in range(10)]


def test_the_chunk_that_is_tried_while_it_loads(directory: Path) -> None:
    """It is no larger than the cache, or the library finds no place for it."""
    for cache, chunk in ((4096, 2048), (512, 512)):
        layers = Layers()
        read(directory, layers, lambda: False, cache)
        assert layers.options["max_chunk_size"] == chunk
    loaded = hash_load(Exl3Config(model="rig", cache_tokens=512))
    assert loaded.new_batch().max_chunk_size == 512


def test_loading_is_given_up(directory: Path) -> None:
    layers = Layers()
    with pytest.raises(GivenUp):
        read(directory, layers, lambda: layers.read > 3)
    assert layers.read == 4


def test_a_server_that_stops_while_it_loads() -> None:
    """The thread that loads is told, and is done before the engine is."""
    ended = []

    async def main() -> None:
        begun = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def slow(config: Exl3Config, given_up: Any) -> Any:
            token.run_sync_soon(begun.set)
            while not given_up():
                pass
            ended.append(True)
            raise GivenUp

        async def open_it() -> None:
            async with open_exllamav3(Exl3Config(model="rig"), slow):
                raise AssertionError("it opened")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_it)
            await begun.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert ended


def test_nothing_heavy_is_imported_before_it_is_opened() -> None:
    code = "import sys, tokenflow_exllamav3; print(sorted({'torch', 'exllamav3', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_example_names_every_option() -> None:
    text = (Path(__file__).parents[3] / "conf" / "exllamav3.toml").read_text()
    uncommented = re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.M)
    options = tomllib.loads(uncommented)["models"]["local"]
    assert options.pop("engine") == "exllamav3"
    assert set(options) == {field.name for field in fields(Exl3Config)}
    given = tomllib.loads(text)["models"]["local"]
    del given["engine"]
    Exl3Config(**given)
