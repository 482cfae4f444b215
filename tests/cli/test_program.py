"""The program: its version, its help, commands to copy, probing, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from tests.cli.commands import ENVIRONMENT, json_of


def test_commands_to_copy_are_quoted_for_the_shell(tmp_path: Path) -> None:
    from fedquilt.data.prepare import missing_message
    from fedquilt.studies.papers import missing_supernet
    from fedquilt.studies.plan import runs_outside_a_study

    folder = tmp_path / "with space"
    (folder / "a run").mkdir(parents=True)
    (folder / "a run" / "rounds.jsonl").touch()
    assert f"fedquilt run --resume '{folder}/a run'," in runs_outside_a_study(folder)
    assert f"`fedquilt data prepare cifar10 --out '{folder}'` prepares it" in missing_message(
        "cifar10", folder
    )
    made = str(missing_supernet("net.safetensors", "", "public.npz", folder, "rafl/table1"))
    assert (
        f"`fedquilt supernet train SPACE --data '{folder}/public.npz' --out "
        f"'{folder}/net.safetensors'` makes"
    ) in made


@pytest.mark.slow
def test_a_machine_is_probed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, "probe")
    assert found["memory"] > 0
    assert found["samples_per_second"] > 0
    assert found["budget"]["macs"] > 0
    assert main(["probe", "--model", "mine.py:net"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-4:-2]] == ["measured", "proposed"]
    assert lines[-1].startswith("proposed: macs ")
    assert main(["probe", "--model", "tiny_resnt"]) == 2
    assert "Did you mean 'tiny_resnet'?" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fedquilt 0.")


def test_importing_the_library_needs_nothing_of_the_command_line() -> None:
    others = (
        "('rich', 'tyro', 'tomli_w', 'sklearn', 'torchvision', 'datasets', 'matplotlib', "
        "'fedquilt.supernet')"
    )
    code = f"import sys, fedquilt; print([m for m in {others} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert done.stdout.strip() == "[]"


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom fedquilt.cli.main import main\ntry:\n    main(['run', '--help'])\nexcept "
        "SystemExit:\n    pass\n"
    )
    code += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert "any setting by its path" in done.stdout
