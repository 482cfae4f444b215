"""Pre-training by progressive shrinking (RaFL, equation 1), and files of supernets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.errors import ConfigError, DataError, DivergenceError, RecordError
from fedquilt.storage.files import Blob
from fedquilt.supernet import (
    ResNet50Space,
    Supernet,
    SupernetData,
    SupernetTraining,
    TinySpace,
    import_weights,
    load_supernet,
    member_accuracy,
    rotations,
    save_supernet,
    train_supernet,
)
from fedquilt.supernet.phases import ShrinkingPhase, phases
from fedquilt.supernet.training import CHECKPOINT, _Trainer

QUICK = SupernetTraining(epochs=1, phase_epochs=1, batch_size=16, calibration=16)


def data(count: int = 8) -> SupernetData:
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return SupernetData(images)


def trainer(settings: SupernetTraining = QUICK) -> _Trainer:
    samples = data()
    return _Trainer(samples.fit(TinySpace()), samples, settings, torch.device("cpu"))


def state(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


# --- data ---------------------------------------------------------------------------------------


def test_rotations_by_hand():
    images = torch.tensor([[[[1, 2], [3, 4]]]])
    turned, labels = rotations(images)
    expected = [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]
    assert turned[:, 0].tolist() == expected
    assert labels.tolist() == [0, 1, 2, 3]


def test_public_images_are_rotated_and_training_images_have_classes():
    pool = fq.data.digits(public=0.25)
    public = SupernetData.of_pool(pool)
    assert pool.public is not None
    assert torch.equal(public.images, pool.public)
    assert public.labels is None
    assert public.num_classes == 4
    own = SupernetData.of_pool(pool, "own")
    assert torch.equal(own.images, pool.inputs)
    assert own.num_classes == 10


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (torch.zeros(4, 1, 8, 6), r"square images .* found samples of shape \(4, 1, 8, 6\)"),
        (torch.zeros(4, 64), r"found samples of shape \(4, 64\)"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), "found images of torch.uint8"),
    ],
)
def test_samples_that_are_no_square_images_are_refused(images, said):
    with pytest.raises(DataError, match=said):
        SupernetData(images)


def test_images_of_another_shape_are_refused():
    images = torch.zeros(4, 3, 32, 32)
    with pytest.raises(DataError, match=r"takes images of shape \(1, 8, 8\); found \(3, 32, 32\)"):
        train_supernet(TinySpace(), SupernetData(images), QUICK)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"epochs = 0, lr = -1 was asked for"):
        SupernetTraining(epochs=0, lr=-1)


# --- phases -------------------------------------------------------------------------------------


def test_phases_open_kernels_then_depths_then_expansions_then_widths():
    tiny = [(phase.kind, phase.num_options, phase.nets) for phase in phases(TinySpace())]
    assert tiny == [("largest", 1, 1), ("kernels", 2, 1), ("depths", 2, 2), ("expansions", 2, 4)]
    resnet = [(phase.kind, phase.num_options) for phase in phases(ResNet50Space())]
    steps = [(kind, count) for kind in ("depths", "expansions", "widths") for count in (2, 3)]
    assert resnet == [("largest", 1), *steps]


def test_a_phase_draws_only_from_open_options():
    space = TinySpace()
    draw = torch.Generator().manual_seed(0)
    drawn = [ShrinkingPhase("depths", 2).sample(space, draw) for _ in range(50)]
    assert {config.depths for config in drawn} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    for config in drawn:
        for choice, value in zip(space.choices, space.flat(config), strict=True):
            if choice.kind == "expansions" and space.is_kept(choice, config):
                assert value == 4
    assert ShrinkingPhase("largest", 1).sample(space, draw) == space.largest


def test_shrinking_never_changes_frozen_weights():
    """Transforms are frozen before the kernel phase, statistics and teacher while nets shrink."""
    run = trainer(replace(QUICK, weight_decay=0.1))
    run.supernet.train()
    started = state(run.supernet)
    for number, phase in enumerate(run.phases):
        run.phase, run.epoch = number, 0
        run._begin(phase)
        before, buffers = state(run.supernet), dict(run.supernet.net.named_buffers())
        teacher = None if run.teacher is None else state(run.teacher)
        run._train_epoch(phase)
        after = state(run.supernet)
        changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert changed
        if phase.kind == "largest":
            assert not [name for name in changed if name.startswith("transforms")]
            assert all(
                torch.equal(after[name], started[name]) for name in after if "transforms" in name
            )
        else:
            assert not [name for name in changed if name.removeprefix("net.") in buffers]
            assert [name for name in changed if name.startswith("transforms")]
            assert run.teacher is not None
            assert teacher is not None
            assert same(state(run.teacher), teacher)
        run._end(phase)


def test_one_step_is_equation_1():
    """The update is that of the mean loss of the sampled nets: labels and KL from the teacher."""
    run = trainer(replace(QUICK, momentum=0.0, weight_decay=0.0, distillation=0.5))
    run._end(run.phases[0])
    run.phase = 2
    phase = run.phases[2]
    run._begin(phase)
    run.supernet.train()
    images, labels = run.data.batch(torch.arange(4))
    before = state(run.supernet)
    draw = run._generator(2, 0)
    configs = [phase.sample(run.space, draw) for _ in range(2)]
    reference = Supernet(run.space)
    reference.load_state_dict(before)
    reference.train()
    assert run.teacher is not None
    target = F.softmax(run.teacher(images), 1)
    loss = torch.zeros(())
    for config in configs:
        predicted = F.log_softmax(reference.run(images, config), 1)
        divergence = (target * (target.log() - predicted)).sum(1).mean()
        loss = loss + (F.nll_loss(predicted, labels) + 0.5 * divergence) / 2
    loss.backward()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1
    sums = run._step(phase, images, labels, 0)
    assert sums[0].item() == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in reference.named_parameters():
        step = torch.zeros(()) if parameter.grad is None else 0.1 * parameter.grad
        torch.testing.assert_close(
            state(run.supernet)[name], before[name] - step, rtol=1e-4, atol=1e-6
        )


def test_augmentation_shifts_and_mirrors():
    run = trainer(replace(QUICK, crop=1, flip=True))
    images = run.data.images
    moved = run._augmented(images, 0)
    assert moved.shape == images.shape
    assert not torch.equal(moved, images)
    assert torch.equal(moved, run._augmented(images, 0))
    padded = F.pad(images, (1,) * 4)
    for source, found in zip(padded, moved, strict=True):
        windows = [source[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
        assert any(
            torch.equal(found, window) or torch.equal(found, window.flip(2)) for window in windows
        )


# --- training, resumed --------------------------------------------------------------------------


def test_training_resumed_equals_training_in_one_go(tmp_path):
    class KilledError(Exception):
        pass

    settings = replace(QUICK, epochs=2, crop=1, seed=3)
    whole = train_supernet(TinySpace(), data(), settings)
    total = 5
    for stop in (1, 2, 4):
        out = tmp_path / f"{stop}.safetensors"

        def kill(progress, stop=stop):
            assert progress.total == total
            if progress.done == stop:
                raise KilledError

        with pytest.raises(KilledError):
            train_supernet(TinySpace(), data(), settings, out=out, watch=kill)
        assert not out.exists()
        done = []
        resumed = train_supernet(
            TinySpace(),
            data(),
            settings,
            out=out,
            resume=True,
            watch=lambda p, done=done: done.append(p.done),
        )
        assert done == list(range(stop + 1, total + 1))
        assert same(state(resumed), state(whole))
        assert same(state(load_supernet(out)), state(whole))
        assert not Path(f"{out}{CHECKPOINT}").exists()


def test_training_in_bf16_keeps_weights_in_float32():
    supernet = train_supernet(TinySpace(), data(), replace(QUICK, precision="bf16"))
    assert {value.dtype for value in supernet.parameters()} == {torch.float32}
    assert all(value.isfinite().all() for value in supernet.parameters())


@pytest.mark.gpu
def test_training_on_a_gpu_is_that_on_a_cpu_up_to_rounding():
    on_cpu = train_supernet(TinySpace(), data(), replace(QUICK, lr=1e-3, phase_lr=1e-3))
    on_gpu = train_supernet(
        TinySpace(), data(), replace(QUICK, lr=1e-3, phase_lr=1e-3), device="cuda"
    )
    for name, value in on_gpu.state_dict().items():
        torch.testing.assert_close(value.cpu(), on_cpu.state_dict()[name], rtol=1e-2, atol=1e-3)


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    run = trainer()
    path = tmp_path / f"net{CHECKPOINT}"
    run.save(path)
    with pytest.raises(RecordError, match=r"another training: it has lr = 0.05"):
        trainer(replace(QUICK, lr=0.1)).restore(path)
    other = replace(run.space, width_multiplier=2.0)
    with pytest.raises(
        RecordError, match=r"with width_multiplier = 1.0; 'tiny' with width_multiplier = 2.0"
    ):
        _Trainer(other, data(), QUICK, torch.device("cpu")).restore(path)
    with pytest.raises(
        RecordError, match="kind 'training' instead of 'supernet'; continue it with --resume"
    ):
        load_supernet(path)


def test_a_loss_that_is_not_finite_stops_the_training():
    with pytest.raises(DivergenceError, match=r"phase largest, epoch 1"):
        train_supernet(TinySpace(), data(), replace(QUICK, lr=1e30))


@pytest.mark.slow
def test_shrinking_makes_small_members_good():
    pool = fq.data.digits(public=0.5)
    public = SupernetData.of_pool(pool)
    images, labels = rotations(pool.test_inputs)
    calibration = rotations(public.images[:200])[0]
    found = []
    for phase_epochs in (0, 8):
        settings = SupernetTraining(epochs=8, phase_epochs=phase_epochs, batch_size=128)
        supernet = train_supernet(TinySpace(), public, settings)
        found.append(
            member_accuracy(supernet, supernet.space.smallest, calibration, images, labels)
        )
    assert found[0] < 0.6 < 0.75 < found[1]


# --- files --------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "net.safetensors"
    save_supernet(Supernet(TinySpace(num_classes=4), seed=5), path, note="a test")
    return path


def test_a_stored_supernet_is_read_bit_for_bit(stored):
    supernet = load_supernet(stored)
    assert supernet.space == TinySpace(num_classes=4)
    assert same(state(supernet), state(Supernet(TinySpace(num_classes=4), seed=5)))
    assert load_supernet(stored, TinySpace()).space.num_classes == 4


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_refused(stored, share):
    whole = stored.read_bytes()
    stored.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(RecordError, match=r"net\.safetensors cannot be read as safetensors: its "):
        load_supernet(stored)


@pytest.mark.parametrize("place", [0.01, 0.15, 0.5, 0.99])
def test_a_damaged_file_is_refused(stored, place):
    damaged = bytearray(stored.read_bytes())
    damaged[int(place * len(damaged))] ^= 1
    stored.write_bytes(damaged)
    with pytest.raises(RecordError):
        load_supernet(stored)


def test_a_file_of_another_version_is_refused(stored):
    data = stored.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    text = data[8:begin].replace(b'\\"version\\": 1', b'\\"version\\": 9')
    stored.write_bytes(data[:8] + text + data[begin:])
    assert text != data[8:begin]
    with pytest.raises(
        RecordError, match=r"version 9; this fedquilt reads 'fedquilt-supernet', version 1"
    ):
        load_supernet(stored)


def test_a_file_of_another_space_is_refused(stored):
    with pytest.raises(RecordError, match=r"of the space 'tiny'.*; 'resnet50'.* was asked for"):
        load_supernet(stored, ResNet50Space())
    with pytest.raises(
        RecordError, match=r"width_multiplier = 1.0; 'tiny' with width_multiplier = 2.0"
    ):
        load_supernet(stored, TinySpace(width_multiplier=2.0))


def test_files_that_are_no_supernets_are_refused(tmp_path):
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        load_supernet(tmp_path / "missing")
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(2)}, other)
    with pytest.raises(RecordError, match="fedquilt did not write it: its metadata has no note"):
        load_supernet(other)
    other.write_bytes(
        b"".join(bytes(chunk) for chunk in Blob.of({"a": torch.zeros(2)}, [1]).chunks())
    )
    with pytest.raises(RecordError, match="is no supernet file"):
        load_supernet(other)
    note = {"format": "fedquilt-supernet", "version": 1, "kind": "supernet"}
    for space in (3, {}, {"name": 3, "fields": {}}, {"name": "tiny", "fields": []}):
        blob = Blob.sealed({"a": torch.zeros(2)}, {**note, "space": space})
        other.write_bytes(b"".join(bytes(chunk) for chunk in blob.chunks()))
        with pytest.raises(RecordError, match="does not say which space it is of"):
            load_supernet(other)
    other.write_text(json.dumps({"a": 1}))
    with pytest.raises(RecordError, match="cannot be read as safetensors: its header should have"):
        load_supernet(other)


# --- weights of the largest net -----------------------------------------------------------------


def largest_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    space = TinySpace(num_classes=7)
    return space.member(space.largest).state_dict()


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
def test_weights_of_the_largest_net_are_imported(tmp_path, ending):
    weights = largest_weights()
    path = tmp_path / f"weights{ending}"
    without_counts = {name: value for name, value in weights.items() if "num_batches" not in name}
    if ending == ".pth":
        torch.save(without_counts, path)
    else:
        save_file(without_counts, path)
    supernet = import_weights(TinySpace(), path)
    assert supernet.space.num_classes == 7
    assert same(state(supernet.net), dict(weights))
    assert all(torch.equal(matrix, torch.eye(9)) for matrix in supernet.transforms.values())


def test_weights_with_other_names_or_shapes_are_refused(tmp_path):
    weights = largest_weights()
    weights["stem.extra"] = weights.pop("stem.conv.weight")
    weights["last.conv.weight"] = torch.zeros(3, 3, 1, 1)
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    with pytest.raises(RecordError) as caught:
        import_weights(TinySpace(), path)
    said = str(caught.value)
    assert "1 names are missing (stem.conv.weight)" in said
    assert "1 names are unexpected (stem.extra)" in said
    assert "last.conv.weight has shape (3, 3, 1, 1) instead of (32, 16, 1, 1)" in said
    assert "fedquilt supernet show tiny --names" in said


def test_pickled_objects_are_never_run(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"stem.conv.weight": Path("anything")}, path)
    with pytest.raises(RecordError, match="cannot be read as weights"):
        import_weights(TinySpace(), path)
    torch.save([torch.zeros(1)], path)
    with pytest.raises(RecordError, match="has no state dict"):
        import_weights(TinySpace(), path)
    with pytest.raises(RecordError, match=r"a \.safetensors, \.pt or \.pth file would work"):
        import_weights(TinySpace(), tmp_path / "weights.bin")
