"""Modules that end the stages of another module: names that are requested, and a proposal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from fedquilt.errors import TraceError
from fedquilt.family.tracing.cutpoints import CutPoint, Reads, candidates, find_cuts, propose
from fedquilt.family.tracing.run import RecordedRun, Value, Visit
from fedquilt.names import nearest

DECLARATION = "stage_ends"  # Attribute by which a module declares its stages
Declaration = Sequence[str] | int


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


def check_ends(
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


def propose_ends(module: nn.Module, run: RecordedRun, count: int) -> tuple[str, ...]:
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
