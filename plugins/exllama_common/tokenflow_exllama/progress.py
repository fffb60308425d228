"""A model that is being loaded: how far it is, and whether anybody still waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable


class GivenUp(Exception):
    """Nobody waits for this model any more."""


class Progress:
    """Called before each layer; says so at every tenth of them.

    Args:
        logger: where it says so.
        name: the model's.
        given_up: whether to raise GivenUp instead.
    """

    def __init__(self, logger: logging.Logger, name: str, given_up: Callable[[], bool]) -> None:
        self._logger = logger
        self._name = name
        self._given_up = given_up
        self._tenths = -1

    def __call__(self, layers: int, of: int) -> None:
        if self._given_up():
            raise GivenUp
        if (tenths := 10 * layers // of) > self._tenths:
            self._tenths = tenths
            self._logger.info("%s: %d%% loaded", self._name, 10 * tenths)
