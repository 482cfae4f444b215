"""Data files that are no plain files are refused at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fedquilt.data import images, npz, text
from fedquilt.errors import DataError


@pytest.fixture(autouse=True)
def at_most_twenty_seconds():
    """Fail instead of waiting forever."""

    def fail(number: int, frame: object) -> None:
        pytest.fail("a FIFO was read")

    earlier = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


def test_pipes_in_place_of_arrays_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(DataError, match=r"x\.npz cannot be read as an \.npz file: it is no plain"):
        npz(str(tmp_path / "x.npz"))


def test_pipes_in_place_of_arrays_of_text_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(DataError, match=r"x\.npz cannot be read as an \.npz file: it is no plain"):
        text(str(tmp_path / "x.npz"))


def test_pipes_in_place_of_images_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for kind in ("ant", "bee"):
        (tmp_path / kind).mkdir()
        os.mkfifo(tmp_path / kind / "0.png")
    with pytest.raises(DataError, match=r"0\.png.*it is no plain file"):
        images(str(tmp_path))
