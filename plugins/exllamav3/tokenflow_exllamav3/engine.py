"""How a model of this plugin becomes an engine."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tokenflow_exllama.engine import ExllamaEngine, open_engine

from tokenflow_exllamav3.config import Exl3Config
from tokenflow_exllamav3.loading import load as load_model
from tokenflow_exllamav3.stepper import Exl3Stepper, Load


def open_exllamav3(config: Exl3Config, load: Load = load_model) -> AbstractAsyncContextManager[ExllamaEngine]:
    """Load the model in the thread that decodes, and serve it.

    Args:
        load: how; tests have no GPU.
    """
    return open_engine(Exl3Stepper(config, load))
