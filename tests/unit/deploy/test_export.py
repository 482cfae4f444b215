"""Exported files: they have the outputs of torch for batches of any size, or are not written."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
from safetensors import safe_open
from torch import nn

import fedquilt as fq
from fedquilt.deploy.formats import Pt2
from fedquilt.errors import ConfigError, ExportError, RecordError
from fedquilt.family.ensemble import Ensemble
from fedquilt.methods import FedBN, FedRolex, HeteroFL, LocalOnly, SplitMix
from fedquilt.models import MODELS
from tests.conftest import CUTTING, few_server_steps

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript"))
ONNX = pytest.param("onnx", marks=pytest.mark.skipif(not HAS_ONNX, reason="needs the extra export"))
HALF = fq.Budget(share=0.5)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )


@pytest.fixture(scope="module")
def family() -> fq.Family:
    return fq.trace(net, torch.zeros(2, 1, 4, 4))


@pytest.mark.parametrize("norms", ["post", "batch"])
@pytest.mark.parametrize("format", [ONNX, "pt2", "safetensors"])
@pytest.mark.parametrize("method", [HeteroFL(), SplitMix(base=0.25)], ids=["one net", "ensemble"])
def test_an_exported_file_has_the_outputs_of_the_deployed_module(
    method, format, norms, family, play, make_data, tmp_path
):
    run = play(method, family, make_data(family, (9, 8)), rounds=1)
    file = tmp_path / "deep" / f"model.{format}"
    found = run.export(file, HALF, norms=norms)
    model = run.deploy(HALF, norms=norms).float().requires_grad_(False)
    assert (found.format, found.file, found.bytes) == (format, str(file), file.stat().st_size)
    assert found.params == sum(weight.numel() for weight in model.parameters())
    assert (found.share, found.norms, found.compared) == (0.5, norms, "test samples")
    assert found.nets == (2 if isinstance(method, SplitMix) else 1)
    assert 0 <= found.max_difference < 1e-4
    for size in (1, 5) if norms == "post" else (2, 5):
        inputs = torch.randn(size, 1, 4, 4)
        torch.testing.assert_close(answers(file, inputs), model(inputs), rtol=0, atol=1e-4)
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing half-written


def answers(file, inputs):
    match file.suffix:
        case ".onnx":
            import onnxruntime

            session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
            assert session.get_inputs()[0].shape[0] == "batch"
            note = json.loads(session.get_modelmeta().custom_metadata_map["fedquilt"])
            assert note["num_classes"] == 4
            return torch.from_numpy(session.run(["logits"], {"input": inputs.numpy()})[0])
        case ".pt2":
            return torch.export.load(file).module()(inputs)
        case _:
            return fq.load_model(file, net).requires_grad_(False)(inputs)


@pytest.mark.parametrize(
    "method",
    [few_server_steps(kind()) for kind in CUTTING.values()],
    ids=lambda method: type(method).__name__,
)
def test_every_method_is_written_and_loaded(method, family, play, make_data, tmp_path):
    run = play(method, family, make_data(family, (9, 8)), rounds=1)
    client = 1 if method.personal else None
    budget = fq.Budget(share=1.0 if isinstance(method, FedBN) else 0.5)
    run.export(tmp_path / "model.safetensors", budget, client=client)
    own, inputs = run.deploy(budget, client=client), torch.randn(5, 1, 4, 4)
    again = fq.load_model(tmp_path / "model.safetensors", net)
    assert not again.training
    torch.testing.assert_close(again(inputs), own.float()(inputs), rtol=0, atol=1e-6)


def test_a_file_describes_its_content(family, play, make_data, tmp_path):
    run = play(FedRolex(), family, make_data(family, (9, 8)))
    run.export(tmp_path / "model.safetensors", fq.Budget(params=400), norms="batch")
    with safe_open(
        tmp_path / "model.safetensors", "pt"
    ) as file:  # by the package that others read it with
        note = json.loads(file.metadata()["fedquilt"])
        assert set(file.keys()) == {
            "0.weight",
            "0.bias",
            "1.weight",
            "1.bias",
            "4.weight",
            "4.bias",
        }
    width = note["nets"][0]["widths"][0][1]
    assert note["budget"] == {"params": 400}
    assert note["share"] == width / 8
    assert note["nets"][0]["index"] == {"layer.0": [[1, 1 + width]]}  # the window of the last round
    told = {
        key: note[key]
        for key in ("method", "model", "input_shape", "input_dtype", "num_classes", "norms")
    }
    assert told == {
        "method": "fedrolex",
        "model": "Sequential",
        "input_shape": [1, 4, 4],
        "input_dtype": "float32",
        "num_classes": 4,
        "norms": "batch",
    }
    assert note["robustness"] is note["client"] is None


@pytest.mark.parametrize("kind", [fq.dual, fq.conditioned])
def test_the_robustness_of_the_file_is_reported(kind, make_data, tmp_path):
    """0 is used if no robustness was requested, and the result reports this default."""
    family = fq.trace(kind(net), torch.zeros(2, 1, 4, 4))
    run = fq.prepare(HeteroFL(), family, make_data(family, (9, 8)), fq.Fleet.of((1.0,), 2, 2))
    for asked, told in ((None, (0.0, True)), (0.0, (0.0, False)), (0.8, (0.8, False))):
        found = run.export(tmp_path / "model.safetensors", HALF, robustness=asked, force=True)
        assert (found.robustness, found.robustness_by_default) == told
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert json.loads(file.metadata()["fedquilt"])["robustness"] == told[0]


def test_a_model_without_dual_norms_has_no_robustness(family, make_data, tmp_path):
    run = fq.prepare(HeteroFL(), family, make_data(family, (9, 8)), fq.Fleet.of((1.0,), 2, 2))
    found = run.export(tmp_path / "model.safetensors", HALF)
    assert (found.robustness, found.robustness_by_default) == (None, False)


def test_nets_of_an_ensemble_are_written_side_by_side(family, play, make_data, tmp_path):
    run = play(SplitMix(base=0.25), family, make_data(family, (9, 8)), rounds=1)
    run.export(tmp_path / "model.safetensors", HALF)
    again = fq.load_model(tmp_path / "model.safetensors", net)
    assert isinstance(again, Ensemble)
    assert [one[0].out_channels for one in again.nets] == [2, 2]
    again.load_state_dict(run.deploy(HALF).state_dict())


@pytest.mark.parametrize("format", [ONNX, "pt2", "safetensors"])
@pytest.mark.parametrize("name", [pytest.param("vit", marks=pytest.mark.slow), "transformer_lm"])
def test_attention_and_tokens(name, format, make_data, tmp_path):
    spec = MODELS[name]
    options = {"depth": 1} if name == "transformer_lm" else {}
    family = fq.trace(
        lambda: spec.factory(**options), spec.example(), fixed=spec.fixed if not options else ()
    )
    run = fq.prepare(
        HeteroFL(), family, make_data(family, (4, 4), tests=4), fq.Fleet.of((1.0,), 2, 1)
    )
    assert run.export(tmp_path / f"model.{format}", HALF).max_difference < 1e-4


def test_wrong_requests_are_refused_before_any_work(family, play, make_data, tmp_path):
    run = play(LocalOnly(), family, make_data(family, (9, 8)), rounds=1)
    there = tmp_path / "there.pt2"
    there.write_text("mine")
    wrong = [
        ((there, HALF), {}, r"it is there already. --force writes over it"),
        ((tmp_path, HALF), {}, r"that is a folder. Name a file in it"),
        (
            (tmp_path / "model", HALF),
            {},
            r"does not say in which format. Let it end with .onnx, .pt2, .safetensors",
        ),
        (
            (tmp_path / "m", HALF),
            {"format": "onix"},
            r"no format named 'onix'. Did you mean 'onnx'",
        ),
        ((there / "model.pt2", HALF), {}, "cannot be written to"),
        ((tmp_path / "m.pt2", HALF), {}, "LocalOnly leaves its result on the clients"),
        ((tmp_path / "m.pt2", 0.5), {}, "export was given float '0.5' where a Budget belongs"),
    ]
    for args, options, told in wrong:
        with pytest.raises(ConfigError, match=told):
            run.export(*args, **options)
    assert there.read_text() == "mine"
    run.export(there, HALF, client=0, force=True)
    assert there.stat().st_size > 1000


def test_without_onnx_the_error_says_how_to_install_it(
    family, play, make_data, tmp_path, monkeypatch
):
    run = play(HeteroFL(), family, make_data(family, (9, 8)), rounds=1)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"needs onnxruntime, .*: pip install -e '\.\[export\]'"):
        run.export(tmp_path / "model.onnx", HALF)


def test_a_file_with_other_outputs_is_not_written(family, play, make_data, tmp_path, monkeypatch):
    run = play(HeteroFL(), family, make_data(family, (9, 8)), rounds=1)
    read = Pt2.read
    spoilt = {
        "has other outputs than torch for a batch of 2, by 0.5": lambda answer: (
            lambda x: answer(x) + 0.5
        ),
        r"returns outputs for a batch of 2 of \(2, 3\), and torch with \(2, 4\)": lambda answer: (
            lambda x: answer(x)[:, :3]
        ),
        "failed on a batch of 2: ZeroDivisionError": lambda answer: lambda x: 1 / 0,
        "other outputs than torch .*, by nan": lambda forward: lambda x: forward(x) * torch.nan,
    }
    for told, spoil in spoilt.items():
        monkeypatch.setattr(
            Pt2, "read", lambda self, data, model, spoil=spoil: spoil(read(self, data, model))
        )
        with pytest.raises(ExportError, match=told):
            run.export(tmp_path / "model.pt2", HALF)
    assert list(tmp_path.iterdir()) == []


class Fickle(nn.Module):
    """Looks at its numbers, which no recording can follow; tracing it does not either, in
    evaluation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.strange = False

    def forward(self, x):
        x = self.fc(x)
        return self.last(x * float(x.sum()) if self.strange and not self.training else x)


def test_modules_that_torch_cannot_export_are_reported(make_data, tmp_path):
    family = fq.trace(Fickle, torch.zeros(2, 4))
    family._module.strange = True
    run = fq.prepare(HeteroFL(), family, make_data(family, (4, 4)), fq.Fleet.of((1.0,), 2, 1))
    with pytest.raises(
        ExportError,
        match=r"Fickle cannot be recorded by torch.export.*safetensors takes every module",
    ):
        run.export(tmp_path / "model.pt2", HALF)
    assert run.export(tmp_path / "model.safetensors", HALF).bytes > 0


def test_files_that_are_no_models_are_refused(family, play, make_data, tmp_path):
    (tmp_path / "text").write_text("no model at all")
    with pytest.raises(RecordError, match=r"cannot be read as safetensors: its "):
        fq.load_model(tmp_path / "text", net)
    with pytest.raises(RecordError, match="nothing cannot be read: No such file"):
        fq.load_model(tmp_path / "nothing", net)
    run = play(HeteroFL(), family, make_data(family, (9, 8)), rounds=1, out=tmp_path / "run")
    with pytest.raises(RecordError, match=r"do not say which nets.*fedquilt\.load"):
        fq.load_model(next((tmp_path / "run" / "checkpoint").glob("0*1.safetensors")), net)
    run.export(tmp_path / "model.safetensors", HALF)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordError, match=r"cannot be read as safetensors: its "):
        fq.load_model(tmp_path / "half", net)
    with pytest.raises(
        ConfigError,
        match=r"was cut from a Sequential; the factory made another Linear.*\n.*0.weight",
    ):
        fq.load_model(tmp_path / "model.safetensors", lambda: nn.Linear(3, 4))
