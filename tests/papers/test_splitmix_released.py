"""Presets of Split-Mix's released code, compared with its formulas in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt import noise
from fedquilt.family.dual import DualNorm
from fedquilt.methods import FedAvg, SplitMix
from fedquilt.terms import Budget, Client, Job
from tests.conftest import LOCAL, with_local

EPS = 8 / 255
STEPS = 7
SIZE = min(1.25 * EPS, EPS + 4 / 255) / STEPS
SIZES = (6, 9)  # samples of each client: one batch an epoch

Loss = Callable[[Tensor, Tensor], Tensor]


def _net() -> nn.Module:
    """Hidden layers of both kinds with norms, in the order of the Digits CNN."""
    first = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    second = (nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    third = (nn.Flatten(1), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(*first, *second, *third, nn.Linear(8, 4))


def _masked(logits: Tensor, targets: Tensor) -> Tensor:
    """The released masked loss: logits of classes that are absent from the batch are zero."""
    present = torch.zeros_like(logits)
    present[:, targets.unique()] = 1
    return F.cross_entropy(logits * present, targets)


def _augmented(inputs: Tensor, pad: int, key: Tensor) -> Tensor:
    """Random crops after padding, then random flips, image by image."""
    height, width = inputs.shape[-2:]
    shift = noise.uniform(noise.fold_in(key, -1), (2, len(inputs)), torch.float32) * (2 * pad + 1)
    flips = noise.uniform(noise.fold_in(key, -2), (len(inputs),), torch.float32) < 0.5
    found = []
    for image, top, left, flip in zip(F.pad(inputs, (pad,) * 4), *shift.long(), flips, strict=True):
        crop = image[:, top : top + height, left : left + width]
        found.append(crop.flip(-1) if flip else crop)
    return torch.stack(found)


def _attacked(net: nn.Module, inputs: Tensor, targets: Tensor, drawn: Tensor) -> Tensor:
    """PGD as advertorch has it, on the net in evaluation mode and up the plain cross-entropy."""
    net.eval()
    found = (inputs + EPS * (2 * drawn - 1)).clamp(0, 1)
    for _ in range(STEPS):
        found = found.detach().requires_grad_()
        loss = F.cross_entropy(net(found), targets, reduction="sum")
        (slope,) = torch.autograd.grad(loss, found)
        moved = (found + SIZE * slope.sign()).clamp(min=inputs - EPS, max=inputs + EPS)
        found = moved.clamp(0, 1)
    net.train()
    return found.detach()


def _rescaled(share: float) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    return lambda layer, _, outputs: outputs / share if layer.training else outputs


def _trained(run: fq.Run, job: Job, state: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """One client's round on one net, from the state that it received."""
    local, engine = run.method.local, run.engine
    net = engine.world.family.module(job.submodel.arch).double().train()
    net.load_state_dict(state, strict=False)
    for layer in net.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) and local.norm.name == "batch":
            layer.running_mean = layer.running_var = None
            layer.track_running_stats = False
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer is not net[-1] and local.scaler:
            layer.register_forward_hook(_rescaled(share))
    pairs = any(isinstance(layer, DualNorm) for layer in net.modules())
    criterion: Loss = _masked if local.masked == "batch" else F.cross_entropy
    optimizer = torch.optim.SGD(
        net.parameters(), lr=local.optimizer.lr, momentum=0.9, weight_decay=5e-4
    )
    batches = engine.batches(job, run.method.learner(job, engine.world))
    assert len(batches) == local.epochs
    for step, rows in enumerate(batches):
        key = noise.fold_in(torch.tensor(engine.keys(job)[1]), step)
        inputs, targets = engine.data.samples(rows), engine.data.targets[rows]
        if local.crop:
            inputs = _augmented(inputs, local.crop, key)
        if pairs:
            fq.set_robustness(net, 0)
        loss = criterion(net(inputs), targets)
        if local.adversarial:
            if pairs:
                fq.set_robustness(net, 1)
            drawn = noise.uniform(noise.fold_in(key, -3), inputs.shape, inputs.dtype)
            noised = criterion(net(_attacked(net, inputs, targets, drawn)), targets)
            loss = 0.5 * loss + 0.5 * noised
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in net.state_dict().items() if name in state}


RELEASED = ("digits-released", "cifar10-released", "digits-robust-released")
RELEASED += ("cifar10-robust-released",)
METHODS = {name: SplitMix.preset(name, base=0.5) for name in RELEASED}
ROBUST = METHODS["digits-robust-released"]
METHODS |= {
    "robust, one net": SplitMix.preset("digits-robust-released"),
    "robust, masked": with_local(ROBUST, masked="batch"),
    "robust, norms of the batch": with_local(ROBUST, norm="batch"),
    "robust, rescaled": with_local(ROBUST, norm="batch", scaler=True),
    "FedAvg, single norms": FedAvg(local=replace(ROBUST.local, masked="batch")),
}


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("name", METHODS)
def test_a_round_is_that_of_the_released_code(name, engine, make_data):
    """Local steps of two clients with unequal data, and the merge by the number of samples."""
    method = METHODS[name]
    single = "single" in name or not method.local.adversarial
    family = fq.trace(_net if single else fq.dual(_net), torch.zeros(2, 1, 8, 8))
    data = make_data(family, SIZES, labels=2)
    data = replace(data, inputs=data.inputs.sigmoid(), test_inputs=data.test_inputs.sigmoid())
    fleet = fq.Fleet.of((1.0,), 2, 2)
    how = fq.Evaluation(every=0)
    run = fq.prepare(method, family, data, fleet, engine, precision="fp64", evaluation=how)
    before = dict(run.server.weights)
    clients = [Client(id, Budget(share=1.0), size, id) for id, size in enumerate(SIZES)]
    jobs = [
        Job(client, net, 0)
        for client in clients
        for net in method.plan(run.server, client, run.world)
    ]
    by_scope: dict[str, list[tuple[int, dict[str, Tensor]]]] = {}
    for job in jobs:
        scope = job.submodel.scope
        names = [name for name in before if name.startswith(scope)]
        state = {name.removeprefix(scope): before[name] for name in names}
        own = _trained(run, job, state, getattr(method, "base", 1.0))
        by_scope.setdefault(scope, []).append((job.client.size, own))
    after = run.train(1).server.weights
    assert len(by_scope) == getattr(method, "count", 1)
    for scope, uploads in by_scope.items():
        for name in uploads[0][1]:
            merged = sum(size * own[name] for size, own in uploads) / sum(SIZES)
            torch.testing.assert_close(after[scope + name], merged, rtol=0, atol=1e-12)
            assert name.endswith("bias") or not torch.equal(merged, before[scope + name])


def test_settings_of_the_released_code():
    digits, cifar = (SplitMix.preset(f"{name}-released") for name in ("digits", "cifar10"))
    assert (digits.lr(0), digits.lr(150), digits.lr(300)) == pytest.approx((0.01, 0.005, 0))
    assert (digits.local.batch_size, digits.local.epochs, digits.local.masked) == (32, 1, "")
    assert [cifar.lr(at) for at in (0, 150, 250)] == pytest.approx([0.01, 0.001, 0.0001])
    assert (cifar.local.batch_size, cifar.local.epochs, cifar.local.masked) == (128, 5, "batch")
    assert (cifar.local.crop, cifar.local.flip, digits.local.crop) == (4, True, 0)
    for method in (digits, cifar):
        assert (method.local.norm.name, method.local.scaler, method.rescale_init) == (
            "batch",
            True,
            True,
        )


def test_settings_of_the_released_adversarial_runs():
    digits, cifar = (SplitMix.preset(f"{name}-robust-released") for name in ("digits", "cifar10"))
    assert (digits.lr(0), digits.lr(300), digits.base) == (0.1, pytest.approx(0), 1.0)
    assert [cifar.lr(at) for at in (0, 199, 200, 300)] == pytest.approx([0.1, 0.1, 0.01, 0.001])
    assert (cifar.local.crop, cifar.local.flip, cifar.local.masked) == (4, True, "")
    for method in (digits, cifar):
        assert (method.local.norm.name, method.local.scaler) == ("tracked", False)
        assert not method.rescale_init
        assert method.attack.step_size * 255 == pytest.approx(1.4286, abs=1e-4)
        assert method.local.adversarial.search == "evaluation"
