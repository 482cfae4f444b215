"""The searched model of a run: nets for the data and the fleet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedquilt.data import Pool
from fedquilt.data.sources import diabetes, digits
from fedquilt.errors import ConfigError, RecordError
from fedquilt.fleets.fleet import Fleet
from fedquilt.fleets.presets import FlopLimited
from fedquilt.supernet import ResNet50Space, Supernet, TinySpace, save_supernet
from fedquilt.supernet.model import SearchedModel

FLEET = Fleet.of(FlopLimited(mean=3e5, levels=2), 10).counts


def test_the_demo_gets_nets_of_the_tiny_space() -> None:
    data = digits()
    family = SearchedModel(num_members=1).search(data, FLEET).family(data.example)
    assert family.layout.nets[0] == "knowledge"
    assert len(family.variants) == 2
    macs = [family.cost(family.at(variant).whole).macs for variant in family.variants]
    assert sum(macs) <= 0.75 * 3e5
    assert family.num_outputs == 10


def test_a_supernet_file_brings_weights(tmp_path: Path) -> None:
    supernet = Supernet(TinySpace(num_classes=4), seed=3)
    save_supernet(supernet, tmp_path / "net.safetensors")
    model = SearchedModel(supernet=str(tmp_path / "net.safetensors"), num_members=1)
    searched = model.search(digits(), FLEET)
    net = searched.nets["knowledge"]
    assert isinstance(net, torch.nn.Module)
    assert torch.equal(
        net.state_dict()["stem.conv.weight"], supernet.net.state_dict()["stem.conv.weight"]
    )


def test_a_supernet_file_of_another_space_is_refused(tmp_path: Path) -> None:
    small = ResNet50Space(
        image_size=8, in_channels=1, stem=8, channels=(8, 8, 8, 8), depths=(3, 3, 3, 3)
    )
    save_supernet(Supernet(small), tmp_path / "net.safetensors")
    with pytest.raises(RecordError, match="resnet50"):
        SearchedModel(supernet=str(tmp_path / "net.safetensors")).search(digits(), FLEET)


@pytest.mark.parametrize(
    "data", [diabetes(), Pool.of((torch.zeros(10, 1, 8, 6), torch.arange(10)))]
)
def test_data_without_square_images_is_refused(data: Pool) -> None:
    with pytest.raises(ConfigError, match="they classify square images"):
        SearchedModel().search(data, FLEET)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_members"):
        SearchedModel(num_members=0)
    with pytest.raises(ConfigError, match="strategy"):
        SearchedModel(strategy="lucky")  # type: ignore[arg-type]
