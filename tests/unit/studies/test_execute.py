"""Planned runs are read, resumed or begun, with the same result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedquilt.config.toml import assign
from fedquilt.errors import ConfigError, DivergenceError, FedquiltError, RecordError, TrainingError
from fedquilt.runs.demo import demo
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.lock import locked
from fedquilt.studies import workers
from fedquilt.studies.entries import Entry, PlannedRun
from fedquilt.studies.execute import Grounds, execute, finished, torch_settings_restored
from fedquilt.studies.plan import Plan

FAST = {"local": {"epochs": 1, "optimizer": {"lr": 1e30}}}


def runs_of(*settings, seeds=(0,), **more):
    entries = tuple(Entry(f"entry{place}", one) for place, one in enumerate(settings))
    return Plan(entries, seeds, **more).final_runs({})


def numbers(result):
    """Return all of a result but the seconds."""
    summary = {**result.summary, "seconds": 0}
    return summary, [{**record.to_dict(), "seconds": 0} for record in result.records]


def test_runs_that_are_there_are_not_repeated(own, settings, counting):
    runs = runs_of(settings(), settings("heterofl"), seeds=(0, 1))
    first, second = counting(), counting()
    before = execute(runs[:3], own / "study", watch=first)
    assert [folder for folder, _ in first.begun] == [run.folder for run in runs[:3]]
    after = execute(runs, own / "study", watch=second)
    assert second.begun == [(runs[3].folder, 0)]
    assert second.ended == [run.folder for run in runs]
    assert list(map(numbers, after[:3])) == list(map(numbers, before))
    assert [(result.entry, result.seed) for result in after] == [
        (run.entry, run.seed) for run in runs
    ]


def test_an_interrupted_run_resumes_to_the_same_result(own, settings, counting):
    runs = runs_of(settings(), settings("heterofl"))
    whole = execute(runs, None)
    for rounds in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            execute(runs, own / "study", watch=counting(rounds))
    resumed = counting()
    ended = execute(runs, own / "study", watch=resumed)
    assert resumed.begun == [(runs[1].folder, 1)]  # it resumed in the middle of a run
    assert list(map(numbers, ended)) == list(map(numbers, whole))
    assert list(map(numbers, execute(runs, own / "study"))) == list(map(numbers, whole))


def test_searched_nets_are_shared_by_runs_that_search_for_the_same_limits(own):
    """Nets depend on what limits bound, so that a run with the account `pair` searches its own."""
    grounds = Grounds()
    searched = [
        Experiment.of(assign(demo("rafl"), ["method"], {"name": "rafl", **options}))
        for options in ({}, {"order": "in_turn"}, {"limit": "private"})
    ]
    pair, in_turn, private = (grounds.of(experiment) for experiment in searched)
    assert in_turn is pair
    assert private is not pair
    assert private.family.variants != pair.family.variants


def test_more_rounds_resume_finished_runs(own, settings, counting):
    execute(runs_of(settings(rounds=1)), own / "study")
    longer = runs_of(settings(rounds=3))
    assert finished(longer[0], own / "study" / longer[0].folder) is None
    with pytest.raises(KeyboardInterrupt):
        execute(longer, own / "study", watch=counting(1))
    assert finished(longer[0], own / "study" / longer[0].folder) is None  # the old summary is gone
    watch = counting()
    (result,) = execute(longer, own / "study", watch=watch)
    assert watch.begun == [(longer[0].folder, 2)]
    records = [
        {**record.to_dict(), "seconds": 0, "accuracy": 0, "metrics": 0} for record in result.records
    ]
    (fresh,) = execute(longer, None)
    assert records == [
        {**one.to_dict(), "seconds": 0, "accuracy": 0, "metrics": 0} for one in fresh.records
    ]
    assert "rounds = 3" in (own / "study" / longer[0].folder / "config.toml").read_text()


def test_a_run_that_has_more_rounds_already_is_refused(own, settings):
    execute(runs_of(settings(rounds=2)), own / "study")
    (run,) = runs_of(settings(rounds=1))
    (own / "study" / run.folder / "summary.json").unlink()
    with pytest.raises(
        ConfigError, match=r"1 rounds were asked for; the run in .* has 2 behind it"
    ):
        execute([run], own / "study")


# --- divergence ---------------------------------------------------------------------------------


def test_a_run_that_diverges_counts_with_its_last_state_and_is_not_repeated(
    own, settings, counting
):
    wild = settings(method="fedavg") | {"method": {"name": "fedavg", **FAST}}
    runs = runs_of(wild, settings())
    found = execute(runs, own / "study")
    assert [result.diverged for result in found] == [2, None]
    assert found[0].metric()["1.0"] >= 0  # of the weights before that round
    summary = json.loads((own / "study" / runs[0].folder / "summary.json").read_text())
    assert (summary["diverged"], summary["rounds"]) == (2, 1)
    watch = counting()
    again = execute(runs, own / "study", watch=watch)
    assert watch.begun == []
    assert list(map(numbers, again)) == list(map(numbers, found))
    assert list(map(numbers, execute(runs, None))) == list(map(numbers, found))


@pytest.mark.parametrize(
    "error",
    [TrainingError("a slot is missing"), RuntimeError("no idea"), RecordError("the disk is full")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_other_than_divergence_is_raised_and_finished_runs_stay(
    own, settings, counting, error
):
    runs = runs_of(settings(), settings("heterofl"))
    with pytest.raises(type(error), match=str(error)):
        execute(runs, own / "study", watch=counting(3, error))
    assert finished(runs[0], own / "study" / runs[0].folder) is not None
    assert finished(runs[1], own / "study" / runs[1].folder) is None


def test_samples_that_are_not_finite_are_no_divergence(own, settings):
    (own / "nan.py").write_text(
        "import own\ndef pool():\n    found = own.pool()\n    found.inputs[0] = float('nan')\n    "
        "return found\n"
    )
    with pytest.raises(TrainingError, match="samples hold values that are not finite") as caught:
        execute(
            runs_of(settings(fleet={"clients": 2, "cohort": 2}) | {"data": "nan.py:pool"}), None
        )
    assert not isinstance(caught.value, DivergenceError)


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "\udcff",
        "",
        '{"rounds": "x"}',
        '{"rounds": 2}',
        '{"rounds": 2, "metrics": 3}',
        '{"rounds": 2, "metrics": {"rmse": {"1.0": "y"}}}',
        '{"rounds": 2, "accuracy": {"1.0": 0.5}, "seconds": "a"}',
    ],
)
def test_a_damaged_summary_is_one_error(own, settings, text):
    (run,) = runs_of(settings())
    file = own / "study" / run.folder / "summary.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RecordError, match=r"summary\.json (is damaged|cannot be read)"):
        finished(run, file.parent)


def test_damaged_rounds_are_one_error(own, settings):
    (run,) = runs_of(settings())
    execute([run], own / "study")
    file = own / "study" / run.folder / "rounds.jsonl"
    file.write_text(file.read_text()[:-5])
    with pytest.raises(
        RecordError, match=r"rounds\.jsonl is not what was written.* Delete the folder .* again\.$"
    ):
        finished(run, file.parent)
    file.write_text("3\n")
    with pytest.raises(RecordError, match=r"rounds\.jsonl is not what was written"):
        finished(run, file.parent)


def test_rounds_that_are_missing_are_one_error(own, settings):
    """Multiply-adds and costs to a target are counted from them."""
    (run,) = runs_of(settings())
    execute([run], own / "study")
    file = own / "study" / run.folder / "rounds.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    said = (
        rf"is damaged: its last round is {len(lines) - 1}, and that of summary\.json "
        rf"{len(lines)}\. Delete the folder"
    )
    with pytest.raises(RecordError, match=said):
        finished(run, file.parent)


def test_a_folder_that_cannot_be_written_is_one_error(own, settings):
    (own / "study").write_text("a file is in the way")
    for measure in ("training", "sizes"):
        with pytest.raises(FedquiltError, match="Not a directory"):
            execute(runs_of(settings(), measure=measure), own / "study")


def test_a_measure_is_taken_again_for_more_rounds(own, settings):
    few, many = (runs_of(settings(rounds=rounds), measure="clients") for rounds in (1, 5))
    execute(few, own / "study")
    found = execute(many, own / "study")
    assert found[0].summary == execute(many, None)[0].summary
    assert found[0].summary["rounds"] == 5
    assert finished(few[0], own / "study" / few[0].folder) is not None


def test_a_run_that_another_process_writes_is_refused(own, settings):
    (run,) = runs_of(settings())
    with (
        locked(own / "study" / run.folder),
        pytest.raises(
            ConfigError,
            match=r"entry0/seed0 was asked for; the run of process \d+ is writing there",
        ),
    ):
        execute([run], own / "study")


def test_reading_many_finished_runs_resolves_no_settings(own, settings, monkeypatch):
    runs = runs_of(settings(rounds=0), seeds=tuple(range(300)))
    for run in runs:
        path = own / "study" / run.folder
        path.mkdir(parents=True)
        (path / "summary.json").write_text('{"rounds": 0, "metrics": {}}')
        (path / "rounds.jsonl").write_text("")
    monkeypatch.setattr(PlannedRun, "experiment", None)  # any use of it would fail
    assert len(execute(runs, own / "study")) == 300


def test_a_run_leaves_the_settings_of_torch_as_they_were():
    threads = torch.get_num_threads()
    with torch_settings_restored():
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(True)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


# --- processes ----------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch):
    """Put a few lines of Python in the place of the worker."""

    def replaced(code):
        real = subprocess.Popen
        monkeypatch.setattr(
            workers.subprocess,
            "Popen",
            lambda line, **more: real([sys.executable, "-S", "-c", code], **more),
        )

    return replaced


def error_of(own, settings, count=2):
    with pytest.raises(FedquiltError) as caught:
        execute(runs_of(*[settings()] * count), own / "study", jobs=2)
    return caught.value


def test_output_that_a_process_prints_is_not_read_as_a_message(own, settings, worker):
    """Bytes that are no text, and text that is no JSON, neither stop the parent nor hide the
    status.
    """
    worker(
        "import sys\nprint('hello'); print('3'); print('{}'); sys.stdout.flush()\n"
        "sys.stderr.buffer.write(b'\\xff' * 200_000 + b'\\nthe last line\\n')\nsys.exit(3)"
    )
    assert (
        str(error_of(own, settings))
        == "entry0, seed 0: its process ended with status 3: the last line"
    )


def test_a_killed_process_is_distinguished_from_an_error(own, settings, worker):
    worker(
        "import os, sys\nprint('a warning', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)"
    )
    said = str(error_of(own, settings))
    assert said.startswith(
        "entry0, seed 0: its process was ended by SIGKILL. Too little memory is the usual reason"
    )


def test_a_process_that_reads_nothing_is_an_error(own, settings, worker):
    """The request is larger than a pipe, so that sending it fails."""
    worker("import os, sys\nos.close(0)\nsys.exit(4)")
    large = settings(init="x" * 200_000)
    with pytest.raises(
        TrainingError, match="ended with status 4: it wrote nothing to standard error"
    ):
        execute(runs_of(large, large), own / "study", jobs=2)


def test_a_process_without_a_summary_is_an_error(own, settings, worker):
    worker("pass")
    assert "its process ended without a summary" in str(error_of(own, settings))


def test_the_error_of_a_process_is_raised_again(own, settings, worker):
    worker(
        'print(\'{"error": {"kind": "RecordError", "text": "full", "notes": ["note"]}}\'); exit(1)'
    )
    error = error_of(own, settings)
    assert (type(error), str(error), error.__notes__) == (
        RecordError,
        "entry0, seed 0: full",
        ["note"],
    )


def test_no_process_begins_after_a_failure(own, settings, worker):
    worker("open('begun', 'a').write('x'); exit(1)")
    error_of(own, settings, count=20)
    assert len(Path("begun").read_text()) <= 4


def test_a_watch_that_fails_stops_its_process(own, settings, worker):
    """Its standard input closes, and nothing waits for output that nobody reads."""

    class Failing:
        def begin(self, planned, display):
            raise BrokenPipeError

    worker(
        'import sys\nsys.stdin.readline()\nprint(\'{"display": {"rounds": 9}}\', flush=True)\n'
        "print('x' * 200_000)\nsys.stdin.read()"
    )
    with pytest.raises(BrokenPipeError):
        execute(runs_of(settings(), settings()), own / "study", jobs=2, watch=Failing())


def test_an_interruption_stops_all_processes(own, settings, worker, counting, monkeypatch):
    worker("import os, sys, time\nopen(str(os.getpid()) + '.pid', 'w')\ntime.sleep(60)")

    def interrupted(futures, **_):
        while len(list(own.glob("*.pid"))) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "wait", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        execute(runs_of(*[settings()] * 9), own / "study", jobs=2)
    assert time.monotonic() - began < 30
    pids = [int(file.stem) for file in own.glob("*.pid")]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # asks only if it is there


def test_a_worker_ends_when_its_parent_does():
    """Also if the interruption is caught and lost."""
    code = (
        "import os, signal, time\nfrom fedquilt.studies import workers\nworkers.STOP_SECONDS = "
        "0.1\n"
        "signal.signal(signal.SIGTERM, lambda *_: "
        "None)\nworkers._stop_with_parent(0)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 130
