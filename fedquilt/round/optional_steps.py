"""Optional steps of a method: those that do nothing unless a method overrides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from fedquilt.family.family import Family
from fedquilt.round.engine import Gradients
from fedquilt.round.federation import World
from fedquilt.round.training.server import TrainServer
from fedquilt.terms import (
    Budget,
    ClientState,
    Extras,
    Job,
    Server,
    Submodel,
    Submodels,
)

TRIAL_SHARES = (1.0, 0.5, 0.25, 0.125)  # Shares of the devices of `fedquilt check`


class OptionalSteps:
    """Steps and figures that most methods do without. `Method` inherits the defaults.

    They are in the order of a run: what is needed before it, steps of a round, and what is reported
    afterwards.
    """

    @property
    def note(self) -> str:
        """Return a note for readers of results, or an empty text.

        It says what clients train if that does not depend on their budgets.
        """
        return ""

    @property
    def inner_method(self) -> OptionalSteps | None:
        """Return the method that trains each round for this one, which titles name. None: none."""
        return None

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Return names of the figures of `figures` that progress lines show. By default none."""
        return ()

    @property
    def needs_public(self) -> bool:
        """Return True if the method needs public samples. Runs without them are then refused."""
        return False

    @property
    def clients_need_public(self) -> bool:
        """Return True if clients use public samples, so that real devices need the same ones.

        Those on which only the server trains can stay on the server.
        """
        return False

    @property
    def needs_supernet(self) -> bool:
        """Return True if searched nets have to start from the weights of a supernet."""
        return False

    @property
    def starts_pretrained(self) -> bool:
        """Return True if nets other than the first start from the supernet's weights.

        It has no effect without a supernet.
        """
        return True

    def adapt(self, family: Family) -> Family:
        """Return the family in the form that the method trains, such as with stages.

        It is called once before a run. By default the family is returned unchanged.
        """
        return family

    def settled(self, rounds: int) -> Self:
        """Return the method with all settings fixed that depend on the number of rounds.

        It is called once before a run, and config.toml stores its result. A resumed run calls it
        again, possibly with more rounds, so that settings that are already fixed must not change.

        Args:
            rounds: Rounds of the run.
        """
        return self

    def turns(self, world: World) -> tuple[int, ...]:
        """Return the rounds of a run in `world`, counted from 0, from which on plans differ.

        Budgets and nets are checked for each of them before the first round. By default plans never
        change, and only round 0 is returned.
        """
        return (0,)

    def status(self, round: int, world: World) -> str:
        """Return a short text on a round for progress lines. It may be empty.

        Args:
            round: Round, from 0.
            world: World of the run.
        """
        return ""

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        """Return the state after the server has learnt, between the merge and the evaluation.

        By default the server does not learn.

        Args:
            server: State after the merge.
            outputs: Outputs of teachers on public samples (`Merged.outputs`).
            world: Family, task, seed and public samples.
            train: Function `train(server, teaching)`. It trains nets of a state on public samples,
                and returns the state with the trained nets.
        """
        return server

    def candidates(self, server: Server, world: World) -> Submodels:
        """Return nets to score before the state is tested or deployed. By default there are none.

        A score is the task's main figure, negated if lower is better, so that a higher score is
        always better. It is measured on validation samples (`FederatedData.with_validation`), or on
        training samples if clients hold back none.

        Args:
            server: State of the server that is tested or deployed.
            world: World of the run, which has the family.
        """
        return ()

    def ranked(self, server: Server, scores: Sequence[float], world: World) -> Server:
        """Return the state that is tested and deployed, given the scores of the candidates.

        By default the state does not change.

        Args:
            server: State of the server.
            scores: Score of each net that `candidates` returned, in its order. Higher is better.
            world: Family, task and seed.
        """
        return server

    def figures(self, server: Server, world: World, gradients: Gradients) -> dict[str, float]:
        """Return further figures of the server's state by name, which records store too.

        It is called after every evaluation. By default there are none.

        Args:
            server: The state that was evaluated.
            world: Family, task and seed.
            gradients: Function `gradients(submodels, samples)`. It returns each sub-model's
                gradient of the mean loss over that many training samples of all clients, by the
                weight's name.
        """
        return {}

    def resumed(self, job: Job, memory: ClientState | None, world: World) -> None:
        """Inspect a client's memory before it trains, such as to log a warning.

        By default nothing is done.

        It is called once for every job of a round, on the server, if `keeps_nets` is set.

        Args:
            job: What the client is asked to train.
            memory: What it kept from earlier rounds. None: nothing.
            world: Family, task and seed.
        """

    def kept_nets(self, memory: ClientState, world: World) -> Mapping[str, Submodel]:
        """Return nets in a client's memory to test, by the prefix of their metrics' names.

        A net named `private` gives the metric `private_accuracy`, a mean over clients on the whole
        test set. It also gives `local_private_accuracy` on each client's own test samples. Both are
        grouped by the keys of the clients' budgets. By default there are no such nets, and
        `keeps_nets` is False.

        Args:
            memory: What the client kept from earlier rounds.
            world: Family, task and seed.
        """
        return {}

    def account(self, counts: Mapping[Budget, int], world: World) -> dict[str, Any]:
        """Return further figures of a fleet for `summary.json`, as plain values.

        By default there are none.

        Args:
            counts: Number of clients that have each budget.
            world: Family, task and seed.
        """
        return {}

    def trial(self, family: Family) -> tuple[Family, tuple[Budget, ...]]:
        """Return the family and the budgets on which `fedquilt check` tries the method.

        Args:
            family: A small net. By default it is used as it is, with shares from 1 to 1/8.
        """
        return family, tuple(Budget(share=share) for share in TRIAL_SHARES)
