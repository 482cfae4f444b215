"""One module of several sizes: it has the outputs of deployed modules, and stores weights once."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.deploy.customizable import CustomizableModel, resident_bytes
from fedquilt.errors import ConfigError
from fedquilt.family.cut import scattered
from fedquilt.methods import FedBN, FedDropout, FedRolex, HeteroFL, LocalOnly, SplitMix
from fedquilt.models import MODELS
from tests.conftest import CUTTING, few_server_steps, with_local

SHARES = (1.0, 0.5, 0.25, 0.125)

ALL = [few_server_steps(kind()) for kind in CUTTING.values() if kind is not FedBN]


@pytest.fixture(scope="module")
def family() -> fq.Family:
    return fq.trace(
        lambda: fq.models.PreResNet((1, 1), 4, 1, widths=(8, 16)), torch.zeros(2, 1, 6, 6)
    )


def pointers(module: nn.Module) -> dict[str, int]:
    return {name: weight.untyped_storage().data_ptr() for name, weight in module.named_parameters()}


@pytest.mark.parametrize("method", ALL, ids=lambda method: type(method).__name__)
def test_outputs_equal_those_of_deployed_modules(method, family, play, make_data):
    run = play(method, family, make_data(family, (9, 8)), (1.0, 0.5), rounds=2)
    client, inputs = 0 if method.personal else None, run.data.test_inputs
    model = run.customizable(SHARES, client=client)
    assert model.shares == SHARES
    assert model.share == 1.0
    for share in (0.125, 1.0, 0.5, 0.25):
        own = run.deploy(fq.Budget(share=share), client=client)
        torch.testing.assert_close(
            model.set(share=share)(inputs), own(inputs).detach(), rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("method", [HeteroFL(), FedRolex(shift=3)], ids=["prefixes", "windows"])
def test_narrow_nets_are_views_of_the_widest(method, family, play, make_data):
    """Also of windows that wrap: the widest holds its channels in an order in which they are
    slices.
    """
    run = play(method, family, make_data(family, (9, 8)), (1.0, 0.5), rounds=3)
    model = run.customizable(SHARES)
    whole = pointers(model.stocks[0])
    assert len(model.stocks) == 1
    for net in model._members.values():
        assert pointers(net) == whole
    separate = [run.deploy(fq.Budget(share=share)) for share in SHARES]
    statistics = sum(resident_bytes([own]) for own in model.statistics)
    # batches seen, 8 bytes a norm
    counters = resident_bytes(model._members.values()) - resident_bytes([model])
    assert 0 <= counters <= 8 * len(SHARES) * 8
    assert model.resident_bytes <= resident_bytes([separate[0]]) + statistics + counters
    assert model.resident_bytes < resident_bytes(separate)


def test_setting_a_share_copies_nothing(family, play, make_data):
    run = play(HeteroFL(), family, make_data(family, (9, 8)), (1.0, 0.5), rounds=1)
    model = run.customizable(SHARES)
    before = {share: pointers(net) for share, net in model._members.items()}

    class Copies(torch.utils._python_dispatch.TorchDispatchMode):
        calls: ClassVar[list[Any]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls.append(func)
            return func(*args, **(kwargs or {}))

    with Copies() as copies:
        for share in SHARES:
            model.set(share=share)
    assert copies.calls == []
    assert before == {share: pointers(net) for share, net in model._members.items()}


def test_base_nets_are_stored_once(family, play, make_data):
    run = play(SplitMix(base=0.25), family, make_data(family, (9, 8)), rounds=1)
    model = run.customizable((1.0, 0.5, 0.25))
    assert len(model.stocks) == 4
    bases = [pointers(stock) for stock in model.stocks]
    assert [pointers(net) for net in model._members[1.0].nets] == bases
    assert [pointers(net) for net in model._members[0.5].nets] == bases[:2]
    assert pointers(model._members[0.25]) == bases[0]


@dataclass(frozen=True)
class Scattered(FedDropout):
    """Hands out random channels, others at every share."""

    def deploy(self, server, budget, world):
        member = world.family.fit(budget)
        return (scattered(member, world.family.layout.sizes, round(1000 * budget.share)),)


@pytest.mark.parametrize("method", [FedRolex(overlap=0.2), Scattered()], ids=["windows", "random"])
def test_nets_that_are_not_nested_are_gathered_once(method, family, play, make_data):
    run = play(method, family, make_data(family, (9, 8)), (1.0, 0.5), rounds=3)
    model, inputs = run.customizable(SHARES), run.data.test_inputs
    assert len(model.stocks) == 1  # all of them are the whole net's channels
    if isinstance(method, Scattered):
        assert any(pointers(net) != pointers(model.stocks[0]) for net in model._members.values())
    parts = {share: run.deploy(fq.Budget(share=share))(inputs).detach() for share in SHARES}
    for share, own in parts.items():
        torch.testing.assert_close(model.set(share)(inputs), own, rtol=0, atol=1e-9)
    apart = run.customizable((0.5, 0.125))  # neither has the other's
    for share in (0.5, 0.125):
        torch.testing.assert_close(apart.set(share)(inputs), parts[share], rtol=0, atol=1e-9)


@pytest.mark.parametrize("norms", ["post", "tracked", "batch"])
def test_it_is_saved_and_loaded(norms, family, play, make_data, tmp_path):
    run = play(
        with_local(HeteroFL(), norm="tracked"), family, make_data(family, (9, 8)), (1.0, 0.5)
    )
    model, inputs = run.customizable(SHARES, norms=norms).set(0.25), run.data.test_inputs
    model.save(tmp_path / "model.safetensors")
    again = fq.load_model(tmp_path / "model.safetensors", family.module(family.whole))
    assert isinstance(again, CustomizableModel)
    assert again.share == 0.25
    for share in SHARES:
        assert torch.equal(again.set(share)(inputs), model.set(share)(inputs))
        own = run.deploy(fq.Budget(share=share), norms=norms)
        torch.testing.assert_close(again(inputs), own(inputs).detach(), rtol=0, atol=1e-9)
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * resident_bytes(
        [family.module(family.whole).double()]
    )


def test_it_moves_loads_and_copies_like_any_module(family, play, make_data):
    run = play(HeteroFL(), family, make_data(family, (9, 8)), (1.0, 0.5), rounds=1)
    model, inputs = run.customizable(SHARES), run.data.test_inputs
    other = copy.deepcopy(model)
    single = copy.deepcopy(model).float()
    for share in SHARES:
        assert torch.equal(other.set(share)(inputs), model.set(share)(inputs))
        torch.testing.assert_close(
            single.set(share)(inputs.float()).double(), model(inputs), rtol=1e-4, atol=1e-4
        )
        assert pointers(single._members[share]) == pointers(single.stocks[0])
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    assert float(other(inputs).abs().max()) == 0
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.set(0.5)(inputs), model.set(0.5)(inputs))


def test_a_clients_own(family, play, make_data):
    run = play(LocalOnly(), family, make_data(family, (9, 8)))
    inputs = run.data.test_inputs
    first, second = (
        run.customizable((1.0, 0.5), client=client).set(0.5)(inputs) for client in (0, 1)
    )
    assert not torch.allclose(first, second)
    with pytest.raises(ConfigError, match="LocalOnly leaves its result on the clients"):
        run.customizable((1.0,))


def test_error_messages_name_a_valid_value(family, play, make_data):
    run = play(HeteroFL(), family, make_data(family, (9, 8)), rounds=1)
    model = run.customizable((1.0, 0.5))
    with pytest.raises(
        ConfigError, match=r"a share of 0.3 was asked for; the model was made for 1, 0.5\."
    ):
        model.set(share=0.3)
    with pytest.raises(
        ConfigError, match=r"a robustness of 0.3 was asked for; .* has no dual norms"
    ):
        model.set(robustness=0.3)
    with pytest.raises(ConfigError, match="without shares"):
        run.customizable(())
    with pytest.raises(fq.errors.BudgetError, match="a share of 2"):
        run.customizable((2.0,))
    for wrong in (0.5, ("a",), (None,)):
        with pytest.raises(
            ConfigError,
            match=r"a customizable model of shares=.* was asked for; several numbers in",
        ):
            run.customizable(wrong)


@pytest.mark.parametrize("method", [HeteroFL(), SplitMix(base=0.25)], ids=["heterofl", "splitmix"])
def test_size_and_robustness_are_chosen_together(method, play, make_data, tmp_path):
    """It equals a module deployed with both, and a file restores the share and the robustness."""
    family = fq.trace(
        lambda: fq.dual(fq.models.PreResNet((1, 1), 4, 1, widths=(8, 16))), torch.zeros(2, 1, 6, 6)
    )
    run = play(
        with_local(method, batch_size=4), family, make_data(family, (9, 8)), (1.0, 0.5), rounds=2
    )
    model, inputs = run.customizable((1.0, 0.5)), run.data.test_inputs
    for share in (1.0, 0.5):
        for robustness in (0.0, 0.3, 1.0):
            found = model.set(share=share, robustness=robustness)(inputs)
            deployed = run.deploy(fq.Budget(share=share), robustness=robustness)
            torch.testing.assert_close(found, deployed(inputs), rtol=0, atol=1e-12)
    made = fq.dual(fq.models.PreResNet((1, 1), 4, 1, widths=(8, 16)))
    assert model.robustness == 1.0
    expected = model.set(share=0.5, robustness=0.7)(inputs)
    model.save(tmp_path / "all.safetensors")
    for again in (
        fq.load_model(tmp_path / "all.safetensors", made),
        copy.deepcopy(model),
        model.float().double(),
    ):
        assert (again.share, again.robustness) == (0.5, 0.7)
        torch.testing.assert_close(again.double()(inputs), expected, rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="one number for all samples"):
        model.set(share=1.0, robustness="a")
    assert (model.share, model.robustness) == (0.5, 0.7)
    exported = run.export(tmp_path / "some.safetensors", fq.Budget(share=0.5), robustness=0.3)
    assert exported.max_difference == 0
    again = fq.load_model(tmp_path / "some.safetensors", made)
    expected = run.deploy(fq.Budget(share=0.5), robustness=0.3)(inputs)
    torch.testing.assert_close(again(inputs.float()).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["densenet", "vit", "transformer_lm", "unet2d"])
def test_weights_that_no_slice_cuts_are_gathered_one_by_one(name, make_data):
    """Concatenations and heads: their weights are copies, all others still views."""
    spec = MODELS[name]
    family = fq.trace(spec.factory, spec.example(), fixed=spec.fixed)
    run = fq.prepare(
        HeteroFL(), family, make_data(family, (4, 4), tests=4), fq.Fleet.of((1.0,), 2, 1)
    )
    model, inputs = run.customizable((1.0, 0.5)), run.data.test_inputs[:2]
    whole, half = pointers(model.stocks[0]), pointers(model._members[0.5])
    assert any(whole[name] == half[name] for name in half)
    torch.testing.assert_close(
        model.set(0.5)(inputs), run.deploy(fq.Budget(share=0.5))(inputs).detach()
    )
