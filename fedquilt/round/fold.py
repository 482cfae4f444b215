"""The contract of a fold, the weights of clients in it, and checks of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.family.cut import Cutter
from fedquilt.terms import Extras, Server, Slots, Update, Weights

if TYPE_CHECKING:
    from fedquilt.round.federation import World
    from fedquilt.round.method import Method


# Weights of clients in a mean. `client_weight` explains each of them.
Weighting = Literal["uniform", "data", "model", "updates", "both"]


def client_weight(update: Update, weighting: Weighting, cutter: Cutter) -> float:
    """Return a client's weight in the mean, p_m of FedRolex (equation 10, appendices A.2 and A.3).

    The weight is multiplied by `update.times`.

    Args:
        update: Update of the client.
        weighting: `uniform` gives 1. `data` gives the number of samples, and `model` the number of
            kernels of its net. `updates` gives its optimizer steps in all rounds so far. `both`
            gives kernels times steps.
        cutter: It counts kernels.
    """
    kernels = cutter.kernels(update.job.submodel.arch) if weighting in ("model", "both") else 1
    match weighting:
        case "uniform":
            weight = 1
        case "data":
            weight = update.job.client.size
        case "model":
            weight = kernels
        case "updates":
            weight = update.steps
        case "both":
            weight = kernels * update.steps
    return float(update.times * weight)


class Fold(Protocol):
    """Contract of a fold: a running merge of updates."""

    def add(self, update: Update) -> None:
        """Add one update of a client. The update is not kept."""

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        """Add many updates that sent the same positions.

        Args:
            updates: Updates of the clients.
            stacked: One dictionary of weights per payload, with the clients in dimension 0.
        """

    def join(self, other: Self) -> None:
        """Add the sums of `other`, a fold of the same kind that has updates of further clients.

        Workers each fold their own clients, and their folds are joined afterwards.
        """

    def finish(self, server: Server) -> Merged:
        """Return the new weights, slots and extras of the server.

        Args:
            server: State at the start of the round. It is not changed.
        """


class Merged(NamedTuple):
    """The server's tensors after a round."""

    weights: Weights  # All weights of the server, by scope and name.
    slots: Slots = MappingProxyType({})  # Slots of the server, by slot, scope and name.
    extras: Extras = MappingProxyType({})  # Extras of the server, by name.
    # Outputs of teachers on public samples. They are not part of the server's state.
    outputs: Extras = MappingProxyType({})
    macs: int = 0  # Multiply-adds that the server spent on these outputs.


_STEPS = ("add", "add_stack", "join", "finish")  # methods of a fold


def fold_of(method: Method, server: Server, world: World) -> Fold:
    """Return a method's fold, after a check that it has the methods that engines call.

    Args:
        method: Its `fold` is called.
        server: State at the start of the round.
        world: What the method may look at.

    Raises:
        ConfigError: Names the method, and what its fold lacks.
    """
    fold = method.fold(server, world)
    missing = [step for step in _STEPS if not callable(getattr(fold, step, None))]
    if missing:
        result = (
            "nothing" if fold is None else f"a {type(fold).__name__} without {', '.join(missing)}"
        )
        raise ConfigError(
            f"{type(method).__name__}.fold returned {result} in round {server.round + 1}; a fold "
            f"has {', '.join(_STEPS)}. A subclass of fedquilt.methods.api.Mean inherits those that "
            "it does not override."
        )
    return fold


def merged_of(method: Method, fold: Fold, server: Server) -> Merged:
    """Return the result of a fold, after a check that it has all weights of the server.

    Args:
        method: Method of the run, for messages.
        fold: Fold of all updates of the round.
        server: State at the start of the round.

    Raises:
        ConfigError: Names the method, and the weight that is missing, too many, or of another shape
            or type.
    """
    result = fold.finish(server)
    is_pair = isinstance(result, tuple) and 1 <= len(result) <= len(Merged._fields)
    merged = Merged(*result) if is_pair else None
    problem = (
        _wrong_weights(merged.weights, server.weights) if merged else f"a {type(result).__name__}"
    )
    if merged is None or problem:
        raise ConfigError(
            f"the fold of {type(method).__name__} returned {problem} in round {server.round + 1}; "
            "finish must return Merged(weights, slots, extras) with all weights of the server, "
            "also those that nobody sent."
        )
    return merged


def _wrong_weights(merged: object, server: Weights) -> str:
    """Describe the first difference between merged weights and those of the server.

    Names, shapes and types must match. Values are not compared. The text is empty if all match.

    Args:
        merged: Weights that a fold returned. A user's fold may return anything.
        server: Weights of the server, by scope and name.
    """
    if not isinstance(merged, Mapping):
        return f"a {type(merged).__name__} in place of weights"
    for name in {**server, **merged}:
        if name not in merged:
            return f"weights without {name!r}"
        if name not in server:
            return f"the weight {name!r}, which the server does not have,"
        value = merged[name]
        expected = server[name]
        if not isinstance(value, Tensor):
            return f"a {type(value).__name__} as {name!r}"
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            return (
                f"{name!r} as {value.dtype} {list(value.shape)} in place of {expected.dtype} "
                f"{list(expected.shape)}"
            )
    return ""
