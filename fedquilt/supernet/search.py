"""Search for the best member of a space within a device's limits (RaFL, section 3.1)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedquilt.checks import one_of, within
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.errors.extras import how_to_install
from fedquilt.supernet.genome import Genes, Genome
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.meter import Costs, Meter
from fedquilt.supernet.predictor import Floats
from fedquilt.supernet.space import Config
from fedquilt.units import amount

Score = Callable[[Sequence[Config]], Floats]  # Returns scores of configurations. Higher is better.
Measure = Callable[[Config], float]  # Returns the accuracy of a member.
Strategy = Literal["evolution", "random", "exhaustive"]
Watch = Callable[[int, int], None]  # Gets the number of finished generations and of all.
# Configurations up to which a space is enumerated, so that its best member is known exactly.
MAX_ENUMERATED = 20_000
SATURATED = 12  # Generations without a better member after which the evolution ends.
MAX_CACHED_LIMITS = 4_096  # Limits whose capacity is cached.
# Random configurations that are enlarged up to a limit, to find how much of it a space can use.
FILLED_STARTS = 32


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Args:
        strategy: `evolution` is a genetic algorithm. `random` draws configurations until one is
            within `tolerance` of the limit, as the released code does; it uses no score.
            `exhaustive` scores every candidate of a small space.
        floor: Least share of the limit's multiply-adds that a candidate has, wherever the space has
            such members.
        tolerance: Share of the limit's multiply-adds by which `random` may stay below it.
        draws: Configurations that `random` draws at most.
        population: Members of a generation.
        generations: Generations of the evolution.
        verified: Members with the highest scores that are measured before `best` chooses among
            them. 0 returns the one with the highest score. It has no effect without a measure, nor
            on `random`, which uses no score.
        seed: Random seed.
    """

    strategy: Strategy = "evolution"
    floor: float = 0.9
    tolerance: float = 0.05
    draws: int = 2_000
    population: int = 64
    generations: int = 40
    verified: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(self, strategy=Strategy)
        within(
            self,
            floor="[0, 1]",
            tolerance="(0, 1]",
            draws="[1, inf)",
            population="[4, inf)",
            generations="[1, inf)",
            verified="[0, inf)",
            seed="[0, 4294967295]",
        )


@dataclass(frozen=True)
class Found:
    """A member that a search found."""

    config: Config  # Choices of the member.
    costs: Costs  # Multiply-adds, parameters, memory and time.
    score: float  # Predicted accuracy, or the proxy: multiply-adds, then parameters.
    limits: Limits  # Limits that the member was searched for.
    scored: int  # Number of members that the search scored.
    accuracy: float | None = None  # Accuracy on validation images. None: it was not measured.

    @property
    def name(self) -> str:
        """Return a name with the multiply-adds that is a valid module name, such as `net44_8M`."""
        return f"net{amount(self.costs.macs)}".replace(".", "_")


class Search:
    """A search for the best member of a space within limits.

    A candidate is within all limits and has at least `floor` of the multiply-adds that the limits
    allow. These are the limit's own, or, if the space has no such member, the most that a member
    within the limits has. Costs are counted for every configuration that the evolution meets. Only
    candidates are scored, and the result is one of them.

    Spaces with at most `MAX_ENUMERATED` configurations are enumerated, so that the members close to
    a limit are known exactly. In larger spaces, which have many members near any limit, random
    configurations are enlarged up to the limits.

    Searches for different limits share nothing but cached costs, so that several threads may call
    `best`. Equal limits and seeds give equal members.
    """

    def __init__(
        self,
        meter: Meter,
        score: Score | None = None,
        options: SearchOptions = SearchOptions(),
        measure: Measure | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            meter: Counts the costs of configurations of a space.
            score: Score of configurations, such as a predicted accuracy. None: `proxy`, for spaces
                without trained weights.
            options: Options of the search.
            measure: Function that returns the accuracy of a member, such as `MeasuredAccuracy` of a
                supernet. `best` then chooses among `options.verified` members by it. None: by the
                score alone, which is fast.
        """
        self.meter = meter
        self.space = meter.space
        self.options = options
        self.score = score or self.proxy
        self.measure = measure
        self.has_proxy = score is None  # True if the score is no predicted accuracy
        self._genome = Genome(self.space)
        self._columns: dict[
            str, Floats
        ] = {}  # costs of all configurations of a small space, by name
        self._lock = threading.Lock()
        self.capacity = lru_cache(MAX_CACHED_LIMITS)(self._capacity)

    def with_options(self, options: SearchOptions) -> Search:
        """Return a new search with other options, and the same meter, score and measure.

        Costs that were counted are shared with it.
        """
        search = Search(self.meter, None if self.has_proxy else self.score, options, self.measure)
        search._columns = self._columns
        search._lock = self._lock
        return search

    def proxy(self, configs: Sequence[Config]) -> Floats:
        """Return scores that need no weights: multiply-adds, and among equals the parameters.

        Without trained weights nothing is known about a member's accuracy. A member that uses more
        of its limit is taken as the better one. The released code accepts members by this alone.

        Args:
            configs: Configurations, for each of which there is one score.
        """
        max_params = 1 + self.meter.cost(self.space.largest).params
        costs = [self.meter.cost(config) for config in configs]
        return np.asarray(
            [cost.macs + cost.params / max_params for cost in costs], dtype=np.float64
        )

    # --- limits ----------------------------------------------------------------------------------

    def check(self, limits: Limits) -> None:
        """Refuse limits that no member of the space is within.

        Raises:
            BudgetError: The smallest member exceeds the limits. The message names it.
        """
        smallest = self.space.smallest
        exceeded = self.meter.exceeded(smallest, limits)
        if exceeded:
            raise BudgetError(
                f"a member of {self.space.name} was asked for within {limits}; the smallest "
                f"member has {self.meter.costs(smallest)}, which exceeds "
                f"{' and '.join(exceeded)}. Raise these limits, or use a smaller space."
            )

    def _capacity(self, limits: Limits) -> float:
        """Return the multiply-adds that a member within the limits can have.

        For a limit on multiply-adds alone this is the limit, or the largest member's if that is
        less. Another limit may be reached first. Then the largest member that a quick search finds
        counts.

        Raises:
            BudgetError: No member is within the limits. A limit on multiply-adds alone is not
                checked.
        """
        bound = min(limits.macs or math.inf, float(self.meter.cost(self.space.largest).macs))
        if set(limits.given) <= {"macs"}:
            return bound
        self.check(limits)
        return min(bound, max(self._macs(genes) for genes in self._filled(limits)))

    def _macs(self, genes: Genes) -> float:
        return float(self.meter.cost(self._genome.config(genes)).macs)

    def _exceeds(self, genes: Genes, limits: Limits) -> bool:
        return bool(self.meter.exceeded(self._genome.config(genes), limits))

    # --- search ----------------------------------------------------------------------------------

    def best(self, limits: Limits, watch: Watch | None = None) -> Found:
        """Return the best member within limits. The arguments are those of `top`.

        With a measure it is the most accurate of the `verified` members with the highest scores,
        and its accuracy is set. Predicted accuracies of these are too high on average, because a
        search also finds what a predictor overrates.
        """
        measure = self.measure
        if measure is None or not self.options.verified or self.options.strategy == "random":
            return self.top(limits, 1, watch)[0]
        members = self.top(limits, self.options.verified, watch)
        accuracies = [measure(member.config) for member in members]
        best_index = int(np.argmax(accuracies))  # of equals the first, which has the highest score
        return replace(members[best_index], accuracy=accuracies[best_index])

    def top(self, limits: Limits, count: int, watch: Watch | None = None) -> list[Found]:
        """Return the best members within limits, the best first.

        They differ from one another, so that a few can be measured before one is chosen.

        Args:
            limits: Limits of a device.
            count: Number of members, at most.
            watch: Function that is called after every generation. None: no calls.

        Raises:
            BudgetError: No member is within the limits.
            ConfigError: `exhaustive` was asked for in a space with more than `MAX_ENUMERATED`
                configurations.
        """
        self.check(limits)
        if self.options.strategy == "random":
            return self._draw(limits, count)
        filled = self._filled(limits)
        candidates = _Candidates(self, limits, self._min_macs(limits, filled))
        if self.options.strategy == "exhaustive":
            self._exhaust(candidates)
        else:
            self._evolve(candidates, filled, watch)
        ranked = sorted(
            candidates.scores, key=lambda genes: (candidates.scores[genes], genes), reverse=True
        )
        return [
            self._found(genes, candidates.scores[genes], limits, len(candidates.scores))
            for genes in ranked[:count]
        ]

    def _found(self, genes: Genes, score: float, limits: Limits, scored: int) -> Found:
        config = self._genome.config(genes)
        return Found(config, self.meter.costs(config), score, limits, scored)

    def _min_macs(self, limits: Limits, filled: Sequence[Genes]) -> float:
        """Return the fewest multiply-adds that a candidate may have.

        It is `floor` times the limit, or `floor` times the largest of `filled` if the limit cannot
        be used to that extent.

        Args:
            limits: Limits of the device.
            filled: Members that were enlarged up to the limits.
        """
        max_macs = max(self._macs(genes) for genes in filled)
        aim = limits.macs or math.inf
        return self.options.floor * (aim if max_macs >= self.options.floor * aim else max_macs)

    def _exhaust(self, candidates: _Candidates) -> None:
        if not self.is_enumerable:
            raise ConfigError(
                f"an exhaustive search of {self.space.name} was asked for; it has "
                f"{self.space.num_configs:.3g} "
                f"configurations, and at most {MAX_ENUMERATED:,} are enumerated. "
                'strategy="evolution" fits.'
            )
        is_candidate = self._fitting(candidates.limits) & (
            self._column("macs") >= candidates.min_macs
        )
        candidates.fitness([self._all[index] for index in np.flatnonzero(is_candidate)])

    def _evolve(
        self, candidates: _Candidates, filled: Sequence[Genes], watch: Watch | None
    ) -> None:
        """Evolve a population by PyGAD. Scores are added to `candidates`, and nothing is returned.

        Parents are chosen in tournaments and crossed uniformly. Mutation changes single choices.
        After every mutation configurations are moved back to the limits (`_fill`), so that nearly
        all of a generation are candidates. The two best are kept from generation to generation.

        Args:
            candidates: Limits of the search, and the scores so far.
            filled: Members to start from. Random ones are added up to the size of the population.
            watch: Function that is called after every generation. None: no calls.
        """
        pygad = _pygad()
        options = self.options
        random = np.random.default_rng([options.seed, 1])
        start = list(filled[: options.population])
        while len(start) < options.population:
            start.append(
                self._fill(
                    self._genome.random(random), candidates.limits, candidates.min_macs, random
                )
            )

        def mended(algorithm: Any, offspring: NDArray[Any]) -> NDArray[Any]:
            children = [self._genome.canonical(row) for row in offspring.tolist()]
            return np.asarray(
                [
                    self._fill(child, candidates.limits, candidates.min_macs, random)
                    for child in children
                ]
            )

        def fitness(algorithm: Any, rows: NDArray[Any], places: Any) -> list[float]:
            return candidates.fitness(
                [self._genome.canonical(row) for row in np.asarray(rows).tolist()]
            )

        def report(algorithm: Any) -> None:
            if watch:
                watch(algorithm.generations_completed, options.generations)

        algorithm = pygad.GA(
            num_generations=options.generations,
            num_parents_mating=max(2, options.population // 4),
            initial_population=np.asarray(start),
            gene_type=int,
            gene_space=[list(range(count)) for count in self._genome.sizes],
            fitness_func=fitness,
            fitness_batch_size=options.population,
            parent_selection_type="tournament",
            crossover_type="uniform",
            mutation_type="random",
            mutation_probability=max(0.1, 1 / len(self._genome.sizes)),
            keep_elitism=2,
            on_mutation=mended,
            on_generation=report,
            stop_criteria=f"saturate_{SATURATED}",
            random_seed=options.seed,
            suppress_warnings=True,
        )
        algorithm.run()

    def _draw(self, limits: Limits, count: int) -> list[Found]:
        """Draw configurations until `count` are within the limits and `tolerance` of them.

        The released code does so for one. At most `draws` configurations are drawn, so that fewer
        than `count` may be returned, the highest score first. If none fits, the last one is filled
        up to the limits.
        """
        random = np.random.default_rng([self.options.seed, 2])
        capacity = self.capacity(limits)
        min_macs = (1 - self.options.tolerance) * capacity
        candidates: dict[Genes, None] = {}
        for _ in range(self.options.draws):
            genes = self._genome.random(random)
            if self._macs(genes) >= min_macs and not self._exceeds(genes, limits):
                candidates[genes] = None
            if len(candidates) == count:
                break
        if not candidates:
            genes = self._fill(genes, limits, min_macs, random)
            if self._macs(genes) < self.options.floor * capacity:
                genes = self._filled(limits)[0]
            candidates[genes] = None
        scores = self.score([self._genome.config(genes) for genes in candidates])
        ranked = sorted(zip(scores.tolist(), candidates, strict=True), reverse=True)
        return [self._found(genes, score, limits, len(candidates)) for score, genes in ranked]

    def sample(self, count: int, seed: int = 0) -> list[Config]:
        """Draw different members, half of them with evenly spread multiply-adds.

        Uniformly drawn choices give multiply-adds close to the middle. A predictor that is fitted
        on them alone would be inaccurate for small and large members. Every second member is drawn
        uniformly. The others fill random limits between the smallest and the largest member.

        Args:
            count: Number of members. A space with fewer gives all of them.
            seed: Random seed.

        Returns:
            Canonical configurations, in the order in which they were drawn.
        """
        random = np.random.default_rng([seed, 3])
        low, high = (
            self.meter.cost(config).macs for config in (self.space.smallest, self.space.largest)
        )
        members: dict[Genes, None] = {}
        while len(members) < min(count, self.space.num_configs):
            genes = self._genome.random(random)
            if len(members) % 2 or genes in members:
                limit = float(random.uniform(low, high))
                genes = self._fill(genes, Limits(macs=limit), limit, random)
            members[genes] = None
        return [self._genome.config(genes) for genes in members]

    # --- configurations that fill a limit --------------------------------------------------------

    @property
    def is_enumerable(self) -> bool:
        """Return True if the space has at most `MAX_ENUMERATED` configurations."""
        return self.space.num_configs <= MAX_ENUMERATED

    def _column(self, name: str) -> Floats:
        """Return one cost of all configurations of a small space, in the order of `_all`.

        It is counted on the first call and then cached.

        Args:
            name: Name of the cost, a field of `Limits`.
        """
        with self._lock:
            if name not in self._columns:
                values = [self.meter.value(self._genome.config(genes), name) for genes in self._all]
                self._columns[name] = np.asarray(values, dtype=np.float64)
            return self._columns[name]

    @cached_property
    def _all(self) -> list[Genes]:
        return list(self._genome)

    def _fitting(self, limits: Limits) -> NDArray[np.bool_]:
        fits = np.ones(len(self._all), dtype=bool)
        for name, limit in limits.given.items():
            fits &= self._column(name) <= limit
        return fits

    def _filled(self, limits: Limits) -> list[Genes]:
        """Return members that use as many multiply-adds as the limits allow, the largest first.

        They are random configurations that were enlarged by `_fill`. In a small space the first one
        has the most multiply-adds of all members within the limits.
        """
        random = np.random.default_rng([self.options.seed, 0])
        aim = limits.macs or math.inf
        starts = [self._genome.random(random) for _ in range(FILLED_STARTS)]
        filled = [self._fill(genes, limits, aim, random) for genes in starts]
        if self.is_enumerable:
            macs = np.where(self._fitting(limits), self._column("macs"), -1)
            filled.append(self._all[int(np.argmax(macs))])
        return sorted(filled, key=lambda genes: (-self._macs(genes), genes))

    def _fill(self, genes: Genes, limits: Limits, aim: float, random: np.random.Generator) -> Genes:
        """Shrink a configuration until it is within the limits, then enlarge it up to the limits.

        Choices move by one option at a time. Enlarging ends at `aim`, or if no larger option fits.

        Args:
            genes: Configuration to start from.
            limits: Limits of the device.
            aim: Multiply-adds at which enlarging ends.
            random: Source of random numbers, by which choices are picked.
        """
        while self._exceeds(genes, limits):
            genes = self._genome.moved(genes, int(random.choice(self._genome.smaller(genes))), -1)
        grows = True
        while grows and self._macs(genes) < aim:
            grows = False
            for index in random.permutation(self._genome.larger(genes)):
                larger = self._genome.moved(genes, int(index), 1)
                if not self._exceeds(larger, limits):
                    genes = larger
                    grows = True
                    break
        return genes


@dataclass
class _Candidates:
    """The candidates of one search and their scores."""

    search: Search
    limits: Limits  # Limits of the device.
    min_macs: float  # Fewest multiply-adds that a candidate has.
    scores: dict[Genes, float] = field(default_factory=dict)  # Scores of candidates.

    def is_candidate(self, genes: Genes) -> bool:
        """Return True if a configuration is within the limits and has at least `min_macs`."""
        return self.search._macs(genes) >= self.min_macs and not self.search._exceeds(
            genes, self.limits
        )

    def fitness(self, rows: Sequence[Genes]) -> list[float]:
        """Return one number for each row: its score if it is a candidate.

        Other configurations are not scored, and get less than the worst candidate. New scores are
        stored in `scores`.
        """
        new = [
            genes
            for genes in dict.fromkeys(rows)
            if genes not in self.scores and self.is_candidate(genes)
        ]
        if new:
            scores = self.search.score([self.search._genome.config(genes) for genes in new])
            self.scores.update(zip(new, scores.tolist(), strict=True))
        worst = min(self.scores.values(), default=0.0)
        return [self.scores.get(genes, worst - 1) for genes in rows]


def _pygad() -> Any:
    try:
        import pygad
    except ImportError as error:
        raise ConfigError(
            "a search by evolution was asked for; it needs PyGAD, which is not installed: "
            f"{how_to_install('search')}. "
            'strategy="random" needs nothing.'
        ) from error
    return pygad
