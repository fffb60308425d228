"""Logs for a terminal or a journal: one line a record, on stderr.

An exception is its type, message and place on that same line; its whole trace follows only at level debug. So a log
can be searched by line, and an attacker's text cannot forge one.
"""

from __future__ import annotations

import logging
import traceback
from datetime import UTC, datetime

import click

from tokenflow.errors import described

LEVELS = ("debug", "info", "warning", "error")

log_level_option = click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    metavar="LEVEL",
    default="info",
    show_default=True,
    help=f"What to log, on stderr: {', '.join(LEVELS)}.",
)


class OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123Z warning tokenflow.http: text`, in UTC as the ledger's times are."""

    def __init__(self, *, traces: bool) -> None:
        super().__init__()
        self.traces = traces

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = f"{at} {record.levelname.lower()} {record.name}: {record.getMessage()}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text += f" ({_summary(error)})"
        line = text if text.isprintable() else _escaped(text)
        return f"{line}\n{''.join(traceback.format_exception(error)).rstrip()}" if self.traces and error else line


def start_logging(level: str) -> None:
    """Log to stderr from `level` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(traces=level == "debug"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The client library tells of every request it makes; that is for debugging alone.
    logging.getLogger("httpx2").setLevel(logging.WARNING if level != "debug" else logging.DEBUG)


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _summary(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{described(error)}{place}"
