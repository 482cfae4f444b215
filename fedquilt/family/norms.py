"""Norm policies: rules for the norms of a model in training, evaluation and deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Protocol

from fedquilt.checks import one_of
from fedquilt.errors import ConfigError
from fedquilt.family.net import Pass
from fedquilt.names import find, is_reference, said

Affine = Literal["shared", "local"]
Statistics = Literal["batch", "tracked", "measured"]
Owner = Literal["server", "client"]
Samples = Literal["training", "public"]


class Norms(Protocol):
    """The names of a model's norms, as a family and its members have them."""

    @property
    def statistics(self) -> Sequence[str]:
        """Return the names of the running statistics."""

    @property
    def parts(self) -> Mapping[str, Sequence[str]]:
        """Return the names of weights by part. `norm` has the statistics and the affine weights."""


@dataclass(frozen=True)
class NormPolicy:
    """A rule for the running statistics and the affine weights of norms.

    All decisions of the package about norms are made here. To write a policy, make a subclass that
    sets some of the class attributes:

    - `statistics`: Statistics that norms use after training. `batch`: those of the batch that is
      evaluated. `tracked`: running values that every training step updates. `measured`: means over
      batches of training samples, taken at the end of training. Training steps always use the
      statistics of their own batch.
    - `owner`: Owner of the statistics. `server`: all clients share one set. Tracked statistics are
      sent and averaged, and measured ones are taken over the training samples of all clients.
      `client`: each client has its own set. It keeps tracked ones between rounds, and measures on
      its own samples.
    - `samples`: Samples that statistics are measured on. `training`: the owner's training samples.
      `public`: the data's public samples, for everyone.

    If affine weights are local, tracked statistics are local too, whoever owns them. Layer and
    group norms have no statistics, so that only `affine` concerns them.
    """

    affine: Affine = "shared"  # Weights and biases of norms: averaged, or local to each client

    statistics: ClassVar[Statistics] = "batch"  # Statistics that norms use after training
    owner: ClassVar[Owner] = "server"  # Owner of the statistics
    samples: ClassVar[Samples] = "training"  # Samples that statistics are measured on

    def __post_init__(self) -> None:
        one_of(self, affine=Affine, statistics=Statistics, owner=Owner, samples=Samples)

    @property
    def name(self) -> str:
        """Return the policy's name in files and flags, or the name of its class."""
        kind = type(self)
        return next(
            (name for name, policy in NORM_POLICIES.items() if policy is kind), kind.__name__
        )

    @property
    def fingerprint(self) -> str:
        """Return the name and the fields that differ from their defaults: `post(affine=local)`."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        changed = [
            setting.name for setting in fields(self) if values[setting.name] != setting.default
        ]
        settings = ", ".join(f"{name}={values[name]}" for name in changed)
        return f"{self.name}({settings})" if changed else self.name

    @property
    def tracks(self) -> bool:
        """Return True if training steps update running statistics."""
        return self.statistics == "tracked"

    @property
    def measures(self) -> bool:
        """Return True if statistics are measured when training is over."""
        return self.statistics == "measured"

    @property
    def needs_public(self) -> bool:
        """Return True if statistics are measured on public samples."""
        return self.measures and self.samples == "public"

    def check_public(self, num_samples: int) -> None:
        """Refuse to measure statistics on fewer than two public samples.

        Args:
            num_samples: Number of public samples that the data has.

        Raises:
            ConfigError: The policy needs public samples, and there are fewer than two.
        """
        if self.needs_public and num_samples < 2:
            count = "has one, and two or more are needed" if num_samples else "has none"
            raise ConfigError(
                f"the norm policy {self.name!r} was asked for, which measures statistics on public "
                f"samples; the data {count}. data.public = 0.1 in a file, pool.with_public(0.1) in "
                "Python, sets samples aside."
            )

    @property
    def has_server_statistics(self) -> bool:
        """Return True if the server's state has tracked statistics."""
        return self.tracks and self.owner == "server"

    @property
    def keeps_statistics(self) -> bool:
        """Return True if each client keeps the statistics that it tracked, and sends none."""
        return self.tracks and self.personal

    @property
    def personal(self) -> bool:
        """Return True if clients end with unequal norms, each with a result of its own."""
        return self.owner == "client" or self.affine == "local"

    def kept(self, model: Norms) -> frozenset[str]:
        """Return the names of the weights of `model` that a client neither sends nor receives.

        They are tracked statistics if clients keep them, and the norms' weights and biases if
        `affine` is "local".
        """
        statistics = frozenset(model.statistics)
        affine = frozenset(model.parts.get("norm", ())) - statistics
        kept_statistics = statistics if self.keeps_statistics else frozenset()
        return kept_statistics | affine if self.affine == "local" else kept_statistics

    def training_pass(self, scaler: bool = False) -> Pass:
        """Return the options of a training step's forward pass.

        Norms use the statistics of the batch. If the policy tracks statistics, the pass also
        returns new running values.

        Args:
            scaler: True: outputs of cut hidden layers are divided by the client's share (HeteroFL).
                False: they are not divided.
        """
        return Pass(train=True, statistics="track" if self.tracks else "batch", scaler=scaler)

    @property
    def evaluation_pass(self) -> Pass:
        """Return the options of a forward pass in evaluation.

        Norms use the batch's statistics if `statistics` is "batch", and stored ones in all other
        cases.
        """
        return Pass(train=False, statistics="batch" if self.statistics == "batch" else "stored")

    @property
    def stores(self) -> bool:
        """Return True if evaluation uses stored statistics, whatever the batch."""
        return self.evaluation_pass.statistics == "stored"

    def deployed(self) -> NormPolicy:
        """Return the policy of a deployed model if none is requested.

        It is this policy if it stores statistics. If not, statistics are measured on the training
        samples of all clients, because a device may have one sample at a time.
        """
        return self if self.stores else MeasuredOnAll()

    def localized(self) -> NormPolicy:
        """Return a copy of the policy with local affine weights, as in FedBN.

        Clients then keep all weights of norms.
        """
        return replace(self, affine="local")


@dataclass(frozen=True)
class BatchStatistics(NormPolicy):
    """Norms use the statistics of the batch, also in evaluation."""


@dataclass(frozen=True)
class Tracked(NormPolicy):
    """Clients track statistics in training, and the server averages them like weights."""

    statistics = "tracked"


@dataclass(frozen=True)
class KeptByClient(NormPolicy):
    """Clients track statistics in training and keep them; affine weights are averaged."""

    statistics = "tracked"
    owner = "client"


@dataclass(frozen=True)
class MeasuredOnAll(NormPolicy):
    """Statistics are measured on the training samples of all clients (HeteroFL's static norms)."""

    statistics = "measured"


@dataclass(frozen=True)
class MeasuredByClient(NormPolicy):
    """Clients measure the server's weights on their own samples, as Split-Mix's code does."""

    statistics = "measured"
    owner = "client"


@dataclass(frozen=True)
class MeasuredOnPublic(NormPolicy):
    """Statistics are measured on public samples, so that no client's samples are needed."""

    statistics = "measured"
    samples = "public"


@dataclass(frozen=True)
class AllLocal(KeptByClient):
    """Clients keep affine weights and tracked statistics (FedBN, Split-Mix's option lbn)."""

    affine: Affine = "local"  # Weights and biases of norms: averaged, or local to each client


NORM_POLICIES: dict[str, type[NormPolicy]] = {
    "batch": BatchStatistics,
    "tracked": Tracked,
    "per_client": KeptByClient,
    "post": MeasuredOnAll,
    "post-own": MeasuredByClient,
    "post-public": MeasuredOnPublic,
    "per_client-all": AllLocal,
}


def norm_policy(policy: NormPolicy | str) -> NormPolicy:
    """Return a norm policy by its name, or of a class `file.py:Class` or `package.module:Class`.

    The class is called without arguments. A policy is returned as it is.

    Raises:
        ConfigError: There is no such policy. The message begins with the value of `policy`.
    """
    if isinstance(policy, NormPolicy):
        return policy
    if isinstance(policy, str) and (policy in NORM_POLICIES or is_reference(policy)):
        kind = find(NORM_POLICIES, policy, "norm policy")
        try:
            custom_policy = kind()
        except Exception as error:  # a class of the user's own may raise anything
            message = f"{policy!r} was called for a NormPolicy and failed: {said(error)}"
            raise ConfigError(message) from error
        if isinstance(custom_policy, NormPolicy):
            return custom_policy
    names = ", ".join(map(repr, NORM_POLICIES))
    custom = "a NormPolicy in a file, 'file.py:Class'"
    raise ConfigError(f"{policy!r} was asked for; it may be {names}, or {custom}.")
