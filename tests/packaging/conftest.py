"""A wheel of the package, and commands that do not see the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STALE = Path("build/lib/fedquilt/stale.py")  # Left behind by an older build.


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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def wheel(folder: Path) -> Path:
    run("make", "wheel", f"VENV={folder / 'env'}", cwd=folder / "source")
    (wheel,) = (folder / "source" / "dist").glob("*.whl")
    return wheel
