"""One module of several sizes that share their weights, and switch while they are in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from fedquilt.axes import Index, Positions
from fedquilt.data.parts import Array
from fedquilt.deploy import Shelf, check_nets, has_statistics, norms_of
from fedquilt.errors import ConfigError, FormatError, RecordError
from fedquilt.family import Family
from fedquilt.family.dual import set_robustness
from fedquilt.family.ensemble import Ensemble
from fedquilt.family.faithful import forget_statistics
from fedquilt.family.norms import BatchStatistics, NormPolicy
from fedquilt.family.union import alone
from fedquilt.files import Blob, why, write
from fedquilt.portable import Note, about, check_names, check_submodel, check_weights, under
from fedquilt.terms import Budget, Mix, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.experiment import Run


@dataclass(frozen=True)
class Placed:
    """A net, and which of the stocks its weights are in."""

    net: Submodel
    stock: int


@dataclass(frozen=True)
class Plan:
    """Which weights are held, which nets use them, and which nets answer at a share."""

    stocks: tuple[
        Submodel, ...
    ]  # each the widest net of some, its channels in an order in which the narrower come first
    nets: tuple[Placed, ...]
    mixes: Mapping[float, tuple[int, ...]]

    @staticmethod
    def of(mixes: Mapping[float, Mix]) -> Plan:
        """Nets whose channels are among another's have no weights of their own."""
        nets = dict.fromkeys(net for mix in mixes.values() for net in mix)
        groups: list[list[Submodel]] = []
        for net in sorted(nets, key=_size, reverse=True):
            home = next((group for group in groups if _inside(net, group[0])), None)
            if home is None:
                groups.append([net])
            else:
                home.append(net)
        stocks: list[Submodel] = []
        placed: dict[Submodel, Placed] = {}
        for place, group in enumerate(groups):
            held, inner = _ordered(group)
            stocks.append(held)
            placed |= {net: Placed(found, place) for net, found in inner.items()}
        order = list(placed)
        return Plan(
            tuple(stocks),
            tuple(placed.values()),
            {share: tuple(order.index(net) for net in mix) for share, mix in mixes.items()},
        )

    def with_nets(self, nets: Sequence[Submodel]) -> Plan:
        """Return the plan with other sub-models in the same places: those of the stocks, then those of the nets."""
        stocks, others = nets[: len(self.stocks)], nets[len(self.stocks) :]
        placed = tuple(Placed(net, old.stock) for net, old in zip(others, self.nets, strict=True))
        return Plan(tuple(stocks), placed, self.mixes)

    def mix(self, share: float) -> Mix:
        """The nets that answer at a share."""
        return tuple(self.nets[place].net for place in self.mixes[share])

    def to_note(self) -> Note:
        return {
            "stocks": [stock.to_dict() for stock in self.stocks],
            "nets": [{**one.net.to_dict(), "stock": one.stock} for one in self.nets],
            "mixes": [[share, list(nets)] for share, nets in self.mixes.items()],
        }

    def check(
        self, family: Family, weights: Sequence[Weights], statistics: Sequence[Weights]
    ) -> None:
        """Refuse nets and tensors of a file that do not fit the family.

        Args:
            family: What the nets were cut from.
            weights: Tensors of every stock.
            statistics: Norm statistics of every net, or nothing.

        Raises:
            FormatError: They do not fit.
        """
        for place, (stock, own) in enumerate(zip(self.stocks, weights, strict=True)):
            check_submodel(family, stock, f"stock {place}")
            check_weights(family, stock, own, f"stock {place}")
        for place, (placed, own) in enumerate(zip(self.nets, statistics, strict=True)):
            check_submodel(family, placed.net, f"net {place}")
            check_weights(family, placed.net, own, f"net {place}", is_whole=False)
            if not _inside(placed.net, self.stocks[placed.stock]):
                raise FormatError(
                    f"net {place} has channels that its stock {placed.stock} does not have"
                )

    @staticmethod
    def from_note(note: Mapping[str, Any]) -> Plan:
        return Plan(
            tuple(Submodel.from_dict(stock) for stock in note["stocks"]),
            tuple(Placed(Submodel.from_dict(net), net["stock"]) for net in note["nets"]),
            {share: tuple(nets) for share, nets in note["mixes"]},
        )


def _size(net: Submodel) -> int:
    return sum(width for _, width in net.arch.widths)


def _inside(one: Submodel, other: Submodel) -> bool:
    """Whether all channels of a net are another's."""
    if (one.scope, one.arch.variant) != (
        other.scope,
        other.arch.variant,
    ) or one.index.keys() != other.index.keys():
        return False
    return all(set(kept) <= set(other.index[axis]) for axis, kept in one.index.items())


def _ordered(group: Sequence[Submodel]) -> tuple[Submodel, dict[Submodel, Submodel]]:
    """The widest net of a group (its first) in an order in which nested nets are prefixes, and the nets in that order.

    A net's function does not depend on the order of its channels. Windows that wrap become slices so. Nets that are
    not nested in the one before (windows that move apart, random sets) keep their positions, and are gathered once.
    """
    chain = [group[0]]
    for net in group[1:]:
        if _inside(net, chain[-1]):
            chain.append(net)
    order: dict[str, list[int]] = {}
    for net in reversed(chain):
        for axis, kept in net.index.items():
            own = order.setdefault(axis, [])
            there = set(own)
            own += [position for position in kept if position not in there]

    def first(net: Submodel) -> Submodel:
        index = {
            axis: Positions.chosen(order[axis][: len(kept)]) for axis, kept in net.index.items()
        }
        return Submodel(net.arch, Index(index), net.scope)

    return first(group[0]), {net: first(net) if net in chain else net for net in group}


class CustomisableModel(nn.Module):
    """A model that is as wide as it is told to be: `set(share=0.5)` costs no copy, and no file is read.

    Weights are held once, those of the widest net; narrower ones are views of them, and have norm statistics of their
    own. It answers and does not train: for that, `Run.deploy` gives plain modules.
    """

    def __init__(
        self,
        family: Family,
        plan: Plan,
        weights: Sequence[Weights],
        statistics: Sequence[Weights],
        norms: str,
        note: Note | None = None,
    ) -> None:
        """`weights` are those of the stocks, `statistics` those of the nets; `Run.customisable` puts it together.

        `norms` is the name of the norm policy. Norms without statistics in either normalize by the batch.
        """
        super().__init__()
        self.plan, self.norms, self.note = plan, norms, note or {}
        self._family = family.bare()
        self.stocks = nn.ModuleList(map(family.assemble, plan.stocks, weights))
        self.statistics = nn.ModuleList(map(_Statistics, statistics))
        stocks = zip(plan.stocks, weights, strict=True)
        if not all(has_statistics(family.member(stock), state) for stock, state in stocks):
            forget_statistics(self.stocks)  # every net has its own, or none
        self.requires_grad_(False).eval()
        self._share = next(iter(plan.mixes))
        self._robustness: float | None = None
        self._members: dict[
            float, nn.Module
        ] = {}  # modules around the stocks' tensors: not to be counted or moved
        self._link()
        self.register_load_state_dict_post_hook(_relink)  # type: ignore[no-untyped-call]

    @property
    def shares(self) -> tuple[float, ...]:
        """Those one can set."""
        return tuple(self.plan.mixes)

    @property
    def share(self) -> float:
        """The one that is set."""
        return self._share

    @property
    def robustness(self) -> float | None:
        """The one that is set; None: none was, and dual norms are clean."""
        return self._robustness

    @property
    def resident_bytes(self) -> int:
        """What all its tensors take, those that share memory once."""
        return resident_bytes([self, *self._members.values()])

    def set(self, share: float | None = None, robustness: float | None = None) -> Self:
        """Answer with another share, or another weight on robustness (dual norms); what is not given stays."""
        if share is not None and share not in self._members:
            known = ", ".join(f"{one:g}" for one in self.shares)
            raise ConfigError(f"a share of {share} was asked for; the model was made for {known}.")
        if robustness is not None:
            for net in self._members.values():
                set_robustness(net, robustness)
            self._robustness = float(robustness)
        if share is not None:
            self._share = share  # last: what was refused has changed nothing
        return self

    def forward(self, *inputs: Any) -> Tensor:
        found: Tensor = self._members[self._share](*inputs)
        return found

    def _link(self) -> None:
        """Put modules around the stocks' tensors: views where a slice will do, else one gather, which is kept."""
        nets = []
        for one, own in zip(self.plan.nets, self.statistics, strict=True):
            held, stock = self.plan.stocks[one.stock], self.stocks[one.stock]
            cut = self._family.cutter.narrow(
                _values(stock, self._family), held.index, one.net.index
            )
            assert isinstance(own, _Statistics)
            state = {**cut, **own.values}
            module = self._family.assemble(one.net, state, shared=True)
            if not has_statistics(self._family.member(one.net), state):
                forget_statistics(module)
            nets.append(module.requires_grad_(False).eval())
        self._members = {
            share: nets[mix[0]] if len(mix) == 1 else Ensemble(nets[place] for place in mix).eval()
            for share, mix in self.plan.mixes.items()
        }
        self.set(robustness=self._robustness)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._link()  # what moved has left its views behind
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": {}}  # a copy of views would be a copy of each

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._link()

    def save(self, file: str | Path) -> None:
        """Write it as safetensors, whole or not at all; `fedquilt.load_model(file, factory)` has it again."""
        try:
            write(Path(file), self.blob().chunks())
        except OSError as error:
            raise RecordError(f"the model could not be written to {file}: {why(error)}.") from error

    def blob(self) -> Blob:
        """What `save` writes."""
        tensors = {
            f"stocks.{place}.{name}": value
            for place, stock in enumerate(self.stocks)
            for name, value in _values(stock, self._family).items()
        }
        for place, own in enumerate(self.statistics):
            assert isinstance(own, _Statistics)
            tensors |= {f"statistics.{place}.{name}": value for name, value in own.values.items()}
        chosen = {"norms": self.norms, "share": self.share, "robustness": self.robustness}
        return Blob.sealed(
            tensors, {**self.note, **self.plan.to_note(), "format": "customisable", **chosen}
        )

    @staticmethod
    def restored(family: Family, tensors: Weights, note: Note) -> CustomisableModel:
        """Return the model that `save` wrote.

        Raises:
            FormatError: Nets or tensors do not fit the family, or each other.
        """
        plan = Plan.from_note(note)
        leads = [f"stocks.{place}." for place in range(len(plan.stocks))]
        leads += [f"statistics.{place}." for place in range(len(plan.nets))]
        values = [under(lead, tensors) for lead in leads]
        names = [lead + name for lead, own in zip(leads, values, strict=True) for name in own]
        check_names(tensors, (), names, "the file")
        weights, statistics = values[: len(plan.stocks)], values[len(plan.stocks) :]
        plan.check(family, weights, statistics)
        own = (*plan.to_note(), "format", "norms", "share", "robustness")
        about = {key: value for key, value in note.items() if key not in own}
        made = CustomisableModel(family, plan, weights, statistics, note["norms"], about)
        return made.set(note["share"], note["robustness"])


class _Statistics(nn.Module):
    """Norm statistics of one net, by name; buffers may have no dots in theirs."""

    def __init__(self, values: Weights) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name.replace(".", "/"), value.detach().clone())

    @property
    def values(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): value for name, value in self.named_buffers()}


def customisable(
    run: Run,
    shares: Iterable[float],
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
) -> CustomisableModel:
    """A run's nets for several shares as one module."""
    shelf, policy, family = Shelf(run, client), norms_of(run, norms, client), run.world.family
    try:
        budgets = {float(share): Budget(share=float(share)) for share in shares}
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a customisable model of shares={shares!r} was asked for; several numbers in (0, 1] fit, such as "
            "shares=(1, 0.5)."
        ) from error
    if not budgets:
        raise ConfigError(
            "a customisable model was asked for without shares; give some, such as shares=(1, 0.5)."
        )
    plan = Plan.of({share: shelf.nets(budget) for share, budget in budgets.items()})
    check_nets(run, (placed.net for placed in plan.nets), policy)
    stored = policy.tracks  # with the weights: a narrower net's are a view of the wider one's
    weights = shelf.settled(plan.stocks, policy if stored else BatchStatistics(), samples)
    statistics: list[Weights] = [{} for _ in plan.nets]
    if policy.measures and family.statistics:
        states = shelf.settled([one.net for one in plan.nets], policy, samples)
        statistics = [
            {name: state[name] for name in family.statistics if name in state} for state in states
        ]
    nets = (*plan.stocks, *(placed.net for placed in plan.nets))
    if family.layout.nets and len(variants := {net.arch.variant for net in nets}) > 1:
        raise ConfigError(
            f"one customisable model of shares {', '.join(f'{share:g}' for share in budgets)} was asked for; these are "
            f"nets of several architectures: {', '.join(sorted(variants))}. Deploy each by itself: run.deploy(budget)."
        )
    family, own, renamed = alone(family, nets, (*weights, *statistics))
    plan = plan.with_nets(own)
    count = len(plan.stocks)
    note = {**about(run, family, plan.stocks), "client": client}
    return CustomisableModel(family, plan, renamed[:count], renamed[count:], policy.name, note)


def resident_bytes(modules: Iterable[nn.Module]) -> int:
    """The memory of all tensors of some modules; what several of them share is counted once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())


def _values(stock: nn.Module, family: Family) -> dict[str, Tensor]:
    held = {**dict(stock.named_parameters()), **dict(stock.named_buffers())}
    return {name: held[name].detach() for name in family.layout.dims if name in held}


def _relink(model: nn.Module, _: object) -> None:
    """What was gathered is gathered anew from what was loaded."""
    assert isinstance(model, CustomisableModel)
    model._link()
