"""Settings of a run that was started in Python, so that the command line can open its folder.

`fedquilt.run(…, out=…)` takes objects. Each is written as its name and its settings, if a file can
make it again. This holds for listed classes and functions, and for a user's code that can be
imported. If an object cannot be written, the folder has the reason instead.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedquilt.config.choice import Choice
from fedquilt.config.reading import read
from fedquilt.config.schema import parameters
from fedquilt.config.tables import UNSET, Problem
from fedquilt.config.toml import Settings
from fedquilt.config.writing import write
from fedquilt.data import DATA
from fedquilt.engines import ENGINES
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.family.family import Family
from fedquilt.family.origin import JoinedTracings, Tracing
from fedquilt.fleets.fleet import Devices
from fedquilt.methods import Method
from fedquilt.models import MODELS
from fedquilt.names import is_file, name_of, said
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.client_states import ClientStates
from fedquilt.runs.data_settings import Source
from fedquilt.runs.description import describe
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.fingerprint import is_same
from fedquilt.runs.machine import Machine
from fedquilt.runs.model_settings import Model, TraceOptions, net_names
from fedquilt.runs.tracking import Tracking
from fedquilt.runs.trust import named_code
from fedquilt.terms import WHOLE

if TYPE_CHECKING:
    from fedquilt.data.origin import Origin
    from fedquilt.runs.run import Run

_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")


def config_text(
    run: Run,
    rounds: int,
    checkpoint: Checkpointing = Checkpointing(),
    trackers: Sequence[Tracking] = (),
) -> str:
    """Return the text of config.toml for a run.

    It has the settings. If these cannot be written, it has a description and the reasons.

    Args:
        run: A prepared run.
        rounds: Total number of rounds.
        checkpoint: Settings of when to save a checkpoint.
        trackers: Trackers that log the records, besides the run's folder.
    """
    settings, missing = settings_of(run, rounds, checkpoint, trackers)
    if missing:
        return describe(run, rounds, missing)
    try:
        import tomli_w
    except ModuleNotFoundError:
        reason = (
            "config.toml: the package tomli-w, which writes it, is not installed: pip install "
            "'fedquilt[cli]'."
        )
        return describe(run, rounds, [reason])
    return tomli_w.dumps(settings)


def settings_of(
    run: Run,
    rounds: int,
    checkpoint: Checkpointing = Checkpointing(),
    trackers: Sequence[Tracking] = (),
) -> tuple[Settings, list[str]]:
    """Return the settings of a run, and a reason for each part that cannot be written.

    Args:
        run: A prepared run.
        rounds: Total number of rounds.
        checkpoint: Settings of when to save a checkpoint.
        trackers: Trackers that log the records, besides the run's folder.
    """
    hints = typing.get_type_hints(Experiment, include_extras=True)
    settings: Settings = {}
    missing = []
    for name, part in _parts(run, rounds, checkpoint, trackers).items():
        try:
            value = part()
            if value is None:  # It is the default, and TOML has no null.
                continue
            settings[name] = write(value, hints[name])
            _check_read_back(value, settings[name], hints[name])
            _check_imports(settings[name])
        except FedquiltError as error:
            missing.append(f"{name}: {error}")
        # A user's objects may raise anything, and the run starts all the same.
        except Exception as error:
            missing.append(f"{name}: {said(error)}")
    return settings, missing


def _parts(
    run: Run, rounds: int, checkpoint: Checkpointing, trackers: Sequence[Tracking]
) -> dict[str, Callable[[], Any]]:
    """Return functions that make the parts of an experiment, by the name of their field.

    They are called one by one, so that the error of one part does not hide the others.

    Args:
        run: A prepared run. If it has settings, all parts but the rounds are taken from them.
        rounds: Total number of rounds.
        checkpoint: Settings of when to save a checkpoint.
        trackers: Trackers that log the records.
    """
    if run.settings is not None:
        experiment = replace(run.settings, rounds=max(rounds, 1))
        return {
            field_info.name: partial(getattr, experiment, field_info.name)
            for field_info in fields(experiment)
        }
    assert run.origin is not None, "prepare keeps the parts that it was given"
    seed = run.world.seed
    return {
        "rounds": lambda: _rounds(rounds),
        "seed": lambda: seed,
        "method": lambda: _method(run.method, rounds),
        "model": partial(_model, run.origin.family),
        "data": partial(_source, run.origin.data, run.fleet.num_clients, seed),
        "task": lambda: run.world.task,
        "fleet": partial(_devices, run, seed),
        "engine": partial(_machine, run),
        "link": lambda: run.link,
        "evaluation": lambda: run.evaluation,
        "checkpoint": lambda: checkpoint,
        "trackers": lambda: tuple(trackers),
    }


# --- the parts ----------------------------------------------------------------------------------


def _rounds(rounds: int) -> int:
    if rounds < 1:
        raise ConfigError("0 rounds were asked for; files have 1 or more.")
    return rounds


def _method(method: Method, rounds: int) -> Method:
    if not is_same(method.settled(rounds), method):
        raise ConfigError(
            f"{type(method).__name__} was not settled for {rounds} rounds, and a file would do "
            f"that. fq.prepare(method.settled({rounds}), …) does it in Python."
        )
    return method


def _model(family: Family) -> Model | tuple[Model, ...]:
    """Return the settings of the model that a family was traced from, or of each net of a union.

    Raises:
        ConfigError: Files cannot make the model again.
    """
    if family.variant != WHOLE or family.trains:
        raise ConfigError(
            f"the family of the variant {family.variant!r} was given; files have whole families."
        )
    if not isinstance(family.tracing, JoinedTracings):
        return _traced_model(family.tracing, family)
    nets = family.tracing.nets
    models = [_traced_model(tracing, family) for tracing in nets.values()]
    if list(net_names(models)) != list(nets):
        models = [replace(model, net_name=name) for model, name in zip(models, nets, strict=True)]
    return tuple(models)


def _traced_model(tracing: Tracing | JoinedTracings | None, family: Family) -> Model:
    """Return the settings of the model that a net was traced from.

    Args:
        tracing: Record of how the net was traced. None: it is not known.
        family: Family of the net, for the message.

    Raises:
        ConfigError: Files cannot make the model again, for example because a module was traced.
    """
    if not isinstance(tracing, Tracing):
        raise ConfigError(
            f"{family.title} was not traced by fq.trace in this process, as fq.trace(net, example) "
            "is."
        )
    if tracing.has_variants:
        raise ConfigError(
            "the model was traced with stages (fq.with_stages); files have them as settings of the "
            "method: ProgFed(stages=…), with fq.trace(net, example)."
        )
    source = tracing.source
    if not callable(source) or isinstance(source, torch.nn.Module):
        raise ConfigError(
            f"fq.trace was given a {type(source).__name__} that was made already, of which neither "
            "arguments nor weights are known. fq.trace(net, example) fits, with the function or "
            "class that makes it."
        )
    factory, options = _call_of(source)
    listed = (name for name, spec in MODELS.items() if spec.factory is factory)
    name = next(listed, None) or name_of(factory)
    # The command line fills in sizes of the data that are not set.
    takes = parameters(factory)
    left_open = (key for key in takes if key in Model.offers and key not in options)
    options |= {key: takes[key].default for key in left_open if takes[key].default is not UNSET}
    _check_options(Model, factory, options)
    trace_settings = tracing.options
    parts = {part: tuple(names) for part, names in (trace_settings["parts"] or {}).items()}
    model = Model(name, options)
    trace_options = TraceOptions(
        tuple(trace_settings["fixed"]), parts, trace_settings["heads"], trace_settings["class_dim"]
    )
    if trace_options == TraceOptions(fixed=model.fixed):
        return model
    return replace(model, tracing=trace_options)


def _source(origin: Origin | None, num_clients: int, seed: int) -> Source:
    """Return the settings of a data source with its options and its partition.

    Args:
        origin: Record of how the data was made. None: it is not known.
        num_clients: Number of clients of the fleet.
        seed: Random seed of the run. A partition with another seed gets `partition_seed`.

    Raises:
        ConfigError: Files cannot make the data again.
    """
    if origin is None:
        raise ConfigError(
            "it is not known how the samples were made. A data source remembers it, such as "
            'fq.data.digits() or fq.data.source("mine.npz")(), and so does a function at the top '
            "level of a file with @fq.data.source above it. Samples that were changed afterwards, "
            "or partitioned by lists of positions, do not."
        )
    if origin.partition is not None and origin.num_clients != num_clients:
        raise ConfigError(
            f"the samples were partitioned among {origin.num_clients} clients, and the fleet has "
            f"{num_clients}. pool.partition({num_clients}) would work."
        )
    factory, options = origin.factory, _plain_options(origin.options)
    listed = (name for name, source in DATA.items() if source is factory)
    name = next(listed, None) or name_of(factory)
    takes = parameters(factory)
    limit = 0
    if "max_bytes" in takes:  # The command line has it as a setting beside the options.
        limit = options.pop("max_bytes", takes["max_bytes"].default)
    _check_options(Source, factory, options)
    partition_seed = None if origin.seed == seed else int(origin.seed)
    return Source(
        name, options, origin.partition, partition_seed, float(origin.validation), int(limit)
    )


def _devices(run: Run, seed: int) -> Devices:
    devices = run.fleet.settings
    if devices is None:
        raise ConfigError(
            "the fleet was put together from its fields; fq.Fleet.of(…) and fq.Fleet.mixed(…) fit."
        )
    return replace(devices, seed=None) if devices.seed == seed else devices


def _machine(run: Run) -> Machine:
    """Return the settings of a run's engine, with the threads of this process."""
    engine = run.engine
    name = next((name for name, kind in ENGINES.items() if kind is type(engine)), None)
    if name is None:
        raise ConfigError(
            f"the engine is a {type(engine).__name__}; files have the engines {', '.join(ENGINES)}."
        )
    options = engine.engine_options
    assert isinstance(run.server.memory, ClientStates)
    return Machine(
        name=name,
        device=str(options.device),
        precision=options.precision,
        memory=options.memory,
        client_state_memory=int(run.server.memory.limit),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        threads=torch.get_num_threads(),
        workers=options.workers,
        address=options.address,
        chunks=options.chunks,
    )


# --- factories and their options ----------------------------------------------------------------


def _call_of(source: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function behind a `functools.partial`, and the arguments that it has, by name.

    Any other callable is returned itself, without arguments.
    """
    if not isinstance(source, partial):
        return source, {}
    bound = inspect.signature(source.func).bind_partial(*source.args, **source.keywords)
    return source.func, _plain_options(bound.arguments)


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with paths as text and NumPy numbers as Python numbers."""
    plain = {}
    for key, value in options.items():
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif isinstance(value, np.generic):
            value = value.item()
        plain[key] = value
    return plain


def _check_options(
    kind: type[Choice], factory: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Refuse arguments of a factory that a file cannot hold.

    Args:
        kind: Table that the factory's options are written into. Names of its fields are reserved.
        factory: The factory.
        options: Arguments by name.
    """
    takes = parameters(factory)
    reserved = [field_info.name for field_info in fields(kind)]
    for key, value in options.items():
        argument = f"{getattr(factory, '__name__', factory)}({key}={str(value)[:40]!r})"
        if key not in takes:
            raise ConfigError(
                f"{argument}: the signature does not name {key!r}; files have arguments by name "
                "alone."
            )
        if key in reserved:
            raise ConfigError(
                f"{argument}: files have a setting of their own named {key!r}. Give it another "
                "name."
            )
        if not _is_writable(value, takes[key].hint):
            raise ConfigError(
                f"{argument}: a file cannot hold this value. Numbers, text and lists fit, with a "
                "type hint that names their kind, or a default value in the signature."
            )


def _is_writable(value: Any, hint: Any) -> bool:
    """Return True if a file can hold an argument, so that an equal value is read back.

    Args:
        value: The argument.
        hint: Type hint of the parameter, by which it is read back.
    """
    problems: list[Problem] = []
    try:
        back = read(hint, write(value), "", problems)
    except ConfigError:
        return False
    return not problems and is_same(back, value)


# --- what was written ---------------------------------------------------------------------------


def _check_read_back(value: Any, plain: Any, hint: Any) -> None:
    """Refuse settings that would be read back as another value.

    A user's code is not imported for this.

    Args:
        value: A part of a run.
        plain: Plain values that were written for it.
        hint: Type hint of the part.
    """
    if named_code(plain):
        if not isinstance(plain, dict) or isinstance(value, Choice) or not is_dataclass(value):
            return
        inner = {key: setting for key, setting in plain.items() if key != "name"}
        if named_code(inner):
            return
        # The class is known, so that its name need not be looked up.
        plain, hint = inner, type(value)
    problems: list[Problem] = []
    back = read(hint, plain, "", problems)
    if problems:
        raise ConfigError(f"it cannot be read back: {problems[0].path} {problems[0].text}")
    if not is_same(back, value):
        raise ConfigError(
            f"{str(value)[:200]} is another value when it is read back from a file: "
            f"{str(back)[:200]}."
        )


def _check_imports(plain: Any) -> None:
    """Refuse settings whose code cannot be imported by another process.

    Importing the file that is running now would start the run again. A file by itself cannot import
    from its own package.

    Args:
        plain: Plain settings of one part, which may name code at any depth.
    """
    for code in named_code(plain):
        if code.path is None or code.path.suffix != ".py":
            continue
        tree = ast.parse(code.path.read_bytes())
        if line := _running_line(code.path, tree):
            raise ConfigError(
                f"{code.reference} is in the file that starts this run in line {line}, and "
                "importing it would start "
                'the run again. Put the run under `if __name__ == "__main__":`, or the code into a '
                "file of its own."
            )
        relative = (
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level
        )
        if is_file(code.reference) and (node := next(relative, None)):
            raise ConfigError(
                f"{code.reference} imports from its own package in line {node.lineno}, which a "
                "file by itself cannot. Install the package (pip install -e), or import by the "
                "full name."
            )


def _running_line(file: Path, tree: ast.Module) -> int | None:
    """Return the number of the line at the top level of a file that is being executed now.

    Args:
        file: Resolved path of the file.
        tree: Syntax tree of the file.

    Returns:
        None if the file is not being executed, or the line is under `if __name__ == "__main__":`,
        which an import skips.
    """
    guards = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) in _GUARDS
    ]
    guarded = [(node.body[0].lineno, node.body[-1].end_lineno or node.lineno) for node in guards]
    for frame in _frames():
        frame_file = frame.f_globals.get("__file__") or frame.f_code.co_filename
        if frame.f_code.co_name != "<module>" or Path(frame_file).resolve() != file:
            continue
        if not any(first <= frame.f_lineno <= last for first, last in guarded):
            return frame.f_lineno
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
