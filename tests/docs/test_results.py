"""docs/results: tables have the numbers of the stored runs in results/.

Other tables are marked as transcribed, with their command.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.fleets.presets import Quarters
from fedquilt.runs.experiment import Experiment
from fedquilt.studies.stored import MAX_BYTES, read_config, read_stored
from tests.conftest import load_script

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/*/config.toml"))
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def results():
    return load_script("tools/results.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_marked_tables_have_the_numbers_of_the_stored_runs(results, page):
    """`make results` would change nothing."""
    text = page.read_text()
    assert results.filled(text) == text


def test_a_number_that_no_run_has_is_found(results):
    text = "".join(page.read_text() for page in PAGES)
    tables = list(results.MARKED.finditer(text))
    assert tables
    for marked in tables:
        names = {line.split(": ")[0] for line in marked["mark"].splitlines()}
        rows = marked["table"].splitlines()
        # A table may have transcribed rows beside those of stored runs.
        stored = [row for row in rows if row.split("|")[1].strip(" *") in names]
        row = (stored or rows)[-1]
        number = re.findall(r"\d[\d,.]*", row)[-1]
        wrong = marked[0].replace(row, row.replace(number, f"{number[:-1]}{9 - int(number[-1])}"))
        assert wrong != marked[0]
        assert results.filled(wrong) == marked[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_have_the_points_of_the_stored_runs(results, page):
    """`make results` would draw nothing."""
    for figure in results.curves_of(page.read_text()):
        text = (page.parent / figure.file).read_text()
        assert text.endswith(figure.digest), f"{figure.file}: make results"
        for name in {row["entry"] for row in figure.rows}:
            assert f">{name}<" in text


def test_curves_are_means_over_seeds_and_count_costs_from_the_first_round(results, tmp_path):
    """Two seeds with 0.5 and 0.7; rounds that are not evaluated count as costs."""
    for seed, accuracy in enumerate((0.5, 0.7)):
        folder = tmp_path / "paper" / f"fedavg-seed{seed}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"accuracy": {"1.0": accuracy}}))
        cost = {"seconds": 1.0, "clients": 2, "bytes_down": 2e9, "bytes_up": 1e9, "macs": 4e12}
        figures = {"accuracy": {"1.0": accuracy}}
        figures |= {"metrics": dict(figures), "main": "accuracy"}
        records = [{"round": 1, "loss": 1.0, **cost}, {"round": 2, "loss": 1.0, **cost, **figures}]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "rounds.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    page = "<!-- curves\nmetric: {}\nFedAvg: paper/fedavg-*\n-->\n![A](a.svg)\n"
    (figure,) = results.curves_of(page.format("accuracy"), tmp_path)
    (point,) = figure.rows
    assert point == {
        "entry": "FedAvg",
        "value": 0.6,
        "low": pytest.approx(0.6 - 0.02**0.5, abs=1e-6),
        "high": pytest.approx(0.6 + 0.02**0.5, abs=1e-6),
        "round": 2.0,
        "bytes": 6.0,
        "macs": 8.0,
    }
    other = replace(figure, rows=[{**point, "value": 0.61}])
    assert other.digest != figure.digest
    with pytest.raises(ValueError, match=r"a\.svg: no stored result has dice of {'FedAvg'}"):
        results.curves_of(page.format("dice"), tmp_path)


@pytest.mark.parametrize(
    ("baseline", "target"),
    [
        ("table3-cifar10-fedavg-seed*", "0.8292"),
        ("table3-hippocampus-fedavg-seed0", "0.8564"),
        ("table4-fedavg-float-seed0", "0.3838"),
    ],
)
def test_targets_of_progfed_are_98_percent_of_the_last_figure_of_the_baseline(baseline, target):
    runs = [read_stored(path) for path in (ROOT / "results" / "progfed").glob(baseline)]
    last = statistics.fmean(run.summary["metrics"][run.main]["1.0"] for run in runs)
    assert f"{0.98 * last:.4f}" == target
    page = (ROOT / "docs" / "results" / "progfed.md").read_text()
    assert f"progfed/{baseline} @ {target}\n" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_other_tables_say_that_they_were_transcribed_and_from_which_command(results, page):
    text = page.read_text()
    marked = [one.span("table") for one in results.MARKED.finditer(text)]
    for table in TABLE.finditer(text):
        if any(begin <= table.start() < end for begin, end in marked):
            continue
        section = re.split(r"^#+ .*\n", text[: table.start()], flags=re.MULTILINE)[-1]
        before = section.rstrip().rpartition("\n\n")[2]
        header = table[0].splitlines()[0]
        assert "ranscribed" in before, header
        assert re.search(r"python (examples|bench)/|fedquilt reproduce", section), header


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_stored_runs_are_small_whole_and_without_weights(folder):
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert files.keys() <= {"config.toml", "summary.json", "rounds.jsonl.gz"}
    assert sum(files.values()) <= MAX_BYTES
    config, result = read_config(folder), read_stored(folder)
    command = result.summary["about"]["command"] if "about" in result.summary else config["command"]
    assert command.startswith(("fedquilt reproduce ", "python examples/"))
    assert config.keys() >= {"rounds", "seed", "data", "fleet", "link", "method"}
    assert folder.name.endswith(f"-seed{config['seed']}")
    assert ("accuracy" in result.summary) == bool(result.records)
    if result.records:
        evaluated = [record for record in result.records if record.grades.main]
        assert len(result.records) == config["rounds"] or result.diverged
        if not result.diverged:
            assert result.summary["accuracy"] == evaluated[-1].grades.accuracy
        round_of_best, grades = result.best
        assert result.summary["best"]["accuracy"] == grades.accuracy
        assert result.summary["best"]["round"] == round_of_best
        assert result.summary["bytes_up"] == sum(record.bytes_up for record in result.records)


@pytest.mark.parametrize(
    "folder",
    [one for one in FOLDERS if "command" not in read_config(one)],
    ids=lambda one: one.name,
)
def test_settings_of_stored_runs_can_be_read_again(folder, tmp_path, monkeypatch):
    """Results that `fedquilt reproduce --store` wrote; earlier ones list settings that a script
    had.
    """
    config = read_config(folder)
    monkeypatch.chdir(tmp_path)
    # an archive without arrays
    (tmp_path / config["data"]["name"]).write_bytes(b"PK\x05\x06" + bytes(18))
    model = config.get("model")
    supernet = model.get("supernet", "") if isinstance(model, dict) else ""
    if supernet:
        (tmp_path / supernet).touch()
    assert Experiment.of(config).rounds == config["rounds"]


def test_the_readme_repeats_what_the_pages_have():
    """Every accuracy of its table is on the page that the row links to."""
    table = README.split("Reproduced on one H200")[1].split("## ")[0]
    page, count = "", 0
    for row in TABLE.search(table)[0].splitlines()[2:]:
        if link := re.search(r"\]\((docs/results/\w+\.md)\)", row):
            page = (ROOT / link[1]).read_text()
        for number in re.findall(r"\d+\.\d", "|".join(row.split("|")[3:])):
            assert re.search(rf"(?<![\d.]){re.escape(number)}", page), (number, row)
            count += 1
    assert count >= 20


def test_what_clients_of_split_mix_compute_follows_from_their_budgets():
    """A client trains as many base nets as it can hold; FedAvg's client trains one."""
    base, mixing, slim = (
        read_stored(ROOT / "results" / "splitmix" / f"clients-{name}-seed0").summary
        for name in ("fedavg-0.125", "split-mix", "sheterofl")
    )
    fleet = fq.Fleet.of(Quarters(), 50, 1.0)
    bases = [8 * fleet.kinds[kind].share for kind in fleet.which]
    for of in ("macs", "params"):
        assert base[of]["deviation"] == 0
        assert mixing[of]["mean"] == pytest.approx(base[of]["mean"] * statistics.fmean(bases))
        assert mixing[of]["deviation"] == pytest.approx(base[of]["mean"] * statistics.pstdev(bases))
        assert slim[of]["mean"] > 5 * mixing[of]["mean"]
    assert set(mixing["trained"].values()) == {1.0}
    # of the domain's clients
    widest = {
        "mnist": 1 / 8,
        "svhn": 1 / 4,
        "usps": 1 / 2,
        "syn": 1.0,
        "mnistm": 1.0,
    }
    assert slim["trained"] == pytest.approx(
        {name: share**2 for name, share in widest.items()}, abs=2e-3
    )


def test_a_table_is_filled_in_from_several_runs_and_the_papers_numbers_stay(results, tmp_path):
    for seed, accuracy in enumerate((0.5, 0.7)):
        summary = {
            "accuracy": {"1.0": accuracy},
            "macs": {"mean": 2e6, "deviation": 5e5},
            "by": {"0.2": accuracy},
        }
        folder = tmp_path / "paper" / f"fedavg-seed{seed}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(summary))
    mark = "<!-- results\ncolumns: {}\nFedAvg, all: paper/{}\n-->\n| | | ×1 |\n|---|---|---:|\n{}"
    page = mark.format(
        "accuracy 1.0 %", "fedavg-*", "| **FedAvg** | all | 1.0 (68.0) |\n| paper | | 68.0 |\n"
    )
    assert results.filled(page, tmp_path).endswith(
        "| **FedAvg** | all | 60.0 ± 14.1 (68.0) |\n| paper | | 68.0 |\n"
    )
    one = mark.format("macs M / by @ %", "fedavg-seed0 @ 0.2", "| FedAvg | all | **0** |\n")
    assert results.filled(one, tmp_path).endswith("| FedAvg | all | **2.00 ± 0.50 / 50.0** |\n")
    with pytest.raises(ValueError, match="no stored result"):
        results.filled(page.replace("fedavg-*", "fedprox-*"), tmp_path)
    with pytest.raises(ValueError, match=r"has no loss 1\.0"):
        results.filled(page.replace("accuracy 1.0", "loss 1.0"), tmp_path)
    with pytest.raises(ValueError, match=r"no row .*FedAvg, all"):
        results.filled(page.replace("| all |", "| some |"), tmp_path)
