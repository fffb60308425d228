"""One line a record, whatever is in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tokenflow.cli.logs import OneLine, start_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, client = logging.getLogger(), logging.getLogger("httpx2")
    before = root.level, root.handlers[:], client.level
    yield
    root.handlers[:] = before[1]
    root.setLevel(before[0])
    client.setLevel(before[2])


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("tokenflow.x", logging.WARNING, __file__, 1, message, None, info)


def test_a_line() -> None:
    noted = record("text")
    noted.created = 1_769_860_800.123456
    assert OneLine(traces=False).format(noted) == "2026-01-31T12:00:00.123Z warning tokenflow.x: text"
    noted.created = 1_769_860_800.0
    assert OneLine(traces=False).format(noted).startswith("2026-01-31T12:00:00.000Z ")


def test_nothing_can_forge_a_line() -> None:
    line = OneLine(traces=False).format(record("a\n2026-01-01 info: b\x1b[2J ä"))
    assert line.endswith("tokenflow.x: a\\n2026-01-01 info: b\\x1b[2J ä")


def test_an_exception_is_on_the_line_and_its_trace_only_in_debug() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as exc:
        error = exc
    noted = record("text", error)
    plain = OneLine(traces=False).format(noted)
    assert "\n" not in plain
    assert "text (ValueError: two\\nlines at " in plain
    assert OneLine(traces=True).format(noted).startswith(plain + "\nTraceback ")


def test_an_exception_without_a_trace() -> None:
    assert OneLine(traces=False).format(record("text", ValueError("x"))).endswith("text (ValueError: x)")


def test_an_exception_that_cannot_say_what_it_is_or_says_too_much() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    plain = OneLine(traces=False)
    assert plain.format(record("text", Mute())).endswith("text (Mute: its text cannot be had)")
    assert len(plain.format(record("text", ValueError("x" * 1_000_000)))) < 2000


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("warning")
    logging.getLogger("tokenflow").info("quiet")
    logging.getLogger("tokenflow").warning("loud")
    assert capsys.readouterr().err.endswith("warning tokenflow: loud\n")
    assert not logging.getLogger("httpx2").isEnabledFor(logging.INFO)
    start_logging("debug")
    assert logging.getLogger("httpx2").isEnabledFor(logging.INFO)
