"""llama.cpp as an engine, embedded through cyllama: the default of tokenflow.

config      the options, and the models that have names
loading     a model file into memory, or one line that says why not
compat      what depends on cyllama's release
vocabulary  text to tokens and back
slots       who holds which part of the KV cache, and which prefixes are kept
sampling    how a token is drawn
guide       a grammar's mask in the sampler chain
stepper     continuous batching: the steps of the shared StepLoop
engine      all of it as an `Engine`
"""

from tokenflow.api import EnginePlugin, hookimpl
from tokenflow_llamacpp.config import MODELS, SMOLLM2, LlamaConfig, missing
from tokenflow_llamacpp.engine import LlamaEngine, open_llama

__all__ = ["SMOLLM2", "LlamaConfig", "LlamaEngine", "open_llama"]


@hookimpl
def register_engines() -> list[EnginePlugin[LlamaConfig]]:
    return [EnginePlugin(name="llamacpp", config=LlamaConfig, open=open_llama, models=MODELS, missing=missing)]
