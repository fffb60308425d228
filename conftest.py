"""Options and fixtures of every room, and of the plugins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from tokenflow import compiled

settings.register_profile("tokenflow", deadline=None)  # by the wall clock: a busy machine is no finding
settings.load_profile("tokenflow")
pytest.register_assert_rewrite("plugins.exllama_common.tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compiled", action="store_true", help="refuse to run with a tokenflow that is not compiled")
    parser.addoption(
        "--stress-share",
        type=float,
        default=1.0,
        help="how much of each stress test to run: 0.05 is a twentieth (default: all of it)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--compiled") and not compiled():
        raise pytest.UsageError("--compiled, but the tokenflow that is imported here is not")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if compiled():
        for item in items:
            if item.get_closest_marker("interpreted"):
                item.add_marker(pytest.mark.skip(reason="it replaces what is compiled here"))


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """`share(200)`: how many of 200 trials to run, at least 2."""
    part: float = request.config.getoption("--stress-share")

    def share(trials: int) -> int:
        return max(2, round(trials * part))

    return share
