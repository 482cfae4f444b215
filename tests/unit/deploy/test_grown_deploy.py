"""Growing models that are deployed before and after they have grown."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError, ExportError
from fedquilt.methods import FedAvg, ProgFed


class Chain(nn.Module):
    """A module whose forward calls modules in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 5), nn.ReLU())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Between(Chain):
    """The same with code in front of its first module."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


def grown(kind: type[nn.Module], rounds: int) -> fq.Run:
    """Return a run of a model in two stages, of which the first has two of four rounds."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 6, generator=draw), torch.randint(3, (60,), generator=draw)
    data = fq.FederatedData.of((x, y), (x[:20], y[:20]), list(torch.arange(60).split(15)))
    family = fq.trace(fq.with_stages(kind, ["first", "second"]), data.example)
    method = ProgFed(over=FedAvg(local=fq.LocalTraining(batch_size=5)), stage_rounds=2, rounds=4)
    return fq.run(
        method, family, data, fq.Fleet.of((1, 0.5), 4), rounds=rounds, engine="sequential"
    )


def test_the_grown_model_is_the_users_own_module_without_heads():
    run = grown(Between, 4)
    model = run.deploy(fq.Budget(share=1))
    assert type(model) is Between
    assert set(model.state_dict()) == set(Between().state_dict())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [Chain, Between])
def test_a_growing_model_is_deployed_with_its_temporary_head(kind):
    run = grown(kind, 1)
    state = run.server.weights
    model = run.deploy(fq.Budget(share=1))
    x = torch.randn(7, 6)
    hidden = (x * (2 if kind is Between else 1)) @ state["first.0.weight"].T + state["first.0.bias"]
    head = "stage_heads.stage1"
    names = [name for name in state if name.startswith(head)]
    weight, bias = (
        state[next(name for name in names if name.endswith(leaf))] for leaf in ("weight", "bias")
    )
    assert torch.allclose(model(x), hidden.relu() @ weight.T + bias, atol=1e-6)
    assert set(model.state_dict()) == {"first.0.weight", "first.0.bias", *names}


STAGED = fq.with_stages(Between, ["first", "second"])


@pytest.mark.parametrize(
    ("rounds", "factories"),
    [(1, [STAGED]), (4, [Between, STAGED])],
    ids=["first stage", "whole model"],
)
def test_a_stage_is_read_from_a_file_as_it_was_written(rounds, factories, tmp_path):
    run = grown(Between, rounds)
    file = tmp_path / "model.safetensors"
    run.export(file, fq.Budget(share=0.5))
    x = torch.randn(5, 6)
    for factory in factories:
        again = fq.load_model(file, factory)
        assert torch.equal(again(x), run.deploy(fq.Budget(share=0.5))(x))
        assert rounds == 1 or type(again) is Between


def test_a_stage_cannot_be_read_into_a_module_without_stages(tmp_path):
    file = tmp_path / "model.safetensors"
    grown(Chain, 1).export(file, fq.Budget(share=1))
    with pytest.raises(ConfigError, match=r"with its stages \(fq.with_stages\)"):
        fq.load_model(file, Chain)


def test_a_chain_of_modules_is_recorded_and_other_stages_are_refused(tmp_path):
    written = grown(Chain, 1).export(tmp_path / "chain.pt2", fq.Budget(share=1))
    assert written.max_difference == 0
    with pytest.raises(
        ExportError, match=r"stage1 of Between .* behind 'first'.* mul .* safetensors takes"
    ):
        grown(Between, 1).export(tmp_path / "between.pt2", fq.Budget(share=1))
    assert grown(Between, 4).export(tmp_path / "whole.pt2", fq.Budget(share=1)).max_difference == 0


def test_a_customizable_model_of_a_stage_has_its_shares():
    run = grown(Chain, 1)
    model = run.customizable((1.0, 0.5))
    x = torch.randn(5, 6)
    for share in (1.0, 0.5):
        assert torch.equal(model.set(share=share)(x), run.deploy(fq.Budget(share=share))(x))
