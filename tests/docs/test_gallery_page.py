"""docs/gallery.md: pictures and commands are those of tools/gallery.py, drawn from real runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import load_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gallery.md").read_text()
FOLDER = ROOT / "docs" / "gallery"


@pytest.fixture(scope="module")
def gallery():
    """Return the script as a module."""
    for name in ("altair", "vl_convert", "PIL", "flwr"):
        pytest.importorskip(name)
    return load_script("tools/gallery.py")


def test_the_page_shows_every_picture_and_none_is_large(gallery):
    shown = set(re.findall(r"\]\(gallery/([\w-]+)\.png\)", PAGE))
    assert shown == {*gallery.PICTURES, *gallery.SCREENSHOTS}
    assert shown == {file.stem for file in FOLDER.iterdir()}
    assert all(file.stat().st_size <= gallery.MAX_BYTES for file in FOLDER.iterdir())
    assert set(re.findall(r"docs/gallery/([\w-]+)\.png", (ROOT / "README.md").read_text())) <= shown


def test_the_page_has_the_commands_and_a_sentence_for_each_picture(gallery):
    place = gallery.Place()
    for name, picture in gallery.PICTURES.items():
        assert f"python tools/gallery.py {name}\n" in PAGE
        if not picture.folder:
            assert picture.command(place) in PAGE
        (sentence,) = re.findall(rf"<!-- sentence {name} -->\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)
        assert sentence.endswith("."), name
    assert "python tools/gallery.py pages\n" in PAGE
    assert re.search(r"^gallery:.*\n\t\$\(BIN\)/python tools/gallery.py$", MAKEFILE, re.MULTILINE)


MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_panels_have_every_method_once(gallery):
    from fedquilt.methods import METHODS

    names = [name for group in gallery.GROUPS.values() for name in group]
    assert sorted(names) == sorted(METHODS)


def test_the_sentence_of_the_stored_growth_is_on_the_page(gallery):
    _, sentence = gallery.draw_growth(gallery.Place())
    assert gallery.filled(PAGE, {"growth": sentence}) == PAGE
    with pytest.raises(ValueError, match="no place for the sentence of nothing"):
        gallery.filled(PAGE, {"nothing": ""})


@pytest.mark.slow
def test_all_pictures_are_drawn_from_short_runs(gallery, tmp_path, monkeypatch):
    place = gallery.Place(tmp_path / "out", tmp_path / "runs", rounds=2)
    sentences = {name: gallery.make(name, place) for name in gallery.PICTURES}
    assert {file.stem for file in place.out.iterdir()} == set(gallery.PICTURES)
    assert gallery.filled(PAGE, sentences) != PAGE
    quilts = gallery.quilts_of(place)
    prefix = quilts["heterofl"].cells(gallery.QUILT_AXIS)
    assert {min(c["start"] for c in prefix if c["first"] == number) for number in (1, 2)} == {0}
    moved = quilts["fedrolex"].cells(gallery.QUILT_AXIS)
    starts = [min(c["start"] for c in moved if c["first"] == number) for number in (1, 2)]
    assert starts == [0, 1]


def test_the_faults_of_the_deployment_are_those_of_the_page(gallery):
    devices = load_script("tools/faulty_devices.py")
    text = PAGE.replace("\n", " ")
    for phase in (devices.OFFLINE, devices.DAMAGED, devices.HASTY):
        assert f"rounds {phase[0]} to {phase[1]} the" in text
    assert f"with a probability of {devices.LOSS}" in text
    run = devices.deployed(6)
    attendance = run.records[5].attendance
    assert attendance is not None
    assert {0, 1, 2} <= set(attendance.missing)
