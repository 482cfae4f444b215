"""`make wheel`: the wheel has the whole package, and is all that the demo needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STALE = Path("build/lib/fedquilt/stale.py")  # Left behind by an older build.

pytestmark = pytest.mark.slow


def run(
    *command: str | Path, cwd: Path, timeout: int = 300, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command that does not see the checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        check=False,
        cwd=cwd,
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packed, with an empty environment in `env`."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT / "fedquilt", source / "fedquilt", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, source)
    (source / STALE).parent.mkdir(parents=True)
    (source / STALE).touch()
    run("make", f"VENV={folder / 'env'}", folder / "env" / "bin" / "pip", cwd=source)
    _skip_without_index(folder)
    return folder


def _skip_without_index(folder: Path) -> None:
    pip = folder / "env" / "bin" / "pip"
    probe = run(
        pip,
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        folder / "probe",
        "tomli-w",
        cwd=folder,
        check=False,
    )
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip reaches no package index: {reason}")


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    run("make", "wheel", f"VENV={folder / 'env'}", cwd=folder / "source")
    (wheel,) = (folder / "source" / "dist").glob("*.whl")
    return wheel


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
    """First without the extra, where a command names what installs it, then as that message says."""
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
