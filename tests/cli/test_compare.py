"""`fedquilt compare`: methods, seeds and grids on the same data, in tables and as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from fedquilt.cli.main import main
from fedquilt.cli.show import show_text_table
from fedquilt.studies.table import Table
from tests.cli.commands import THREE, TINY, json_of, on_a_terminal, values

QUICK = [*TINY[:4], "--cohort", "3", "--rounds", "1"]
Capture = pytest.CaptureFixture[str]
Log = pytest.LogCaptureFixture


def figures(found: dict, entry: str) -> dict[str, float]:
    return {share: spread["mean"] for share, spread in found["entries"][entry]["figures"].items()}


def test_methods_are_compared_on_the_same_data(own: Path, capsys: Capture) -> None:
    found = json_of(capsys, "compare", "fedavg", "heterofl", "mine.py:method", *QUICK, "--out", "c")
    assert list(found["entries"]) == ["fedavg", "heterofl", "mine.py:method"]
    assert json.loads(Path("c/compare.json").read_text()) == found
    for name, folder in (("fedavg", "fedavg"), ("mine.py:method", "mine.py_method")):
        summary = json.loads(Path("c", folder, "seed0", "summary.json").read_text())
        assert summary["accuracy"] == figures(found, name)
        assert len(Path("c", folder, "seed0", "rounds.jsonl").read_text().splitlines()) == 1
    alone = json_of(capsys, "run", "--method", "heterofl", *QUICK)
    assert alone["accuracy"] == figures(found, "heterofl")


def test_a_comparison_that_was_stopped_runs_all_that_was_asked_for(
    own: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Also methods that have no folder yet."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedquilt.runs.run.Run.train", interrupted)
        assert main(["compare", "fedavg", "heterofl", *QUICK, "--out", "c"]) == 130
    said = capsys.readouterr().err
    assert (
        "The study was stopped with 0 of 2 runs finished. Continue with: fedquilt compare "
        "--resume c" in said
    )
    assert not Path("c/heterofl").exists()
    assert list(json_of(capsys, "compare", "--resume", "c")["entries"]) == ["fedavg", "heterofl"]
    assert list(json_of(capsys, "compare", "heterofl", "--resume", "c")["entries"]) == ["heterofl"]
    # nothing is forgotten
    assert list(json_of(capsys, "compare", "--resume", "c")["entries"]) == [
        "fedavg",
        "heterofl",
    ]
    with monkeypatch.context() as patched:
        patched.setattr("fedquilt.runs.run.Run.train", interrupted)
        assert main(["compare", "heterofl", "--resume", "c", "--rounds", "2"]) == 130
    assert "Continue with: fedquilt compare heterofl --resume c" in capsys.readouterr().err


def test_finished_runs_are_not_repeated(own: Path, capsys: Capture) -> None:
    before = json_of(capsys, "compare", "fedavg", *QUICK, "--out", "c")
    kept = Path("c/fedavg/seed0/rounds.jsonl").stat().st_mtime_ns
    after = json_of(
        capsys, "compare", "fedavg", "heterofl", *QUICK, "--seeds", "0", "1", "--out", "c"
    )
    assert Path("c/fedavg/seed0/rounds.jsonl").stat().st_mtime_ns == kept
    assert (
        after["entries"]["fedavg"]["figures"]["1.0"]["by_seed"]["0"]
        == figures(before, "fedavg")["1.0"]
    )
    assert after["seeds"] == [0, 1]
    longer = json_of(capsys, "compare", "--resume", "c", "--rounds", "2")
    assert len(Path("c/heterofl/seed1/rounds.jsonl").read_text().splitlines()) == 2
    assert (
        longer["entries"]["fedavg"]["bytes_down"]["mean"]
        == 2 * after["entries"]["fedavg"]["bytes_down"]["mean"]
    )


def test_settings_that_all_runs_share_are_printed_once(
    own: Path, capsys: Capture, caplog: Log
) -> None:
    """Runs that are there are counted, and a warning is not repeated for every seed."""
    asked = ["compare", "fedavg", *QUICK, *THREE, "--out", "c", "--seeds", "0"]
    assert main(asked) == 0
    assert "are there" not in capsys.readouterr().out
    caplog.clear()
    assert main([*asked, "1", "2"]) == 0
    assert "1 of 3 runs are there and are not repeated" in capsys.readouterr().out.splitlines()
    assert [record.message for record in caplog.records if "ignores budgets" in record.message] == [
        "FedAvg ignores budgets: 4 of 6 devices cannot hold the net that they train."
    ]


def test_a_file_is_no_folder_of_a_study(own: Path, capsys: Capture) -> None:
    Path("file").write_text("")
    assert main(["compare", "fedavg", *QUICK, "--out", "file"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: the folder file was asked for; a file is there. Name another folder for the "
        "study.\n"
    )


def test_a_study_keeps_to_its_data(own: Path, capsys: Capture) -> None:
    """A method on other data is refused before the folder has it, so that the study can be
    continued.
    """
    json_of(capsys, "compare", "fedavg", *QUICK, "--out", "c")
    assert main(["compare", "local", "--data", "diabetes", "--rounds", "1", "--out", "c"]) == 2
    said = capsys.readouterr().err
    assert "a comparison was asked for; these rows differ" in said
    assert "data diabetes: local" in said
    assert list(json_of(capsys, "compare", "--resume", "c")["entries"]) == ["fedavg"]


def test_a_comparison_is_one_table(own: Path, capsys: Capture) -> None:
    assert (
        main(["compare", "fedavg", "local", *TINY[:4], *THREE, "--cohort", "3", "--rounds", "1"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    own_values = values("lr 0.05, 1 epoch, batch 32", "3 of 6")
    assert lines[1] == f"settings: fedavg's defaults, local's defaults {own_values}"
    assert lines[2].startswith(
        "fedavg, local on mine.py:data: mine.py:net for 6 clients, 3 a round"
    )
    head = next(place for place, line in enumerate(lines) if line.startswith("method"))
    assert lines[head].split("  ")[0] == "method"
    assert lines[head].split()[1:6] == ["1", "0.5", "0.25", "to", "clients"]
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["fedavg", "local"]
    assert any(line.startswith("Nothing is marked because ") for line in lines)
    small = "4 of 6 devices cannot hold the net that they train"
    assert f"fedavg: every client trains share 1, whatever its budget; {small}" in lines
    assert [line.split()[0] for line in lines[-3:]] == ["1", "0.5", "0.25"]


def test_settings_of_one_method_and_files_of_whole_experiments(own: Path, capsys: Capture) -> None:
    assert main(["run", "--method", "heterofl", *QUICK, "--out", "alone"]) == 0
    Path("whole.toml").write_text(Path("alone/config.toml").read_text())
    asked = ["--set", "fedrolex:method.shift=2", "--set", "method.local.epochs=1", "--out", "c"]
    capsys.readouterr()
    found = json_of(capsys, "compare", "fedrolex", "fedavg", "whole.toml", *QUICK, *asked)
    assert list(found["entries"]) == ["fedrolex", "fedavg", "whole"]
    assert "shift = 2" in Path("c/fedrolex/seed0/config.toml").read_text()
    alone = json.loads(Path("alone/summary.json").read_text())
    assert figures(found, "whole") == alone["accuracy"]


def test_a_grid_is_tuned_on_samples_that_are_held_back(own: Path, capsys: Capture) -> None:
    grid = [
        "--grid",
        "method.local.optimizer.lr=0.0001,0.05",
        "--tuning-rounds",
        "2",
        "--validation",
        "0.3",
    ]
    found = json_of(capsys, "compare", "fedavg", *QUICK, *grid, "--seeds", "0", "1", "--out", "c")
    tuned = found["tuned"]["fedavg"]
    assert [trial["point"] for trial in tuned["trials"]] == [
        {"method.local.optimizer.lr": 0.0001},
        {"method.local.optimizer.lr": 0.05},
    ]
    best = max(tuned["trials"], key=lambda trial: trial["figures"]["0"])
    assert tuned["chosen"] == best["point"]
    assert json.loads(Path("c/fedavg/tuned.json").read_text()) == tuned
    lr = tuned["chosen"]["method.local.optimizer.lr"]
    for seed in (0, 1):
        assert f"lr = {lr}" in Path(f"c/fedavg/seed{seed}/config.toml").read_text()
    trial = Path("c/fedavg/tuning/lr0.05-seed0/config.toml").read_text()
    assert 'on = "validation"' in trial
    assert "validation = 0.3" in trial
    assert "rounds = 2" in trial
    assert 'on = "validation"' not in Path("c/fedavg/seed0/config.toml").read_text()
    assert main(["compare", "--resume", "c"]) == 0
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert table[0] == "tuning"
    assert [line.endswith("yes") for line in table[2:4]].count(True) == 1
    assert table[-1].endswith("The test set was not used.")


def test_every_format_has_the_same_figures(own: Path, capsys: Capture) -> None:
    asked = ["compare", "fedavg", "heterofl", *QUICK, "--out", "c"]
    shown = f"{figures(json_of(capsys, *asked), 'fedavg')['1.0']:.1%}"
    for kind in ("markdown", "latex", "csv"):
        assert main([*asked, "--format", kind]) == 0
        text = capsys.readouterr().out
        assert shown.replace("%", r"\%" if kind == "latex" else "%") in text
    rows = list(csv.reader(text.splitlines()))
    assert rows[0][:2] == ["method", "1"]
    assert main([*asked, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["metric"] == "accuracy"


def test_costs_to_parts_of_a_baselines_best(own: Path, capsys: Capture) -> None:
    assert (
        main(["compare", "fedavg", "heterofl", *QUICK, "--baseline", "fedavg", "--target", "0.01"])
        == 0
    )
    text = capsys.readouterr().out
    for what in ("rounds", "bytes", "client MACs"):
        assert f"{what} to a percentage of the best accuracy of fedavg" in text
    assert "cost until a share first had 1%" in text


def test_names_are_whole_on_a_narrow_terminal() -> None:
    table = Table("", ["method", *"abcdef"], [["heterofl", *(["177 kB (3 of 4)"] * 6)]])
    console = Console(width=70, force_terminal=True, file=io.StringIO())
    show_text_table(console, table)
    assert "heterofl" in console.file.getvalue()


def test_methods_with_other_members_have_separate_tables(own: Path, capsys: Capture) -> None:
    """HeteroFL as released rounds up."""
    Path("up.py").write_text(
        "import fedquilt as fq\ndef up():\n    return fq.methods.HeteroFL(rounding='ceil')\n"
    )
    assert (
        main(["compare", "heterofl", "up.py:up", *QUICK, "--set", 'fleet.budgets={"0.3"=1.0}']) == 0
    )
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sizes")]
    assert [title.rpartition(" ")[2] for title in titles] == ["(heterofl)", "(up.py:up)"]


def test_a_terminal_gets_bars(own: Path) -> None:
    text = on_a_terminal(
        "compare", "fedavg", "local", *TINY[:4], "--cohort", "3", "--rounds", "2", cwd=own
    )
    assert "rounds/s" in text
    assert "╭" in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "compare was asked for without methods; name them, as in compare fedavg heterofl."),
        (["fedavg", "fedavg"], "compare fedavg fedavg was asked for; name each method once"),
        (["fedavg", "fedrolx", "fedbm"], "fedbm: a problem:"),
        (["fedavg", "fedrolex", "--set", "method.shift=2"], "fedavg has no such key"),
        (["fedavg", "--set", "fedrolex:method.shift=2"], "there is no entry 'fedrolex'"),
        (["--resume", "absent"], "the study in absent was asked for; there is no such folder."),
        (["--resume", "absent", "--seed", "2"], "together with --seed"),
        (["fedavg", "--target", "60"], "a target of 60 was asked for; accuracy is in (0, 1]"),
        (["fedavg", "--seed", "1", "--seeds", "2", "3"], "--seed and --seeds were asked for"),
        (["fedavg", "--seeds", "2", "2"], "the seeds 2 2 repeat one"),
        (["fedavg", "--jobs", "0"], "--jobs 0 was asked for"),
        (["fedavg", "--validation", "0.2"], "--validation was asked for without --grid"),
        (["fedavg", "--grid", "method.shift=1,2"], "fedavg has no such key"),
        (
            ["fedavg", "--grid", "method.share="],
            "write it as --grid method.local.optimizer.lr=0.01,0.1",
        ),
        (["fedavg", "--grid", "method.local.optimizer.lr=0.1,0.1"], "repeats a value"),
        (
            ["fedavg", "--grid", f"rounds={','.join(map(str, range(1, 1101)))}"],
            "a study of 1,101 runs was asked for; more than 1,000 are started only with --yes",
        ),
        (["fedavg", "digits.toml"], "these rows differ:"),
        (["fedavg", *QUICK, "--metric", "f2"], "--metric f2 was asked for; no run records it"),
        (
            ["fedavg", *QUICK, "--baseline", "fedprox"],
            "--baseline fedprox was asked for; it is not compared",
        ),
    ],
)
def test_a_wrong_comparison_exits_with_2(
    own: Path,
    args: Sequence[str],
    said: str,
    capsys: Capture,
) -> None:
    settings = 'method = "fedavg"\ndata = "diabetes"\nrounds = 1\n'
    Path("digits.toml").write_text(settings)
    assert main(["compare", *args]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_with_other_settings_is_refused(own: Path, capsys: Capture) -> None:
    assert main(["compare", "fedavg", *QUICK, "--out", "c"]) == 0
    assert main(["compare", "fedavg", *QUICK, "--lr", "0.3", "--out", "c"]) == 2
    said = capsys.readouterr().err
    assert "fedavg: method.local.optimizer.lr is nothing there, 0.3 was asked for" in said


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_damaged_summary_is_named(own: Path, capsys: Capture, text: str) -> None:
    assert main(["compare", "fedavg", *QUICK, "--out", "c"]) == 0
    Path("c/fedavg/seed0/summary.json").write_bytes(text.encode(errors="surrogateescape"))
    assert main(["compare", "--resume", "c"]) == 1
    assert "c/fedavg/seed0/summary.json" in capsys.readouterr().err


def test_the_error_for_a_folder_of_the_old_layout_names_a_command(
    own: Path,
    capsys: Capture,
) -> None:
    assert main(["run", *TINY, "--rounds", "1", "--out", "c/fedavg"]) == 0
    said = (
        "It has the runs fedavg, which an earlier version or `fedquilt run` wrote. Continue "
        "each with fedquilt run"
    )
    for args in (["--resume", "c"], ["fedavg", *QUICK, "--out", "c"]):
        assert main(["compare", *args]) == 2
        assert said in capsys.readouterr().err
    assert not Path("c/study.toml").exists()
