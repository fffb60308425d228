"""What engines say of a context's length, all in the same words."""

from __future__ import annotations

import logging


def check_context(context_length: int | None, cache_tokens: int | None) -> None:
    """One sequence's tokens must fit into those of the cache, where a configuration sets both.

    Raises:
        ValueError: they do not; with both numbers and the way out.
    """
    if context_length is not None and cache_tokens is not None and context_length > cache_tokens:
        raise ValueError(
            f"context_length = {context_length} is larger than cache_tokens = {cache_tokens}, which has to hold it; "
            "lower context_length or raise cache_tokens"
        )


def warn_beyond_training(log: logging.Logger, model: object, context_length: int | None, trained: int) -> None:
    """Say so in `log` where a configuration asks for more than a model can be expected to make sense of.

    Args:
        model: its file or directory.
        trained: tokens that the model is made for, stretched or not; 0: it does not say.
    """
    if context_length is not None and 0 < trained < context_length:
        log.warning(
            "%s: context_length = %d, but the model was trained for %d tokens: what it says beyond may be of no use.",
            model,
            context_length,
            trained,
        )


def warn_of_small_cache(log: logging.Logger, model: object, context_length: int | None, usual: int, room: int) -> None:
    """Say so in `log` where a cache holds less than the context that a model has if nobody sets its length.

    Args:
        model: its file or directory.
        usual: tokens of that context.
        room: tokens that one sequence can have of the cache.
    """
    if context_length is None and room < usual:
        log.warning(
            "%s: the context is %d tokens and not %d, for cache_tokens has no room for more: raise it, or set "
            "context_length if this is what you want.",
            model,
            room,
            usual,
        )
