"""How a model of this plugin becomes an engine."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tokenflow_exllama.engine import ExllamaEngine, open_engine

from tokenflow_exllamav2.config import Exl2Config
from tokenflow_exllamav2.stepper import Exl2Stepper, Load, load_model


def open_exllamav2(config: Exl2Config, load: Load = load_model) -> AbstractAsyncContextManager[ExllamaEngine]:
    """Load the model in the thread that decodes, and serve it.

    Args:
        load: how; tests have no GPU.
    """
    return open_engine(Exl2Stepper(config, load))
