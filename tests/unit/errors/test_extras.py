"""Optional packages: messages that say how to install them."""

import re
import sys
from pathlib import Path

import pytest

from fedquilt import data
from fedquilt.__main__ import main
from fedquilt.errors import ConfigError
from fedquilt.errors.extras import how_to_install
from fedquilt.version import __version__

ROOT = Path(__file__).parents[3]


def test_both_ways_to_install_an_extra_are_named():
    wheel = f"fedquilt-{__version__}-py3-none-any.whl"
    assert how_to_install("ray") == (
        f"pip install -e '.[ray]' in a checkout of fedquilt, or pip install '{wheel}[ray]' with "
        "its wheel"
    )


def test_nothing_says_to_install_fedquilt_by_its_name():
    """It is on no package index, so that `pip install 'fedquilt[hub]'` installs nothing, or another
    package.
    """
    files = [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile")]
    for folder in ("fedquilt", "docs", "examples", "bench"):
        files += [
            file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md", ".ipynb")
        ]
    by_name = re.compile(r"pip install\s+[\"']*fedquilt(?!-)")
    assert len(files) > 200
    for file in files:
        assert not by_name.search(file.read_text()), file


def test_the_command_line_without_its_packages_names_the_extra(monkeypatch, capsys):
    for name in ("tyro", "tomli_w"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main() == 2
    assert (
        f"needs tyro, tomli_w, which is not installed: {how_to_install('cli')}."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["digits", "diabetes"])
def test_bundled_data_without_scikit_learn_names_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        ConfigError, match=rf"the data '{name}' was asked for; .*pip install -e '\.\[cli\]'"
    ):
        getattr(data, name)()
