"""Where ranks on GPUs keep compiled kernels if their home can't be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.distributed import triton_cache
from quire.distributed.triton_cache import TRITON_CACHE_DIR, triton_cache_environment


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a folder for temporary files, and a home that cannot be written."""
    for name in (TRITON_CACHE_DIR, "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null/home")
    monkeypatch.setattr(triton_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_what_can_be_written_or_is_named_already_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a folder that only this user can write is used."""
    first = triton_cache_environment()
    assert [*first] == [TRITON_CACHE_DIR]
    assert Path(first[TRITON_CACHE_DIR]).parent == place
    assert Path(first[TRITON_CACHE_DIR]).stat().st_mode & 0o777 == 0o700
    assert triton_cache_environment() == first, "all ranks have one"
    monkeypatch.setenv("TRITON_HOME", str(place / "home"))
    assert triton_cache_environment() == {}
    monkeypatch.setenv("TRITON_HOME", "/dev/null/home")
    monkeypatch.setenv(TRITON_CACHE_DIR, "/somewhere")
    assert triton_cache_environment() == {}


@pytest.mark.parametrize("how", ["link", "open"])
def test_a_folder_that_others_can_write_is_left_alone(how: str, place: Path) -> None:
    """Files in it are executed."""
    folder = Path(triton_cache_environment()[TRITON_CACHE_DIR])
    if how == "open":
        folder.chmod(0o777)
    else:
        folder.rename(place / "other")
        folder.symlink_to(place / "other")
    assert triton_cache_environment() == {}
