"""`make wheel`: the wheel has the whole package, and is all that the demo needs."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import run

pytestmark = pytest.mark.slow


def test_a_wheel_has_every_file_of_the_package_and_no_other(folder: Path, wheel: Path) -> None:
    source = folder / "source"
    files = {
        str(file.relative_to(source)) for file in (source / "fedquilt").rglob("*") if file.is_file()
    }
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert names == files
    assert {
        "fedquilt/py.typed",
        "fedquilt/papers/README.md",
        "fedquilt/papers/fedrolex/table3.toml",
    } <= names


def test_a_wheel_in_an_empty_environment_runs_the_demo(folder: Path, wheel: Path) -> None:
    """First without the extra, which a command asks for, then as its message says."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    programs = folder / "env" / "bin"
    install = (programs / "pip", "install", "--quiet", "-c", folder / "source" / "constraints.txt")

    run(*install, wheel, cwd=elsewhere, timeout=900)
    home = run(
        programs / "python",
        "-c",
        "import fedquilt; fedquilt.trace; print(fedquilt.__file__)",
        cwd=elsewhere,
    )
    assert home.stdout.startswith(str(folder / "env" / "lib"))
    refused = run(programs / "fedquilt", "run", cwd=elsewhere, check=False)
    assert refused.returncode == 2
    assert (
        "needs tyro, rich, tomli_w, which is not installed: pip install -e '.[cli]'"
        in refused.stderr
    )
    assert f"pip install '{wheel.name}[cli]'" in refused.stderr

    run(*install, f"{wheel}[cli]", cwd=elsewhere, timeout=900)
    demo = run(programs / "fedquilt", "run", "--rounds", "2", "--json", cwd=elsewhere)
    summary = json.loads(demo.stdout)
    assert summary["rounds"] == 2
    assert summary["accuracy"]["1.0"] > 0.3
    table = run(
        programs / "fedquilt",
        "reproduce",
        "fedrolex/table7",
        "--scale",
        "smoke",
        "--json",
        cwd=elsewhere,
    )
    assert json.loads(table.stdout)["rows"]
