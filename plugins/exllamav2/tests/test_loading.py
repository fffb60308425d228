"""From a configuration to a model, or to one line that says what is wrong and what to do."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tomllib
import weakref
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from tokenflow_exllama.progress import GivenUp, Progress
from tokenflow_exllamav2 import Exl2Config, loading, open_exllamav2
from tokenflow_exllamav2.config import PAGE
from tokenflow_exllamav2.loading import Shape, load

from tokenflow.api import StartupError

from .rig.library import import_exllamav2
from .rig.model import HashCache, HashModel, settings_of, write_directory


def refusal(config: Exl2Config) -> str:
    with pytest.raises(StartupError) as caught:
        load(config, lambda: False)
    assert "\n" not in caught.value.message
    return caught.value.message


# --- before a GPU is looked for -------------------------------------------------------------------------------------


def test_no_such_directory(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert "there is no such directory" in refusal(Exl2Config(model=nowhere))
    told = dict(loading.missing(Exl2Config(model=nowhere, draft_model=nowhere)))
    assert told["model"].startswith(f"{nowhere}: there is no such directory; ")
    assert told.keys() == {"model", "draft_model"}


def test_no_such_loras(directory: Path, tmp_path: Path) -> None:
    """Before the model is read, which takes minutes."""
    (tmp_path / "good").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "good" / name).touch()
    loras = [str(tmp_path / name) for name in ("a", "good", "b")]
    config = Exl2Config(model=str(directory), loras=tuple(loras))
    assert refusal(config).startswith(f"{loras[0]}: there is no such directory; ")
    assert [(key, text.partition(":")[0]) for key, text in loading.missing(config)] == [
        ("loras", loras[0]),
        ("loras", loras[2]),
    ]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_no_model_in_it(tmp_path: Path, name: str) -> None:
    directory = write_directory(tmp_path / "model")
    (directory / name).unlink()
    assert name.replace("model.", "*.") in refusal(Exl2Config(model=str(directory)))


def test_another_engines_model(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "model")
    (directory / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "exl3"}}))
    assert 'use `engine = "exllamav3"`' in refusal(Exl2Config(model=str(directory)))


def test_two_ways_to_guess() -> None:
    with pytest.raises(ValueError, match="draft_model and ngram_draft are two ways"):
        Exl2Config(model="m", draft_model="d", ngram_draft=True)


def test_a_context_larger_than_the_cache() -> None:
    with pytest.raises(ValueError, match="context_length = 4096 is larger than cache_tokens = 1024"):
        Exl2Config(model="m", context_length=4096, cache_tokens=1024)
    assert Exl2Config(model="m", context_length=1024, cache_tokens=1024)


def test_a_draft_model_with_other_tokens(directory: Path, tmp_path: Path) -> None:
    other = write_directory(tmp_path / "other")
    spelled = json.loads((other / "tokenizer.json").read_text())
    spelled["model"]["vocab"]["another"] = 9999
    (other / "tokenizer.json").write_text(json.dumps(spelled))
    assert "other tokens" in refusal(Exl2Config(model=str(directory), draft_model=str(other)))


def test_no_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "without CUDA" in refusal(Exl2Config(model=str(directory)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in refusal(Exl2Config(model=str(directory)))


# --- as far as the rig goes: a library whose models need no GPU ----------------------------------------------------


class Library:
    """What `load` asks of exllamav2. A model has ten layers.

    Args:
        fail: raised while they are read.
    """

    def __init__(self, fail: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.unloaded = 0
        self.caches: list[tuple[str, int]] = []
        library = self

        class Model(HashModel):
            def load_autosplit(self, cache: Any, callback: Any) -> None:
                self._load("autosplit", callback)

            def load(self, split: list[float], callback: Any) -> None:
                self._load(f"split {split}", callback)

            def load_tp(self, split: Any, callback: Any, **expect: Any) -> None:
                self._load(f"tp {split}", callback)

            def _load(self, how: str, callback: Any) -> None:
                library.calls.append(how)
                for layer in range(11):
                    callback(layer, 10)
                if fail is not None:
                    raise fail

            def unload(self) -> None:
                library.unloaded += 1

        self.ExLlamaV2 = Model
        self.ExLlamaV2Tokenizer = import_exllamav2().ExLlamaV2Tokenizer
        for name in ("", "_Q8", "_Q6", "_Q4", "_TP"):
            setattr(self, "ExLlamaV2Cache" + name, self._cache(name))

    def ExLlamaV2Config(self, directory: str) -> Any:
        settings = settings_of(Path(directory), Shape.of(Exl2Config(model=directory), 4096))
        settings.max_seq_len, settings.arch_compat_overrides = 4096, lambda quiet: None
        settings.num_hidden_layers, settings.num_key_value_heads, settings.head_dim = 10, 2, 64
        return settings

    def _cache(self, name: str) -> Any:
        def make(model: Any, max_seq_len: int, lazy: bool = False, base: Any = None) -> HashCache:
            self.caches.append((name, max_seq_len))
            return HashCache(max_seq_len)

        return make


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gpu(free_gb=…, fail=…)`: a machine with a GPU, as far as `load` can tell."""

    def make(free_gb: float = 24.0, fail: Exception | None = None) -> Library:
        library = Library(fail)
        monkeypatch.setattr(loading, "import_on_gpu", lambda name, version: library)
        monkeypatch.setattr(loading, "free_bytes", lambda: int(free_gb * (1 << 30)))
        return library

    return make


def test_progress_is_told(directory: Path, gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    library = gpu()
    with caplog.at_level(logging.INFO, "tokenflow.exllamav2"):
        loaded = load(Exl2Config(model=str(directory)), lambda: False)
    assert [record.getMessage() for record in caplog.records] == [f"hash-model: {n}% loaded" for n in range(0, 101, 10)]
    assert library.calls == ["autosplit"]
    assert loaded.info.context_length == 4096
    assert loaded.info.model == "hash-model"
    assert "banned_strings" in loaded.info.capabilities
    assert loaded.info.chat_template is not None
    loaded.batch.close()
    loaded.unload()
    assert library.unloaded == 1


@pytest.mark.parametrize(
    ("options", "call", "caches"),
    [
        ({"gpu_split": (8.0, 16.0)}, "split [8.0, 16.0]", [("", 8192)]),
        ({"tensor_parallel": True}, "tp None", [("_TP", 8192)]),
        ({"cache_type": "Q4", "cache_tokens": 5000}, "autosplit", [("_Q4", 5120)]),
        ({"cache_type": "Q8", "rope_scale": 2.0}, "autosplit", [("_Q8", 16384)]),
    ],
)
def test_options_reach_the_library(directory: Path, gpu: Any, options: Any, call: str, caches: Any) -> None:
    library = gpu()
    loaded = load(Exl2Config(model=str(directory), **options), lambda: False)
    assert (library.calls, library.caches) == ([call], caches)
    loaded.batch.close()


def test_a_closed_engine_gives_its_memory_back(directory: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caches too, though somebody keeps the batch; PyTorch hands over to the driver what is gone by then."""
    gpu()
    loaded = load(Exl2Config(model=str(directory), draft_model=str(directory)), lambda: False)
    caches = [weakref.ref(cache) for cache in (loaded.batch.cache, loaded.batch.draft_cache)]
    left: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(sum(cache() is not None for cache in caches)))
    loaded.batch.close()
    loaded.unload()
    assert left == [0]
    assert loaded.batch.used_tokens == 0


@pytest.mark.parametrize(
    ("options", "slots"),
    [({}, 1), ({"gpu_split": (8.0, 16.0)}, 1), ({"gpu_split": (8.0,)}, 4), ({"gpu_split": (8, 0)}, 4)],
)
def test_a_gpu_that_is_too_old_for_flash_attn(
    directory: Path,
    gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: Any,
    slots: int,
) -> None:
    """It can be installed all the same, and fails at its first call."""
    gpu()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: [(8, 6), (7, 5)][gpu])
    loaded = load(Exl2Config(model=str(directory), slots=4, **options), lambda: False)
    assert loaded.info.slots == slots
    assert len(caplog.messages) == (slots == 1)
    loaded.batch.close()


def test_a_draft_model_is_read_first(directory: Path, gpu: Any) -> None:
    library = gpu()
    loaded = load(Exl2Config(model=str(directory), draft_model=str(directory)), lambda: False)
    assert library.caches == [("", 8192)] * 2
    assert loaded.batch.draft_model is not None and loaded.batch.num_draft_tokens == 4
    loaded.batch.close()
    loaded.unload()
    assert library.unloaded == 2


def test_a_draft_model_is_on_as_few_gpus_as_it_fits(directory: Path, gpu: Any) -> None:
    library = gpu()
    config = Exl2Config(model=str(directory), draft_model=str(directory), tensor_parallel=True, cache_type="Q4")
    loaded = load(config, lambda: False)
    assert library.calls == ["autosplit", "tp None"]
    assert [name for name, _ in library.caches] == ["_Q4", "_TP"]
    loaded.batch.close()


def test_too_little_memory_is_seen_before(directory: Path, gpu: Any) -> None:
    library = gpu(free_gb=0.01)
    message = refusal(Exl2Config(model=str(directory), cache_tokens=1 << 20))
    assert "needs 5.0 GB" in message and "1048576 tokens" in message and "`cache_tokens`" in message
    assert not library.calls


def test_memory_that_runs_out(directory: Path, gpu: Any) -> None:
    library = gpu(fail=torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."))
    message = refusal(Exl2Config(model=str(directory)))
    assert "the GPU memory ran out" in message and "24.0 GB were free" in message
    assert library.unloaded == 1


def test_a_file_that_is_broken(directory: Path, gpu: Any) -> None:
    gpu(fail=ValueError("invalid header\nin file"))
    assert "exllamav2 cannot load this model (invalid header in file)." in refusal(Exl2Config(model=str(directory)))


def test_loading_can_be_given_up(directory: Path, gpu: Any) -> None:
    library = gpu()
    asked = []

    def after_three() -> bool:
        asked.append(None)
        return len(asked) > 3

    with pytest.raises(GivenUp):
        load(Exl2Config(model=str(directory)), after_three)
    assert len(asked) == 4
    assert library.unloaded == 1


def test_a_cancel_while_it_loads(directory: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opening task is let go, once the thread has given up."""
    library = gpu()
    original = Progress.__call__
    layers: list[int] = []

    def wait_for_the_cancel(self: Any, layer: int, of: int) -> None:
        layers.append(layer)
        trio.from_thread.run_sync(scope.cancel)
        while not self._given_up():  # `interrupt` comes from Trio's thread, soon
            pass
        original(self, layer, of)

    monkeypatch.setattr(Progress, "__call__", wait_for_the_cancel)
    scope = trio.CancelScope()

    async def open() -> None:
        with scope:
            async with open_exllamav2(Exl2Config(model=str(directory))):
                raise AssertionError("it was opened")

    trio.run(open)
    assert scope.cancelled_caught
    assert layers == [0]
    assert library.unloaded == 1


def test_a_context_that_the_cache_makes_smaller_is_told(
    directory: Path, gpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gpu()
    loaded = load(Exl2Config(model=str(directory), cache_tokens=1024), lambda: False)
    assert loaded.info.context_length == 1024
    assert f"{directory}: the context is 1024 tokens and not 4096" in caplog.messages[0]
    loaded.batch.close()


# --- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "trained", "shape"),
    [
        ({}, 131072, (8192, 8192, 16384, 512)),
        ({}, 2048, (2048, 2048, 4096, 512)),
        ({"context_length": 1000}, 4096, (1000, 1024, 2048, 512)),
        ({"cache_tokens": 1000}, 4096, (1024, 1024, 1024, 512)),
        ({"context_length": 4096, "cache_tokens": 4096, "ngram_draft": True}, 4096, (4092, 4096, 4096, 512)),
        ({"context_length": 8}, 4096, (8, 256, 256, 256)),
        ({"context_length": 1024, "chunk_size": 8192}, 4096, (1024, 2048, 2048, 2048)),
        ({"slots": 256, "cache_tokens": 1024}, 4096, (1024, 2048, 2048, 2048)),
        ({"slots": 256, "chunk_size": 300}, 4096, (4096, 4096, 8192, 2048)),
    ],
)
def test_shapes(options: dict[str, Any], trained: int, shape: tuple[int, ...]) -> None:
    found = Shape.of(Exl2Config(model="m", **options), trained)
    assert (found.context, found.longest, found.cache, found.chunk) == shape
    assert found.cache % PAGE == found.chunk % PAGE == 0
    assert found.cache >= found.chunk, "the library tries one while it loads"


def test_nothing_heavy_is_imported_before_it_is_opened() -> None:
    code = "import sys, tokenflow_exllamav2; assert not {'torch', 'exllamav2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_has_every_key() -> None:
    example = Path(__file__).parents[3] / "conf" / "exllamav2.toml"
    text = example.read_text()
    for field in fields(Exl2Config):
        assert f"\n{field.name} = " in text or f"\n# {field.name} = " in text, field.name
    command = [sys.executable, "-m", "tokenflow", "config", "check", "-c", str(example)]
    [complaint] = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
    assert "there is no such directory" in complaint, "the example's model is not there, and all else is right"
    everything = re.sub(r"(?m)^# (\w+ = )", r"\1", text)
    values = tomllib.loads(everything)["models"]["local"]
    assert values.pop("engine") == "exllamav2"
    assert values.pop("ngram_draft"), "it is no company for a draft_model"
    Exl2Config(**values)


def test_ends_are_named_in_several_files(directory: Path) -> None:
    tokens = loading.ends(directory, SimpleNamespace(eos_token_id=5))
    assert len(tokens) == 3 and 5 in tokens
