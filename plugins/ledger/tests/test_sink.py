"""The sink on a clock that only the test moves; the writes are real threads on real files."""

from __future__ import annotations

import errno
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from tokenflow_ledger import register_sinks
from tokenflow_ledger.file import Appended, LedgerFile
from tokenflow_ledger.sink import CLOSE_S, GATHER_S, RETRY_S, LedgerConfig, LedgerSink, open_ledger

from tokenflow.api import Admitted, Ended, SinkPlugin, StartupError

Make = Callable[..., Ended]
Ids = Callable[[Path], list[str]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class ScriptedFile(LedgerFile):
    """A ledger file whose disk fails, or hangs, when told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.errors: list[OSError | None] = []
        """One for each coming batch; None, or none left: it works."""
        self.batches: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def append(self, lines: Sequence[bytes]) -> Appended:
        self.batches.append(len(lines))
        self.go_on.wait()
        error = self.errors.pop(0) if self.errors else None
        return super().append(lines) if error is None else Appended(0, error)


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def file(tmp_path: Path) -> ScriptedFile:
    return ScriptedFile(tmp_path / "ledger.jsonl")


@asynccontextmanager
async def running(sink: LedgerSink) -> AsyncIterator[LedgerSink]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.run)
        try:
            yield sink
        finally:
            sink.close()


async def record(sink: LedgerSink, ended: Make, *names: int) -> None:
    for name in names:
        await sink.record(ended(id=str(name)))


async def refused(sink: LedgerSink, file: ScriptedFile, batches: int, until: Until) -> None:
    """Wait until the disk has refused that many batches, and the sink is waiting to try again."""
    await until(lambda: len(file.batches) == batches and sink.statistics().retry_at is not None)


async def test_the_plugin_offers_one_sink(
    tmp_path: Path, ended: Make, ids: Ids, mock_clock: trio.testing.MockClock, until: Until
) -> None:
    (plugin,) = register_sinks()
    assert isinstance(plugin, SinkPlugin)
    assert plugin.name == "ledger"
    async with plugin.open(plugin.config(path=str(tmp_path / "deep" / "er" / "l.jsonl"), fsync=True)) as sink:
        await sink.record(ended())
    assert ids(tmp_path / "deep" / "er" / "l.jsonl") == ["s1"]


async def test_the_path_is_relative_to_the_working_directory_at_the_start(
    tmp_path: Path, ended: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_ledger(LedgerConfig()) as sink:
        monkeypatch.chdir("/")
        await sink.record(ended())
    assert ids(tmp_path / "ledger.jsonl") == ["s1"]


async def test_only_ended_streams_are_written(file: ScriptedFile, mock_clock: trio.testing.MockClock) -> None:
    async with running(LedgerSink(file, gather_s=0.0)) as sink:
        await sink.record(Admitted(id="s1", at=0.0, model="m", engine="e", key="-", route="/", stream=True, choices=1))
        assert sink.statistics().pending == 0
    assert file.batches == []


async def test_a_line_is_written_at_once_and_those_gathered_meanwhile_together(
    file: ScriptedFile, ended: Make, ids: Ids, mock_clock: trio.testing.MockClock, until: Until
) -> None:
    async with running(LedgerSink(file, gather_s=0.0)) as sink:
        await record(sink, ended, 1)
        await until(lambda: sink.statistics().pending == 0)
        file.go_on.clear()
        await record(sink, ended, 2)
        await until(lambda: file.batches == [1, 1])
        await record(sink, ended, 3, 4, 5)
        file.go_on.set()
        await until(lambda: sink.statistics().pending == 0)
        assert ids(file.path) == ["1", "2", "3", "4", "5"]
        assert file.batches == [1, 1, 3]
        assert trio.current_time() == 0


async def test_lines_that_come_soon_after_a_write_share_the_next(
    file: ScriptedFile, ended: Make, ids: Ids, mock_clock: trio.testing.MockClock, until: Until
) -> None:
    async with running(LedgerSink(file)) as sink:
        await record(sink, ended, 1)
        await until(lambda: sink.statistics().pending == 0)
        for name in (2, 3):
            await record(sink, ended, name)
            mock_clock.jump(0.4 * GATHER_S)
            await trio.testing.wait_all_tasks_blocked()
        assert ids(file.path) == ["1"]
        mock_clock.jump(0.2 * GATHER_S)
        await until(lambda: sink.statistics().pending == 0)
        assert ids(file.path) == ["1", "2", "3"]
        assert file.batches == [1, 2]


async def test_closing_writes_everything_that_is_pending(
    file: ScriptedFile, ended: Make, ids: Ids, mock_clock: trio.testing.MockClock
) -> None:
    async with running(LedgerSink(file)) as sink:
        await record(sink, ended, *range(100))
    assert ids(file.path) == [str(n) for n in range(100)]


async def test_being_cancelled_writes_everything_that_is_pending(
    file: ScriptedFile, ended: Make, ids: Ids, mock_clock: trio.testing.MockClock
) -> None:
    with trio.CancelScope() as scope:
        async with running(LedgerSink(file)) as sink:
            await record(sink, ended, *range(100))
            scope.cancel()
            await trio.sleep_forever()
    assert ids(file.path) == [str(n) for n in range(100)]


async def test_a_full_disk_is_logged_once_and_loses_neither_lines_nor_order(
    file: ScriptedFile,
    ended: Make,
    ids: Ids,
    mock_clock: trio.testing.MockClock,
    until: Until,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file.errors = [full(), full(), full()]
    async with running(LedgerSink(file, gather_s=0.0)) as sink:
        await record(sink, ended, 1, 2)
        for tries in (1, 2, 3):
            await refused(sink, file, tries, until)
            await record(sink, ended, tries + 2)
            assert sink.statistics().pending == tries + 2
            mock_clock.jump(RETRY_S)
        await until(lambda: sink.statistics().pending == 0)
        await record(sink, ended, 6)
    assert ids(file.path) == ["1", "2", "3", "4", "5", "6"]
    first, second = [r.getMessage() for r in caplog.records if r.name == "tokenflow.ledger"]
    assert f"ledger {file.path}: cannot write: [Errno 28] No space left on device" in first
    assert second.endswith("writing again; 0 lines were dropped meanwhile")


async def test_another_error_is_another_line_in_the_log(
    file: ScriptedFile, ended: Make, mock_clock: trio.testing.MockClock, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    file.errors = [full(), OSError(errno.EIO, "Input/output error")]
    async with running(LedgerSink(file, gather_s=0.0)) as sink:
        await record(sink, ended, 1)
        await refused(sink, file, 1, until)
        mock_clock.jump(RETRY_S)
        await refused(sink, file, 2, until)
        mock_clock.jump(RETRY_S)
        await until(lambda: sink.statistics().pending == 0)
    assert [text for text in ("Errno 28", "Errno 5]", "writing again") if text in caplog.text] == [
        "Errno 28",
        "Errno 5]",
        "writing again",
    ]


async def test_past_the_bound_the_newest_are_dropped_and_counted(
    file: ScriptedFile,
    ended: Make,
    ids: Ids,
    mock_clock: trio.testing.MockClock,
    until: Until,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file.errors = [full()]
    async with running(LedgerSink(file, gather_s=0.0, max_pending=3)) as sink:
        await record(sink, ended, 1, 2, 3, 4, 5)
        assert sink.statistics()[:2] == (3, 2)
        await refused(sink, file, 1, until)
        mock_clock.jump(RETRY_S)
        await until(lambda: sink.statistics().pending == 0)
        await record(sink, ended, 6)
    assert ids(file.path) == ["1", "2", "3", "6"]
    assert sink.statistics().dropped == 0
    assert caplog.text.count("3 lines wait; dropping further ones") == 1
    assert "writing again; 2 lines were dropped meanwhile" in caplog.text


async def test_what_a_full_disk_never_took_is_counted_at_the_end(
    file: ScriptedFile, ended: Make, mock_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    file.errors = [full()] * 9
    async with running(LedgerSink(file, gather_s=0.0, max_pending=2)) as sink:
        await record(sink, ended, 1, 2, 3)
    assert f"ledger {file.path}: closed; 3 lines could not be written and are lost" in caplog.text
    assert len(file.batches) == 1


async def test_closing_during_an_outage_tries_once_more_and_at_once(
    file: ScriptedFile, ended: Make, ids: Ids, mock_clock: trio.testing.MockClock, until: Until
) -> None:
    file.errors = [full()]
    async with running(LedgerSink(file, gather_s=0.0)) as sink:
        await record(sink, ended, 1)
        await refused(sink, file, 1, until)
    assert ids(file.path) == ["1"]
    assert trio.current_time() == 0


async def test_a_disk_that_hangs_does_not_hold_up_the_end(
    file: ScriptedFile, ended: Make, mock_clock: trio.testing.MockClock, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    file.go_on.clear()
    try:
        async with running(LedgerSink(file, gather_s=0.0)) as sink:
            await record(sink, ended, 1)
            await until(lambda: file.batches == [1])
            sink.close()
            mock_clock.jump(CLOSE_S)
        assert "closed; 1 lines could not be written and are lost" in caplog.text
    finally:
        file.go_on.set()


async def test_a_failing_fsync_is_logged_and_repeats_no_line(
    tmp_path: Path,
    ended: Make,
    ids: Ids,
    mock_clock: trio.testing.MockClock,
    until: Until,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", fsync)
    async with open_ledger(LedgerConfig(path=str(tmp_path / "l.jsonl"), fsync=True)) as sink:
        await record(sink, ended, 1)
        await until(lambda: sink.statistics().pending == 0)
        await record(sink, ended, 2)
    assert ids(tmp_path / "l.jsonl") == ["1", "2"]
    assert caplog.text.count("Errno 5") == 1


async def test_an_unwritable_path_is_one_clear_line_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for path, why in (
        (tmp_path, "Is a directory (errno 21)"),
        (tmp_path / "taken" / "l", "Not a directory (errno 20)"),
    ):
        with pytest.raises(StartupError) as caught:
            async with open_ledger(LedgerConfig(path=str(path))):
                raise AssertionError("it opened")
        assert str(caught.value) == (
            f"sinks.ledger.path: cannot write {path}: {why}; make it writable for this user, or name another file."
        )


def test_what_config_check_says_of_the_file(tmp_path: Path) -> None:
    """The same as opening it would, and nothing is made."""
    (plugin,) = register_sinks()
    (tmp_path / "taken").write_text("a file")
    for path, why in (
        (tmp_path, "Is a directory (errno 21)"),
        (tmp_path / "taken" / "l", "Not a directory (errno 20)"),
        (tmp_path / "taken" / "deep" / "er" / "l", "Not a directory (errno 20)"),
        (tmp_path / ("x" * 300), "File name too long (errno 36)"),
    ):
        line = f"cannot write {path}: {why}; make it writable for this user, or name another file"
        assert list(plugin.missing(LedgerConfig(path=str(path)))) == [("path", line)]
    for path in (tmp_path / "l", tmp_path / "taken", tmp_path / "deep" / "er" / "l", Path("/dev/null")):
        assert list(plugin.missing(LedgerConfig(path=str(path)))) == []
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken").read_text() == "a file"
