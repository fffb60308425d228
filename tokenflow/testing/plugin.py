"""What pytest loads in every run (entry point `pytest11`): fixtures, each importing what it needs when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import trio.testing

    from tokenflow.testing.fakes import Recorder

pytest.register_assert_rewrite("tokenflow.testing.conformance")


@pytest.fixture
def make_recorder() -> type[Recorder]:
    """`make_recorder(window=..., follow=...)` gives a `tokenflow.testing.fakes.Recorder`."""
    from tokenflow.testing.fakes import Recorder

    return Recorder


@pytest.fixture
def pin(autojump_clock: trio.testing.MockClock) -> Callable[[bool], None]:
    """For `StepLoop.on_busy`: pytest-trio's autojump clock does not jump while the loop's thread is at work.

    The test itself must ask for `autojump_clock`, too: pytest-trio uses no clock that only a fixture asked for.
    """
    from tokenflow.testing.clocks import pinned

    return pinned(autojump_clock)
