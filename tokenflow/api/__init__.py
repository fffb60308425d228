"""All that a plugin imports.

`Stepper`, `LoopEngine` and the other adapters may be inherited from. `Delta`, `Send`, `Sequence`, `Step` and `StepLoop`
may not: where tokenflow is compiled, they cannot.
"""

from tokenflow.api.adapters import LoopEngine, engine_from_blocking_iterator, engine_from_generator, serving
from tokenflow.api.context import check_context, warn_beyond_training, warn_of_small_cache
from tokenflow.api.engine import Engine, StructuredEngine
from tokenflow.api.grammar import Grammars, Matcher
from tokenflow.api.hookspecs import EnginePlugin, SinkPlugin, hookimpl
from tokenflow.api.loop import Sequence, Step, StepLoop
from tokenflow.api.models import ModelSource, cache_dir
from tokenflow.api.send import Send
from tokenflow.api.sink import Exposition, MetricsSink, Sink
from tokenflow.api.stepper import Stepper
from tokenflow.api.vocabulary import BYTE_TOKEN, GPT2_BYTES, Vocabulary, VocabularyEngine
from tokenflow.core.lifecycle import (
    Admitted,
    Ended,
    FirstToken,
    Gaps,
    Gauges,
    LifecycleEvent,
    ModelGauges,
    SlotTaken,
)
from tokenflow.core.timings import TBT_BUCKETS_S, TTFT_BUCKETS_S, TTLT_BUCKETS_S
from tokenflow.core.types import (
    CAPABILITIES,
    Delta,
    Dry,
    EngineInfo,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    Grammar,
    Mirostat,
    Released,
    Resumed,
    Sampling,
    SequenceRequest,
    Started,
    TokenLogprob,
    Xtc,
)
from tokenflow.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineError,
    EngineLost,
    EngineStuck,
    InvalidRequest,
    StartupError,
)

__all__ = [
    "BYTE_TOKEN",
    "CAPABILITIES",
    "GPT2_BYTES",
    "TBT_BUCKETS_S",
    "TTFT_BUCKETS_S",
    "TTLT_BUCKETS_S",
    "Admitted",
    "ContextLengthExceeded",
    "Delta",
    "Dry",
    "Ended",
    "Engine",
    "EngineClosed",
    "EngineError",
    "EngineInfo",
    "EngineLost",
    "EnginePlugin",
    "EngineStats",
    "EngineStuck",
    "Event",
    "Exposition",
    "FinishReason",
    "Finished",
    "FirstToken",
    "Gaps",
    "Gauges",
    "Grammar",
    "Grammars",
    "InvalidRequest",
    "LifecycleEvent",
    "LoopEngine",
    "Matcher",
    "MetricsSink",
    "Mirostat",
    "ModelGauges",
    "ModelSource",
    "Released",
    "Resumed",
    "Sampling",
    "Send",
    "Sequence",
    "SequenceRequest",
    "Sink",
    "SinkPlugin",
    "SlotTaken",
    "Started",
    "StartupError",
    "Step",
    "StepLoop",
    "Stepper",
    "StructuredEngine",
    "TokenLogprob",
    "Vocabulary",
    "VocabularyEngine",
    "Xtc",
    "cache_dir",
    "check_context",
    "engine_from_blocking_iterator",
    "engine_from_generator",
    "hookimpl",
    "serving",
    "warn_beyond_training",
    "warn_of_small_cache",
]
