"""`tokenflow pull`: what it shows. What it does is tests/engines/test_pull.py's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenflow.api.models import ModelSource
from tokenflow.cli import pull as command
from tokenflow.engines.pull import PullError
from tokenflow.errors import PluginError

TINY = ModelSource(
    name="tiny",
    requirement="tiny-model==1.0",
    member="m",
    sha256="0" * 64,
    size=100_000_000,
    license="MIT",
    filename="tiny.gguf",
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(command.Registry, "load_all", lambda self: {"bad": PluginError("bad is broken")})
    monkeypatch.setattr(command.Registry, "models", lambda self: {"tiny": TINY})


def fetching(monkeypatch: pytest.MonkeyPatch, fetch: Callable[[Callable[[int], None]], object]) -> None:
    monkeypatch.setattr(command, "pull", lambda source, progress: fetch(progress))


def test_a_line_every_tenth(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetching(monkeypatch, lambda progress: [progress(done * 1_000_000) for done in (1, 9, 10, 11, 35, 36, 99, 120)])
    result = run("pull", "tiny")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "Fetching tiny (tiny-model==1.0, 100 MB, MIT)",
        "tiny: 10 of about 100 MB (10%)",
        "tiny: 35 of about 100 MB (30%)",
        "tiny: 99 of about 100 MB (90%)",
        "tiny: 120 of about 100 MB (100%)",
        f"tiny is there: {tmp_path}/tiny.gguf",
    ]


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.sys.stdout, "isatty", lambda: True, raising=False)
    with command._Meter("tiny", 100_000_000) as meter:
        meter.show(50_000_000)
    assert capsys.readouterr().out == f"\r\x1b[K[{'#' * 15}{'.' * 15}] tiny: 50 of about 100 MB\r\x1b[K"


def test_there_already(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "is_there", lambda source: True)
    result = run("pull", "tiny")
    assert (result.exit_code, result.stdout) == (0, f"tiny is there already, and right: {tmp_path}/tiny.gguf\n")


def test_an_unknown_name_lists_those_there_are(run) -> None:
    result = run("pull", "nope")
    assert result.exit_code == 1
    assert result.stderr == ('tokenflow: no installed engine knows the model "nope"; there is tiny; bad is broken\n')


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-GGUF", "https://example.org/a.gguf", "a.gguf", "qwen3:8b"])
def test_what_is_no_name_is_downloaded_by_other_means(run, name: str) -> None:
    result = run("pull", name)
    assert result.exit_code == 1
    assert result.stderr == (
        f'tokenflow: "{name}" is no name of a model, and only those are fetched (tiny); '
        "download the GGUF file, and name its path in `model`; bad is broken\n"
    )


def test_a_failure_is_one_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(progress: object) -> None:
        raise PullError("no space left; free some")

    fetching(monkeypatch, fail)
    result = run("pull", "tiny")
    assert (result.exit_code, result.stderr) == (1, "tokenflow: no space left; free some\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_unwind(run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int) -> None:
    cleaned = []

    def wait(progress: object) -> None:
        try:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5)  # until the handler runs
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    fetching(monkeypatch, wait)
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    try:
        result = run("pull", "tiny")
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    assert result.exit_code == code
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is before
