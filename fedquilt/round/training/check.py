"""Trial of a user's objectives on two samples before a run, so that mistakes are found early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace

from torch import Tensor
from typing_extensions import override

from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.errors.faults import is_out_of_memory
from fedquilt.family.member import Member
from fedquilt.names import said
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, gradient, teach
from fedquilt.round.training.view import View

_PACKAGE = __name__.partition(".")[0]
_WORKS = "A tensor with one real number works, of shape (), such as the mean over the samples."


def has_own_objective(learner: Learner) -> bool:
    """Return True if any objective of a learner's phases is defined outside of fedquilt.

    Objectives inside of others, such as in a wrapper, count too.
    """
    parts = (part for phase in learner.phases for part in _parts(phase.objective))
    return any(type(part).__module__.partition(".")[0] != _PACKAGE for part in parts)


def check_objectives(
    learner: Learner, member: Member, state: State, batch: Batch, owner: str
) -> None:
    """Compute a gradient of every phase's objective, and refuse those that break the contract.

    Args:
        learner: Learner whose phases are tried.
        member: The client's net.
        state: Weights of the client, by name.
        batch: A few samples of one client.
        owner: Name of the method, for messages.

    Raises:
        ConfigError: An objective fails, returns another thing than one real number, or runs a net
            that it does not name.
    """
    slotted = learner.slotted(member)
    slots = {
        slot: {name: state[name].new_zeros(state[name].shape) for name in slotted}
        for slot in learner.state.slots
    }
    received = Received(state, slots)
    if learner.taught:
        batch = replace(
            batch, taught=teach(learner.teaching_net(member), learner.local, state, batch)
        )
    for phase in learner.phases:
        objective = phase.objective
        request = f"{owner} trains by the objective {_name(objective)}"
        if not isinstance(objective, Objective):
            raise ConfigError(
                f"{request}, which is no Objective. An instance of a class derived from Objective "
                "works."
            )
        checked = _Checked(objective, request)
        try:
            named = objective.nets(member)
            _check_members(request, named)
            gradient(learner, member, checked, state, received, batch)
        except FedquiltError:
            raise
        except Exception as error:  # an objective of the user's own may raise anything
            if is_out_of_memory(error):
                raise
            raise ConfigError(f"{request}, which failed on two samples: {said(error)}") from error
        _check_named(request, named, checked.run)


@dataclass
class _Recording(View):
    """A view that records the nets that are run."""

    run: list[Member] = field(default_factory=list)  # Nets in the order of their runs

    def _run(self, net: Member) -> Tensor:
        self.run.append(net)
        return super()._run(net)


@dataclass(frozen=True)
class _Checked(Objective):
    """A wrapper that checks an objective's loss and records the nets that it runs."""

    objective: Objective  # Objective that is checked
    request: str  # Beginning of error messages: what was asked for
    run: list[Member] = field(default_factory=list)  # Nets in the order of their runs

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        return self.objective.nets(member)

    def __call__(self, view: View) -> Tensor:
        values = {item.name: getattr(view, item.name) for item in fields(View)}
        loss: object = self.objective(_Recording(**values, run=self.run))
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"{self.request}, which returned {type(loss).__name__} {loss!r:.40}. {_WORKS} A "
                "number that was taken out of a tensor, as by `.item()`, has no gradient."
            )
        if loss.shape or not loss.is_floating_point():
            raise ConfigError(
                f"{self.request}, which returned {loss.dtype} of shape {tuple(loss.shape)}. "
                f"{_WORKS}"
            )
        return loss


def _check_members(request: str, named: object) -> None:
    """Raise a ConfigError if `named`, a result of `nets`, is not a tuple of members.

    The message begins with `request`. Engines use the tuple as a key of dictionaries, which a list
    cannot be.
    """
    if not isinstance(named, tuple) or not all(isinstance(net, Member) for net in named):
        raise ConfigError(
            f"{request}; its `nets` returned {named!r:.80}. A tuple of members works, such as "
            "(member,)."
        )


def _check_named(request: str, named: tuple[Member, ...], run: list[Member]) -> None:
    """Raise a ConfigError if an objective runs nets which its `nets` does not name.

    Costs and the plans of engines are derived from `nets`.

    Args:
        request: Beginning of the error message.
        named: Nets that the objective names.
        run: Nets that it has run.
    """
    missing = [net for net in dict.fromkeys(run) if net not in named]
    if missing:
        names = ", ".join(_net_name(net) for net in named) or "none"
        raise ConfigError(
            f"{request}, which ran {_net_name(missing[0])}; its `nets` names {names}. Costs and "
            f"memory are counted by `nets`: add {_code(missing[0])} to the tuple that nets(member) "
            "returns."
        )


def _net_name(net: Member) -> str:
    return "the client's own net" if net.share is None else f"the nested net of share {net.share}"


def _code(net: Member) -> str:
    return "`member`" if net.share is None else f"`member.nested({net.share})`"


def _name(objective: object) -> str:
    """Return the class names of an objective and those inside it, as in `Proximal(TaskLoss)`."""
    inner_names = [_name(part) for part in _inside(objective)]
    return type(objective).__name__ + (f"({', '.join(inner_names)})" if inner_names else "")


def _parts(objective: object) -> Iterator[object]:
    yield objective
    for part in _inside(objective):
        yield from _parts(part)


def _inside(objective: object) -> list[Objective]:
    """Return the objectives that are fields of `objective`, alone or in tuples.

    Objectives inside of these are not included. The result is empty for anything but a dataclass.
    """
    if not is_dataclass(objective):
        return []
    values = [getattr(objective, item.name) for item in fields(objective)]
    listed = [value if isinstance(value, tuple) else (value,) for value in values]
    return [part for value in listed for part in value if isinstance(part, Objective)]
