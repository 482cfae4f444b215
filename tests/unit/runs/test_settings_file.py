"""Settings in TOML files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.config.toml import parse_toml, read_toml
from fedquilt.errors import ConfigError
from fedquilt.runs.experiment import Experiment


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a = 1\nb = = 2", r"x\.toml:2:5: this is not TOML: Invalid value\."),
        (b"a = 1\na = 2", r"x\.toml:2:6: this is not TOML: Cannot overwrite a value\."),
        (b"a = \xff", r"x\.toml is not text in UTF-8: byte 4 is 0xff\."),
        (b"a = " + b"[" * 5000, r"x\.toml nests too deeply|x\.toml:1:\d+: this is not TOML"),
        (b"a = " + b"9" * 5000, r"x\.toml: this is not TOML: Exceeds the limit"),
        (b"a = [1", r"x\.toml:1:7: this is not TOML: Unclosed array\."),
    ],
)
def test_text_that_is_not_toml_is_reported_with_its_line(text: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_toml(text, "x.toml")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent\.toml was asked for; it cannot be read: No such file"
    ):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="it cannot be read: Is a directory"):
        read_toml(tmp_path)


def test_all_problems_of_a_file_are_reported_with_their_flags() -> None:
    settings = {
        "method": "fedrolx",
        "model": "tiny_resnet",
        "data": "digits",
        "rounds": 0,
        "engine": "vectorised",
    }
    with pytest.raises(ConfigError) as caught:
        Experiment.of(settings, {"method": "--method"}, "a.toml")
    first, *told = str(caught.value).split("\n  ")
    assert first == "3 problems in a.toml:"
    assert told[0].startswith(
        "method.name (--method): there is no method named 'fedrolx'. Did you mean 'fedrolex'?"
    )
    assert told[1].startswith(
        "engine.name: 'vectorised' was asked for; there is no such engine. It is called 'vect"
    )
    assert told[2] == "rounds: 0 was asked for; it must lie in [1, inf)."
