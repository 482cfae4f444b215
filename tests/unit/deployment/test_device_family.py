"""The model on a device: without values, from the server's layout, and compared with it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedquilt as fq
from fedquilt.deployment.device import Device
from fedquilt.deployment.device_family import (
    WithoutValues,
    check_layouts,
    check_module,
    constant_digests,
    device_family,
    emptied,
)
from fedquilt.deployment.enrolment import ServerFacts
from fedquilt.deployment.in_process import InProcess, own_data
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.engine import Flower
from fedquilt.errors import ConfigError, FormatError
from fedquilt.runs.model_settings import Model, offered, traced

BUILT_IN = ["tiny_resnet", "mlp", "vgg11", "preresnet18", "mobilenet_v2", "densenet", "vit"]


class Net(nn.Module):
    """A net whose constructor reads values, with a mask and a table that are never trained."""

    def __init__(self, width: int = 8, num_classes: int = 4, draws: str = "") -> None:
        super().__init__()
        rates = torch.linspace(0, 0.1, 3).tolist()
        self.first = nn.Linear(64, width)
        self.drop = nn.Dropout(rates[1])
        self.token = nn.Parameter(torch.zeros(width))
        self.last = nn.Linear(width, num_classes)
        self.register_buffer("mask", torch.ones(64).cumsum(0) / 64)
        self.table = torch.arange(64.0) / 64
        if draws == "buffer":
            self.register_buffer("mask", torch.randn(64))
        if draws == "in_place":
            self.register_buffer("mask", torch.zeros(64).normal_())
        if draws == "attribute":
            self.table = torch.rand(64)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1) * self.mask + self.table
        return self.last(self.drop(self.first(rows).relu() + self.token))


@pytest.fixture
def data() -> fq.FederatedData:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, 1, 8, 8, generator=generator)
    targets = torch.arange(40) % 4
    return fq.data.Pool.of((inputs, targets), (inputs[:8], targets[:8])).partition(2)


def built(model: Model, data: fq.FederatedData, server: Model | None = None) -> fq.Family:
    """Return the family of a device whose server has another model, or the same."""
    family = (server or model).trace(data)
    digests = constant_digests(family)
    return device_family([model], family.layout, offered(data), data.example, digests)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_model_is_built_without_values(name):
    shape = (3, 32, 32)
    inputs, targets = torch.rand(4, *shape), torch.arange(4)
    data = fq.data.Pool.of((inputs, targets), (inputs, targets)).partition(1)
    family = built(Model(name), data)
    assert all(weight.is_meta for weight in family.parameters.values())
    truth = Model(name).trace(data)
    assert family.layout.fingerprint == truth.layout.fingerprint
    assert family.output_shape == truth.output_shape
    budget = fq.Budget(params=truth.count(truth.whole) // 3)
    assert family.fit(budget) == truth.fit(budget)
    for name, value in truth.constants.items():
        assert torch.equal(value, family.constants[name])


def test_tables_and_masks_have_the_values_that_the_code_computes(data):
    server = fq.trace(Net, data.example)
    with WithoutValues():
        module = Net()
    assert all(weight.is_meta for name, weight in module.named_parameters() if name != "token")
    assert torch.equal(module.mask, Net().mask)
    check_module(module, server.layout, "Net")
    family = emptied(fq.Family(module, server.layout, (data.example,), lambda: module))
    assert family.traced_module.token.is_meta
    assert constant_digests(family) == constant_digests(server)
    assert {*constant_digests(server)} == {"mask", "table"}


def of_file(folder, options: str = "") -> Model:
    """Return a model of a file, whose factory has these options."""
    (folder / "mine.py").write_text(
        "from tests.unit.deployment.test_device_family import Net\n"
        f"def net(num_classes): return Net(num_classes=num_classes{options})\n"
    )
    return Model(f"{folder / 'mine.py'}:net")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (", width=6", r"token of shape \(8,\); .* on the device has \(6,\)"),
        (", draws='buffer'", "mask, which is random"),
        (", draws='attribute'", "table, which is random"),
        (", draws='in_place'", "the constant mask .* differs"),
    ],
)
def test_a_model_that_differs_is_refused_with_the_weight(tmp_path, data, options, reason):
    for folder in ("server", "device"):
        (tmp_path / folder).mkdir()
    server, device = of_file(tmp_path / "server"), of_file(tmp_path / "device", options)
    assert built(server, data).layout.dims
    with pytest.raises(ConfigError, match=reason):
        built(device, data, server)


def test_weights_that_one_side_alone_has_are_named(data):
    small = fq.trace(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), data.example)
    large = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"on the device has 2\.weight of shape \(4, 4\)"):
        check_module(large, small.layout, "large")
    with pytest.raises(ConfigError, match=r"the server's model has 2\.weight .* does not have it"):
        check_module(small.traced_module, fq.trace(large, data.example).layout, "small")


class Headed(nn.Module):
    """A net that keeps the size of a layer in an attribute."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 4)
        self.size = size

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs.flatten(1)).view(-1, self.size))


def test_sizes_that_a_layout_states_are_compared_with_the_layers(data):
    layout = fq.trace(Headed, data.example).layout
    assert "size" in layout.attributes
    check_module(Headed(), layout, "headed")
    with pytest.raises(ConfigError, match="size = 8; the model headed on the device has 99"):
        check_module(Headed(99), layout, "headed")


def test_layouts_with_equal_shapes_and_other_axes_are_refused(data):
    free = Model("tiny_resnet").trace(data)
    fixed = fq.trace(lambda: free.traced_module, data.example, fixed=[next(iter(free.layout.axes))])
    check_layouts(free.layout, free.layout, "tiny_resnet")
    with pytest.raises(ConfigError, match="weights of the same shapes and the axes"):
        check_layouts(free.layout, fixed.layout, "tiny_resnet")


def test_a_union_is_built_without_values(data):
    models = [Model("tiny_resnet"), Model("mlp")]
    server = traced(models, data)
    family = device_family(
        models, server.layout, offered(data), data.example, constant_digests(server)
    )
    assert family.layout.fingerprint == server.layout.fingerprint
    assert family.variants == server.variants
    assert all(weight.is_meta for weight in family.parameters.values())


@pytest.mark.parametrize("layout", ["", "!", "AAAA", 7, None])
def test_a_description_without_a_layout_is_refused(data, layout):
    model = Model("mlp")
    facts = ServerFacts.of("run1", [model], data, model.trace(data))
    plain = {**json.loads(facts.to_bytes()), "layout": layout}
    with pytest.raises(FormatError, match="layout"):
        ServerFacts.read(json.dumps(plain).encode())


def test_a_layout_that_becomes_huge_is_refused_before_it_is_unpacked(data):
    model = Model("mlp")
    facts = ServerFacts.of("run1", [model], data, model.trace(data))
    bomb = ServerFacts(**{**vars(facts), "layout": " " * (64 << 20)}).to_bytes()
    assert len(bomb) < 200_000
    with pytest.raises(FormatError, match="more than"):
        ServerFacts.read(bomb)


class Allocations(TorchDispatchMode):
    """A context that counts the bytes of tensors with values that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if type(leaf) is Tensor and not leaf.is_meta:
                size = leaf.untyped_storage().nbytes()
                self.largest = max(self.largest, size)
                self.total += size
        return results


def allocations_of(share: float) -> Allocations:
    """Return what a device allocates to build a wide perceptron and to train a share of it."""
    inputs = torch.rand(4, 16, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(4) % 2
    data = fq.data.Pool.of((inputs, targets), (inputs, targets)).partition(1)
    model = Model("mlp", {"hidden": [1024, 1024]})
    server = model.trace(data)
    facts = ServerFacts.of("run1", [model], data, server)
    allocations = Allocations()
    with allocations:
        device = Device(own_data(data, 0), facts.family(data))
    answer = device.answer

    def counted(message):
        with allocations:
            return answer(message)

    device.answer = counted
    engine = Flower(data, courier=InProcess({0: device}), run_id="run1", terms=Terms.of)
    fq.run(fq.methods.HeteroFL(), server, data, fq.Fleet.of((share,), 1, 1), engine, 1)
    assert device.trained == 1
    return allocations


def test_tensors_with_values_on_a_device_follow_its_member():
    small, whole = allocations_of(1 / 16), allocations_of(1.0)
    weight = 4 * 1024 * 1024  # Bytes of the largest weight of the whole model
    assert whole.largest >= weight
    assert small.largest < weight / 64
    assert small.total < whole.total / 64
