"""The synthetic engine: deterministic text at any pace, and planned faults. For tests, lessons and load.

It needs no model. The same prompt always gives the same text: `generate` says which, without the engine.
"""

from tokenflow.api import EnginePlugin, hookimpl
from tokenflow_synthetic.config import SyntheticConfig
from tokenflow_synthetic.engine import SyntheticEngine, open_in_task, open_synthetic
from tokenflow_synthetic.stepper import SyntheticStepper
from tokenflow_synthetic.words import generate

__all__ = ["SyntheticConfig", "SyntheticEngine", "SyntheticStepper", "generate", "open_in_task", "open_synthetic"]


@hookimpl
def register_engines() -> list[EnginePlugin[SyntheticConfig]]:
    return [EnginePlugin(name="synthetic", config=SyntheticConfig, open=open_synthetic)]
