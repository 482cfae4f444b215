"""Pre-training of a supernet (RaFL, equation 1) by progressive shrinking.

Equation 1 minimises the loss over all members. The largest net is trained first. Then phases open
one kind of choice after the other: kernel, depth, expansion, width (Cai et al., ICLR 2020). Every
step adds up the gradients of a few sampled members. Each learns from the labels and from the
largest net as it was before shrinking.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedquilt import noise
from fedquilt.errors import ConfigError, DivergenceError, RecordError
from fedquilt.hardware.device import device_of
from fedquilt.hardware.precision import Precision, computing
from fedquilt.supernet.elastic import Supernet, recalibrate
from fedquilt.supernet.images import NUM_ROTATIONS, SupernetData
from fedquilt.supernet.phases import ShrinkingPhase, phases
from fedquilt.supernet.space import Config, Space
from fedquilt.supernet.store import read_tensors, save_supernet, space_of, write_tensors

CHECKPOINT = ".training"  # Suffix that a checkpoint adds to the name of the final file.


@dataclass(frozen=True)
class SupernetTraining:
    """Settings of the pre-training of a supernet."""

    epochs: int = 20  # Epochs in which the largest net is trained alone.
    phase_epochs: int = 10  # Epochs of each shrinking phase. 0 trains the largest net alone.
    batch_size: int = 256  # Samples per step. A rotated image counts as four.
    lr: float = 0.05  # Learning rate of the largest net at the start. It falls to 0 (cosine).
    phase_lr: float = 0.02  # Learning rate at the start of each shrinking phase.
    momentum: float = 0.9  # Momentum of SGD (Nesterov).
    weight_decay: float = 3e-5  # Weight decay. Norms, biases and kernel transforms have none.
    distillation: float = 1.0  # Weight of KL from the largest net. 0 trains on labels alone.
    crop: int = 0  # Pixels by which images are shifted at random. 0 shifts nothing.
    flip: bool = False  # True mirrors half of the images at random.
    calibration: int = 2048  # Samples on which norm statistics are measured after each phase.
    precision: Precision = "fp32"  # Precision of products: fp32, tf32 or bf16.
    seed: int = 0  # Random seed of weights, order, sampled members and augmentation.

    def __post_init__(self) -> None:
        positive = {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "calibration": self.calibration,
        }
        invalid: dict[str, float] = {name: value for name, value in positive.items() if value < 1}
        rates = {"lr": self.lr, "phase_lr": self.phase_lr}
        invalid |= {name: value for name, value in rates.items() if not 0 < value < math.inf}
        nonnegative = {
            "phase_epochs": self.phase_epochs,
            "weight_decay": self.weight_decay,
            "crop": self.crop,
        }
        invalid |= {name: value for name, value in nonnegative.items() if not value >= 0}
        if invalid:
            raise ConfigError(
                f"{', '.join(f'{name} = {value}' for name, value in invalid.items())} was asked "
                "for; epochs, batch_size, calibration and rates must be above 0, the others at "
                "least 0.",
            )


@dataclass(frozen=True)
class SupernetProgress:
    """The state of a training after one epoch."""

    phase: str  # Name of the phase.
    epoch: int  # Epochs of this phase that are done.
    done: int  # Epochs of all phases that are done.
    total: int  # Epochs of all phases.
    loss: float  # Mean loss of the epoch.
    accuracy: float  # Mean share of correct labels in the epoch's training batches.


Watch = Callable[[SupernetProgress], None]


def train_supernet(
    space: Space,
    data: SupernetData,
    settings: SupernetTraining = SupernetTraining(),
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    watch: Watch | None = None,
) -> Supernet:
    """Train a supernet by progressive shrinking (equation 1).

    The result depends on space, data, settings and the kind of device alone. A training that was
    killed and resumed ends with the same weights as an uninterrupted one. On a GPU this requires
    `torch.use_deterministic_algorithms(True)`.

    Args:
        space: Search space. Its number of classes is replaced by that of the data.
        data: Images, with labels or to be rotated.
        settings: Epochs, rates and the random seed.
        out: File for the trained supernet. A checkpoint is kept beside it after every epoch. None
            writes nothing.
        resume: True continues from the checkpoint beside `out`, if there is one.
        device: Device to train on, such as "cpu" or "cuda".
        watch: Function that is called after every epoch. None: no calls.

    Returns:
        The supernet in evaluation mode, on `device`.

    Raises:
        DataError: The images do not fit the space.
        RecordError: A checkpoint is damaged, or of another training.
        DivergenceError: The loss is no longer finite.
    """
    trainer = _Trainer(data.fit(space), data, settings, device_of(device))
    checkpoint = None if out is None else Path(f"{out}{CHECKPOINT}")
    if resume and checkpoint is None:
        raise ConfigError("resume was asked for without a file; give the file as `out`.")
    if resume and checkpoint is not None and checkpoint.exists():
        trainer.restore(checkpoint)
    for progress in trainer.epochs():
        if checkpoint is not None:
            trainer.save(checkpoint)
        if watch is not None:
            watch(progress)
    supernet = trainer.supernet.eval()
    if out is not None and checkpoint is not None:
        save_supernet(supernet, out, training=trainer.fingerprint)
        with suppress(OSError):
            checkpoint.unlink(missing_ok=True)
    return supernet


class _Trainer:
    """State of a training between two epochs, which a checkpoint stores."""

    def __init__(
        self,
        space: Space,
        data: SupernetData,
        settings: SupernetTraining,
        device: torch.device,
    ) -> None:
        self.space = space
        self.settings = settings
        self.device = device
        self.fingerprint = {
            "settings": asdict(settings),
            "labels": "rotations" if data.labels is None else "own",
            "images": len(data.images),
            "fingerprint": data.fingerprint,
        }
        self.data = data.to(device)
        self.supernet = Supernet(space, settings.seed).to(device)
        self.phases = [phase for phase in phases(space) if self._num_epochs(phase)]
        self.phase = 0  # Index of the current phase. The number of phases if all are done.
        self.epoch = 0  # Epochs of the current phase that are done.
        self.teacher: nn.Module | None = None  # The largest net as it was before shrinking.
        self.optimizer = self._optimizer(self.phases[0])

    def _num_epochs(self, phase: ShrinkingPhase) -> int:
        return self.settings.epochs if phase.kind == "largest" else self.settings.phase_epochs

    def epochs(self) -> Iterator[SupernetProgress]:
        """Train epoch by epoch, from the current phase and epoch on, and yield each one's progress.

        When an epoch is yielded, the trainer has its state after this epoch, which `save` can
        store.
        """
        counts = [self._num_epochs(phase) for phase in self.phases]
        while self.phase < len(self.phases):
            phase = self.phases[self.phase]
            if self.epoch == 0:
                self._begin(phase)
            loss, accuracy = self._train_epoch(phase)
            self.epoch += 1
            done = sum(counts[: self.phase]) + self.epoch
            progress = SupernetProgress(phase.name, self.epoch, done, sum(counts), loss, accuracy)
            if self.epoch == self._num_epochs(phase):
                self._end(phase)
                self.phase += 1
                self.epoch = 0
            yield progress

    def _begin(self, phase: ShrinkingPhase) -> None:
        first_of_kind = self.phases[self.phase - 1].kind != phase.kind
        if phase.kind == "expansions" and first_of_kind:
            self.supernet.sort_channels(("expansion",))
        if phase.kind == "widths" and first_of_kind:
            self.supernet.sort_channels(("width",))
        self.optimizer = self._optimizer(phase)

    def _end(self, phase: ShrinkingPhase) -> None:
        """Measure the largest net's norm statistics at the end of a phase.

        After the phase "largest" a frozen copy of that net is kept as the teacher of later phases.
        """
        rows = torch.arange(
            min(len(self.data.images), self.settings.calibration // self._per_image),
        )
        batches = torch.split(rows, self._rows_per_step)
        with computing(self.settings.precision, self.device, search=False):
            recalibrate(self.supernet.net, (self.data.batch(part)[0] for part in batches))
        if phase.kind == "largest":
            self.teacher = _frozen(self.supernet.net)

    @property
    def _per_image(self) -> int:
        return NUM_ROTATIONS if self.data.labels is None else 1

    @property
    def _rows_per_step(self) -> int:
        """Return the number of images of a step, before rotation: at least two, which norms need.

        It is `batch_size`, or a quarter of it if images are rotated.
        """
        return max(2, self.settings.batch_size // self._per_image)

    def _optimizer(self, phase: ShrinkingPhase) -> torch.optim.SGD:
        """Return a new SGD optimizer over the weights that a phase trains, without momentum yet.

        The phase "largest" does not train kernel transforms. Vectors and transforms have no weight
        decay. The learning rate is 0 until `_train_epoch` sets it.
        """
        supernet = self.supernet
        matrices = [p for p in supernet.net.parameters() if p.dim() > 1]
        undecayed = [p for p in supernet.net.parameters() if p.dim() <= 1]
        if phase.trains_transforms:
            undecayed += list(supernet.transforms.values())
        decay = self.settings.weight_decay
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        momentum = self.settings.momentum
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=momentum > 0)

    def _generator(self, stream: noise.Stream, *numbers: int) -> torch.Generator:
        seed = noise.key(self.settings.seed, stream, self.phase, self.epoch, *numbers)
        return torch.Generator().manual_seed(seed)

    def _train_epoch(self, phase: ShrinkingPhase) -> tuple[float, float]:
        """Train one epoch of a phase on all images, in a random order.

        The learning rate falls from that of the phase to 0 over all epochs of the phase (cosine).

        Returns:
            Mean loss and mean accuracy over the batches.

        Raises:
            DivergenceError: The mean loss is not finite.
        """
        settings = self.settings
        order = torch.randperm(
            len(self.data.images), generator=self._generator(noise.Stream.SUPERNET_ORDER)
        )
        batches = [rows for rows in torch.split(order, self._rows_per_step) if len(rows) > 1]
        start = settings.lr if phase.kind == "largest" else settings.phase_lr
        total = len(batches) * self._num_epochs(phase)
        sums = torch.zeros(2, device=self.device)
        self.supernet.train()
        # Each step trains nets of other shapes.
        with computing(settings.precision, self.device, search=False):
            for step, rows in enumerate(batches):
                passed = (self.epoch * len(batches) + step) / total
                for group in self.optimizer.param_groups:
                    group["lr"] = start * 0.5 * (1 + math.cos(math.pi * passed))
                images, labels = self.data.batch(rows)
                images = self._augmented(images, step)
                sums += self._step(phase, images, labels, step)
        loss, accuracy = (sums / len(batches)).tolist()
        if not math.isfinite(loss):
            raise DivergenceError(
                f"The loss of the supernet is {loss} in phase {phase.name}, epoch "
                f"{self.epoch + 1}. A lower rate may help. The last checkpoint is intact.",
            )
        return loss, accuracy

    def _step(self, phase: ShrinkingPhase, images: Tensor, labels: Tensor, step: int) -> Tensor:
        """Update the shared weights once, by the mean gradient of members that the phase samples.

        In shrinking phases members also learn from the teacher, if `distillation` is above 0.

        Args:
            phase: Phase whose open options are sampled.
            images: (sample, channel, height, width) Augmented images.
            labels: (sample,) Classes.
            step: Number of the step in the epoch, for the random numbers.

        Returns:
            (2,) Mean loss and mean accuracy of the sampled members.
        """
        generator = self._generator(noise.Stream.SUPERNET_CONFIG, step)
        targets = None
        if phase.kind != "largest" and self.teacher is not None and self.settings.distillation:
            with torch.no_grad():
                targets = F.log_softmax(self.teacher(images).float(), dim=1)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(2, device=self.device)
        for _ in range(phase.nets):
            config = phase.sample(self.space, generator)
            logits = self._forward(phase, images, config).float()
            loss = F.cross_entropy(logits, labels)
            if targets is not None:
                student = F.log_softmax(logits, dim=1)
                divergence = F.kl_div(student, targets, reduction="batchmean", log_target=True)
                loss = loss + self.settings.distillation * divergence
            loss = loss / phase.nets
            loss.backward()  # type: ignore[no-untyped-call]
            correct = (logits.argmax(1) == labels).float().mean()
            sums += torch.stack([loss.detach(), correct / phase.nets])
        self.optimizer.step()
        return sums

    def _forward(self, phase: ShrinkingPhase, images: Tensor, config: Config) -> Tensor:
        """Return the logits of a member, (sample, class), in training mode.

        The phase "largest" runs the largest net and updates its running statistics. In a shrinking
        phase no member updates them.

        Args:
            phase: Current phase.
            images: (sample, channel, height, width) Images.
            config: The member. It has no effect in the phase "largest".
        """
        if phase.kind == "largest":
            logits: Tensor = self.supernet(images)
            return logits
        return self.supernet.run(images, config)

    def _augmented(self, images: Tensor, step: int) -> Tensor:
        """Mirror and shift each image at random, according to `flip` and `crop` of the settings.

        The shape stays the same, and the border is filled with 0. With neither setting the images
        are returned as they are.

        Args:
            images: (sample, channel, height, width) Images.
            step: Number of the step in the epoch, for the random numbers.
        """
        generator = self._generator(noise.Stream.SUPERNET_AUGMENTATION, step)
        crop, size = self.settings.crop, images.shape[-1]
        if self.settings.flip:
            mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
            images = torch.where(mirrored.to(images.device), images.flip(3), images)
        if crop:
            offsets = torch.randint(0, 2 * crop + 1, (2, len(images), 1), generator=generator)
            rows, columns = (offsets + torch.arange(size)).to(images.device)  # (sample, size) each
            padded = F.pad(images, (crop,) * 4)
            samples = torch.arange(len(images), device=images.device)[:, None, None]
            # The indices are (sample, size, size), and the channels stay behind them.
            images = padded.movedim(1, 3)[samples, rows[:, :, None], columns[:, None, :]].movedim(
                3,
                1,
            )
            images = images.contiguous()
        return images

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint with everything that the training needs to resume.

        It has the supernet, the teacher, the momentum buffers, and the number of the phase and
        epoch.
        """
        tensors = {f"supernet/{name}": value for name, value in self.supernet.state_dict().items()}
        if self.teacher is not None:
            teacher = self.teacher.state_dict()
            tensors |= {f"teacher/{name}": value for name, value in teacher.items()}
        for name, parameter in self.supernet.named_parameters():
            momentum = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum/{name}"] = momentum
        note = {"training": self.fingerprint, "phase": self.phase, "epoch": self.epoch}
        write_tensors(path, "training", self.space, tensors, note)

    def restore(self, path: Path) -> None:
        """Read a checkpoint, and continue from its phase and epoch.

        Raises:
            RecordError: The checkpoint is damaged, or belongs to another training.
        """
        note, tensors = read_tensors(path, "training")
        space_of(note["space"], path, self.space)
        self._check_identity(note["training"], path)
        self.phase, self.epoch = note["phase"], note["epoch"]
        self.supernet.load_state_dict(_part(tensors, "supernet/"))
        teacher = _part(tensors, "teacher/")
        if teacher:
            self.teacher = _frozen(self.supernet.net)
            self.teacher.load_state_dict(teacher)
        if self.phase < len(self.phases):
            self.optimizer = self._optimizer(self.phases[self.phase])
        parameters = dict(self.supernet.named_parameters())
        for name, momentum in _part(tensors, "momentum/").items():
            self.optimizer.state[parameters[name]]["momentum_buffer"] = momentum.to(self.device)

    def _check_identity(self, stored: Mapping[str, Any], path: Path) -> None:
        expected = json.loads(json.dumps(self.fingerprint))
        expected, stored = (
            {**fingerprint, **fingerprint["settings"]} for fingerprint in (expected, stored)
        )
        keys = [key for key in expected if key != "settings"]
        differing = [
            f"{key} = {stored.get(key)}" for key in keys if stored.get(key) != expected[key]
        ]
        if differing:
            raise RecordError(
                f"{path} is the checkpoint of another training: it has {', '.join(differing)}. "
                "Resume with the same settings and data, or delete it to start anew.",
            )


def _frozen(net: nn.Module) -> nn.Module:
    return deepcopy(net).eval().requires_grad_(False)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors[name] for name in names}
