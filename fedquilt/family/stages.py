"""Stages of any module: where they end, how they are run, and what is wrong with a request for them."""

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
from fedquilt.family.cutpoints import CutPoint, Reads, candidates, channel_dim, find_cuts, propose
from fedquilt.family.heads import fit_head
from fedquilt.family.record import Run, Value, Visit, layer_name
from fedquilt.family.staged import Plan, Stage
from fedquilt.family.tracer import Traced, record_evaluation, trace_runs, variant_runs
from fedquilt.family.variants import Variants, VariantSource, names_of
from fedquilt.names import nearest
from fedquilt.terms import WHOLE

USUAL_STAGES = 4  # Stages of a model that declares none, as ProgFed has them in most experiments
DECLARATION = "stage_ends"  # Attribute by which a module declares its stages
Declaration = Sequence[str] | int


def with_stages(
    module: nn.Module | Callable[[], nn.Module], stages: int | str | Sequence[str] | None = None
) -> StageSource:
    """Let a model grow in stages while it trains, as ProgFed does.

    A stage runs the first blocks of the module, E_1..E_s, and a temporary head G_s. The last stage
    is the module itself. Give the result to `fedquilt.trace` in place of the module. The module's
    own weights keep their names, and the deployed model is the module as it was written, without
    temporary heads.

    A module of your own may declare its stages by an attribute or property `stage_ends`. It is a
    list of module names, or a number of stages that the module runs itself by a method
    `forward_stage(stage, *inputs)`, counted from 1. A mapping has several such declarations by
    name, the default first.

    Args:
        module: The module, or a function that makes one.
        stages: Where stages end. A list has the names of the modules whose outputs end E_1..E_S;
            what `forward` does after the last of them is the model's own head. A number lets that
            many stages be proposed, which end where the resolution changes, else after equal
            numbers of multiply-adds; 1 has no effect. A name is that of a growth that the module
            declares. None: the module's own declaration.

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
            f"with_stages was asked for the stages {stages!r}. A list of module names would work, or a number."
        )
    if len(stages) == 1:
        raise ConfigError(
            f"with_stages was asked for the stages {list(stages)}; one name makes one stage, which is the whole "
            "module. The last name ends the last stage, before the module's own head, so that at least two names "
            "would work, or a number of stages."
        )
    return StageSource(module, tuple(stages))


@dataclass(frozen=True, eq=False)
class StageSource(VariantSource):
    """A module and a request for stages, which running it on an example turns into a plan."""

    module: nn.Module | Callable[[], nn.Module]
    stages: int | str | tuple[str, ...] | None = None

    def resolve(
        self, example_inputs: tuple[Any, ...], class_dim: int | None = None
    ) -> nn.Module | Callable[[], nn.Module]:
        """Return the module in stages, or a function that makes it."""
        if isinstance(self.module, nn.Module):
            plan = make_plan(self.module, example_inputs, self.stages, class_dim)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return plan.apply(self.module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.module()
        return partial(_make, self.module, make_plan(model, example_inputs, self.stages, class_dim))


def _make(factory: Callable[[], nn.Module], plan: Plan) -> nn.Module:
    """Make a module in stages. Heads are drawn after the module's own weights, which they leave as they are."""
    return plan.apply(factory())


def make_plan(
    module: nn.Module,
    inputs: tuple[Any, ...],
    stages: int | str | tuple[str, ...] | None,
    class_dim: int | None = None,
) -> Plan:
    """Find out how a module grows.

    Args:
        module: The user's module, which does not change.
        inputs: Example inputs.
        stages: The request, as `with_stages` takes it.
        class_dim: Dimension of the output that the classes are in; None: as `trace` guesses it.

    Raises:
        TraceError: There are no such stages.
    """
    asked = stages
    declared = asked is None or isinstance(asked, str)
    if asked is None or isinstance(asked, str):
        asked = declaration(module, asked)
    if isinstance(asked, int) and declared:
        return _own_plan(module, inputs, asked)
    if asked == 1:  # the module itself, wherever it might be cut
        return Plan(())
    traced = trace_runs(module, inputs, "inside", class_dim)
    run = traced.runs[0]
    ends = _proposed(module, run, asked) if isinstance(asked, int) else asked
    visits = _checked(module, run, ends, declared)
    return _cut_plan(module, traced, visits)


def declaration(module: nn.Module, name: str | None) -> tuple[str, ...] | int:
    """Return how a module declares that it grows: by names of modules, or by a number of stages that it runs itself.

    Args:
        module: The user's module.
        name: Which of several growths is asked for; None: the default.
    """
    kind = type(module).__name__
    growths = growths_of(module)
    if not growths:
        asked = (
            f"the stages that {kind} declares were"
            if name is None
            else f"the growth {name!r} of {kind} was"
        )
        raise TraceError(
            f"{asked} asked for; it declares none (`{DECLARATION}`). Give a number of stages, "
            "with_stages(module, 4), or a list of the names of the modules that end them."
        )
    if name is None:
        name = next(iter(growths))
    if name not in growths:
        names = [growth for growth in growths if growth]
        if not names:
            raise TraceError(
                f"the growth {name!r} of {kind} was asked for; it declares one growth that has no name. Leave the name "
                "out. A list of module names is written [...] or (...,)."
            )
        raise TraceError(f"the growth {name!r} of {kind} was asked for.{nearest(name, names)}")
    return growths[name]


def growths_of(module: nn.Module) -> dict[str, tuple[str, ...] | int]:
    """Return the growths that a module declares, by name and the default first. One without a name has the name ""."""
    declared = getattr(module, DECLARATION, None)
    if declared is None:
        return {}
    growths: Mapping[str, Declaration] = (
        declared if isinstance(declared, Mapping) else {"": declared}
    )
    stated = {name: stages for name, stages in growths.items() if stages}
    return {
        name: stages if isinstance(stages, int) else tuple(stages)
        for name, stages in stated.items()
    }


def usual_stages(module: nn.Module, inputs: tuple[Any, ...]) -> int | None:
    """Return the stages of a module for which none were asked: None for those that it declares, else a number.

    The number is the paper's S = 4, or the number of cut points if that is smaller.
    """
    if growths_of(module):
        return None
    cuts = candidates(find_cuts(trace_runs(module, inputs, "inside", None).runs[0]))
    return max(1, min(USUAL_STAGES, len(cuts)))


@dataclass(frozen=True)
class StageSize:
    """A stage in numbers."""

    end: str  # name of the module that ends its block; "" where the module runs its stages itself
    block: int  # parameters of E_s
    head: int  # parameters of G_s


def stage_sizes(
    module: nn.Module, inputs: tuple[Any, ...], stages: int | str | tuple[str, ...] | None = None
) -> list[StageSize]:
    """Count the parameters of each stage of a module, the last one included. The arguments are `make_plan`'s."""
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


# --- names that were asked for -------------------------------------------------------------------------------------


def _checked(module: nn.Module, run: Run, ends: Sequence[str], declared: bool) -> list[Visit]:
    """Return the executions of the modules that end the stages, or refuse names that cannot end one."""
    kind = type(module).__name__
    known = [path for path, _ in module.named_modules() if path]
    times = Counter(visit.path for visit in run.visits)
    for name in ends:
        asked = f"a stage of {kind} that ends with {name!r} was asked for"
        if name not in known:
            raise TraceError(f"{asked}; there is no such module.{nearest(name, known)}")
        if not times[name]:
            raise TraceError(f"{asked}; forward does not run that module. {_what_works(run)}")
        if times[name] > 1:
            raise TraceError(
                f"{asked}; forward runs that module {times[name]} times, so that it has no one output. "
                f"{_what_works(run)}"
            )
    visits = {visit.path: visit for visit in run.visits}
    for name, other in ((name, other) for name in ends for other in ends):
        if other.startswith(f"{name}."):
            raise TraceError(
                f"stages of {kind} that end with {name!r} and {other!r} were asked for; {other!r} is nested in "
                f"{name!r}. Name modules of which none is in another."
            )
    chosen = [visits[name] for name in ends]
    order = [visit.path for visit in run.visits]
    for name, following in pairwise(ends):
        if order.index(following) <= order.index(name):
            right = sorted(dict.fromkeys(ends), key=order.index)
            raise TraceError(
                f"stages of {kind} that end with {', '.join(map(repr, ends))} were asked for; forward runs "
                f"{following!r} {'once' if name == following else f'before {name!r}'}. This order works: {right}."
            )
    reads = Reads(run)
    for visit in chosen:
        _check_cut(kind, run, reads, visit, declared)
    return chosen


def _check_cut(kind: str, run: Run, reads: Reads, visit: Visit, declared: bool) -> None:
    asked = f"a stage of {kind} that ends with {visit.path!r} was asked for"
    if not isinstance(visit.output, Value):
        raise TraceError(f"{asked}; that module does not return one tensor. {_what_works(run)}")
    if not reads.is_computed(visit.output):
        raise TraceError(f"{asked}; its output does not depend on the inputs. {_what_works(run)}")
    crossing = [] if declared else reads.crossing(visit)
    if crossing:
        values = [f"that of {reads.maker(value)}" for value in crossing]
        raise TraceError(
            f"{asked}; what follows reads more than its output, namely {len(crossing)} earlier "
            f"result{'s' if len(crossing) > 1 else ''}: {'; '.join(sorted(values))}. {_what_works(run)}"
        )


def _what_works(run: Run) -> str:
    cuts = find_cuts(run)
    names = [cut.name for cut in candidates(cuts) or cuts]
    if not names:
        return "No stage can end anywhere in it."
    return f"Stages can end with {', '.join(names)}."


# --- stages that are proposed --------------------------------------------------------------------------------------


def _proposed(module: nn.Module, run: Run, count: int) -> tuple[str, ...]:
    """Return the names of modules that end a number of stages."""
    if not isinstance(run.output, Value):
        raise TraceError(f"{type(module).__name__} does not return one tensor.")
    cuts = find_cuts(run)
    options = candidates(cuts)
    if len(options) < count:
        asked = f"{count} stages of {type(module).__name__} were asked for"
        if not options:
            raise TraceError(
                f"{asked}; no stage can end in it. There is no module of layers that returns one tensor on which alone "
                "everything later depends. A module can run its stages itself, by a method forward_stage(stage, "
                f"*inputs) and their number as {DECLARATION}."
            )
        where = ", ".join(cut.name for cut in options)
        raise TraceError(
            f"{asked}; they can end with {where} alone, so at most {len(options)} would work."
        )
    return _names(propose(cuts, count, run))


def _names(chosen: Sequence[CutPoint]) -> tuple[str, ...]:
    """Return the outermost name of each cut that does not contain another one."""
    names = []
    for cut in chosen:
        others = [path for other in chosen if other is not cut for path in other.paths]
        free = [
            path for path in cut.paths if not any(other.startswith(f"{path}.") for other in others)
        ]
        names.append(min(reversed(free or cut.paths), key=lambda path: path.count(".")))
    return tuple(names)


# --- plans ---------------------------------------------------------------------------------------------------------


def _own_plan(module: nn.Module, inputs: tuple[Any, ...], count: int) -> Plan:
    """Plan the stages that a module runs itself."""
    kind = type(module).__name__
    if count < 1:
        raise TraceError(f"{kind} declares {count} stages; a number from 1 on would work.")
    if not callable(getattr(module, "forward_stage", None)):
        raise TraceError(
            f"{kind} declares {count} stages that it runs itself, and has no method forward_stage(stage, *inputs)."
        )
    empty = [Stage("", None, frozenset()) for _ in range(count - 1)]
    grown = Plan(tuple(empty)).apply(module)
    assert isinstance(grown, Variants)
    whole = record_evaluation(grown, inputs, WHOLE).output.shape
    stages = []
    for number, name in enumerate(grown.variants, 1):
        runs = variant_runs(grown, inputs, name)
        shape = runs[0].output.shape
        if shape != whole:
            raise TraceError(
                f"{kind} declares {count} stages that it runs itself; forward_stage({number}, …) returns a tensor of "
                f"shape {shape}. The shape of what forward returns, {whole}, would work."
            )
        stages.append(Stage("", None, _uses(runs, "")))
    return Plan(tuple(stages))


def _cut_plan(module: nn.Module, traced: Traced, visits: Sequence[Visit]) -> Plan:
    run = traced.runs[0]
    output: Value = run.output
    stages = []
    for visit in visits[:-1]:
        value = visit.output
        assert isinstance(value, Value)
        where = layer_name(visit.path)
        head = fit_head(
            value.shape, channel_dim(value), output.shape, traced.layout.class_dim, where
        )
        chain, between = _chain(traced.runs, visit.path)
        stages.append(Stage(visit.path, head, _uses(traced.runs, visit.path), chain, between))
    return Plan(tuple(stages), visits[-1].path)


def _uses(runs: Sequence[Run], end: str) -> frozenset[str]:
    """Return the weights that all runs compute with until a module ends."""
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


def _chain(runs: Sequence[Run], end: str) -> tuple[tuple[str, ...], str]:
    """Return the modules that run one after another until a module ends, or what else `forward` does until then.

    Only if nothing happens between them, in evaluation and in training, are they the same as a part of `forward`.
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


def _chain_in(run: Run, outer: Visit, end: str) -> tuple[tuple[str, ...], str]:
    """Return the modules that run one after another inside of a module until `end`, or what is in their way."""
    chain: tuple[str, ...] = ()
    last = "the inputs"
    value = _only_input(outer)
    reached = outer.start
    forward = f"the forward of {layer_name(outer.path)}"
    for visit in (visit for visit in run.visits if visit.within is outer):
        if visit.start > reached:
            return (), f"{forward} runs {run.calls[reached]} between {last} and {visit.path!r}"
        if value is None or _only_input(visit) is not value:
            given = f"the result of {last}" if chain else last
            return (), f"{visit.path!r} takes something else than {given} alone"
        if sum(other.path == visit.path for other in run.visits) > 1:
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
    """Return what a module is given, if that is one tensor."""
    args, kwargs = visit.inputs
    return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Value) else None
