"""Stages of any module: requests for them, and plans. `stage_ends.py` finds where they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fedquilt.errors import ConfigError, TraceError
from fedquilt.family.heads import fit_head
from fedquilt.family.stage_ends import check_ends, declaration, growths_of, propose_ends
from fedquilt.family.staged import Stage, StagePlan
from fedquilt.family.tracing.cutpoints import candidates, channel_dim, find_cuts
from fedquilt.family.tracing.run import RecordedRun, Value, Visit, layer_name
from fedquilt.family.tracing.traced import Traced
from fedquilt.family.tracing.tracer import trace_runs
from fedquilt.family.tracing.variant_runs import record_evaluation, record_variant
from fedquilt.family.variants import Variants, VariantSource, names_of
from fedquilt.terms import WHOLE

USUAL_STAGES = 4  # Stages of a model that declares none, as in most of ProgFed's experiments


def with_stages(
    module: nn.Module | Callable[[], nn.Module], stages: int | str | Sequence[str] | None = None
) -> StageSource:
    """Let a model grow in stages while it trains, as ProgFed does.

    A stage runs the first blocks of the module, E_1..E_s, and a temporary head G_s. The last stage
    is the module itself. Pass the result to `fedquilt.trace` in place of the module. The module's
    own weights keep their names, and the deployed model is the user's module without temporary
    heads.

    A module may declare its stages by an attribute or property `stage_ends`. It is a list of module
    names, or the number of stages that the module runs itself by a method `forward_stage(stage,
    *inputs)`, counted from 1. A mapping has several such declarations by name, the default first.

    Args:
        module: The module, or a function that makes one.
        stages: The requested stages. A list has the names of the modules whose outputs end
            E_1..E_S. What `forward` does after the last of them is the model's own head. With a
            number, that many stages are proposed. They end where the resolution changes, or else
            after equal numbers of multiply-adds. 1 has no effect. A string is the name of a growth
            that the module declares. None: the module's own declaration.

    Raises:
        ConfigError: `stages` is no number from 1 on, no name and no list of at least two names.
            Stages that the module does not have are refused by `fedquilt.trace`, as a TraceError.

    Example:
        >>> import torch, fedquilt as fq
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> source = fq.with_stages(net, ["0", "1"])
        >>> grown = source.resolve((torch.randn(5, 4),))
        >>> grown.variants
        ('stage1',)
        >>> grown.choose("stage1")  # the first layer and a temporary head
        >>> grown(torch.randn(5, 4)).shape
        torch.Size([5, 2])
    """
    if isinstance(module, VariantSource):
        raise ConfigError(
            "with_stages was asked to grow a model in stages that has stages already. Call it once."
        )
    if isinstance(stages, bool) or (isinstance(stages, int) and stages < 1):
        raise ConfigError(
            f"with_stages was asked for {stages} stages; a number from 1 on would work."
        )
    if stages is None or isinstance(stages, int | str):
        return StageSource(module, stages)
    if (
        not isinstance(stages, Sequence)
        or not stages
        or not all(isinstance(name, str) for name in stages)
    ):
        raise ConfigError(
            f"with_stages was asked for the stages {stages!r}. A list of module names would work, "
            "or a number."
        )
    if len(stages) == 1:
        raise ConfigError(
            f"with_stages was asked for the stages {list(stages)}; one name makes one stage, which "
            "is the whole module. The last name ends the last stage, before the module's own head, "
            "so that at least two names would work, or a number of stages."
        )
    return StageSource(module, tuple(stages))


@dataclass(frozen=True, eq=False)
class StageSource(VariantSource):
    """A module and a request for stages, which becomes a plan by running it on an example."""

    module: nn.Module | Callable[[], nn.Module]  # The module, or a function that makes one
    stages: int | str | tuple[str, ...] | None = None  # The request, as in `with_stages`

    def resolve(
        self, example_inputs: tuple[Any, ...], class_dim: int | None = None
    ) -> nn.Module | Callable[[], nn.Module]:
        """Return the module in stages, or a function that makes it if `module` is a function.

        Running the module on the example gives the plan. The arguments are those of `make_plan`.
        """
        if isinstance(self.module, nn.Module):
            plan = make_plan(self.module, example_inputs, self.stages, class_dim)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return plan.apply(self.module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.module()
        return partial(_make, self.module, make_plan(model, example_inputs, self.stages, class_dim))


def _make(factory: Callable[[], nn.Module], plan: StagePlan) -> nn.Module:
    """Make a module by a user's function, and return it in the stages of a plan.

    Heads are drawn after the module's own weights, which therefore do not change.
    """
    return plan.apply(factory())


def make_plan(
    module: nn.Module,
    inputs: tuple[Any, ...],
    stages: int | str | tuple[str, ...] | None,
    class_dim: int | None = None,
) -> StagePlan:
    """Return the plan of how a module grows.

    Args:
        module: The user's module, which does not change.
        inputs: Example inputs.
        stages: The request, as in `with_stages`.
        class_dim: Dimension of the output that has the classes. None: `trace` guesses it.

    Raises:
        TraceError: There are no such stages.
    """
    request = stages
    declared = request is None or isinstance(request, str)
    if request is None or isinstance(request, str):
        request = declaration(module, request)
    if isinstance(request, int) and declared:
        return _own_plan(module, inputs, request)
    if request == 1:  # The whole module is the only stage.
        return StagePlan(())
    traced = trace_runs(module, inputs, "inside", class_dim)
    run = traced.runs[0]
    ends = propose_ends(module, run, request) if isinstance(request, int) else request
    visits = check_ends(module, run, ends, declared)
    return _cut_plan(module, traced, visits)


def usual_stages(module: nn.Module, inputs: tuple[Any, ...]) -> int | None:
    """Return the stages that a module gets if none are requested, as a request of `with_stages`.

    None stands for the stages that the module declares. For other modules it is the paper's S = 4,
    or the number of cut points if that is smaller.
    """
    if growths_of(module):
        return None
    cuts = candidates(find_cuts(trace_runs(module, inputs, "inside", None).runs[0]))
    return max(1, min(USUAL_STAGES, len(cuts)))


@dataclass(frozen=True)
class StageSize:
    """The sizes of a stage."""

    # Name of the module that ends its block. "" if the module runs its stages itself.
    end: str
    block: int  # Number of parameters of E_s
    head: int  # Number of parameters of G_s


def stage_sizes(
    module: nn.Module, inputs: tuple[Any, ...], stages: int | str | tuple[str, ...] | None = None
) -> list[StageSize]:
    """Count the parameters of each stage of a module, including the last, in order.

    A parameter counts for the first stage that uses it.

    Args:
        module: The user's module, which does not change.
        inputs: Example inputs.
        stages: The request, as in `with_stages`.
    """
    plan = make_plan(module, inputs, stages)
    grown = plan.apply(module)
    assert isinstance(grown, Variants)
    runs = {name: record_evaluation(grown, inputs, name) for name in names_of(grown)}
    parts = grown.variant_parts(runs)
    sizes = {name: weight.numel() for name, weight in grown.named_parameters()}
    ends = [*(stage.end for stage in plan.stages), plan.last_end]
    counted = []
    for number, end in enumerate(ends, 1):
        block = sum(sizes.get(name, 0) for name in parts[f"stage{number}"])
        head = sum(sizes.get(name, 0) for name in parts[f"head{number}"])
        counted.append(StageSize(end, block, head))
    return counted


# --- plans --------------------------------------------------------------------------------------


def _own_plan(module: nn.Module, inputs: tuple[Any, ...], count: int) -> StagePlan:
    """Plan the stages that a module runs itself by `forward_stage`, by running each of them.

    `count` is the number of stages that it declares, the last one included.

    Raises:
        TraceError: It has no `forward_stage`, or a stage's output has another shape than forward's.
    """
    kind = type(module).__name__
    if count < 1:
        raise TraceError(f"{kind} declares {count} stages; a number from 1 on would work.")
    if not callable(getattr(module, "forward_stage", None)):
        raise TraceError(
            f"{kind} declares {count} stages that it runs itself, and has no method "
            "forward_stage(stage, *inputs)."
        )
    empty = [Stage("", None, frozenset()) for _ in range(count - 1)]
    grown = StagePlan(tuple(empty)).apply(module)
    assert isinstance(grown, Variants)
    full_shape = record_evaluation(grown, inputs, WHOLE).output.shape
    stages = []
    for number, name in enumerate(grown.variants, 1):
        runs = record_variant(grown, inputs, name)
        shape = runs[0].output.shape
        if shape != full_shape:
            raise TraceError(
                f"{kind} declares {count} stages that it runs itself; forward_stage({number}, …) "
                f"returns a tensor of shape {shape}. The shape of what forward returns, "
                f"{full_shape}, would work."
            )
        stages.append(Stage("", None, _uses(runs, "")))
    return StagePlan(tuple(stages))


def _cut_plan(module: nn.Module, traced: Traced, visits: Sequence[Visit]) -> StagePlan:
    """Plan stages that end inside of the forward, each with a temporary head.

    Args:
        module: The user's module.
        traced: Its runs and its layout.
        visits: Executions of the modules that end the stages, in order. The last one ends E_S,
            which has the model's own head.

    Raises:
        TraceError: No head turns the features of a stage into the model's output.
    """
    run = traced.runs[0]
    output: Value = run.output
    stages = []
    for visit in visits[:-1]:
        value = visit.output
        assert isinstance(value, Value)
        end_name = layer_name(visit.path)
        head = fit_head(
            value.shape, channel_dim(value), output.shape, traced.layout.class_dim, end_name
        )
        chain, between = _chain(traced.runs, visit.path)
        stages.append(Stage(visit.path, head, _uses(traced.runs, visit.path), chain, between))
    return StagePlan(tuple(stages), visits[-1].path)


def _uses(runs: Sequence[RecordedRun], end: str) -> frozenset[str]:
    """Return the names of the weights and buffers that any of the runs reads until a module ends.

    `end` is the module's name, and "" is the whole module.
    """
    names: set[str] = set()
    for run in runs:
        stop = next((visit.stop for visit in run.visits if visit.path == end), 0)
        names.update(
            value.weight
            for call in run.calls[:stop]
            for value in call.inputs
            if value.weight is not None
        )
    return frozenset(names)


def _chain(runs: Sequence[RecordedRun], end: str) -> tuple[tuple[str, ...], str]:
    """Return the names of the modules that run one after another until the module `end` ends.

    `runs` are runs of the user's module in evaluation and in training.

    They equal a part of `forward` only if nothing happens between them, in evaluation and in
    training. If something does, an empty chain and a description of it are returned.
    """
    chains = []
    for run in runs:
        root = next(visit for visit in run.visits if not visit.path)
        chain, reason = _chain_in(run, root, end)
        if reason:
            return (), reason + (" in training" if run.train else "")
        chains.append(chain)
    if any(chain != chains[0] for chain in chains):
        return (), "it runs other modules in training than in evaluation"
    return chains[0], ""


def _chain_in(run: RecordedRun, outer: Visit, end: str) -> tuple[tuple[str, ...], str]:
    """Return the names of the modules that run one after another inside `outer`, up to `end`.

    If something prevents that, an empty chain and a description of it are returned.

    Args:
        run: The run of the user's module.
        outer: Execution of the module whose inner modules are followed.
        end: Name of the module that ends the stage. It may be deeper inside.
    """
    chain: tuple[str, ...] = ()
    last = "the inputs"
    value = _only_input(outer)
    reached = outer.start
    forward = f"the forward of {layer_name(outer.path)}"
    for visit in (visit for visit in run.visits if visit.within is outer):
        if visit.start > reached:
            return (), f"{forward} runs {run.calls[reached]} between {last} and {visit.path!r}"
        if value is None or _only_input(visit) is not value:
            expected = f"the result of {last}" if chain else last
            return (), f"{visit.path!r} takes something else than {expected} alone"
        if sum(later_visit.path == visit.path for later_visit in run.visits) > 1:
            return (), f"{visit.path!r} runs more than once"
        if end.startswith(f"{visit.path}."):
            inner, reason = _chain_in(run, visit, end)
            return (*chain, *inner) if not reason else (), reason
        chain = (*chain, visit.path)
        if visit.path == end:
            return chain, ""
        value = visit.output if isinstance(visit.output, Value) else None
        reached = visit.stop
        last = repr(visit.path)
    return (), f"{forward} does not run what ends the stage, {end!r}, by itself"


def _only_input(visit: Visit) -> Value | None:
    """Return the input of an executed module if it is one positional tensor, else None."""
    args, kwargs = visit.inputs
    return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Value) else None
