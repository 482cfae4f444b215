"""The runs whose records are stored, in two tables: `RUNS` and `FOLDERS`.

All are tiny: ten clients, handwritten digits, float64, the sequential engine, two or three rounds.
Initial weights come from fedquilt's own hash, because torch's generators round differently on
other CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt import noise
from fedquilt.family.variants import VariantSource
from fedquilt.fleets.availability import Diurnal
from fedquilt.fleets.presets import net_budgets
from fedquilt.methods import METHODS, Method
from fedquilt.methods.dsfl import DSFL
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.fedbn import FedBN
from fedquilt.methods.fednova import FedNova
from fedquilt.methods.fedprox import FedProx
from fedquilt.methods.fedrescue import FedResCuE
from fedquilt.methods.fedrolex import FedRolex
from fedquilt.methods.heterofl import HeteroFL
from fedquilt.methods.progfed import ProgFed
from fedquilt.methods.rafl import RaFL
from fedquilt.methods.sheterofl import SHeteroFL
from fedquilt.methods.splitmix import SplitMix
from fedquilt.models import MLP, TransformerLM, tiny_resnet, unet2d
from fedquilt.round.federation import World
from fedquilt.round.server_optimizers import ServerAdam, ServerMomentum
from fedquilt.round.training.learner import Learner
from fedquilt.tasks import Segmentation, Task
from fedquilt.terms import Job
from tests.conftest import CUTTING, few_server_steps

# --- models --------------------------------------------------------------------------------------


def hashed(module: nn.Module, seed: int | None = None) -> nn.Module:
    """Fill all matrices and kernels from fedquilt's hash, and set all biases to zero."""
    with torch.no_grad():
        for place, (name, weight) in enumerate(module.named_parameters()):
            if weight.dim() > 1:
                key = noise.key(place) if seed is None else noise.key(place, seed)
                drawn = noise.uniform(torch.tensor(key), weight.shape, torch.float64)
                weight.copy_((2 * drawn - 1) / weight[0].numel() ** 0.5)
            elif name.endswith("bias"):
                weight.zero_()
    return module


def residual_net() -> nn.Module:
    """Return the demo's residual net, which has batch norm."""
    return hashed(tiny_resnet(num_classes=10))


def seeded_net() -> nn.Module:
    """Return the residual net with weights that depend on the seed that the family sets."""
    return hashed(tiny_resnet(num_classes=10), torch.initial_seed())


def small_net(channels: int) -> nn.Module:
    """Return two convolutions with batch norms, one of several architectures that a union has."""
    layers = [
        nn.Conv2d(1, channels, 3, 2, 1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3),
    ]
    return hashed(
        nn.Sequential(
            *layers, nn.BatchNorm2d(channels), nn.ReLU(), nn.Flatten(), nn.Linear(4 * channels, 10)
        )
    )


def dual_net() -> nn.Module:
    """Return the seeded residual net with dual norms."""
    return fq.dual(seeded_net())


def conditioned_net() -> nn.Module:
    """Return the residual net with norms that a robustness conditions."""
    return hashed(fq.conditioned(tiny_resnet(num_classes=10), codes=8))


@dataclass(frozen=True)
class HashedStages(VariantSource):
    """A net that grows in the stages that it declares, with temporary heads from fedquilt's hash
    too.
    """

    net: Callable[[], nn.Module] = residual_net

    def resolve(
        self, example_inputs: tuple[Any, ...], class_dim: int | None = None
    ) -> Callable[[], nn.Module]:
        made = fq.with_stages(self.net).resolve(example_inputs, class_dim)
        assert not isinstance(made, nn.Module)
        return lambda: hashed(made())


def language_model() -> nn.Module:
    """Return the built-in transformer in a small size, for the 16 tokens of `texts`."""
    return hashed(
        TransformerLM(
            16, max_length=6, width=16, depth=1, heads=2, head_dim=4, hidden=24, dropout=0.1
        )
    )


# --- data ---------------------------------------------------------------------------------------


def digits(labels: int = 6) -> fq.FederatedData:
    """Partition the digits by label, so that each of ten clients has as many classes."""
    return fq.data.digits().partition(10, fq.data.Labels(labels), seed=1)


def unequal_digits() -> fq.FederatedData:
    """Partition the digits by a Dirichlet distribution, so that clients take unequal numbers of
    steps.
    """
    return fq.data.digits().partition(10, fq.data.Dirichlet(0.5), seed=1)


def public_digits() -> fq.FederatedData:
    """Partition the digits by label, and make a tenth of them public, without their labels."""
    return fq.data.digits(public=0.1).partition(10, fq.data.Labels(6), seed=1)


def texts() -> fq.FederatedData:
    """Write texts of a small grammar for ten users, and read them for next-word prediction."""
    users = {f"user{user}": [_sentence(user, line) for line in range(16)] for user in range(10)}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(users))
        return fq.data.text(file, vocabulary=12, length=6).partition()


def _sentence(user: int, line: int) -> str:
    """Return four to nine words; each follows from the one before, except for every fifth."""
    word = noise.key(1, user, line) % 12
    words = [word]
    for place in range(3 + noise.key(2, user, line) % 6):
        key = noise.key(3, user, line, place)
        word = key // 5 % 12 if key % 5 == 0 else (5 * word + 1 + user % 2) % 12
        words.append(word)
    return " ".join(f"w{word}" for word in words)


# --- a run --------------------------------------------------------------------------------------

FOUR_BITS = fq.Link(codec=fq.links.Codec(bits=4, feedback=True))
SHARES = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Case:
    """A run with a small learning rate, so that training does not magnify differences in rounding.

    Args:
        method: Its optimizer and batch size are replaced by plain ones.
        local: Other local settings that are changed, by field name.
        fleet: Options of `Fleet.of` besides shares and numbers of clients.
    """

    method: Method
    local: Mapping[str, Any] = field(default_factory=dict)
    net: Callable[[], nn.Module] | VariantSource = residual_net
    data: Callable[[], fq.FederatedData] = digits
    shares: tuple[Any, ...] = SHARES
    fleet: Mapping[str, Any] = field(default_factory=dict)
    link: fq.Link = fq.Link()
    evaluation: fq.Evaluation = fq.Evaluation()
    rounds: int = 2
    task: Task | None = None  # None: found from the data
    # Nets of a union by name, in the place of `net`; the first is the knowledge net, and clients
    # train pairs.
    nets: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)

    def play(self, out: Path | None = None) -> fq.Run:
        """Train, and record the run in a folder if one is given, with a checkpoint after each
        round.
        """
        data = self.data()
        local = {"optimizer": fq.optimizers.SGD(lr=0.03), "batch_size": 16, **self.local}
        family, budgets = self.family(data.example)
        return fq.run(
            self.method.with_local(**local),
            family,
            data,
            fq.Fleet.of(budgets, 10, 4, **self.fleet),
            "sequential",
            rounds=self.rounds,
            seed=1,
            precision="fp64",
            evaluation=self.evaluation,
            link=self.link,
            out=out,
            checkpoint=fq.Checkpointing(rounds=1, seconds=0),
            task=self.task,
        )

    def family(self, example: Tensor) -> tuple[fq.Family, tuple[Any, ...]]:
        """Return the family, and the budgets that clients have in turn."""
        if not self.nets:
            return fq.trace(self.net, example), self.shares
        family = fq.union({name: fq.trace(net, example) for name, net in self.nets.items()})
        return family, net_budgets(family, pairs=True)


@dataclass(frozen=True)
class Keeping(FedAvg):
    """FedAvg whose clients keep the state of their optimizers between rounds."""

    def learner(self, job: Job, world: World) -> Learner:
        return replace(super().learner(job, world), keep_slots=True)


# --- the tables ---------------------------------------------------------------------------------

LINKS = {"": fq.Link(), "-lossy-mild": fq.Link.preset("lossy-mild"), "-four-bits": FOUR_BITS}
NETS: dict[str, Callable[[], nn.Module] | VariantSource] = {
    "splitmix": seeded_net,
    "feddf": seeded_net,
    "dsfl": seeded_net,
    "fedet": seeded_net,
    "progfed": HashedStages(),
}
DATA = {
    "fednova": unequal_digits,
    "feddf": public_digits,
    "dsfl": public_digits,
    "fedet": public_digits,
}
OPTIMIZERS = {"scaffold": fq.optimizers.SGD(lr=0.03, momentum=0.0)}  # it refuses momentum

# The first three records are older than the others. Their learning rate is larger, and clients have
# fewer classes.
FIRST_RUNS = {
    name: Case(
        METHODS[name](),
        {"optimizer": fq.optimizers.SGD(lr=0.1)},
        data=partial(digits, labels=3),
        rounds=3,
    )
    for name in ("fedavg", "heterofl", "fedrolex")
}
METHOD_RUNS = {
    name + ending: Case(
        few_server_steps(DSFL(coded=True) if name == "dsfl" else method()),
        {"optimizer": OPTIMIZERS[name]} if name in OPTIMIZERS else {},
        net=NETS.get(name, residual_net),
        data=DATA.get(name, digits),
        link=link,
        rounds=3,
    )
    for name, method in CUTTING.items()
    for ending, link in LINKS.items()
}
METHOD_RUNS |= FIRST_RUNS

PAIRS = {
    name: partial(small_net, channels)
    for name, channels in (("knowledge", 4), ("small", 6), ("big", 8))
}
RAFL = Case(RaFL(), nets=PAIRS, data=public_digits, rounds=3)
PAIR_RUNS = {f"rafl{ending}": replace(RAFL, link=link) for ending, link in LINKS.items()}
PAIR_RUNS |= {
    "rafl-public": replace(RAFL, method=few_server_steps(RaFL(distil=True))),
    "rafl-transfer": replace(RAFL, method=RaFL(transfer=True)),
    "rafl-in-turn": replace(RAFL, method=RaFL(order="in_turn")),
    "rafl-released": replace(
        RAFL, method=few_server_steps(RaFL.preset("released", distil=True)), local={"epochs": 1}
    ),
}

WEAK_ATTACK = fq.attacks.PGD(steps=2, step_size=6 / 255)
ATTACKED = fq.attacks.AdversarialTraining(attack=WEAK_ATTACK)
ROBUST = fq.Evaluation(robustness=(0.5,), attack=WEAK_ATTACK)
ROBUST_SPLITMIX = Case(
    SplitMix.preset("robust", base=0.5),
    shares=(1.0, 0.5),
    local={"adversarial": ATTACKED},
    net=dual_net,
    evaluation=ROBUST,
)
KEPT_MOMENTUM = Case(Keeping(), rounds=3, data=unequal_digits)
# Clients that keep momentum send to a server with state over a link with state.
ALL_STATE = replace(
    KEPT_MOMENTUM,
    method=Keeping(server_optimizer=ServerAdam()),
    link=fq.Link(loss=fq.links.ColumnLoss(0.1, 0.2), codec=fq.links.Codec(bits=4, feedback=True)),
)

TRANSFORMER = Case(
    FedRolex(),
    {"optimizer": fq.optimizers.Adam(lr=0.02), "epochs": 6},
    language_model,
    texts,
    rounds=3,
)


def perceptron() -> nn.Module:
    """Return a perceptron for the ten measurements of a diabetes patient."""
    return hashed(MLP(1, 10, hidden=(32, 16)))


def labels_net() -> nn.Module:
    """Return the residual net with an output for each of three labels."""
    return hashed(tiny_resnet(num_classes=3))


def diabetes() -> fq.FederatedData:
    return fq.data.diabetes().partition(10, seed=1)


def digits_labels() -> fq.FederatedData:
    return fq.data.digits_labels().partition(10, seed=1)


def unet() -> nn.Module:
    """Return a small U-Net for the three classes of `strokes`."""
    return hashed(unet2d(3, width=8, depth=2, groups=4))


def strokes() -> fq.FederatedData:
    """Partition digits with masks: class 1 at the edge of a stroke, class 2 inside, and a top row
    that is ignored.
    """
    pool = fq.data.digits()

    def masks(images: Tensor) -> Tensor:
        brightness = images[:, 0] / pool.inputs.max()
        classes = (brightness > 0.25).long() + (brightness > 0.75).long()
        classes[:, 0] = -100
        return classes

    targets, test_targets = masks(pool.inputs), masks(pool.test_inputs)
    dense = replace(pool, targets=targets, test_targets=test_targets, num_classes=3, class_names=())
    return dense.partition(10, fq.data.Iid(fraction=0.1), seed=1)


MOVED_MASKS = {
    "crop": 1,
    "flip": True,
    "flip_axes": (0, 1),
    "intensity": fq.methods.api.Intensity(0.1, 0.1, 0.05),
}
TASK_RUNS = {
    "segmentation": Case(HeteroFL(), MOVED_MASKS, unet, strokes, task=Segmentation()),
    **{
        f"diabetes-{name}": Case(METHODS[name](), {"scaler": False}, perceptron, diabetes)
        for name in ("fedavg", "heterofl")
    },
    "digits-labels": Case(HeteroFL(), net=labels_net, data=digits_labels),
}

KEPT = (("local", "per_client"),)  # The record has the name that the policy had first.

SETTING_RUNS = {
    # Norm policies.
    **{
        f"norm-{name}": Case(HeteroFL(), local={"norm": norm}, rounds=3)
        for name, norm in (("batch", "batch"), ("tracked", "tracked"), *KEPT, ("post", "post"))
    },
    "norm-tracked-lossy-mild": Case(
        HeteroFL(), local={"norm": "tracked"}, rounds=3, link=fq.Link.preset("lossy-mild")
    ),
    "fedbn-tracked": Case(FedBN(), local={"norm": "tracked"}, rounds=3),
    # Optimizers of clients.
    "adam": Case(FedRolex(), local={"optimizer": fq.optimizers.Adam(lr=0.01)}),
    "adamw": Case(FedRolex(), local={"optimizer": fq.optimizers.AdamW(lr=0.01)}),
    "nesterov-decay": Case(
        FedRolex(), local={"optimizer": fq.optimizers.SGD(0.03, 0.9, True, 1e-2)}
    ),
    "clip": Case(FedRolex(), local={"optimizer": fq.optimizers.SGD(lr=0.03, clip=0.5)}),
    "cosine": Case(FedRolex(), local={"schedule": fq.schedules.Cosine(3)}, rounds=3),
    "kept-momentum": KEPT_MOMENTUM,
    "kept-adam": replace(KEPT_MOMENTUM, local={"optimizer": fq.optimizers.Adam(lr=0.01)}),
    # Optimizers of the server.
    "server-momentum": Case(FedRolex(server_optimizer=ServerMomentum(0.7, 0.5)), rounds=3),
    "server-adam": Case(FedRolex(server_optimizer=ServerAdam()), rounds=3),
    # Local settings.
    "masked-client": Case(SHeteroFL(), local={"masked": "client"}),
    "masked-batch": Case(HeteroFL(), local={"masked": "batch"}),
    "without-mask-and-scaler": Case(HeteroFL(), local={"masked": "", "scaler": False}),
    "scaler": Case(SHeteroFL(), local={"scaler": True}),
    "crop-and-flip": Case(HeteroFL(), local={"crop": 1, "flip": True}),
    "last-batch-drop": Case(HeteroFL(), local={"last_batch": "drop", "epochs": 2}),
    "proximal": Case(FedProx(mu=0.5)),
    "fednova-proximal": Case(FedNova(mu=0.5), data=unequal_digits),
    # Settings of methods.
    **{
        f"weighting-{weighting}": Case(HeteroFL(weighting=weighting), data=unequal_digits)
        for weighting in ("uniform", "data", "model", "updates", "both")
    },
    "progfed-warm-up": Case(
        ProgFed(HeteroFL(), stage_rounds=1, warmup=1, extra_warmup=True),
        {"keep_optimizer": True, "schedule": fq.schedules.Cosine(3)},
        HashedStages(),
        rounds=4,
    ),
    "progfed-mixed": Case(ProgFed(strategy="mixed"), {"norm": "tracked"}, HashedStages(), rounds=3),
    "fedrolex-overlap": Case(FedRolex(overlap=0.5)),
    "fedrescue-masked-gradient": Case(FedResCuE.preset("masked-gradient")),
    "splitmix-sorted": Case(SplitMix(base=0.25, sort=True), net=seeded_net),
    # Adversarial training.
    "splitmix-robust": ROBUST_SPLITMIX,
    "splitmix-robust-lossy-mild": replace(ROBUST_SPLITMIX, link=fq.Link.preset("lossy-mild")),
    "adversarial": Case(FedAvg(), local={"adversarial": ATTACKED}),
    "adversarial-conditioned": Case(
        FedAvg(),
        local={"adversarial": fq.attacks.AdversarialTraining((0.0, 0.5, 1.0), WEAK_ATTACK)},
        net=conditioned_net,
        evaluation=ROBUST,
    ),
    # Next-word prediction with a transformer.
    "transformer": TRANSFORMER,
    "transformer-four-bits": replace(TRANSFORMER, link=FOUR_BITS),
    # Clients and their budgets.
    "changing-budgets": Case(HeteroFL(), fleet={"dynamic": True}, rounds=3),
    "changing-budgets-lossy-mild": Case(
        HeteroFL(),
        {"norm": "per_client"},
        fleet={"dynamic": True},
        link=fq.Link.preset("lossy-mild"),
        rounds=3,
    ),
    "budgets-in-memory": Case(
        HeteroFL(),
        shares=tuple(fq.Budget(memory=bytes) for bytes in (4_000_000, 1_000_000, 500_000)),
    ),
    "availability": Case(HeteroFL(), fleet={"availability": Diurnal(4, 1)}, rounds=3),
    # Links.
    "link-sparse-both-ways": Case(
        FedRolex(), link=fq.Link(codec=fq.links.Codec(keep=0.25, bits=8, down=True)), rounds=3
    ),
    "link-with-a-clock": Case(HeteroFL(), link=fq.Link.preset("mobile")),
    "all-state": ALL_STATE,
}

RUNS = {**METHOD_RUNS, **PAIR_RUNS, **SETTING_RUNS, **TASK_RUNS}


def export(case: Case, folder: Path, share: float = 0.5, **how: Any) -> None:
    """Train, and write the model for a share of every axis as a safetensors file."""
    case.play().export(folder / "model.safetensors", fq.Budget(share=share), **how)


def save_customizable(folder: Path) -> None:
    """Train, and write one model for several shares."""
    METHOD_RUNS["heterofl"].play().customizable((1.0, 0.5)).save(folder / "sizes.safetensors")


FOLDERS: dict[str, Callable[[Path], object]] = {
    "files-checkpoint": ALL_STATE.play,
    "files-checkpoint-fedbn": METHOD_RUNS["fedbn-lossy-mild"].play,
    "files-export": partial(export, METHOD_RUNS["heterofl"]),
    "files-export-fedbn": partial(export, METHOD_RUNS["fedbn"], share=1.0, client=0),
    "files-export-splitmix": partial(export, ROBUST_SPLITMIX, robustness=0.5),
    "files-customisable": save_customizable,
}

# Run by `make test`; all others are slow.
QUICK = (
    "heterofl",
    "fedrolex-lossy-mild",
    "fedrescue-four-bits",
    "fedbn",
    "rafl",
    "transformer",
    "diabetes-heterofl",
    "files-checkpoint",
)
# Pairs with equal weights: LocalOnly sends nothing over any link, these norms differ in evaluation
# alone, and a private net is the same whether a client draws it or downloads it.
SAME_RUNS = {
    ("local", "local-lossy-mild"),
    ("local", "local-four-bits"),
    ("local-lossy-mild", "local-four-bits"),
    ("norm-batch", "norm-post"),
    ("rafl", "rafl-transfer"),
}
