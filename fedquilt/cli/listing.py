"""Lists of everything that can be chosen by name, as `fedquilt list` shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from fedquilt.config.listing import described, leaves
from fedquilt.config.writing import write
from fedquilt.errors import ConfigError
from fedquilt.names import find, is_file, is_in_module, known

if TYPE_CHECKING:
    from fedquilt.methods import Method
    from fedquilt.models import ModelSpec
    from fedquilt.round.link import Link
    from fedquilt.tasks import Metric, Task

Entry = dict[str, Any]
LISTS = (
    "methods",
    "models",
    "data",
    "partitions",
    "tasks",
    "metrics",
    "fleets",
    "links",
    "codecs",
    "engines",
    "trackers",
    "formats",
    "norms",
    "objectives",
    "papers",
)


def entries(what: str, name: str = "", with_stages: bool = False) -> dict[str, Entry]:
    """Return all entries of a list by name, or one of them.

    The name of a paper selects all its tables.

    Args:
        what: A name of `LISTS`.
        name: Name of one entry, or `file.py:Class` for a method. Empty: all of them.
        with_stages: True: the entry of one model has its stages too, which takes a while.
    """
    describe: Callable[[Any], Entry] = _ABOUT.get(what, _plain)
    if not name:
        kinds = _table(what)
    elif what == "papers":
        kinds = {table: table for table in _tables_named(name)}
    else:
        kinds = {name: _known(what, name)}
    rows = {key: describe(kind) for key, kind in kinds.items()}
    if what == "models" and name and with_stages:
        rows[name]["stages"] = _stages(kinds[name])
    return rows


def details(what: str, name: str) -> dict[str, dict[str, Entry]]:
    """Return further tables on one entry, by the title of their first column.

    They are the entry's options, stages of a model, or rows, scales and notes of a paper's table.

    Args:
        what: A name of `LISTS`.
        name: Name of the entry.
    """
    if what == "models":
        return {"option": options(what, name), **_stages(_known(what, name))}
    if what != "papers":
        return {"option": options(what, name)}
    if _tables_named(name) != (name,):  # The name is that of a paper with several tables.
        return {}
    table = _paper_table(name)
    notes = {
        str(number): {"what it says": note} for number, note in enumerate(table["notes"], start=1)
    }
    return {"row (the paper's numbers)": table["rows"], "scale": table["sizes"], "note": notes}


def options(what: str, name: str) -> dict[str, Entry]:
    """Return the settings of one entry by name: type, default and description of each.

    Args:
        what: A name of `LISTS`.
        name: Name of the entry.
    """
    from fedquilt.runs.data_settings import Source
    from fedquilt.runs.machine import Machine

    kind = _known(what, name)
    if what == "links":
        return leaves(type(kind), kind)
    rows = leaves(kind.factory if what == "models" else Machine if what == "engines" else kind)
    if what == "data":  # All data sets have this option. `list partitions` has those of partitions.
        rows = {**rows, "validation": leaves(Source)["validation"]}
    if presets := getattr(kind, "presets", None):
        shown = {
            "type": " | ".join(presets),
            "default": "null",
            "what it is": "a setting of its paper's or its code's",
        }
        rows = {"preset": shown, **rows}
    return rows


def _known(what: str, name: str) -> Any:
    if what == "methods" and (is_file(name) or is_in_module(name)):
        return _own_method(name)
    return known(_table(what), name, _NOUNS.get(what, what.removesuffix("s")))


def _own_method(name: str) -> type[Method]:
    """Return the class that `file.py:Class` or `package.module:Class` names.

    Raises:
        ConfigError: It is not a subclass of `Method`.
    """
    from fedquilt.methods import METHODS, Method

    kind = find(METHODS, name, "method")
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ConfigError(
            f"list methods {name} was asked for; that is no class of a method, and has no "
            "settings to list. A class derived from fedquilt.methods.Method would work."
        )
    return kind


def _table(what: str) -> Mapping[str, Any]:
    import fedquilt.runs.experiment  # noqa: F401  # which says what settings are chosen by name
    from fedquilt.data import DATA, PARTITIONS
    from fedquilt.deploy.formats import FORMATS
    from fedquilt.engines import ENGINES
    from fedquilt.engines.flower.engine import Flower
    from fedquilt.family.norms import NORM_POLICIES
    from fedquilt.fleets.presets import FLEETS
    from fedquilt.methods import METHODS
    from fedquilt.models import MODELS
    from fedquilt.round.link import CODECS, LINKS
    from fedquilt.round.training.objectives import OBJECTIVES
    from fedquilt.runs.auto import quickest
    from fedquilt.runs.machine import AUTO
    from fedquilt.runs.tracking import TRACKERS
    from fedquilt.studies.papers import presets
    from fedquilt.tasks import METRICS, TASKS

    tables: tuple[Mapping[str, Any], ...] = (
        METHODS,
        MODELS,
        DATA,
        PARTITIONS,
        TASKS,
        METRICS,
        FLEETS,
        LINKS,
        CODECS,
        {**ENGINES, "flower": Flower, AUTO: quickest},
        TRACKERS,
        FORMATS,
        NORM_POLICIES,
        OBJECTIVES,
        {name: name for name in presets()},
    )
    return known(dict(zip(LISTS, tables, strict=True)), what, "list")


def _tables_named(name: str) -> tuple[str, ...]:
    from fedquilt.studies.papers import tables_named

    return tables_named(name)


def _paper_table(name: str) -> Entry:
    """Return what is known of a paper's table or figure: data, scales, and the paper's numbers.

    Args:
        name: Name of the table, such as an entry of `fedquilt list papers`.
    """
    from fedquilt.studies.papers import parsed_preset

    preset = parsed_preset(name)
    titles = [column.title for column in preset.columns]
    sizes = {
        scale: {
            "seeds": " ".join(map(str, preset.seeds_at(scale))),
            "what differs": preset.scales[scale].note,
        }
        for scale in preset.scales
    }
    return {
        "runs": len(preset.rows) * len(preset.seeds),
        "data": " ".join(preset.data) or "none",
        "scales": " ".join(preset.scales),
        "measure": preset.measure,
        "title": preset.title,  # the last one, because it is long
        "rows": {row.name: dict(zip(titles, row.paper, strict=True)) for row in preset.rows},
        "sizes": sizes,
        "notes": list(preset.notes),
    }


def _method(kind: type[Method]) -> Entry:
    has_defaults = all(
        field.default is not MISSING or field.default_factory is not MISSING
        for field in fields(kind)
        if field.init
    )
    note = kind().note if has_defaults else ""
    return {"paper": kind.paper, **_plain(kind), "note": note, "presets": list(kind.presets)}


def _model(spec: ModelSpec) -> Entry:
    import torch

    with torch.device("meta"):  # Parameters are counted and not allocated.
        parameters = sum(weight.numel() for weight in spec.factory().parameters())
    shape = list(spec.input_shape)
    return {
        "paper": spec.paper,
        "input_shape": shape,
        "parameters": parameters,
        **described(spec.factory),
    }


def _stages(spec: ModelSpec) -> dict[str, dict[str, Entry]]:
    """Return a table of stages for each growth that a model declares, by title.

    A row has the parameters of a stage and of its temporary head. The model is built without
    memory for its weights.
    """
    import torch

    from fedquilt.family.stage_ends import growths_of
    from fedquilt.family.stages import stage_sizes

    with torch.device("meta"):  # Parameters are counted and not allocated.
        model = spec.factory()
    tables: dict[str, dict[str, Entry]] = {}
    for growth in growths_of(model):
        sizes = stage_sizes(model, (spec.example(),), growth or None)
        rows = {}
        for number, stage in enumerate(sizes, 1):
            end = {"ends with": stage.end} if stage.end else {}
            rows[str(number)] = {
                **end,
                "parameters": stage.block,
                "parameters of its head": stage.head,
            }
        tables[f"stage ({growth})" if growth else "stage"] = rows
    return tables


def _engine(kind: Callable[..., Any]) -> Entry:
    from fedquilt.runs.machine import Machine

    return {"summary": _summary(kind), **described(Machine)}


def _link(link: Link) -> Entry:
    return {"summary": str(link), "settings": write(link), **described(type(link))}


def _task(kind: type[Task]) -> Entry:
    task = kind()
    return {
        "main": task.main.name,
        **_plain(kind),
        "metrics": [metric.name for metric in task.measured],
    }


def _metric(kind: type[Metric]) -> Entry:
    better = "higher" if kind.higher_is_better else "lower"
    return {"better": better, "for": ", ".join(kind.kinds), **_plain(kind)}


def _plain(kind: Callable[..., Any]) -> Entry:
    return {"summary": _summary(kind), **described(kind)}


def _summary(thing: object) -> str:
    """Return the first paragraph of an object's docstring in one line, empty if it has none."""
    paragraph, _, _ = (thing.__doc__ or "").strip().partition("\n\n")
    return " ".join(paragraph.split())


_NOUNS = {"data": "data set", "norms": "norm policy"}  # Noun for one entry of a list.
_ABOUT: dict[str, Callable[[Any], Entry]] = {
    "methods": _method,
    "models": _model,
    "tasks": _task,
    "metrics": _metric,
    "engines": _engine,
    "links": _link,
    "papers": _paper_table,
}
