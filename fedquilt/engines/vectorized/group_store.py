"""Client groups that are ready for use, and the choice of their layout."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedquilt.engines.vectorized.cuda_graph import CaptureError
from fedquilt.engines.vectorized.group_tensors import GroupLayout, Shape
from fedquilt.engines.vectorized.groups import ClientGroup, replay_time
from fedquilt.engines.vectorized.stack import Stack
from fedquilt.errors import FedquiltError
from fedquilt.family.grouped import GroupingError
from fedquilt.round.client_checks import blamed
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Arch

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


# Memory that idle client groups may hold on a CPU, as a multiple of a stack's memory.
IDLE_STACKS = 4
MIN_TIMED_CLIENTS = 4  # Least number of clients with which layouts are timed
# Multiply-adds of a client's training step from which on clients are trained one by one on a GPU.
# No other layout was faster for such steps (docs/performance.md), and capturing all of them to time
# them takes seconds for each net.
MIN_MACS_ALONE = 3_000_000_000

_log = logging.getLogger(__name__)


class GroupStore:
    """Client groups of an engine.

    Building and capturing a group is slow, so that idle groups are kept for later stacks.

    Args:
        engine: Engine that the groups belong to.
    """

    def __init__(self, engine: Vectorized) -> None:
        self.engine = engine
        self.idle: dict[Shape, list[ClientGroup]] = {}  # Groups without clients, by shape
        self.refused: dict[Shape, str] = {}  # Shapes that cannot be used, with the reason
        self._chosen: dict[Shape, GroupLayout] = {}  # Fastest layout, by shape
        self.warm: set[Hashable] = set()  # Actions that a client group has captured before

    def group_for(self, stack: Stack) -> ClientGroup | None:
        """Return a client group that can train a stack, either an idle one or a new one.

        On a GPU its steps are captured. If the chosen layout fails, stacked nets are tried. Several
        clients are never trained in the layout "alone", which is for stacks of one client.

        Args:
            stack: Clients that train together. It is not loaded into the group.

        Returns:
            The group. None: the stack trains without one. This is so if `record` is False, if no
            client has a full batch, or if no layout works.
        """
        if self.engine.record is False:
            return None
        full = stack.learner.local.batch_size
        if not any(full in client_sizes for client_sizes in stack.sizes):
            return None
        count = len(stack.jobs)
        layout = self.layout_for(stack.arch, stack.learner, count)
        if layout == "alone" and count > 1:
            # Clients that are stacked for their own samples learn a lesson as the same stack, also
            # if one by one is the fastest layout of the lesson.
            layout = "grouped"
        shape = Shape.of(stack.arch, stack.learner, count, layout)
        ragged = any(
            set(client_sizes) != {full} or len(client_sizes) != len(stack.sizes[0])
            for client_sizes in stack.sizes
        )
        all_sizes = {size for client_sizes in stack.sizes for size in client_sizes}
        for layout in dict.fromkeys((shape.layout, "stack" if count > 1 else "alone")):
            candidate = replace(shape, layout=layout)
            try:
                with blamed(stack.jobs[0], f"preparing a stack of {count}"):
                    group = self._ready(candidate, all_sizes)
                    if ragged and count > 1:
                        group.capture_step(masked=True)
                return group
            except (CaptureError, GroupingError) as error:
                self._refuse(candidate, error)
        return None

    def layout_for(self, arch: Arch, learner: Learner, count: int) -> GroupLayout:
        """Return the layout in which clients of a member are trained.

        It is the one that was asked for, or the fastest on this machine. On a GPU clients with much
        work in a step are trained one by one without timing other layouts.

        Args:
            arch: Architecture of the member.
            learner: Local training of the clients.
            count: Number of clients that train together.
        """
        if self.engine.layout != "auto":
            return self.engine.layout
        if count == 1:
            return "alone"
        if self.engine.device.type != "cuda":  # Never slower than stacked: bench/layouts.py
            return "grouped"
        # A choice by measured times would not be deterministic.
        if not self.engine.captures_steps or torch.are_deterministic_algorithms_enabled():
            return "stack"
        member = self.engine.world.family.member(arch)
        if learner.macs(member, [learner.local.batch_size]) >= MIN_MACS_ALONE:
            return "alone"
        key = Shape.of(arch, learner, count, "stack")
        if key not in self._chosen:
            # Training side by side pays off more with more clients. If it did not for more clients
            # than these, it is not tried.
            layouts_of_more = (
                layout
                for shape, layout in self._chosen.items()
                if shape.count > count and replace(shape, count=count) == key
            )
            self._chosen[key] = "alone" if "alone" in layouts_of_more else self._fastest(key)
        return self._chosen[key]

    def _fastest(self, shape: Shape) -> GroupLayout:
        """Capture every layout, time its replays, and return the fastest.

        Several groups are replayed together, as in a cohort. A single group would measure the
        latency of its kernels, whereas in a cohort their number matters. Groups of the best layout,
        and those of single clients, stay in `idle`. If no layout can be captured, the result is
        "stack".

        Args:
            shape: Shape of the groups. Its layout is ignored.
        """
        num_clients = shape.count * max(1, MIN_TIMED_CLIENTS // shape.count)
        seconds_by_layout: dict[GroupLayout, float] = {}
        layouts: tuple[GroupLayout, ...] = ("alone", "grouped", "stack")
        for layout in layouts:
            # Stacked was never faster than side by side: docs/performance.md.
            if layout == "stack" and "grouped" in seconds_by_layout:
                continue
            candidate = replace(shape, layout=layout, count=1 if layout == "alone" else shape.count)
            try:
                groups = [self._ready(candidate) for _ in range(num_clients // candidate.count)]
            except (CaptureError, GroupingError) as error:
                self._refuse(candidate, error)
                continue
            seconds_by_layout[layout] = replay_time(groups)
            self.idle.setdefault(candidate, []).extend(groups)
        best: GroupLayout = "stack"
        if seconds_by_layout:
            best = min(seconds_by_layout, key=lambda layout: seconds_by_layout[layout])
        for layout in seconds_by_layout:
            if layout != best and layout != "alone":
                self.idle.pop(replace(shape, layout=layout), None)
        times = ", ".join(
            f"{layout} {1e3 * seconds:.2f} ms" for layout, seconds in seconds_by_layout.items()
        )
        _log.info("%d clients of one member, %d at once: %s", num_clients, shape.count, times)
        return best

    def _ready(self, shape: Shape, sizes: Collection[int] = ()) -> ClientGroup:
        """Return a client group of this shape whose step is captured.

        It is an idle group, which is removed from `idle`, or else a new one. Of several idle groups
        it is one that has run the most steps of the given batch sizes, because it has captured
        them, or will do so soon.

        Args:
            shape: Shape of the group.
            sizes: Batch sizes that the group will train on.

        Raises:
            CaptureError: The step cannot be captured, or the shape was refused before.
            GroupingError: The layout is "grouped", and the nets cannot be computed side by side.
        """
        if shape in self.refused:
            raise CaptureError(self.refused[shape])
        if idle := self.idle.get(shape):
            group = max(idle, key=lambda candidate: candidate.num_unusual_steps(sizes))
            idle.remove(group)
        else:
            group = ClientGroup(self.engine, shape)
        with self.engine.computing():  # A captured step keeps the precision of its capture.
            group.capture_step()
        return group

    def _refuse(self, shape: Shape, error: FedquiltError) -> None:
        """Remember that a shape cannot be used, and log the reason once.

        A failed capture is logged as a warning. Nets that cannot be computed side by side are
        logged at level INFO, because another layout is used.
        """
        if shape not in self.refused:
            self.refused[shape] = str(error)
            if isinstance(error, GroupingError):  # Another layout is used instead
                _log.info(
                    "%d clients of one member cannot be trained %s: %s",
                    shape.count,
                    shape.layout,
                    error,
                )
            else:
                message = "clients with equal nets cannot be trained %s: %s"
                self.engine.once.warning(
                    str(error), message, shape.layout, error, kind=shape.layout
                )

    def move_to(self, engine: Vectorized) -> None:
        """Make another engine the owner of this store and of its idle groups.

        Captured steps stay valid, because the other engine has the same samples at the same
        addresses, which the caller ensures. The store itself does not change hands here.

        Args:
            engine: New owner. The caller makes this store its `groups`.
        """
        self.engine = engine
        for groups in self.idle.values():
            for group in groups:
                group.engine = engine

    def keep(self, group: ClientGroup) -> None:
        """Keep a client group without clients for later stacks of the same shape.

        Building groups anew in every round would be slow. If idle groups take too much memory, all
        groups of the least recently used shapes are dropped.
        """
        self.idle[group.shape] = [*self.idle.pop(group.shape, []), group]
        max_bytes = self.engine.memory
        if self.engine.device.type != "cuda":
            max_bytes *= IDLE_STACKS
        while len(self.idle) > 1 and sum(self.idle_bytes(shape) for shape in self.idle) > max_bytes:
            self.idle.pop(next(iter(self.idle)))

    def idle_bytes(self, shape: Shape) -> int:
        """Return the estimated bytes that all idle client groups of a shape hold together.

        They hold weights and slots, and on a GPU also the workspace of their captured graphs.
        """
        engine, learner = self.engine, shape.learner
        num_clients = len(self.idle[shape]) * shape.count
        if engine.device.type == "cuda":
            batch_size = learner.local.batch_size
            return num_clients * engine.client_bytes(shape.arch, batch_size, learner.num_slots)
        member = engine.world.family.member(shape.arch)
        weight_bytes = member.weight_bytes * engine.world.dtype.itemsize // 4
        return num_clients * weight_bytes * (2 + learner.num_slots)
