"""A small model as the exllama libraries read one, made of the GGUF file that `tokenflow pull` fetches.

FP16 safetensors with the names and layouts of Hugging Face, config.json and a tokenizer, without network or GPU. The
weights are the file's, so what was lost in its quantization stays lost: a model to measure with, not to talk to.

    python -m bench.small_model DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenflow_llamacpp import SMOLLM2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3
"""The type of a token, llama.h: LLAMA_TOKEN_TYPE_CONTROL."""
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write(source: Path, directory: Path) -> None:
    """Make `directory` of a GGUF file with a model of the Llama kind and a byte-level vocabulary."""
    reader = gguf.GGUFReader(source)
    known: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    if known["general.architecture"] != "llama" or known["tokenizer.ggml.model"] != "gpt2":
        raise SystemExit(f"{source}: this is made for Llama models with a byte-level vocabulary.")
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(known)
    save_file(_weights(reader, config), directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_tokenizer(known, directory)


def _config(known: dict[str, Any]) -> dict[str, Any]:
    of = {name.removeprefix("llama."): value for name, value in known.items() if name.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": of["embedding_length"],
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": of["attention.head_count"],
        "num_key_value_heads": of["attention.head_count_kv"],
        "rms_norm_eps": of["attention.layer_norm_rms_epsilon"],
        "rope_theta": of["rope.freq_base"],
        "max_position_embeddings": of["context_length"],
        "vocab_size": of["vocab_size"],
        "bos_token_id": known["tokenizer.ggml.bos_token_id"],
        "eos_token_id": known["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": False,
    }


def _weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        *layer, kind, _ = tensor.name.split(".")
        if kind in heads:
            values = _unrotate(values, heads[kind])
        name = f"model.layers.{layer[1]}.{_PER_LAYER[kind]}" if layer else _OTHERS[kind]
        weights[f"{name}.weight"] = np.ascontiguousarray(values, dtype=np.float16)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].copy())  # where the two are one
    return weights


def _unrotate(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours, Hugging Face a head's first half with its second; so rows lie in another order."""
    rows = values.reshape(heads, -1, 2, values.shape[-1])
    return rows.swapaxes(1, 2).reshape(values.shape)


def _write_tokenizer(known: dict[str, Any], directory: Path) -> None:
    texts: list[str] = known["tokenizer.ggml.tokens"]
    types: list[int] = known["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in known["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # of the kind `smollm`
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [text for text, type in zip(texts, types, strict=True) if type == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {name: texts[known[f"tokenizer.ggml.{name}_id"]] for name in ("bos_token", "eos_token")}
    _write_json(directory / "tokenizer_config.json", {**named, "chat_template": known["tokenizer.chat_template"]})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


if __name__ == "__main__":
    write(SMOLLM2.path, Path(sys.argv[1]))
