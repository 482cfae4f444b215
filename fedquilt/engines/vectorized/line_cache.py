"""Caches of masks and nested nets, for weights that are stored in rows."""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedquilt.engines.vectorized.lines import Inner, Lines
from fedquilt.family.member import Member
from fedquilt.round.training.regions import Region
from fedquilt.tensors import BoundedCache

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


# Bytes of cached masks. Phases that are drawn at random have hundreds, of one byte per weight.
MAX_MASK_BYTES = 2 << 30


class LineCache:
    """Masks and positions of nested nets in the rows of client groups.

    Args:
        engine: Engine that has the family and the device.
    """

    def __init__(self, engine: Vectorized) -> None:
        self._engine = engine
        self._masks: BoundedCache[Hashable, Tensor] = BoundedCache(
            MAX_MASK_BYTES, attrgetter("nbytes")
        )
        # Nested nets that at least one client group uses.
        self.nested: WeakValueDictionary[Hashable, Inner] = WeakValueDictionary()

    def mask(self, member: Member, moves: Region, lines: Lines) -> Tensor:
        """Return a mask that is True where a phase may move the weights of a member.

        The newest masks are cached.

        Args:
            member: Member that the clients train.
            moves: Region that the phase may move.
            lines: Layout of the member's weights in one row.

        Returns:
            Booleans of shape (1, entry).
        """

        def new_mask() -> Tensor:
            masks = {}
            for name, shape in lines.shapes.items():
                mask = moves.mask(member, name)
                masks[name] = (
                    mask[None] if isinstance(mask, Tensor) else torch.full((1, *shape), mask)
                )
            return lines.join(masks).to(self._engine.device)

        return self._masks.get((member, moves, lines.channels_last), new_mask)

    def nested_net(self, member: Member, inner: Member, lines: Lines) -> Inner:
        """Return the positions of a nested net in the weights of a member.

        Client groups share the result as long as one of them uses it.

        Args:
            member: Outer net.
            inner: Nested net, which is part of `member`.
            lines: Layout of the outer net's weights in one row.
        """
        key = member, inner, lines.channels_last
        entries = self.nested.get(key)
        if entries is None:
            cutter = self._engine.world.family.cutter
            entries = lines.nested(cutter, member.index, inner.index).to(self._engine.device)
            self.nested[key] = entries
        return entries
