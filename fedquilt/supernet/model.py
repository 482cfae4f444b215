"""Settings of a searched model: the search for nets if the user names none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fedquilt.checks import File, one_of, within
from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.supernet.limits import DeviceCounts
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.nets import Account, SearchedNets, searched_nets
from fedquilt.supernet.search import MAX_ENUMERATED, SearchOptions, Strategy
from fedquilt.supernet.store import load_supernet, space_by_name

if TYPE_CHECKING:
    from fedquilt.data import Pool
    from fedquilt.supernet.elastic import Supernet
    from fedquilt.supernet.space import Space

# Images of up to this many pixels in height get the space `tiny`, because the other spaces halve
# images five times.
TINY_IMAGES = 16


@dataclass(frozen=True)
class SearchedModel:
    """A knowledge net and private nets, searched for the data and the fleet of a run.

    Without a supernet all weights are drawn at random, as in RaFL's settings (a) and (b). With a
    supernet the nets start from its weights, as in setting (c).
    """

    # Name of the search space, or file.py:Class. Empty: tiny for small images, else mobilenetv3.
    space: str = ""
    supernet: File = ""  # Supernet file with the initial weights of nets. Empty: random weights.
    # Multiply-adds of the knowledge net, at most. 0: half of the weakest device's limit.
    knowledge_macs: float = 0.0
    num_members: int = 8  # Number of different private nets, at most.
    # Search strategy: evolution, random or exhaustive. Empty: exhaustive in small spaces, else
    # evolution.
    strategy: Strategy | Literal[""] = ""

    def __post_init__(self) -> None:
        within(self, knowledge_macs="[0, inf)", num_members="[1, inf)")
        if self.strategy:
            one_of(self, strategy=Strategy)

    def search(
        self,
        data: Pool,
        fleet: DeviceCounts,
        seed: int = 0,
        step: TrainingStep = TrainingStep(),
        *,
        account: Account = "pair",
        private_weights: bool = True,
    ) -> SearchedNets:
        """Search a knowledge net and private nets for the data and the devices.

        The space gets the channels, image size and classes of the data.

        Args:
            data: Samples that the nets classify. They must be square images.
            fleet: Number of devices with each budget, such as `Fleet.counts`.
            seed: Random seed of the search.
            step: Training step whose memory is limited, if the fleet has limits on memory.
            account: Nets that a limit bounds: `pair`, or `private` as in the paper.
            private_weights: Private nets start from the supernet's weights too. False: the
                knowledge net alone does.

        Raises:
            BudgetError: No pair of nets is within the limits of a device.
            ConfigError: The data has no square images, or no classes.
            RecordError: The supernet file cannot be used.
        """
        space = self._space(data)
        supernet = self._supernet(space)
        return searched_nets(
            space,
            fleet,
            knowledge_macs=self.knowledge_macs or None,
            num_members=self.num_members,
            account=account,
            supernet=supernet,
            private_weights=private_weights,
            meter=Meter(space, step),
            options=SearchOptions(self.strategy or _usual_strategy(space), seed=seed % 2**32),
        )

    def _space(self, data: Pool) -> Space:
        shape = tuple(data.example.shape[1:])
        if len(shape) != 3 or shape[1] != shape[2] or not data.num_classes:
            raise ConfigError(
                f"searched nets were asked for; they classify square images, and {data.name} has "
                f"samples of shape {shape} and {data.num_classes} classes. Name models that fit, "
                "or your own search space."
            )
        name = self.space or ("tiny" if shape[1] <= TINY_IMAGES else "mobilenetv3")
        return replace(
            space_by_name(name),
            in_channels=shape[0],
            image_size=shape[1],
            num_classes=data.num_classes,
        )

    def _supernet(self, space: Space) -> Supernet | None:
        return load_supernet(self.supernet, space) if self.supernet else None


def _usual_strategy(space: Space) -> Strategy:
    """Return the default search strategy of a space: "exhaustive" or "evolution".

    Spaces of up to `MAX_ENUMERATED` nets are searched exhaustively, which needs no library for
    evolution.
    """
    return "exhaustive" if space.num_configs <= MAX_ENUMERATED else "evolution"
