"""The file: whole lines in order, whatever happens to the disk and to the file's name."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenflow_ledger.file import Appended, LedgerFile, why_not

LINES = [b'{"n": %d}\n' % n for n in range(6)]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LedgerFile]:
    file = LedgerFile(tmp_path / "logs" / "ledger.jsonl")
    yield file
    file.close()


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: the kernel cuts the write there, and refuses the next with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def cut(file: LedgerFile) -> bytes:
    """`file`, cut within its third line; returns what was in it before. Large, so that pytest's own files fit."""
    before = b"\n" * (1 << 20)
    file.path.parent.mkdir()
    file.path.write_bytes(before)
    file.open()
    with disk_of(len(before) + len(LINES[0]) * 2 + 4):
        done, error = file.append(LINES[:4])
    assert (done, error and error.errno) == (2, errno.EFBIG)
    assert file.path.read_bytes().endswith(LINES[1] + LINES[2][:4])
    return before


def test_it_makes_folders_and_appends_in_order(file: LedgerFile) -> None:
    file.open()
    assert file.append(LINES[:2]) == Appended(2, None)
    assert file.append(LINES[2:4]) == Appended(2, None)
    assert file.path.read_bytes() == b"".join(LINES[:4])
    assert file.path.stat().st_mode & 0o007 == 0  # names of keys are nobody else's affair


def test_one_line_is_one_write(file: LedgerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    write = os.write

    def spy(fd: int, data: bytes) -> int:
        writes.append(data)
        return write(fd, data)

    monkeypatch.setattr(os, "write", spy)
    file.append(LINES)
    assert writes == LINES


def test_a_file_that_is_there_is_kept(file: LedgerFile) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(b"old\n")
    file.append(LINES[:1])
    assert file.path.read_bytes() == b"old\n" + LINES[0]


def test_half_a_line_left_by_a_crash_stays_on_its_own_line(file: LedgerFile) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(b'{"n": ')
    file.append(LINES[:2])
    assert file.path.read_bytes() == b'{"n": \n' + LINES[0] + LINES[1]


def test_a_line_that_was_cut_is_made_whole(file: LedgerFile, cut: bytes) -> None:
    assert file.append(LINES[2:]) == Appended(4, None)
    assert file.path.read_bytes() == cut + b"".join(LINES)


def test_a_line_can_be_cut_twice(file: LedgerFile, cut: bytes) -> None:
    with disk_of(len(cut) + len(LINES[0]) * 2 + 7):
        assert file.append(LINES[2:]).lines == 0
    assert file.append(LINES[2:]) == Appended(4, None)
    assert file.path.read_bytes() == cut + b"".join(LINES)


@pytest.mark.parametrize(("other", "between"), [(b"other\n", b""), (b"other", b"\n")])
def test_a_cut_line_that_somebody_wrote_behind_comes_again_on_a_line_of_its_own(
    file: LedgerFile, cut: bytes, other: bytes, between: bytes
) -> None:
    with file.path.open("ab") as stranger:
        stranger.write(other)
    file.append(LINES[2:])
    half = LINES[2][:4]
    assert file.path.read_bytes() == cut + LINES[0] + LINES[1] + half + other + between + b"".join(LINES[2:])


def test_after_a_rotation_a_cut_line_is_whole_in_the_new_file(file: LedgerFile, cut: bytes) -> None:
    file.path.rename(file.path.with_suffix(".1"))
    assert file.append(LINES[2:]) == Appended(4, None)
    assert file.path.read_bytes() == b"".join(LINES[2:])


def test_rotation_by_renaming_opens_a_new_file(file: LedgerFile) -> None:
    file.append(LINES[:2])
    old = file.path.rename(file.path.with_suffix(".1"))
    file.append(LINES[2:3])
    file.path.unlink()
    file.path.write_bytes(b"")  # as logrotate's `create` does
    file.append(LINES[3:])
    assert old.read_bytes() == b"".join(LINES[:2])
    assert file.path.read_bytes() == b"".join(LINES[3:])


def test_rotation_by_copying_and_truncating_goes_on_at_the_start(file: LedgerFile) -> None:
    file.append(LINES[:2])
    os.truncate(file.path, 0)
    file.append(LINES[2:3])
    assert file.path.read_bytes() == LINES[2]


def test_a_new_file_that_cannot_be_opened_is_tried_again(file: LedgerFile) -> None:
    file.append(LINES[:1])
    file.path.unlink()
    file.path.mkdir()
    done, error = file.append(LINES[1:])
    assert (done, error and error.errno) == (0, errno.EISDIR)
    file.path.rmdir()
    assert file.append(LINES[1:]) == Appended(5, None)


def test_fsync_waits_for_the_disk_once_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    file = LedgerFile(tmp_path / "ledger.jsonl", fsync=True)
    file.append(LINES)
    assert len(synced) == 1
    file.close()
    file.close()  # repeatable


def test_a_disk_that_is_always_full() -> None:
    file = LedgerFile(Path("/dev/full"))
    file.open()
    done, error = file.append(LINES)
    assert (done, error and error.errno) == (0, errno.ENOSPC)
    file.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_real_disk_that_fills_up_and_is_cleared(small_disk: Path, ids: Callable[[Path], list[str]]) -> None:
    lines = [b'{"id": "%05d"}\n' % n for n in range(6000)]  # 96 kB
    other = small_disk / "other"
    other.write_bytes(bytes(40_000))
    file = LedgerFile(small_disk / "ledger.jsonl")
    done, error = file.append(lines)
    assert error is not None
    assert error.errno == errno.ENOSPC
    assert 0 < done < 4000
    other.unlink()
    more, error = file.append(lines[done:3000])
    assert (more, error) == (3000 - done, None)
    file.close()
    assert ids(file.path) == [f"{n:05d}" for n in range(3000)]


# --- before it is opened --------------------------------------------------------------------------------------------


def test_folders_that_are_made_are_told_once(file: LedgerFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file.open()
    file.close()
    file.open()
    assert caplog.messages == [f"ledger {file.path}: made the folder {file.path.parent}"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
@pytest.mark.parametrize("path", ["/proc/x/y.jsonl", "/proc/y.jsonl"])
def test_where_no_file_can_be(path: str) -> None:
    """Root is told that it may write there."""
    assert why_not(Path(path)) is not None
    with pytest.raises(OSError, match="proc"):
        LedgerFile(Path(path)).open()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*arguments: object, **options: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    error = why_not(tmp_path / "deep" / "l")
    assert error is not None and error.errno == code


@pytest.mark.parametrize(("writable", "code"), [(True, None), (False, errno.EACCES)])
def test_a_file_system_without_nameless_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool, code: int | None
) -> None:
    def refuse(*arguments: object, **options: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)  # whoever runs the tests may be root
    error = why_not(tmp_path / "l")
    assert (error and error.errno) == code


def test_a_name_that_no_file_has() -> None:
    error = why_not(Path("a\0b"))
    assert error is not None and error.errno == errno.EINVAL


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "l").symlink_to(tmp_path / "there" / "l")
    (tmp_path / "there").symlink_to(tmp_path / "deep")
    for path in (tmp_path / "l", tmp_path / "there" / "er" / "l"):
        assert isinstance(why_not(path), FileNotFoundError)
        with pytest.raises(FileNotFoundError):
            LedgerFile(path).open()
    (tmp_path / "deep").mkdir()
    assert why_not(tmp_path / "l") is why_not(tmp_path / "there" / "er" / "l") is None
    (tmp_path / "m").symlink_to(tmp_path)
    assert isinstance(why_not(tmp_path / "m"), IsADirectoryError)
