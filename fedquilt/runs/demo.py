"""Settings of the demo, and the default settings for other data and models."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import fedquilt.runs.registries  # noqa: F401  # Classes that settings select by name
from fedquilt.config.schema import label
from fedquilt.config.toml import Settings
from fedquilt.errors import ConfigError
from fedquilt.fleets.fleet import Devices
from fedquilt.fleets.presets import ByNet
from fedquilt.methods import METHODS, Method
from fedquilt.names import find, is_reference

# Settings of a run without arguments. A third of the clients can hold the whole model, a third half
# of it and a third a quarter. For other data or models, `defaults` has the settings.
DEMO: Settings = {
    "method": {"name": "heterofl"},
    "model": {"name": "tiny_resnet"},
    "data": {"name": "digits"},
    "fleet": {"cohort": 0.5, "budgets": {"name": "uniform", "shares": [1.0, 0.5, 0.25]}},
    "rounds": 20,
}

# Share of the demo's training samples that becomes public, without labels, if a method needs it
DEMO_PUBLIC = 0.2

# Local training with which the demo learns in twenty rounds with any method
LEARNING: Settings = {"optimizer": {"lr": 0.1}, "batch_size": 16, "epochs": 2}

# Bundled data with settings of its own: its model, and local training that works with any method.
# A perceptron has no norms that would undo the scaler. With a scaler, real-valued outputs of narrow
# nets would have another scale in training than in use. Gradients of squared errors are steep, so
# that they are clipped.
DEMOS: dict[str, tuple[str, Settings]] = {
    DEMO["data"]["name"]: (DEMO["model"]["name"], LEARNING),
    "digits-labels": (DEMO["model"]["name"], LEARNING),
    "diabetes": (
        "mlp",
        {"optimizer": {"lr": 0.05, "clip": 1.0}, "batch_size": 16, "epochs": 2, "scaler": False},
    ),
}


def demo(
    method: str = DEMO["method"]["name"],
    preset: bool = False,
    data: str = DEMO["data"]["name"],
    together: Sequence[str] = (),
) -> Settings:
    """Return the demo's settings for a method.

    A preset, or a function in a file, defines itself how clients train. If the method or one that
    it is compared with needs public samples, a fifth of the training samples becomes public,
    without labels.

    Args:
        method: Name of the method.
        preset: True if a preset of the method was asked for.
        data: A key of `DEMOS`.
        together: Names of methods that it is compared with on the same data.
    """
    model, learning = DEMOS[data]
    kind = _method_class(method)
    local: Settings = {}
    if not preset and not is_made_by_function(method):
        local = {"local": learning, **(kind.demo if kind else {})}
    public = (
        {"public": DEMO_PUBLIC} if any(needs_public(name) for name in (method, *together)) else {}
    )
    named = {
        "method": {"name": method} | local,
        "model": {"name": model},
        "data": {"name": data} | public,
    }
    federation = kind.demo_federation if kind else {}
    return copy.deepcopy({**DEMO, **named, **federation})


def needs_public(method: str) -> bool:
    """Return True if a method by its name needs public samples with its default settings.

    The result is False for unknown names, for functions, and for classes that need arguments.
    """
    kind = _method_class(method)
    try:
        return kind is not None and kind().needs_public
    except Exception:  # A user's class may need arguments. `Experiment.of` reports the error.
        return False


def trains_pairs(method: str) -> bool:
    """Return True if clients of a method, by its name, train two nets of a union.

    The result is False for unknown names and for functions.
    """
    kind = _method_class(method)
    return kind is not None and kind.trains_pairs


def _method_class(name: str) -> type[Method] | None:
    """Return a method's class by name or as `file.py:Class`. None: a function, or unknown."""
    try:
        entry = find(METHODS, name, "method")
    except ConfigError:  # `Experiment.of` reports the error.
        return None
    return entry if isinstance(entry, type) and issubclass(entry, Method) else None


def defaults(
    method: str = DEMO["method"]["name"], names_model: bool = True, num_models: int = 1
) -> Settings:
    """Return settings that name method, model and data only, so that all else has its defaults.

    The default fleet is named too, so that `--set fleet.budgets.shares=[1.0]` changes its shares.

    Args:
        method: Name of the method.
        names_model: True: the demo's model is named. False: no model is, so that the data decides.
        num_models: Number of models that are asked for. If there are several, the fleet has equally
            many clients for each, and the demo's data has public samples if the method needs them.
    """
    named = {
        part: copy.deepcopy(DEMO[part])
        for part in (("model", "data") if names_model else ("data",))
    }
    budgets = Devices().budgets if num_models < 2 else ByNet()
    if num_models > 1 and needs_public(method):
        named["data"]["public"] = DEMO_PUBLIC
    table: Settings = {"name": label(type(budgets))}
    if num_models > 1 and trains_pairs(method):
        table["pairs"] = True
    return {"method": {"name": method}, **named, "fleet": {"budgets": table}}


def is_made_by_function(method: str) -> bool:
    """Return True if a method's name refers to a function in a file, which defines all settings.

    The result is False for listed methods, for classes, and for references that cannot be found.
    """
    try:
        return is_reference(method) and not isinstance(find(METHODS, method, "method"), type)
    except ConfigError:  # `Experiment.of` reports the error.
        return False
