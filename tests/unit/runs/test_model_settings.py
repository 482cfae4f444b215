"""Settings of models, and initial weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedquilt as fq
from fedquilt.data import Pool
from fedquilt.errors import ConfigError
from fedquilt.models import MODELS
from fedquilt.runs.initial_weights import load_weights
from fedquilt.runs.model_settings import Model, offered
from fedquilt.tasks import MultiLabel
from tests.unit.runs.experiments import refused, small


def test_models_get_sizes_of_the_data(own: Path) -> None:
    images = Pool.of(
        (torch.zeros(4, 3, 16, 16), torch.arange(4)), (torch.zeros(1, 3, 16, 16), torch.tensor([6]))
    )
    assert offered(images) == {
        "num_classes": 7,
        "num_outputs": 7,
        "in_features": 768,
        "in_channels": 3,
        "image_size": 16,
    }
    rows = Pool.of((torch.zeros(4, 5), torch.arange(4)), (torch.zeros(1, 5), torch.tensor([0])))
    assert offered(rows) == {"num_classes": 4, "num_outputs": 4, "in_features": 5}
    tokens = torch.zeros(4, 9, dtype=torch.int64)
    text = Pool.of((tokens, tokens), (tokens, tokens), num_classes=50)
    assert offered(text) == {"num_classes": 50, "num_outputs": 50, "max_length": 9}
    numbers = Pool.of((torch.zeros(4, 5), torch.zeros(4)), (torch.zeros(1, 5), torch.zeros(1)))
    assert offered(numbers) == {"num_classes": 1, "num_outputs": 1, "in_features": 5}
    # whole numbers are classes, unless a task says that they are labels
    yes_or_no = torch.tensor([[0, 1, 1]] * 4)
    labels = Pool.of((torch.zeros(4, 5), yes_or_no), (torch.zeros(4, 5), yes_or_no))
    assert offered(labels)["num_outputs"] == 2
    assert offered(labels, MultiLabel())["num_outputs"] == 3


@pytest.mark.parametrize("name", ["num_classes", "num_outputs"])
def test_a_factory_gets_the_number_of_outputs_by_its_parameter_name(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / "mine.py"
    text = (
        f"from torch import nn\ndef net({name}: int, in_features: int):\n    return "
        f"nn.Linear(in_features, {name})"
    )
    file.write_text(text)
    y = torch.zeros(4, 3)
    family = Model(f"{file}:net").trace(Pool.of((torch.zeros(4, 5), y), (torch.zeros(4, 5), y)))
    assert family.layout.sizes["class"] == 3
    assert Model("mlp").trace(fq.data.diabetes()).num_outputs == 1
    assert Model("tiny_resnet").trace(fq.data.digits_labels()).num_classes == 3


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (
            torch.zeros(4, 7),
            r"data has numbers of shape \(7,\)\. Made for these: mlp; or a module of yours",
        ),
        (
            torch.zeros(4, 9, dtype=torch.int64),
            r"data has tokens of shape \(9,\)\. Made for these: transformer_lm;",
        ),
        (torch.zeros(4, 1, 8, 8, 8), r"numbers of shape \(1, 8, 8, 8\)\. Made for these: unet3d;"),
        (
            torch.zeros(4, 1, 2, 2, 2, 2),
            r"numbers of shape .*\. Made for these: none of those by name; or",
        ),
    ],
)
def test_a_model_for_other_samples_is_refused_with_those_that_fit(
    inputs: torch.Tensor, told: str
) -> None:
    targets = torch.arange(4) % 3
    pool = Pool.of((inputs, targets), (inputs, targets))
    with pytest.raises(
        ConfigError,
        match=rf"'tiny_resnet' was asked for; it is for samples such as \(1, 8, 8\).*{told}",
    ):
        Model("tiny_resnet").trace(pool)


def test_rows_of_numbers_have_a_default_model() -> None:
    x, y = torch.zeros(4, 7), torch.arange(4) % 3
    family = Model("mlp", {"hidden": (6,)}).trace(Pool.of((x, y), (x, y)))
    assert family.count(family.whole) == 7 * 6 + 6 + 6 * 3 + 3


def test_options_of_the_user_replace_sizes_of_the_data() -> None:
    pool = fq.data.digits()
    assert Model("tiny_resnet").trace(pool).num_classes == 10
    assert Model("tiny_resnet", {"num_classes": 12}).trace(pool).num_classes == 12


def test_layers_that_a_paper_never_cuts_are_not_cut() -> None:
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    pool = Pool.of((tokens, tokens), (tokens, tokens), num_classes=50)
    options = {"width": 8, "heads": 2, "head_dim": 4, "hidden": 16}
    family = Model("transformer_lm", options).trace(pool)
    assert Model("transformer_lm").fixed == MODELS["transformer_lm"].fixed
    assert {name for name, axis in family.layout.axes.items() if axis.fixed}


def test_model_options_are_read_by_the_signature(own: Path) -> None:
    assert small(model={"name": "mine.py:net", "width": 12}).model.options == {"width": 12}
    assert "model.width: 'x' was found; a whole number would fit." in refused(
        model={"name": "mine.py:net", "width": "x"}
    )
    assert "mine.py:net has no such option. Did you mean 'width'?" in refused(
        model={"name": "mine.py:net", "widht": 1}
    )


def test_runs_may_start_from_a_file_of_weights(own: Path) -> None:
    family = small().ground().family
    start = {name: torch.randn(weight.shape) for name, weight in family.init(3).items()}
    save_file(start, "start.safetensors")
    run = small(init="start.safetensors").prepare()
    for name, weight in start.items():
        assert torch.equal(run.server.weights[name], weight)
    broken = {
        "0.weight": torch.zeros(2, 2),
        "0.bais": torch.zeros(8),
        "2.weight": start["2.weight"],
    }
    save_file(broken, "broken.safetensors")
    with pytest.raises(ConfigError) as caught:
        small(init="broken.safetensors").prepare()
    told = str(caught.value)
    assert "0.bias is not in the file" in told
    assert "0.bais is not in the model. Did you mean '0.bias'?" in told
    assert "0.weight is (2, 2) in the file and (8, 4) in the model" in told
    with pytest.raises(ConfigError, match="cannot be read as safetensors: its header"):
        small(init="mine.py").prepare()


def test_missing_files_are_reported_beside_other_problems(own: Path) -> None:
    told = refused(
        rounds=0,
        init="absent.safetensors",
        model="absent.py:net",
        data={"name": "npz", "path": "absent.npz"},
        fleet={"clients": 6, "budgets": {"name": "csv", "file": "a.csv"}, "availability": "b.csv"},
    )
    assert "6 problems" in told
    for path, file in {
        "init": "absent.safetensors",
        "model.name": "absent.py",
        "data.path": "absent.npz",
        "fleet.budgets.file": "a.csv",
        "fleet.availability": "b.csv",
    }.items():
        (line,) = (line for line in told.splitlines() if line.startswith(f"  {path}: "))
        assert f"{file}" in line
        assert "there is no" in line


def test_a_run_begins_where_another_ended(own: Path) -> None:
    ended = small(rounds=2).prepare().train(2)
    ended.save("one")
    begun = small(init="one", seed=7).prepare()
    for name, weight in ended.server.weights.items():
        assert torch.equal(begun.server.weights[name], weight)
    Path("empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"init = 'empty' was asked for: .* there is no checkpoint there"
    ):
        small(init="empty").prepare()


def test_norm_statistics_may_be_missing_from_a_file_of_weights(tmp_path: Path) -> None:
    module = MODELS["tiny_resnet"].factory()
    save_file(
        {name: value.detach() for name, value in module.named_parameters()},
        tmp_path / "x.safetensors",
    )
    load_weights(module, str(tmp_path / "x.safetensors"))


def test_initial_weights_have_the_memory_limit_of_data(own: Path) -> None:
    small(rounds=1).prepare().train(1).save("one")
    (weights,) = Path("one/checkpoint").glob("0*.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"init = .* takes .* bytes in memory, and max_bytes allows 99\. --max-bytes",
    ):
        small(init=str(weights), data={"name": "mine.py:pool", "max_bytes": 99}).prepare()
