"""Stages of any module: finding where they end, planning them, and checking requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fedquilt.errors import ConfigError, TraceError
from fedquilt.family.heads import fit_head
from fedquilt.family.staged import Stage, StagePlan
from fedquilt.family.tracing.cutpoints import (
    CutPoint,
    Reads,
    candidates,
    channel_dim,
    find_cuts,
    propose,
)
from fedquilt.family.tracing.run import RecordedRun, Value, Visit, layer_name
from fedquilt.family.tracing.traced import Traced
from fedquilt.family.tracing.tracer import trace_runs
from fedquilt.family.tracing.variant_runs import record_evaluation, record_variant
from fedquilt.family.variants import Variants, VariantSource, names_of
from fedquilt.names import nearest
from fedquilt.terms import WHOLE

USUAL_STAGES = 4  # Stages of a model that declares none, as in most of ProgFed's experiments
DECLARATION = "stage_ends"  # Attribute by which a module declares its stages
Declaration = Sequence[str] | int


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
    ends = _proposed(module, run, request) if isinstance(request, int) else request
    visits = _checked(module, run, ends, declared)
    return _cut_plan(module, traced, visits)


def declaration(module: nn.Module, name: str | None) -> tuple[str, ...] | int:
    """Return the stages that a module declares.

    They are names of modules, or a number of stages that it runs itself.

    Args:
        module: The user's module.
        name: Name of one of several growths. None: the default.

    Raises:
        TraceError: The module declares no such growth.
    """
    kind = type(module).__name__
    growths = growths_of(module)
    if not growths:
        request = f"the stages that {kind} declares were"
        if name is not None:
            request = f"the growth {name!r} of {kind} was"
        raise TraceError(
            f"{request} asked for; it declares none (`{DECLARATION}`). Give a number of stages, "
            "with_stages(module, 4), or a list of the names of the modules that end them."
        )
    if name is None:
        name = next(iter(growths))
    if name not in growths:
        names = [growth for growth in growths if growth]
        if not names:
            raise TraceError(
                f"the growth {name!r} of {kind} was asked for; it declares one growth that has no "
                "name. Leave the name out. A list of module names is written [...] or (...,)."
            )
        raise TraceError(f"the growth {name!r} of {kind} was asked for.{nearest(name, names)}")
    return growths[name]


def growths_of(module: nn.Module) -> dict[str, tuple[str, ...] | int]:
    """Return the growths that a module declares by `stage_ends`, by name, with the default first.

    A growth is the names of the modules that end stages, or the number of stages that the module
    runs itself. A growth without a name has the name "". It is empty if none are declared.
    """
    declared = getattr(module, DECLARATION, None)
    if declared is None:
        return {}
    declarations: Mapping[str, Declaration] = {"": declared}
    if isinstance(declared, Mapping):
        declarations = declared
    growths: dict[str, tuple[str, ...] | int] = {}
    for name, stages in declarations.items():
        if stages:
            growths[name] = stages if isinstance(stages, int) else tuple(stages)
    return growths


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


# --- names that were asked for ------------------------------------------------------------------


def _checked(
    module: nn.Module, run: RecordedRun, ends: Sequence[str], declared: bool
) -> list[Visit]:
    """Return the executions of the modules that end the stages, or refuse their names.

    Args:
        module: The user's module.
        run: Its run in evaluation.
        ends: Names of the modules that end the stages.
        declared: True: the module declares them, and may let later layers read earlier results.

    Raises:
        TraceError: A name is unknown, nested in another or out of order, or cannot end a stage.
    """
    kind = type(module).__name__
    paths = [path for path, _ in module.named_modules() if path]
    times = Counter(visit.path for visit in run.visits)
    for name in ends:
        request = f"a stage of {kind} that ends with {name!r} was asked for"
        if name not in paths:
            raise TraceError(f"{request}; there is no such module.{nearest(name, paths)}")
        if not times[name]:
            raise TraceError(f"{request}; forward does not run that module. {_what_works(run)}")
        if times[name] > 1:
            raise TraceError(
                f"{request}; forward runs that module {times[name]} times, so that it has no one "
                f"output. {_what_works(run)}"
            )
    visits = {visit.path: visit for visit in run.visits}
    for name, inner in ((name, inner) for name in ends for inner in ends):
        if inner.startswith(f"{name}."):
            raise TraceError(
                f"stages of {kind} that end with {name!r} and {inner!r} were asked for; {inner!r} "
                f"is nested in {name!r}. Name modules of which none is in another."
            )
    end_visits = [visits[name] for name in ends]
    order = [visit.path for visit in run.visits]
    for name, following in pairwise(ends):
        if order.index(following) <= order.index(name):
            sorted_ends = sorted(dict.fromkeys(ends), key=order.index)
            when = "once" if name == following else f"before {name!r}"
            raise TraceError(
                f"stages of {kind} that end with {', '.join(map(repr, ends))} were asked for; "
                f"forward runs {following!r} {when}. This order works: {sorted_ends}."
            )
    reads = Reads(run)
    for visit in end_visits:
        _check_cut(kind, run, reads, visit, declared)
    return end_visits


def _check_cut(kind: str, run: RecordedRun, reads: Reads, visit: Visit, declared: bool) -> None:
    """Refuse a module whose output cannot end a stage, by a TraceError.

    It must return one tensor that depends on the inputs. Later operations must read no earlier
    result besides it.

    Args:
        kind: Name of the user's class, for messages.
        run: The run of the user's module.
        reads: Results that the operations of the run read.
        visit: Execution of the module that ends the stage.
        declared: True: later operations may read earlier results.
    """
    request = f"a stage of {kind} that ends with {visit.path!r} was asked for"
    if not isinstance(visit.output, Value):
        raise TraceError(f"{request}; that module does not return one tensor. {_what_works(run)}")
    if not reads.is_computed(visit.output):
        raise TraceError(f"{request}; its output does not depend on the inputs. {_what_works(run)}")
    crossing = [] if declared else reads.crossing(visit)
    if crossing:
        values = [f"that of {reads.maker(value)}" for value in crossing]
        raise TraceError(
            f"{request}; what follows reads more than its output, namely {len(crossing)} earlier "
            f"result{'s' if len(crossing) > 1 else ''}: {'; '.join(sorted(values))}. "
            f"{_what_works(run)}"
        )


def _what_works(run: RecordedRun) -> str:
    """Return a sentence that lists the modules of a run that can end stages, for a message."""
    cuts = find_cuts(run)
    names = [cut.name for cut in candidates(cuts) or cuts]
    if not names:
        return "No stage can end anywhere in it."
    return f"Stages can end with {', '.join(names)}."


# --- stages that are proposed -------------------------------------------------------------------


def _proposed(module: nn.Module, run: RecordedRun, count: int) -> tuple[str, ...]:
    """Propose `count` stages, the last included, and return the names of the modules that end them.

    Raises:
        TraceError: The module returns more than one tensor, or has fewer places to end a stage.
    """
    if not isinstance(run.output, Value):
        raise TraceError(f"{type(module).__name__} does not return one tensor.")
    cuts = find_cuts(run)
    options = candidates(cuts)
    if len(options) < count:
        request = f"{count} stages of {type(module).__name__} were asked for"
        if not options:
            raise TraceError(
                f"{request}; no stage can end in it. There is no module of layers that returns one "
                "tensor on which alone everything later depends. A module can run its stages "
                "itself, by a method forward_stage(stage, *inputs) and their number as "
                f"{DECLARATION}."
            )
        end_names = ", ".join(cut.name for cut in options)
        raise TraceError(
            f"{request}; they can end with {end_names} alone, so at most {len(options)} would work."
        )
    return _names(propose(cuts, count, run))


def _names(cuts: Sequence[CutPoint]) -> tuple[str, ...]:
    """Return one module name for each cut, in order.

    A cut may have several names, because an outer module may end with an inner one. The outermost
    name that contains no other cut is chosen.
    """
    names = []
    for cut in cuts:
        inner_paths = [path for inner in cuts if inner is not cut for path in inner.paths]
        free = [
            path
            for path in cut.paths
            if not any(inner.startswith(f"{path}.") for inner in inner_paths)
        ]
        names.append(min(reversed(free or cut.paths), key=lambda path: path.count(".")))
    return tuple(names)


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
