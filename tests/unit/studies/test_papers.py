"""Presets of papers: how files are read, what is refused, and that every shipped one can be run."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from fedquilt.data import Labels
from fedquilt.errors import ConfigError, DataError
from fedquilt.fleets.presets import TwoLevel, Uniform
from fedquilt.methods import FedAvg, FedRolex, HeteroFL
from fedquilt.runs.experiment import Experiment
from fedquilt.studies.measures import TRAINING
from fedquilt.studies.papers import (
    SMOKE,
    SMOKE_NOTE,
    Preset,
    data_folder,
    paper_number,
    papers,
    parsed_preset,
    presets,
    read_preset,
    tables_named,
)
from fedquilt.studies.reproduce import plan_of

SMALL: dict[str, Any] = {
    "title": "Table 1: a small one",
    "data": ["mine"],
    "seeds": [3, 4],
    "notes": ["Only an example."],
    "settings": {
        "method": {"name": "fedrolex", "preset": "paper", "shift": 2},
        "model": "mlp",
        "data": {"name": "mine.npz", "partition": {"name": "labels", "labels": 2}},
        "rounds": 50,
    },
    "parts": {
        "five": {"data": {"partition": {"labels": 5}}, "rounds": 40},
        "static": {"method": {"name": "heterofl", "preset": "fedrolex-cifar10-low"}},
    },
    "scales": {
        "smoke": {
            "seeds": [0],
            "settings": {"rounds": 2, "data": {"name": "generated", "train": 20}},
        },
        "short": {
            "note": "Fewer rounds.",
            "settings": {"rounds": 5},
            "parts": {"five": {"rounds": 4}},
        },
    },
    "columns": [
        {"title": "×1", "value": "accuracy 1.0 %"},
        {"title": "bytes", "value": "bytes_up GB"},
    ],
    "rows": [
        {"name": "FedRolex", "paper": ["69.44 ± 1.50", "1.2"]},
        {
            "name": "HeteroFL",
            "parts": ["five", "static"],
            "settings": {"rounds": 45},
            "paper": ["", ""],
        },
    ],
}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Return a function that reads SMALL with some keys replaced."""

    def make(**changes: Any) -> Preset:
        file = tmp_path / "small.toml"
        file.write_text(tomli_w.dumps({**SMALL, **changes}))
        return read_preset(str(file))

    return make


def problems(make: Any, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    return str(caught.value)


# --- reading ------------------------------------------------------------------------------------


def test_settings_parts_rows_and_scales_are_laid_over_one_another(make: Any) -> None:
    preset = make()
    (_, rolling), (name, static) = preset.rows_at("full")
    assert name == "HeteroFL"
    assert rolling == {**SMALL["settings"], "model": {"name": "mlp"}}
    # shift is FedRolex's own
    assert static["method"] == {
        "name": "heterofl",
        "preset": "fedrolex-cifar10-low",
    }
    assert static["data"] == {"name": "mine.npz", "partition": {"name": "labels", "labels": 5}}
    assert static["rounds"] == 45  # the row's own, over its part's 40
    # the scale's part comes last
    assert [settings["rounds"] for _, settings in preset.rows_at("short")] == [
        5,
        4,
    ]
    (_, rolling), _ = preset.rows_at("smoke")
    assert rolling["data"] == {
        "name": "generated",
        "train": 20,
        "partition": {"name": "labels", "labels": 2},
    }


def test_scales_have_their_own_seeds_and_notes(make: Any) -> None:
    preset = make()
    # the paper's is there though nobody named it
    assert list(preset.scales) == [
        "smoke",
        "short",
        "full",
    ]
    assert [preset.seeds_at(scale) for scale in preset.scales] == [(0,), (3, 4), (3, 4)]
    assert [preset.scale(scale).note for scale in preset.scales] == [
        SMOKE_NOTE,
        "Fewer rounds.",
        "",
    ]
    with pytest.raises(
        ConfigError, match=r"the scale 'shrt' of .*small.toml was asked for.*Did you mean 'short'\?"
    ):
        preset.rows_at("shrt")


def test_a_grid_and_tuning_runs_belong_to_a_scale(make: Any) -> None:
    lr = "method.local.optimizer.lr"
    small = {**SMALL["scales"]["smoke"], "grid": {lr: [0.1]}, "tuning": {"rounds": 1}}
    tuned = {"grid": {lr: [0.1, 0.2]}, "tuning": {"rounds": 9, "evaluation": {"every": 3}}}
    preset = make(**tuned, scales={"smoke": small})
    assert (preset.grid_at("full"), preset.grid_at("smoke")) == ({lr: (0.1, 0.2)}, {lr: (0.1,)})
    assert preset.tuning_at("full") == {"rounds": 9, "evaluation": {"every": 3}}
    assert preset.tuning_at("smoke") == {"rounds": 1, "evaluation": {"every": 3}}
    plan = plan_of(preset, "smoke", data_folder=Path())
    assert [run.settings["rounds"] for run in plan.tuning_runs] == [1, 1]
    assert [entry.points for entry in plan.entries] == [[{lr: 0.1}]] * 2


def test_a_plan_has_the_rows_the_seeds_and_the_measure(make: Any) -> None:
    plan = plan_of(make(measure="sizes"), "smoke", data_folder=Path())
    assert [entry.name for entry in plan.entries] == ["FedRolex", "HeteroFL"]
    assert (plan.seeds, plan.measure) == ((0,), "sizes")
    assert not plan.tuning_runs


def test_the_format_is_as_the_readme_describes_it(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"```toml\n(.*?)```", (files("fedquilt.papers") / "README.md").read_text(), re.DOTALL
    )
    (tmp_path / "example.toml").write_text(text)
    preset = read_preset(str(tmp_path / "example.toml"))
    (_, high), (_, low) = preset.rows_at("short")
    assert (high["rounds"], low["rounds"], low["method"]["name"]) == (250, 200, "heterofl")
    assert set(tomllib.loads(text)) == {field.name for field in fields(Preset)} - {
        "name",
        "grid",
        "tuning",
    }


def test_papers_numbers() -> None:
    assert paper_number("69.44 ± 1.50") == 69.44
    assert paper_number("9,633") == 9633
    assert paper_number("−0.5") == -0.5
    assert paper_number(".5") == 0.5
    assert paper_number("") is None


# --- data ---------------------------------------------------------------------------------------


def test_data_files_are_looked_up_in_a_folder(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = make()
    with pytest.raises(DataError) as caught:
        preset.rows_at("full", tmp_path)
    for text in (
        "small.toml was asked for",
        f"{tmp_path / 'mine.npz'} is needed",
        "FEDQUILT_DATA names another folder",
    ):
        assert text in str(caught.value)
    with pytest.raises(DataError, match="data prepare cifar10 --out"):
        read_preset("fedrolex/table5").rows_at("full", tmp_path)
    preset.rows_at("smoke", tmp_path)  # which needs none
    (tmp_path / "mine.npz").touch()
    assert preset.rows_at("full", tmp_path)[0][1]["data"]["name"] == str(tmp_path / "mine.npz")
    assert preset.rows_at("full")[0][1]["data"]["name"] == "mine.npz"
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder("elsewhere") == Path("elsewhere")
    monkeypatch.delenv("FEDQUILT_DATA")
    assert data_folder() == Path("data")


def test_a_file_may_be_an_option_of_the_source(make: Any, tmp_path: Path) -> None:
    data = {**SMALL["settings"]["data"], "name": "npz", "path": "mine.npz", "channels": "last"}
    preset = make(settings={**SMALL["settings"], "data": data})
    (tmp_path / "mine.npz").touch()
    assert preset.rows_at("full", tmp_path)[0][1]["data"]["path"] == str(tmp_path / "mine.npz")


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"titel": "x"}, "titel: a configuration has no such key. Did you mean 'title'?"),
        ({"columns": []}, "columns: an empty list was found"),
        ({"seeds": []}, "seeds: an empty list was found"),
        ({"seeds": [1, 1]}, "seeds: 1 is there more than once."),
        ({"seeds": ["1"]}, "seeds[0]: '1' was found; a whole number would fit."),
        (
            {"measure": "coverag"},
            "measure: there is no measure 'coverag'. Did you mean 'coverage'?",
        ),
        ({"scales": {"short": {}}}, "scales: there is no 'smoke', which tests run without data."),
        (
            {"scales": {"smoke": {"sed": [0]}}},
            "scales.smoke.sed: smoke has no such key. Did you mean 'seeds'?",
        ),
        ({"rows": SMALL["rows"][:1] * 2}, "rows: 'FedRolex' is there more than once."),
        (
            {"columns": [{"title": "×1", "value": "accuracy 1.0 percent"}] * 2},
            "columns[1].value: the value 'accuracy 1.0 percent' was asked for",
        ),
        ({"columns": SMALL["columns"][:1]}, "rows[0].paper: 2 texts were found for 1 columns"),
        (
            {"rows": [{"name": "a", "paper": ["", "about 3"]}]},
            'rows[0].paper: \'about 3\' was found; a number such as "69.44 ± 1.50", or "", would '
            "fit.",
        ),
        (
            {"rows": [{"name": "a", "paper": ["", ""], "parts": ["fife"]}]},
            "rows[0].parts: there is no part 'fife'. Did you mean 'five'?",
        ),
        (
            {"scales": {**SMALL["scales"], "short": {"parts": {"fiv": {}}}}},
            "scales.short.parts: there is no part 'fiv'. Did you mean 'five'?",
        ),
        (
            {"scales": {**SMALL["scales"], "short": {"grid": {"rounds": [1]}}}},
            "scales.short.grid: 'rounds' is not in the grid.",
        ),
        (
            {"settings": {**SMALL["settings"], "seed": 1}},
            "settings.seed: settings of a preset have no seed",
        ),
        (
            {"parts": {**SMALL["parts"], "five": {"seed": 1}}},
            "parts.five.seed: settings of a preset have no seed",
        ),
        (
            {"data": []},
            "row 'FedRolex' at scale 'short': the data file 'mine.npz' is not in `data`.",
        ),
        (
            {"scales": {"smoke": {}}},
            "row 'FedRolex' at scale 'smoke': the data file 'mine.npz' is needed; a smoke run "
            "needs no files",
        ),
        (
            {"settings": {**SMALL["settings"], "rouns": 3}},
            "row 'FedRolex' at scale 'smoke': a problem:\n    rouns: a configuration has no such "
            "key.",
        ),
        (
            {"settings": {**SMALL["settings"], "data": {"name": "mine.npz", "chanels": "last"}}},
            "data.chanels: npz has no such option. Did you mean 'channels'?",
        ),
        (
            {"parts": {**SMALL["parts"], "static": {"method": {"name": "local"}}}},
            "row 'HeteroFL' at scale 'smoke': a problem:\n    method.preset: 'paper' was found; "
            "local has no preset",
        ),
        (
            {"grid": {"method.shft": [1]}},
            "method.shft: fedrolex has no such key. Did you mean 'shift'?",
        ),
        (
            {"tuning": {"round": 1}},
            "round: a configuration has no such key. Did you mean 'rounds'?",
        ),
    ],
)
def test_problems_of_a_file_are_reported(make: Any, changes: dict[str, Any], told: str) -> None:
    assert told in problems(make, **changes)


def test_all_problems_are_reported_at_once_and_each_once(make: Any) -> None:
    rows = [{"name": "a", "paper": [""], "parts": ["fife"]}, {"name": "a", "paper": ["", "x"]}]
    text = problems(make, rows=rows, measure="nothing")
    assert text.startswith("5 problems in ")
    assert [
        text.count(part)
        for part in ("no measure", "more than once", "no part", "texts were", "'x'")
    ] == [1] * 5
    # of two rows
    assert problems(make, settings={**SMALL["settings"], "rounds": 0}).count("rounds") == 1


def test_a_file_that_is_no_toml_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nothing\.toml was asked for; it cannot be read: No such file"
    ):
        read_preset(str(tmp_path / "nothing.toml"))
    (tmp_path / "bad.toml").write_text("title = ")
    with pytest.raises(ConfigError, match=r"bad\.toml:1:9: this is not TOML"):
        read_preset(str(tmp_path / "bad.toml"))


def test_unknown_papers_and_tables() -> None:
    with pytest.raises(
        ConfigError, match=r"no paper, table or figure named .*Did you mean 'fedrolex/table3'"
    ):
        read_preset("fedrolex/tabel3")
    with pytest.raises(
        ConfigError, match=r"the paper 'fedrolex' was asked for; name one of its tables: .*table3"
    ):
        read_preset("fedrolex")
    with pytest.raises(ConfigError, match="Did you mean 'fedrolex'"):
        tables_named("fedrolx")
    assert tables_named("fedrolex") == papers()["fedrolex"]
    assert tables_named("fedrolex/table3") == ("fedrolex/table3",)


# --- what is shipped ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny file for each data set and supernet that a preset needs."""
    folder = tmp_path_factory.mktemp("data")
    x = np.zeros((20, 28, 28, 3), np.uint8)
    y = np.arange(20) % 10
    domains = np.arange(20) % 5
    for name in {one for preset in map(parsed_preset, presets()) for one in preset.data}:
        arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
        if name == "digits5":
            names = ["mnist", "svhn", "usps", "syn", "mnistm"]
            arrays |= {"domain_train": domains, "domain_test": domains, "domains": np.array(names)}
        np.savez(folder / f"{name}.npz", **arrays)
    for space in ("resnet50", "mobilenetv3"):
        (folder / f"{space}.safetensors").touch()  # Settings are checked, and the file is not read.
    return folder


@pytest.mark.parametrize("name", presets())
def test_every_row_of_every_preset_is_an_experiment_at_every_scale(
    name: str, stand_ins: Path
) -> None:
    preset = read_preset(name)
    for scale in preset.scales:
        plan = plan_of(preset, scale, data_folder=stand_ins)
        for run in (*plan.tuning_runs, *plan.final_runs({})[: len(preset.rows)]):  # one seed
            assert isinstance(Experiment.of(run.settings), Experiment)
    if preset.measure == TRAINING:
        assert all(settings["rounds"] <= 10 for _, settings in preset.rows_at(SMOKE))
    assert len(preset.seeds_at(SMOKE)) == 1
    notes = [*preset.notes, *(scale.note for scale in preset.scales.values() if scale.note)]
    assert all(note.endswith(".") for note in notes)


def rows(name: str, scale: str = "full") -> dict[str, dict[str, Any]]:
    return dict(parsed_preset(name).rows_at(scale))


def experiment(settings: dict[str, Any]) -> Experiment:
    """Return the experiment of a row, without its data."""
    partition = settings["data"].get("partition", "iid")
    return Experiment.of({**settings, "data": {"name": "digits", "partition": partition}})


def paper(name: str) -> dict[str, tuple[str, ...]]:
    return {row.name: row.paper for row in parsed_preset(name).rows}


def test_numbers_of_fedrolex_are_those_that_are_printed() -> None:
    assert paper("fedrolex/table3")["FedRolex, high heterogeneity"][0] == "69.44 ± 1.50"
    assert paper("fedrolex/table3")["Federated Dropout, low heterogeneity"][0] == "76.20 ± 2.53"
    assert (
        paper("fedrolex/table3")["homogeneous (smallest), low heterogeneity"][0] == "46.86 ± 0.54"
    )
    assert paper("fedrolex/table4")["homogeneous (largest), high heterogeneity"] == (
        "95.54 ± 0.26",
        "75.74 ± 0.41",
    )
    assert paper("fedrolex/table5")["model update-based"] == ("96.01 ± 0.71", "68.83 ± 0.89")
    assert paper("fedrolex/table6")["Federated Dropout, 20 %"] == ("55.20 ± 4.64",)
    assert paper("fedrolex/table7")["FedRolex"] == ("2.9781232", "149.048384", "11.36")


def test_rows_of_fedrolex_have_the_schedules_of_its_tables() -> None:
    """Tables 8 to 13: rounds and milestones; a scale `short` has a tenth of both."""
    schedules = {
        "FedRolex, high heterogeneity": (2500, (800, 1500), 2),
        "HeteroFL, low heterogeneity": (2000, (800, 1250), 5),
        "homogeneous (smallest), high heterogeneity": (1250, (500, 1000), 2),
        "homogeneous (largest), low heterogeneity": (1500, (500, 1000), 5),
    }
    for table in ("table3", "table3-tuned"):
        whole, short = rows(f"fedrolex/{table}"), rows(f"fedrolex/{table}", "short")
        for name, (rounds, milestones, labels) in schedules.items():
            found = experiment(whole[name])
            assert (found.rounds, found.method.local.schedule.milestones) == (rounds, milestones)
            assert found.data.partition == Labels(labels)
            tenth = experiment(short[name])
            assert tenth.rounds == rounds // 10
            assert tenth.method.local.schedule.milestones == tuple(one // 10 for one in milestones)
    smallest = experiment(
        rows("fedrolex/table3")["homogeneous (smallest), high heterogeneity"]
    ).method
    assert smallest == FedAvg.preset("fedrolex-cifar10-high", share=1 / 16)
    heterofl = experiment(rows("fedrolex/table3")["HeteroFL, low heterogeneity"]).method
    assert heterofl == HeteroFL.preset("fedrolex-cifar10-low")


def test_figure_3_of_fedrolex() -> None:
    found = rows("fedrolex/figure3")
    for rho in range(11):
        is_mid = 3 <= rho <= 7  # Tables 10 and 11 have no column for 0.5
        high = experiment(found[f"ρ = {rho / 10}, high heterogeneity"])
        low = found[f"ρ = {rho / 10}, low heterogeneity"]
        assert high.fleet.budgets == TwoLevel(rho / 10)
        assert high.data.partition == Labels(2)
        assert high.rounds == (1500 if is_mid else 1250)
        assert high.method == FedRolex.preset(
            f"fedrolex-figure3-cifar10-{'mid' if is_mid else 'ends'}"
        )
        assert low["data"]["partition"] == {"name": "labels", "labels": 5}
        assert low["method"] == found[f"ρ = {rho / 10}, high heterogeneity"]["method"]


def test_other_figures_and_tables_of_fedrolex_vary_their_subject() -> None:
    wide = experiment(rows("fedrolex/figure4")["Federated Dropout, γ = 8, low heterogeneity"])
    assert (wide.fleet.budgets, wide.data.partition, wide.rounds) == (
        Uniform((1 / 8,)),
        Labels(5),
        1500,
    )
    assert wide.evaluation is not None
    assert wide.evaluation.shares == (1.0,)
    overlap = experiment(rows("fedrolex/figure6")["r = 0.25, low heterogeneity"])
    assert overlap.method == FedRolex.preset("fedrolex-cifar10-low", overlap=0.25)
    weighting = experiment(rows("fedrolex/table5")["hybrid"])
    assert weighting.method == FedRolex.preset("fedrolex-cifar10-high", weighting="both")
    cohort = experiment(rows("fedrolex/table6")["HeteroFL, 20 %"])
    assert (cohort.fleet.cohort, cohort.method) == (20, HeteroFL.preset("fedrolex-cifar10-high"))


def test_tuned_rates_are_those_of_the_results_page() -> None:
    """0.03 for FedRolex and Federated Dropout, 0.015 for HeteroFL and one common model, batches of
    50.
    """
    rolling = experiment(rows("fedrolex/table6", "tuned")["FedRolex, 5 %"]).method.local
    static = experiment(rows("fedrolex/table6", "tuned")["HeteroFL, 5 %"]).method.local
    common = experiment(
        rows("fedrolex/table4", "tuned")["homogeneous (largest), low heterogeneity"]
    ).method.local
    assert [local.optimizer.lr for local in (rolling, static, common)] == [0.03, 0.015, 0.015]
    assert {local.batch_size for local in (rolling, static, common)} == {50}
    plan = plan_of(parsed_preset("fedrolex/table3-tuned"), "smoke", data_folder=Path())
    assert {run.settings["data"]["validation"] for run in plan.tuning_runs} == {0.1}
    assert {run.settings["evaluation"]["on"] for run in plan.tuning_runs} == {"validation"}


def test_a_preresnet_starts_with_an_output_bias_of_zero_as_the_authors_does() -> None:
    for name in presets():
        for _, settings in parsed_preset(name).rows_at("full"):
            model = settings.get("model", {})
            if isinstance(model, dict) and model.get("name") == "preresnet18":
                assert model["zero_output_bias"] is True
