"""Types of the package as a user sees them: files of a user's pass `mypy --strict`."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, run

PAGE = (ROOT / "docs" / "add-a-method.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
EXAMPLES = ("clipped.py", "own_model.py")  # Others call functions of torch without types.
WRONG = """
import fedquilt as fq
from fedquilt.methods.api import Client, Method, Server, World

class Wrong(Method):
    def plan(self, server: Server, client: Client, world: World) -> int:  # line 6
        return 3

budget: fq.Budget = fq.optimizers.SGD(lr=0.1)  # line 9
fq.Budget(share="half")  # line 10
fq.Fleet.of([1], num_client=3)  # line 11
fq.nothing  # line 12
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(folder: Path, wheel: Path) -> Path:
    """Python of an environment with the wheel, and with the packages of this one beside it."""
    env = folder / "typed"
    run(sys.executable, "-m", "venv", env, cwd=folder)
    python = env / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--no-deps")
    run(*install, wheel, cwd=folder)
    (packages,) = (env / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(others))
    found = run(python, "-c", "import fedquilt, torch; print(fedquilt.__file__)", cwd=folder)
    assert found.stdout.startswith(str(env))
    return python


def checked(folder: Path, python: Path, *files: str) -> list[str]:
    """Return the errors that mypy finds in a user's files."""
    done = run(
        sys.executable,
        *("-m", "mypy", "--strict", "--no-error-summary", "--config-file=", "--no-color-output"),
        *("--python-executable", python, "--cache-dir", folder / "cache"),
        *files,
        cwd=folder,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout.splitlines()


def test_files_of_a_user_pass_strict_mypy(tmp_path: Path, python: Path) -> None:
    """Methods of docs/add-a-method.md and of examples pass, and each mistake in a file is found."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert {"clipped.py", "fedcm.py", "largest.py"} <= FILES.keys()
    examples = tmp_path / "examples"
    examples.mkdir()
    for name in EXAMPLES:
        shutil.copy(ROOT / "examples" / name, examples)
    (tmp_path / "wrong.py").write_text(WRONG)

    assert checked(tmp_path, python, *sorted(FILES)) == []
    for name in EXAMPLES:  # One at a time, because one of them is called like a file of the page.
        assert checked(tmp_path, python, f"examples/{name}") == []
    problems = checked(tmp_path, python, "wrong.py")
    lines = [re.match(r"wrong\.py:(\d+): error", problem) for problem in problems]
    assert {int(line[1]) for line in lines if line} == {6, 9, 10, 11, 12}, problems
