"""Segmentation with U-Nets on every engine: parity, augmented masks, and bad input."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines import Vectorized
from fedquilt.errors import ConfigError, DataError
from fedquilt.methods import METHODS, FedAvg, HeteroFL, ProgFed, SplitMix
from fedquilt.models import unet2d, unet3d
from fedquilt.tasks import Classification, Segmentation
from tests.conftest import CUTTING, LOCAL, assert_same, with_local

CLASSES = 3
SIZES = {2: (4, 4), 3: (4, 2, 4)}
UNETS = {2: unet2d, 3: unet3d}
METHOD = {"splitmix": SplitMix(base=0.5, sort=True), "progfed": ProgFed(stages=2)}


@cache
def family(dims: int) -> fq.Family:
    def build() -> nn.Module:
        return UNETS[dims](num_classes=CLASSES, in_channels=1, width=4, depth=1, groups=2)

    return fq.trace(build, torch.zeros(2, 1, *SIZES[dims]))


def partitioned(dims: int = 2, **changes: Tensor) -> fq.FederatedData:
    """Partition images of noise to two clients. One mask does not count, others count in part."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(14, 1, *SIZES[dims], generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (14, *SIZES[dims]), generator=generator)
    y[2] = -100
    y[:, 0, 0] = -100
    y = changes.get("masks", y)
    pool = fq.data.Pool.of((x[:9], y[:9]), (x[9:], y[9:]), public=x[9:])
    return pool.with_parts([range(4), range(4, 9)], [range(2), range(2, 5)])


def play(
    method: fq.Method,
    engine: object,
    dims: int = 2,
    task: object = "segmentation",
    **options: object,
) -> fq.Run:
    quick = with_local(method, batch_size=3, optimizer=replace(method.local.optimizer, lr=0.01))
    fleet = fq.Fleet.of((1.0, 0.5), 2)
    options = {
        "rounds": 2,
        "precision": "fp64",
        "evaluation": fq.Evaluation(batch_size=2),
        **options,
    }
    return fq.run(quick, family(dims), partitioned(dims), fleet, engine, task=task, **options)


@pytest.mark.parametrize("method", CUTTING)
def test_every_method_gives_the_same_numbers_on_both_engines(method):
    """Also those that mask absent classes, distil or weigh samples."""
    chosen = METHOD.get(method) or METHODS[method]()
    runs = [play(chosen, engine, rounds=2 if method == "progfed" else 1) for engine in LOCAL]
    assert_same(*runs)
    run = runs[0]
    assert run.records[-1].to_dict()["main"] == "dice"
    assert run.accuracy == {}
    assert math.isfinite(run.metrics["dice"]["1.0"])
    assert {"dice_1", "dice_2", "iou", "pooled_dice", "pooled_iou", "loss"} <= run.metrics.keys()


@pytest.mark.parametrize("dims", UNETS)
@pytest.mark.parametrize("loss", ["cross-entropy", "dice", "both"])
def test_losses_and_augmentation_give_the_same_numbers_on_both_engines(dims, loss):
    axes = tuple(range(dims))
    changes = {
        "crop": 1,
        "flip": True,
        "flip_axes": axes,
        "intensity": fq.methods.api.Intensity(0.1, 0.2, 0.05),
    }
    method = with_local(HeteroFL(), **changes)
    runs = [play(method, engine, dims, Segmentation(loss=loss)) for engine in LOCAL]
    assert_same(*runs)
    plain = play(HeteroFL(), "sequential", dims, Segmentation(loss=loss), rounds=1)
    assert plain.records[0].loss != runs[0].records[0].loss


@pytest.mark.parametrize("layout", ["alone", "grouped", "stack"])
def test_captured_steps_have_the_loss_of_segmentation(layout):
    engine = Vectorized(partitioned(), precision="fp64", layout=layout, record=True)
    assert_same(*(play(FedAvg(), one) for one in (engine, "sequential")))


def test_weighted_samples_give_the_same_numbers_on_both_engines():
    """OAT draws a weight for each sample, which multiplies its loss."""
    attack = fq.attacks.PGD(eps=0.1, step_size=0.05, steps=1, low=-10, high=10)
    method = with_local(
        FedAvg(), adversarial=fq.attacks.AdversarialTraining((0.0, 0.5, 1.0), attack), batch_size=3
    )
    net = fq.conditioned(unet2d(CLASSES, width=4, depth=1, norm="batch"))
    traced, fleet = fq.trace(net, torch.zeros(2, 1, 4, 4)), fq.Fleet.of((1.0,), 2)
    options = {"rounds": 1, "precision": "fp64", "task": Segmentation()}
    assert_same(
        *(fq.run(method, traced, partitioned(), fleet, engine, **options) for engine in LOCAL)
    )


@pytest.mark.parametrize("engine", LOCAL)
def test_metrics_are_those_of_the_deployed_module(engine):
    run = play(FedAvg(), engine)
    outputs = run.deploy(fq.Budget(share=1.0))(run.data.test_inputs).detach()
    task = run.world.task
    expected = task.values(task.sums(outputs, run.data.test_targets))
    assert {name: run.metrics[name]["1.0"] for name in expected} == pytest.approx(
        expected, abs=1e-12
    )
    own = [
        task.values(task.sums(outputs[rows], run.data.test_targets[rows]))["dice"]
        for rows in run.data.test_parts
    ]
    assert run.metrics["local_dice"]["1.0"] == pytest.approx(sum(own) / 2, abs=1e-12)
    best = max(record.grades.figures["1.0"] for record in run.records)
    assert run.reached(best) is not None
    assert run.reached(best + 1e-6) is None
    assert run.reached(1e-9, metric="pooled_iou") is not None


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("dims", UNETS)
def test_a_flipped_sample_has_a_flipped_mask(engine, dims):
    """A net that reads the class from each voxel has hardly any loss, whatever is flipped.

    If masks were not flipped, it would be wrong for about half of the voxels.
    """
    net = (nn.Conv2d if dims == 2 else nn.Conv3d)(1, 2, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([-20.0, 20.0]).reshape(net.weight.shape))
    masks = torch.randint(2, (12, *SIZES[dims]), generator=torch.Generator().manual_seed(6))
    x = 2.0 * masks.unsqueeze(1) - 1
    data = fq.data.Pool.of((x, masks), (x, masks)).with_parts([range(6), range(6, 12)])
    method = with_local(FedAvg(), crop=1, flip=True, flip_axes=tuple(range(dims)), batch_size=3)
    traced = fq.trace(net, x[:2])

    def loss(data: fq.FederatedData) -> float:
        options = {"rounds": 1, "precision": "fp64", "engine": engine, "task": Segmentation()}
        return fq.run(method, traced, data, fq.Fleet.of((1.0,), 2), **options).records[0].loss

    assert loss(data) < 1e-5
    assert loss(replace(data, targets=masks.flip(-1))) > 1


# --- bad input ----------------------------------------------------------------------------------


def prepared(
    data: fq.FederatedData, method: fq.Method = FedAvg(), task: object = "segmentation"
) -> fq.Run:
    return fq.prepare(method, family(2), data, fq.Fleet.of((1.0,), 2), precision="fp64", task=task)


MASKS = torch.randint(CLASSES, (14, 4, 4), generator=torch.Generator().manual_seed(7))
EMPTY_TESTS = torch.cat([MASKS[:9], 0 * MASKS[9:]])


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (MASKS.double(), r"targets are torch\.float64; classes are whole numbers from 0 on"),
        (
            MASKS[:, :2],
            r"targets have shape \(2, 4\) a sample; .* targets of shape \(4, 4\) would fit",
        ),
        (
            MASKS + 1,
            r"data has 4 classes; the model's output has 3\. A model with 4 outputs would fit",
        ),
        (0 * MASKS, "on data; its 9 masks have no foreground"),
        (EMPTY_TESTS, "on the test set of data; its 5 masks have no foreground"),
    ],
)
def test_masks_that_do_not_fit_are_refused_before_the_first_round(masks, message):
    with pytest.raises(DataError, match=message):
        prepared(partitioned(masks=masks))


def test_crops_and_flips_that_do_not_fit_are_refused_before_the_first_round():
    with pytest.raises(ConfigError, match="crop = 4 was asked for; images are 4×4"):
        prepared(partitioned(), with_local(FedAvg(), crop=4))
    with pytest.raises(ConfigError, match="images have 2 axes, so that 2 is none of them"):
        prepared(partitioned(), with_local(FedAvg(), flip=True, flip_axes=(2,)))


def test_a_label_above_all_classes_may_be_ignored():
    """255 is no class: neither the model nor the classes that clients hold count it."""
    masks = MASKS.clone()
    masks[:, 0] = 255
    task = Segmentation(ignore=255)
    run = fq.run(
        HeteroFL(), family(2), partitioned(masks=masks), fq.Fleet.of((1.0,), 2), rounds=1, task=task
    )
    assert math.isfinite(run.metrics["dice"]["1.0"])
    with pytest.raises(DataError, match=r"data has 256 classes; .* task.ignore = 255 would fit"):
        prepared(partitioned(masks=masks))


def test_masks_without_a_task_are_classified_with_a_hint(caplog):
    """Runs of earlier versions can thus be resumed."""
    with caplog.at_level(logging.WARNING):
        assert prepared(partitioned(), task=None).world.task == Classification()
    assert "The task segmentation trains by cross-entropy and Dice" in caplog.text


@pytest.mark.parametrize(
    ("dims", "size", "fitting"), [(2, (10, 8), "12×8"), (3, (8, 6, 5), "8×8×8")]
)
def test_sides_that_cannot_be_halved_are_refused(dims, size, fitting):
    asked = "×".join(map(str, size))
    message = (
        f"a U-Net of depth 2 was asked for on inputs of size {asked}; every side must divide "
        f"by 4. .*{fitting}"
    )
    with pytest.raises(DataError, match=message):
        fq.trace(
            lambda: UNETS[dims](in_channels=1, width=4, depth=2, groups=2), torch.zeros(2, 1, *size)
        )
