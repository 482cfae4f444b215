"""Find the largest member within a budget, with few members counted.

`Fitter` turns a budget into a share of every axis, and a share into a member. Counting a member
takes a run of its module (`cost.py`), and each device of a fleet may have its own limit. Counts are
cached with the members, so that all limits share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fedquilt.axes import Axis
from fedquilt.errors import BudgetError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.member import Member
from fedquilt.family.variants import JOIN, joined, members_of
from fedquilt.tensors import BoundedCache
from fedquilt.terms import Arch, Budget, Submodel

if TYPE_CHECKING:
    from fedquilt.family.family import Family, Rounding

# Budgets whose result a family caches. Searching again needs no run of the module.
MAX_CACHED_FITS = 16_384


@dataclass(eq=False)
class Fitter:
    """Finds the members of a family that fit a budget, and caches the results.

    Args:
        family: The family. Members have its variant, and train its parts.
    """

    family: Family

    def share(self, budget: Budget, rounding: Rounding, step: TrainingStep | None) -> float:
        """Return the share of every axis that a budget allows. See `Family.share`.

        Args:
            budget: Limits that hold together.
            rounding: Rounding of a share of an axis to whole channels.
            step: Training step that a limit on memory is about. None: it is about inference.
        """
        if budget.macs is budget.params is budget.memory is None:
            assert budget.share is not None
            return budget.share
        key = budget, rounding, step if budget.memory else None
        return self._shares.get(key, lambda: self._search(*key))

    @cached_property
    def _shares(self) -> BoundedCache[tuple[Budget, Rounding, TrainingStep | None], float]:
        return BoundedCache(MAX_CACHED_FITS)

    def _search(self, budget: Budget, rounding: Rounding, step: TrainingStep | None) -> float:
        """Return the largest share of every axis whose member is within a budget.

        Only shares at which some axis gains a channel are tried. Costs grow with the share.

        Args:
            budget: Limits that hold together, at least one of them on costs.
            rounding: Rounding of a share of an axis to whole channels.
            step: Training step that a limit on memory is about. None: it is about inference.

        Raises:
            BudgetError: Even the smallest member exceeds a limit.
        """
        limit = budget.share or 1.0
        shares = sorted({share for share in self.steps if share <= limit} or {limit})

        def member(number: int) -> Member:
            return self.family.member(self.arch(shares[number], rounding))

        count = len(shares)
        for bound in ("params", "macs", "memory"):
            limit_of_bound = getattr(budget, bound)
            if limit_of_bound is not None:
                count = 1 + last_within(self._need(bound, member, step), limit_of_bound, count)
        if count == 0:
            cost = self.family.cost(self.arch(shares[0], rounding), step or TrainingStep())
            needs = (
                f"trains in {cost.memory:,} bytes" if step else f"runs in {cost.inference:,} bytes"
            )
            raise BudgetError(
                f"no member fits the budget {budget}: the smallest has {cost.params:,} parameters, "
                f"{cost.macs:,} multiply-adds a sample and {needs}{_batches(step)}."
            )
        return shares[count - 1]

    def _need(self, bound: str, member: Callable[[int], Member], step: TrainingStep | None) -> Need:
        """Return how much of one limit members need, and numbers to estimate it from.

        Parameters need no estimate. Multiply-adds are estimated from the parameters, and
        activations from the number of channels.

        Args:
            bound: Name of the limit: "params", "macs" or "memory".
            member: Returns a member by its number, smallest first.
            step: Training step that a limit on memory is about. None: it is about inference.
        """

        def needed(net: Member) -> int:
            return self._needed(bound, (net,), step)

        def weight_memory(net: Member) -> int:
            return step.memory(net.weight_bytes, []) if step else net.weight_bytes

        def num_channels(net: Member) -> int:
            return sum(net.arch.sizes.values())

        if bound == "params":
            return Need(member, needed, exact=needed, gauge=lambda net: 0)
        if bound == "macs":
            return Need(member, needed, exact=lambda net: 0, gauge=lambda net: net.count)
        return Need(member, needed, exact=weight_memory, gauge=num_channels)

    @cached_property
    def steps(self) -> set[float]:
        """Return the shares in (0, 1] at which some axis gains a channel.

        If one channel of each group, or one whole group, is too much, members shrink by single
        channels of the product.
        """
        shares = {k / axis.size for axis in self._free for k in range(1, axis.size + 1)}
        for groups in self._free:
            for inner in (axis for axis in self._free if axis.name in groups.inner):
                few = range(1, min(groups.size, inner.size))
                shares.update(k / (groups.size * inner.size) for k in few)
        return shares

    def excess(
        self, nets: tuple[Member, ...], budget: Budget, step: TrainingStep | None
    ) -> tuple[str, ...]:
        """Return a phrase for each limit that nets exceed together. See `Family.excess`.

        Args:
            nets: Members that a device has at once.
            budget: The device's limits.
            step: Training step that a limit on memory is about. None: it is about inference.
        """
        key = nets, budget, step if budget.memory else None
        return self._excess.get(
            key, lambda: (*self._widths_over(nets, budget), *self._costs_over(*key))
        )

    @cached_property
    def _excess(
        self,
    ) -> BoundedCache[tuple[tuple[Member, ...], Budget, TrainingStep | None], tuple[str, ...]]:
        return BoundedCache(MAX_CACHED_FITS)

    def _widths_over(self, nets: tuple[Member, ...], budget: Budget) -> list[str]:
        """Return a phrase for the first dimension of which nets have too many channels together.

        The list is empty if there is none, or if the budget has no share.

        Args:
            nets: Members that a device has at once, whose channels are added up.
            budget: The device's limits, of which the share counts.
        """
        if budget.share is None:
            return []
        channels_of_nets = [self._channels(net) for net in nets]
        variants: tuple[str, ...] = (self.family.variant,)
        if self.family.layout.nets:
            variants = members_of(JOIN.join(net.arch.variant for net in nets))
        together = self.family.at(joined(*variants))
        allowed = self._channels(together.fitter.arch(budget.share, "ceil"))
        smallest = self._channels(together.fitter.arch(0.0, "floor"))
        for dim, limit in allowed.items():
            counts = [widths[dim] for widths in channels_of_nets if dim in widths]
            needed = sum(counts)
            if needed > max(limit, len(counts) * smallest[dim]):
                axis = " × ".join(map(repr, dim))
                return [
                    f"share {budget.share:g}: {limit} channels of axis {axis} allowed, "
                    f"{needed} needed"
                ]
        return []

    def _costs_over(
        self, nets: tuple[Member, ...], budget: Budget, step: TrainingStep | None
    ) -> list[str]:
        """Return a phrase for each limit on params, macs and memory that nets exceed together.

        Args:
            nets: Members that a device has at once.
            budget: The device's limits. Those that are None are left out.
            step: Training step that a limit on memory is about. None: it is about inference.
        """
        phrases = []
        use = f" of training{_batches(step)}" if step else " of inference"
        for name in ("params", "macs", "memory"):
            limit = getattr(budget, name)
            if limit is None:
                continue
            needed = self._needed(name, nets, step)
            if needed > limit:
                title = f"memory{use}" if name == "memory" else name
                phrases.append(f"{title}: {limit:,.10g} allowed, {needed:,} needed")
        return phrases

    def _needed(self, bound: str, members: tuple[Member, ...], step: TrainingStep | None) -> int:
        """Return how much nets need of one limit together. Counting a member may take a run.

        Args:
            bound: Name of the limit: "params", "macs" or "memory".
            members: Nets that a device has at once.
            step: Training step that memory is about: all nets train at once. None: memory is about
                inference, in which nets run one after another.
        """
        if bound == "params":
            return sum(member.count for member in members)
        if bound == "macs":
            return sum(member.macs for member in members)
        if step:
            return sum(member.training_memory(step) for member in members)
        weights = sum(member.weight_bytes for member in members)
        return weights + max(member.inference_activations for member in members)

    def width(self, member: Arch | Submodel | Member) -> float:
        """Return the largest share of channels that a dimension of a member keeps.

        Only dimensions that can be cut count. It is 1 if there are none.
        """
        sizes = self.family.layout.sizes
        shares = [
            count / math.prod(sizes[axis] for axis in dim)
            for dim, count in self._channels(member).items()
        ]
        return max(shares, default=1.0)

    def _channels(self, member: Arch | Submodel | Member) -> dict[tuple[str, ...], int]:
        """Return the number of channels that a member keeps of every dimension that can be cut.

        Keys are tuples of the dimension's axes. For a union, only the member's own nets count.

        A dimension is one axis, or the product of two: groups, and the channels inside each. Of
        these, one may stay whole while the other is cut, so that neither alone shows the member's
        width.
        """
        resolved = self.family.member(member)
        fitter = self
        if self.family.layout.nets:
            fitter = self.family.at(resolved.arch.variant).fitter
        dims = fitter._dimensions
        return {dim: math.prod(resolved.sizes[axis] for axis in dim) for dim in dims}

    @cached_property
    def _dimensions(self) -> tuple[tuple[str, ...], ...]:
        """Return the dimensions that can be cut, as tuples of one axis or of groups and inner axis.

        They are those of the family's variant.
        """
        axes = self.family.layout.axes_at(self.family.variant)
        grouped = [(name, inner) for name, axis in axes.items() for inner in axis.inner]
        paired = {axis for dim in grouped for axis in dim}
        dims = [*grouped, *((name,) for name in axes if name not in paired)]
        return tuple(dim for dim in dims if not all(axes[name].fixed for name in dim))

    @cached_property
    def _free(self) -> list[Axis]:
        """Return the axes of the family's variant that are not fixed."""
        return [
            axis
            for axis in self.family.layout.axes_at(self.family.variant).values()
            if not axis.fixed
        ]

    def arch(self, share: float, rounding: Rounding) -> Arch:
        """Return the widths of the member that has a share of every axis.

        Args:
            share: Share of the channels of every axis, in [0, 1]. At least `Axis.least` are kept.
            rounding: Rounding of a share of an axis to whole channels.
        """

        def target(size: int) -> int:
            # 0.29 * 100 is 28.999…: the product is rounded before it is floored.
            exact = round(share * size, 9)
            return max(1, math.floor(exact) if rounding == "floor" else math.ceil(exact))

        widths = {axis.name: target(axis.size) for axis in self._free}
        for groups in self._free:
            inner_sizes = {
                name: self.family.layout.axes[name].size for name in groups.inner if name in widths
            }
            if inner_sizes:
                widths |= _group_widths(groups, inner_sizes, share, target)
        axes = self.family.layout.axes
        arch_widths = tuple((name, max(width, axes[name].least)) for name, width in widths.items())
        return Arch(arch_widths, self.family.variant, self.family.trains)


def _group_widths(
    groups: Axis, inner_sizes: Mapping[str, int], share: float, target: Callable[[int], int]
) -> dict[str, int]:
    """Return the widths of an axis of groups, and of the axes inside the groups.

    Of groups and the channels inside them, the finer one is cut first, then the other. Keeping the
    most channels at each share would not give nested members: of 8 groups of 2, it keeps 8 of 1 at
    a half and 5 of 2 above it.

    Args:
        groups: The axis of groups.
        inner_sizes: Sizes of the axes inside the groups, by name.
        share: Share of the channels that the member has.
        target: Returns the number of channels that the member keeps of a size.
    """
    smallest = min(inner_sizes.values())
    if groups.size < smallest and round(share * smallest, 9) >= 1:
        # All groups are kept, with fewer channels in each.
        return {
            groups.name: groups.size,
            **{name: target(size) for name, size in inner_sizes.items()},
        }
    if groups.size < smallest:  # Each group keeps one channel of the smallest axis.
        num_groups = min(groups.size, target(groups.size * smallest))
        max_widths = {name: size // smallest for name, size in inner_sizes.items()}
    else:  # Whole groups are kept.
        num_groups = target(groups.size)
        max_widths = dict(inner_sizes)
    widths = {groups.name: num_groups}
    for name, size in inner_sizes.items():
        widths[name] = max_widths[name]
        if num_groups == 1:
            widths[name] = min(max_widths[name], target(groups.size * size))
    return widths


def _batches(step: TrainingStep | None) -> str:
    return f" with batches of {step.batch_size}" if step else ""


@dataclass(frozen=True, eq=False)
class Need:
    """The amounts of one limit that members need. Members are numbered by size, smallest first.

    Args:
        member: Returns a member by its number.
        needed: Returns how much a member needs. This may take a run of the module.
        exact: Returns the part of `needed` that follows from the weights and takes no run.
        gauge: Returns a number with which the rest of `needed` grows about linearly.
    """

    member: Callable[[int], Member]
    needed: Callable[[Member], int]
    exact: Callable[[Member], int]
    gauge: Callable[[Member], int]

    def at(self, number: int) -> int:
        """Return how much the member with this number needs."""
        return self.needed(self.member(number))

    def line(self, first: int, second: int) -> Callable[[int], float]:
        """Return a function that estimates what the member with a number needs, without a run.

        The part that weights do not determine is interpolated between two members, which are
        counted.

        Args:
            first: Number of the smaller member.
            second: Number of the larger member.
        """
        small, large = self.member(first), self.member(second)
        base = self.needed(small) - self.exact(small)
        rise = self.needed(large) - self.exact(large) - base
        run = self.gauge(large) - self.gauge(small)

        def estimate(number: int) -> float:
            member = self.member(number)
            part = (self.gauge(member) - self.gauge(small)) / run if run else 0.0
            return self.exact(member) + base + rise * part

        return estimate


def last_within(need: Need, limit: float, count: int) -> int:
    """Return the number of the last member within a limit, or -1 if there is none.

    The largest and the smallest member are counted first. A line between them says where to begin.
    From there the search moves in steps that double, until the result is between two members that
    were counted. Bisection counts log2(count) members. This search counts four if the line is
    right, whatever the count, and about twice log2(count) at most.

    The members that are counted depend on the limit and not on earlier searches. Therefore the
    result does not depend on them either.

    Args:
        need: Amounts that members need, which grow with their number.
        limit: Largest amount that is allowed.
        count: Number of members.
    """
    if count == 0 or need.at(count - 1) <= limit:
        return count - 1
    if need.at(0) > limit:
        return -1
    low, high = 0, count - 1
    number = _bisected(need.line(low, high), limit, low, high)
    number = min(max(number, low + 1), high - 1)
    step = 1
    while high - low > 1:
        fits = need.at(number) <= limit
        low, high = (number, high) if fits else (low, number)
        reach = max(1, min(step, (high - low) // 2))
        number = low + reach if fits else high - reach
        step *= 2
    return low


def _bisected(estimate: Callable[[int], float], limit: float, low: int, high: int) -> int:
    """Return the last number at which an estimate is within a limit.

    Numbers from `low` to one less than `high` are searched. The result is at least `low`, whose
    estimate is not compared.

    Args:
        estimate: Returns an amount by number, which grows with the number.
        limit: Largest amount that is allowed.
        low: First number.
        high: Last number plus one.
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if estimate(middle) <= limit else (low, middle)
    return low
