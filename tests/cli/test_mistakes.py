"""Wrong requests and failing runs: messages and exit statuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from tests.cli.commands import QUICK, TINY


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "fedrolx"], "Did you mean 'fedrolex'?"),
        (["--model", "tiny_resnt"], "Did you mean 'tiny_resnet'?"),
        (["--data", "digit"], "Did you mean 'digits'?"),
        (["--engine", "vectorised"], "It is called 'vectorized' now."),
        (["--rounds", "0"], "rounds (--rounds): 0 was asked for; it must lie in [1, inf)."),
        (["--lr", "nan"], "method.local.optimizer.lr (--lr): nan was found; a finite number"),
        (["--cohort", "50"], "a cohort of 50 was asked for; the fleet has 20 clients"),
        (["--clients", "5000"], "5000 clients were asked for"),
        (["--labels", "11"], "11 labels a client were asked for; digits has 10 classes"),
        (["--device", "nonsense"], "device 'nonsense' was asked for; this machine has"),
        (["--out", "/dev/null/x", *QUICK], "cannot be written to"),
        (["--model", "vgg16"], "VGG does not run on"),
        (["--model", "absent.py:net"], "there is no file 'absent.py'"),
        (["--model", "mine.py"], "Write mine.py:NAME"),
        (["--model", "mine.py:nt"], "Did you mean 'net'?"),
        (
            ["--model", "mine.py:nothing"],
            "mine.py:nothing was called for a Module; it returned an int",
        ),
        (
            ["--data", "mine.py:broken"],
            "mine.py:broken was called and failed: ValueError: on purpose",
        ),
        (
            ["--data", "mine.py:data", "--labels", "2"],
            "mine.py:data returned data that is partitioned already",
        ),
        (
            ["absent.toml"],
            "absent.toml was asked for; it cannot be read: No such file or directory.",
        ),
        (["mine.py"], "mine.py:2:6: this is not TOML"),
        (["--set", "rounds"], "--set rounds was asked for; write it as --set method.shift=2."),
        (
            ["--set", "model={depth=2}"],
            "model.name (--set): nothing was found; the name of a model",
        ),
        (
            ["--labels", "2", "--set", "data.partition=iid"],
            "together with --labels, which sets data.partition. One of",
        ),
        (
            ["--labels", "2", "--set", "data.partition.name=iid"],
            "together with --labels, which sets data.partition.",
        ),
        (
            ["--model", "vit", "--set", "model={depth=2}"],
            "together with --model, which sets model.name. One of them",
        ),
        (
            ["--lr", "1", "--set", "method.local.optimizer.lr=2"],
            "with --lr, which sets method.local.optimizer.lr.",
        ),
        (["--set", "rounds=ten"], "rounds (--set): 'ten' was found; a whole number would fit."),
        (["--set", "method.local={epochs=0}"], "method.local.epochs (--set): 0 was asked for"),
    ],
)
def test_a_wrong_request_exits_with_2(
    own: Path, args: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *args]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert "Traceback" not in told.err


@pytest.mark.parametrize(
    "args", [[], ["rn"], ["run", "--ronds", "3"], ["list", "data", "--by", "age"]]
)
def test_unknown_arguments_exit_with_2(
    args: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_run_that_fails_exits_with_1(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wild = ["run", *TINY, "--rounds", "3", "--lr", "1e30", "--json", "--out", "d"]
    assert main(wild) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "\nDivergenceError: client " in said.err
