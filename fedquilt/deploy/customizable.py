"""One module of several sizes that share their weights. The size can be switched while in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from typing_extensions import override

from fedquilt.axes import Index, Positions
from fedquilt.data.parts import Array
from fedquilt.deploy.deploy import WeightSource, check_nets, has_statistics, norms_of
from fedquilt.deploy.model_file import (
    Note,
    about,
    check_names,
    check_submodel,
    check_weights,
    under,
)
from fedquilt.errors import ConfigError, FormatError, RecordError
from fedquilt.family import Family
from fedquilt.family.dual import set_robustness
from fedquilt.family.ensemble import Ensemble
from fedquilt.family.faithful import forget_statistics
from fedquilt.family.norms import BatchStatistics, NormPolicy
from fedquilt.family.union import alone
from fedquilt.storage.files import Blob, why, write
from fedquilt.terms import Budget, Submodel, Submodels, Weights

if TYPE_CHECKING:
    from fedquilt.deploy.trained import TrainedRun


@dataclass(frozen=True)
class Assignment:
    """A net, and the position in `SizePlan.stocks` of the stock that its weights are in."""

    net: Submodel
    stock: int  # Position in `SizePlan.stocks`.


@dataclass(frozen=True)
class SizePlan:
    """The stocks of weights that a customizable model holds, and the nets that use them.

    A stock is a widest net, whose weights are stored once. At a share, the logits of one or more
    nets are averaged.
    """

    # Widest net of each group. The channels of narrower nets come first.
    stocks: tuple[Submodel, ...]
    nets: tuple[Assignment, ...]  # All nets, each with the stock of its weights.
    nets_by_share: Mapping[float, tuple[int, ...]]  # Positions in `nets` by share.

    @staticmethod
    def of(nets_by_share: Mapping[float, Submodels]) -> SizePlan:
        """Plan which stocks of weights are held, and which nets use them at each share.

        A net whose channels are all in a wider net uses that net's stock. A net that is used at
        several shares is planned once.

        Args:
            nets_by_share: Nets whose logits are averaged, by share.
        """
        nets = dict.fromkeys(net for share_nets in nets_by_share.values() for net in share_nets)
        groups: list[list[Submodel]] = []
        for net in sorted(nets, key=_size, reverse=True):
            stock_group = next((group for group in groups if _inside(net, group[0])), None)
            if stock_group is None:
                groups.append([net])
            else:
                stock_group.append(net)
        stocks: list[Submodel] = []
        assignments: dict[Submodel, Assignment] = {}
        for position, group in enumerate(groups):
            stock, inner = _ordered(group)
            stocks.append(stock)
            assignments |= {
                net: Assignment(reordered, position) for net, reordered in inner.items()
            }
        order = list(assignments)
        return SizePlan(
            tuple(stocks),
            tuple(assignments.values()),
            {
                share: tuple(order.index(net) for net in share_nets)
                for share, share_nets in nets_by_share.items()
            },
        )

    def with_nets(self, nets: Sequence[Submodel]) -> SizePlan:
        """Return the plan with other sub-models in the same positions.

        Args:
            nets: Sub-models of all stocks, followed by those of all nets, in the plan's order.
        """
        stocks, new_nets = nets[: len(self.stocks)], nets[len(self.stocks) :]
        assignments = tuple(
            Assignment(net, old.stock) for net, old in zip(new_nets, self.nets, strict=True)
        )
        return SizePlan(tuple(stocks), assignments, self.nets_by_share)

    def nets_at(self, share: float) -> Submodels:
        """Return the nets whose logits are averaged at a share, which must be in the plan."""
        return tuple(self.nets[position].net for position in self.nets_by_share[share])

    def to_note(self) -> Note:
        """Return the plan as plain values, for the note of a file."""
        return {
            "stocks": [stock.to_dict() for stock in self.stocks],
            "nets": [
                {**assignment.net.to_dict(), "stock": assignment.stock} for assignment in self.nets
            ],
            "mixes": [[share, list(nets)] for share, nets in self.nets_by_share.items()],
        }

    def check(
        self, family: Family, weights: Sequence[Weights], statistics: Sequence[Weights]
    ) -> None:
        """Refuse nets and tensors of a file that do not fit the family.

        Args:
            family: Family that the nets were cut from.
            weights: Tensors of every stock.
            statistics: Norm statistics of every net. Empty: the net has none of its own.

        Raises:
            FormatError: They do not fit, or a net has channels that its stock does not have.
        """
        for position, (stock, tensors) in enumerate(zip(self.stocks, weights, strict=True)):
            check_submodel(family, stock, f"stock {position}")
            check_weights(family, stock, tensors, f"stock {position}")
        for position, (assignment, tensors) in enumerate(zip(self.nets, statistics, strict=True)):
            check_submodel(family, assignment.net, f"net {position}")
            check_weights(family, assignment.net, tensors, f"net {position}", is_whole=False)
            if not _inside(assignment.net, self.stocks[assignment.stock]):
                raise FormatError(
                    f"net {position} has channels that its stock {assignment.stock} does not have"
                )

    @staticmethod
    def from_note(note: Mapping[str, Any]) -> SizePlan:
        """Return the plan that `to_note` described. The note's types were checked before."""
        return SizePlan(
            tuple(Submodel.from_dict(stock) for stock in note["stocks"]),
            tuple(Assignment(Submodel.from_dict(net), net["stock"]) for net in note["nets"]),
            {share: tuple(nets) for share, nets in note["mixes"]},
        )


def _size(net: Submodel) -> int:
    return sum(width for _, width in net.arch.widths)


def _inside(inner: Submodel, outer: Submodel) -> bool:
    """Return True if all channels of `inner` are channels of `outer` too.

    Nets of different scope, variant or axes give False.
    """
    if (inner.scope, inner.arch.variant) != (outer.scope, outer.arch.variant):
        return False
    if inner.index.keys() != outer.index.keys():
        return False
    return all(set(positions) <= set(outer.index[axis]) for axis, positions in inner.index.items())


def _ordered(group: Sequence[Submodel]) -> tuple[Submodel, dict[Submodel, Submodel]]:
    """Reorder the channels of a group of nets, so that nested nets are prefixes of the widest.

    The order of its channels does not change a net's function. With the new order, windows that
    wrap around become slices. Nets that are not nested in the net before keep their positions, and
    are gathered once. Examples are windows that move apart, and random sets.

    Args:
        group: Nets of one stock, the widest first.

    Returns:
        The widest net in the new order, and each net of the group in that order.
    """
    chain = [group[0]]
    for net in group[1:]:
        if _inside(net, chain[-1]):
            chain.append(net)
    order: dict[str, list[int]] = {}
    for net in reversed(chain):
        for axis, positions in net.index.items():
            axis_order = order.setdefault(axis, [])
            ordered_positions = set(axis_order)
            axis_order += [position for position in positions if position not in ordered_positions]

    def first(net: Submodel) -> Submodel:
        index = {
            axis: Positions.chosen(order[axis][: len(positions)])
            for axis, positions in net.index.items()
        }
        return Submodel(net.arch, Index(index), net.scope)

    return first(group[0]), {net: first(net) if net in chain else net for net in group}


class CustomizableModel(nn.Module):
    """A model whose width can be set while it is in use: `model.set(share=0.5)`.

    Setting a share copies no weights and reads no file. The weights of the widest net are held
    once. Narrower nets are views of them with norm statistics of their own. The model is for
    inference only. `Run.deploy` returns plain modules, which can be trained.
    """

    def __init__(
        self,
        family: Family,
        plan: SizePlan,
        weights: Sequence[Weights],
        statistics: Sequence[Weights],
        norms: str,
        note: Note | None = None,
    ) -> None:
        """Build the model. `Run.customizable` is the usual way to get one.

        Args:
            family: Family that the nets were cut from.
            plan: Stocks, nets, and the nets of each share.
            weights: Tensors of every stock. Norms without statistics normalize by the batch.
            statistics: Norm statistics of every net. Empty: the net uses those of its stock.
            norms: Name of the norm policy.
            note: Description that `save` writes into the file. None: nothing.
        """
        super().__init__()
        self.plan, self.norms, self.note = plan, norms, note or {}
        self._family = family.bare()
        self.stocks = nn.ModuleList(map(family.assemble, plan.stocks, weights))
        self.statistics = nn.ModuleList(map(_Statistics, statistics))
        stocks = zip(plan.stocks, weights, strict=True)
        if not all(has_statistics(family.member(stock), state) for stock, state in stocks):
            forget_statistics(self.stocks)  # Every net has its own statistics, or none.
        self.requires_grad_(False).eval()
        self._share = next(iter(plan.nets_by_share))
        self._robustness: float | None = None
        # Modules around the tensors of the stocks, by share. A dictionary hides them from
        # nn.Module, which would count and move the shared tensors again.
        self._members: dict[float, nn.Module] = {}
        self._link()
        self.register_load_state_dict_post_hook(_relink)  # type: ignore[no-untyped-call]

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the shares that can be set, in the order in which they were asked for."""
        return tuple(self.plan.nets_by_share)

    @property
    def share(self) -> float:
        """Return the share that is set."""
        return self._share

    @property
    def robustness(self) -> float | None:
        """Return the robustness that is set. None: none was set, and dual norms are clean."""
        return self._robustness

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of all tensors, for all shares together. Count shared memory once."""
        return resident_bytes([self, *self._members.values()])

    def set(self, share: float | None = None, robustness: float | None = None) -> Self:
        """Set the share, the robustness of dual norms, or both, in-place. Return the model.

        The robustness is set for all shares.

        Args:
            share: One of `shares`. None: it stays.
            robustness: Weight from 0 (clean) to 1. None: it stays.

        Raises:
            ConfigError: The model was not built for this share. Nothing is changed.
        """
        if share is not None and share not in self._members:
            listed_shares = ", ".join(f"{option:g}" for option in self.shares)
            raise ConfigError(
                f"a share of {share} was asked for; the model was made for {listed_shares}."
            )
        if robustness is not None:
            for net in self._members.values():
                set_robustness(net, robustness)
            self._robustness = float(robustness)
        if share is not None:
            self._share = share  # Set last, so that an error changes nothing.
        return self

    @override
    def forward(self, *inputs: Any) -> Tensor:
        outputs: Tensor = self._members[self._share](*inputs)
        return outputs

    def _link(self) -> None:
        """Build the modules of all shares around the tensors of the stocks.

        Earlier modules are replaced. Weights are views where positions form a slice. Other weights
        are gathered once and kept.
        """
        nets = []
        for assignment, net_statistics in zip(self.plan.nets, self.statistics, strict=True):
            stock_net, stock = self.plan.stocks[assignment.stock], self.stocks[assignment.stock]
            cut = self._family.cutter.narrow(
                _values(stock, self._family), stock_net.index, assignment.net.index
            )
            assert isinstance(net_statistics, _Statistics)
            state = {**cut, **net_statistics.values}
            module = self._family.assemble(assignment.net, state, shared=True)
            if not has_statistics(self._family.member(assignment.net), state):
                forget_statistics(module)
            nets.append(module.requires_grad_(False).eval())
        self._members = {}
        for share, positions in self.plan.nets_by_share.items():
            share_nets = [nets[position] for position in positions]
            is_single = len(share_nets) == 1
            self._members[share] = share_nets[0] if is_single else Ensemble(share_nets).eval()
        self.set(robustness=self._robustness)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._link()  # Moved tensors need new views.
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": {}}  # Copying views would copy the weights of each.

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._link()

    def save(self, file: str | Path) -> None:
        """Write the model to a safetensors file, atomically.

        `fedquilt.load_model(file, factory)` reads it back.
        """
        try:
            write(Path(file), self.blob().chunks())
        except OSError as error:
            raise RecordError(f"the model could not be written to {file}: {why(error)}.") from error

    def blob(self) -> Blob:
        """Return the content of the file that `save` writes: all tensors and the note, sealed."""
        tensors = {
            f"stocks.{position}.{name}": value
            for position, stock in enumerate(self.stocks)
            for name, value in _values(stock, self._family).items()
        }
        for position, net_statistics in enumerate(self.statistics):
            assert isinstance(net_statistics, _Statistics)
            tensors |= {
                f"statistics.{position}.{name}": value
                for name, value in net_statistics.values.items()
            }
        current_settings = {"norms": self.norms, "share": self.share, "robustness": self.robustness}
        return Blob.sealed(
            tensors,
            {**self.note, **self.plan.to_note(), "format": "customizable", **current_settings},
        )

    @staticmethod
    def restored(family: Family, tensors: Weights, note: Note) -> CustomizableModel:
        """Return the model that `save` wrote, with the share and robustness that were set then.

        Args:
            family: Family that the nets were cut from.
            tensors: All tensors of the file, by name.
            note: The file's note, checked.

        Raises:
            FormatError: Nets or tensors do not fit the family, or each other.
        """
        plan = SizePlan.from_note(note)
        prefixes = [f"stocks.{position}." for position in range(len(plan.stocks))]
        prefixes += [f"statistics.{position}." for position in range(len(plan.nets))]
        values = [under(prefix, tensors) for prefix in prefixes]
        names = [
            prefix + name for prefix, state in zip(prefixes, values, strict=True) for name in state
        ]
        check_names(tensors, (), names, "the file")
        weights, statistics = values[: len(plan.stocks)], values[len(plan.stocks) :]
        plan.check(family, weights, statistics)
        plan_keys = (*plan.to_note(), "format", "norms", "share", "robustness")
        description = {key: value for key, value in note.items() if key not in plan_keys}
        model = CustomizableModel(family, plan, weights, statistics, note["norms"], description)
        return model.set(note["share"], note["robustness"])


class _Statistics(nn.Module):
    """Norm statistics of one net. Dots in names are replaced, because buffers allow none."""

    def __init__(self, values: Weights) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name.replace(".", "/"), value.detach().clone())

    @property
    def values(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): value for name, value in self.named_buffers()}


def customizable(
    run: TrainedRun,
    shares: Iterable[float],
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
) -> CustomizableModel:
    """Return the nets of a run for several shares as one module.

    Args:
        run: A run, or what is left of it for deployment.
        shares: Shares of the model in (0, 1]. The first one is set.
        client: Client whose own result is deployed. None: the server's.
        norms: Norm policy or its name, as in `Run.deploy`. None: the policy of training, or `post`.
        samples: Inputs on which norm statistics are measured instead of training samples.

    Raises:
        ConfigError: There are no shares, or their nets have several architectures.
    """
    source = WeightSource(run, client)
    policy = norms_of(run, norms, client)
    family = run.world.family
    try:
        budgets = {float(share): Budget(share=float(share)) for share in shares}
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a customizable model of shares={shares!r} was asked for; several numbers in (0, 1] "
            "fit, such as shares=(1, 0.5)."
        ) from error
    if not budgets:
        raise ConfigError(
            "a customizable model was asked for without shares; give some, such as shares=(1, 0.5)."
        )
    plan = SizePlan.of({share: source.nets(budget) for share, budget in budgets.items()})
    check_nets(run, (assignment.net for assignment in plan.nets), policy)
    # Tracked statistics are stored with the weights: narrower nets have views of the wider one's.
    has_tracked = policy.tracks
    weights = source.settled(plan.stocks, policy if has_tracked else BatchStatistics(), samples)
    statistics: list[Weights] = [{} for _ in plan.nets]
    if policy.measures and family.statistics:
        states = source.settled([assignment.net for assignment in plan.nets], policy, samples)
        statistics = [
            {name: state[name] for name in family.statistics if name in state} for state in states
        ]
    nets = (*plan.stocks, *(assignment.net for assignment in plan.nets))
    if family.layout.nets and len(variants := {net.arch.variant for net in nets}) > 1:
        raise ConfigError(
            f"one customizable model of shares {', '.join(f'{share:g}' for share in budgets)} was "
            f"asked for; these are nets of several architectures: {', '.join(sorted(variants))}. "
            "Deploy each by itself: run.deploy(budget)."
        )
    family, nets_alone, renamed = alone(family, nets, (*weights, *statistics))
    plan = plan.with_nets(nets_alone)
    count = len(plan.stocks)
    note = {**about(run, family, plan.stocks), "client": client}
    return CustomizableModel(family, plan, renamed[:count], renamed[count:], policy.name, note)


def resident_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the bytes of all parameters and buffers of modules. Shared memory is counted once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())


def _values(stock: nn.Module, family: Family) -> dict[str, Tensor]:
    tensors = {**dict(stock.named_parameters()), **dict(stock.named_buffers())}
    return {name: tensors[name].detach() for name in family.layout.dims if name in tensors}


def _relink(model: nn.Module, _: object) -> None:
    """Rebuild the nets of a model after `load_state_dict`, because gathered weights are copies."""
    assert isinstance(model, CustomizableModel)
    model._link()
