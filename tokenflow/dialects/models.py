"""`/v1/models`: what can be asked for, in OpenAI's shape with what each can do beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenflow.core.types import EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model as it is offered."""

    id: str
    """What clients ask for."""
    created: int
    """Unix seconds; since when it is served."""
    info: EngineInfo
    defaults: Mapping[str, float]
    """What holds for requests that do not say, by the fields' names."""


def model_object(entry: ModelEntry) -> dict[str, Any]:
    """One model, for `GET /v1/models/{id}`."""
    return {
        "id": entry.id,
        "object": "model",
        "created": entry.created,
        "owned_by": "tokenflow",
        "context_length": entry.info.context_length,
        "max_model_len": entry.info.context_length,  # as vLLM calls it, and clients made for that look for
        "slots": entry.info.slots,
        "capabilities": sorted(entry.info.capabilities),
        "defaults": dict(entry.defaults),
    }


def model_list(entries: Iterable[ModelEntry]) -> dict[str, Any]:
    """All of them, for `GET /v1/models`."""
    return {"object": "list", "data": [model_object(entry) for entry in entries]}
