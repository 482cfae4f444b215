"""Precision by name: types of weights and products, and devices that lack a precision."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.hardware.precision import DTYPES, computing
from fedquilt.methods import FedRolex
from tests.conftest import LOCAL, with_local

METHOD = with_local(FedRolex(), batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9))


@pytest.fixture
def trained(residual, make_data):
    def trained(precision, engine="sequential", family=residual):
        data, fleet = make_data(family, (7, 4, 9, 5)), fq.Fleet.of((1.0, 0.5), 4, 4)
        return fq.run(METHOD, family, data, fleet, engine, 1, precision=precision)

    return trained


def distance(one: fq.Run, other: fq.Run) -> float:
    """Return the distance of two runs' weights, divided by their distance from the start."""
    first = METHOD.init(one.world).weights
    apart = sum(
        float((w.double() - other.server.weights[n].double()).norm() ** 2)
        for n, w in one.server.weights.items()
    )
    moved = sum(float((w.cpu() - first[n]).norm() ** 2) for n, w in one.server.weights.items())
    return (apart / moved) ** 0.5


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_weights_are_kept_in_the_precision_or_in_float32(precision, engine, trained):
    run = trained(precision, engine)
    assert {weight.dtype for weight in run.server.weights.values()} == {DTYPES[precision]}
    assert run.engine.precision == run.summary["precision"] == precision


@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
@pytest.mark.parametrize("engine", LOCAL)
def test_bf16_rounds_products_and_learns_the_same(engine, family, trained):
    """bf16 factors have eight correct bits, so that a step is that of fp32 to a few per cent."""
    fine, coarse = (trained(precision, engine, family) for precision in ("fp32", "bf16"))
    assert 1e-4 < distance(fine, coarse) < 0.1


def test_the_mean_is_computed_in_full_precision(residual, make_data):
    """Clients that learn nothing send back what they received. A mean in bf16 would change the
    model.
    """
    still = with_local(FedRolex(), optimizer=fq.optimizers.SGD(lr=1e-30, momentum=0.0))
    data, fleet = make_data(residual, (8, 8)), fq.Fleet.of((1.0,), 2, 2)
    run = fq.run(still, residual, data, fleet, "vectorized", 1, precision="bf16")
    torch.testing.assert_close(
        dict(run.server.weights), dict(still.init(run.world).weights), rtol=0, atol=1e-7
    )


def test_tf32_is_refused_on_a_cpu(trained):
    with pytest.raises(
        ConfigError,
        match=r"'tf32' was asked for on cpu; only NVIDIA GPUs have it\. 'fp32', 'bf16' or",
    ):
        trained("tf32")


def test_an_unknown_precision_is_refused(trained):
    with pytest.raises(
        ConfigError, match=r"no precision named 'fp16'.* Known: fp32, tf32, bf16, fp64"
    ):
        trained("fp16")


def test_a_run_is_resumed_only_in_its_precision(residual, make_data, tmp_path):
    parts = METHOD, residual, make_data(residual, (4, 4)), fq.Fleet.of((1.0,), 2, 2)
    fq.run(*parts, rounds=1, precision="bf16", out=tmp_path / "run")
    with pytest.raises(ConfigError, match="precision: bf16 there, fp32 here"):
        fq.run(*parts, rounds=2, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("precision", DTYPES)
def test_settings_of_torch_are_restored(precision):
    held = torch.backends.cuda.matmul, torch.backends.cudnn

    def globally() -> list[bool]:
        return [*(one.allow_tf32 for one in held), torch.is_autocast_enabled("cpu")]

    before = globally()
    with computing(precision, torch.device("cpu")):
        assert globally() == [precision == "tf32", precision == "tf32", precision == "bf16"]
    assert globally() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    ("precision", "least", "most"), [("fp32", 0, 1e-3), ("tf32", 1e-6, 0.05), ("bf16", 1e-4, 0.1)]
)
def test_products_on_a_gpu_have_the_precision_asked_for(
    precision, least, most, residual, make_data
):
    data, fleet = make_data(residual, (8, 4, 8, 4)), fq.Fleet.of((1.0, 0.5), 4, 4)
    truth, other = (
        fq.run(METHOD, residual, data, fleet, rounds=1, device="cuda", precision=one)
        for one in ("fp64", precision)
    )
    assert {weight.dtype for weight in other.server.weights.values()} == {torch.float32}
    assert least <= distance(truth, other) < most
