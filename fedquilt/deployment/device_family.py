"""The model on a device: built without values, from the server's layout and the device's code.

A device never builds the whole model. It makes the module with weights on the meta device, which
have shapes and take no memory, and compares them with the layout that the server has traced. The
values of its member arrive with requests. Constants, such as masks and tables of positions, do not
arrive. The device's code computes them, and they are compared with digests of the server's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedquilt.axes import size_of
from fedquilt.errors import ConfigError
from fedquilt.family import Family, Layout
from fedquilt.family.build import blueprint, number_at
from fedquilt.family.nets import Nets
from fedquilt.family.origin import Tracing, as_factory
from fedquilt.runs.model_settings import Model, net_names

META = torch.device("meta")
DIGEST_LENGTH = 16  # Hexadecimal digits
# Functions whose results have no values, or random ones. Weights are made by them.
_VALUELESS = frozenset(
    {
        torch.empty,
        torch.empty_strided,
        torch.rand,
        torch.randn,
        torch.randint,
        torch.randperm,
        torch.normal,
    }
)


class WithoutValues(TorchFunctionMode):
    """A context in which uninitialised and random tensors are made on the meta device.

    All other tensors have values, because constructors read some of them: a model may compute the
    dropout of its layers by `torch.linspace(…).tolist()`. Random values would differ from those of
    the server, since a device does not draw the weights before them.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _VALUELESS and kwargs.get("device") is None:
            kwargs["device"] = META
        return function(*args, **kwargs)


def constant_digests(family: Family) -> dict[str, str]:
    """Return a hash of every constant of a family, by name.

    Constants are weights that are neither trained nor cut, and other tensors among the attributes
    of layers.

    Raises:
        ConfigError: A constant has no values.
    """
    digests = {}
    for name, value in {**family.constants, **_attributes(family.traced_module)}.items():
        if value.is_meta:
            raise ConfigError(
                f"the model has {name}, which is random and never trained. Devices cannot compute "
                "its values, because they do not draw the weights before it. A constant that does "
                "not depend on random numbers would work in the model."
            )
        value = value.detach().cpu().contiguous()
        content = f"{value.dtype} {list(value.shape)} ".encode()
        content += value.flatten().view(torch.uint8).numpy().tobytes()
        digests[name] = hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]
    return digests


def _attributes(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors among the attributes of layers that are no weights, by their path."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, Tensor)
    }


def device_family(
    models: Sequence[Model],
    layout: Layout,
    offers: Mapping[str, int],
    example: Tensor,
    constants: Mapping[str, str],
) -> Family:
    """Build a family from the server's layout and the device's code, without values of weights.

    Args:
        models: One model, or the models of a union.
        layout: The server's layout.
        offers: The server's numbers of outputs and sizes, for options that settings leave out.
        example: Inputs of the model, of any values.
        constants: The server's `constant_digests`.

    Raises:
        ConfigError: A model cannot be built here, or has other weights or constants than the
            server's. The message has the first difference.
    """
    names = " and ".join(model.name for model in models)
    with WithoutValues():
        if len(models) == 1:
            module = models[0].module(offers)
        else:
            module = Nets({name: net.module(offers) for name, net in net_names(models).items()})
    check_module(module, layout, names)
    tracing = Tracing(module, models[0].trace_arguments) if len(models) == 1 else None
    family = emptied(Family(module, layout, (example,), as_factory(module), _traced=tracing))
    _check_constants(constant_digests(family), constants, names)
    return family


def emptied(family: Family) -> Family:
    """Return a family of the same layout whose weights, constants excepted, are on the meta device.

    Stages of a growing model can still be traced, because tracing needs no values.
    """
    constants = {*family.constants}

    def make(name: str, weight: Tensor) -> Tensor:
        if name in constants or weight.is_meta:
            return weight
        empty = torch.empty_like(weight, device=META)
        if isinstance(weight, nn.Parameter):
            return nn.Parameter(empty, weight.requires_grad)
        return empty

    module = blueprint(family.traced_module, make)
    tracing = family.tracing
    if isinstance(tracing, Tracing) and not tracing.has_variants:
        tracing = Tracing(module, tracing.options)
    return Family(module, family.layout, family.example_inputs, as_factory(module), _traced=tracing)


# --- differences between the server's model and the device's -------------------------------------


def check_module(module: nn.Module, layout: Layout, name: str) -> None:
    """Compare every weight and size of a module with a layout.

    Args:
        module: The device's module. Its weights may be on the meta device.
        layout: The server's layout.
        name: Name of the model, for messages.

    Raises:
        ConfigError: A weight is missing on either side or has another shape, or a layer has another
            size. The message has the first difference.
    """
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    shapes = {weight: tuple(tensor.shape) for weight, tensor in tensors}
    sizes = layout.sizes
    expected = {weight: layout.shape(weight, sizes) for weight in layout.dims}
    expected |= {alias: expected[weight] for alias, weight in layout.ties.items()}
    counters = {weight for weight in shapes if weight.endswith("num_batches_tracked")}
    _check_shapes(expected, {w: s for w, s in shapes.items() if w not in counters}, name)
    for path, expression in layout.attributes.items():
        size, number = size_of(expression, sizes), number_at(module, path)
        if number is None or (isinstance(number, int) and number != size):
            raise ConfigError(
                f"the server's model has {path} = {size}; the model {name} on the device has "
                f"{number or 'no such size'}. {_SAME_MODEL}"
            )


def check_layouts(server: Layout, device: Layout, name: str) -> None:
    """Compare the axes and weights of two models.

    Args:
        server: Layout of the server's model.
        device: Layout of the device's model.
        name: Name of the device's model, for messages.

    Raises:
        ConfigError: They differ. The message has the first weight that differs, with both shapes.
    """
    if server.fingerprint == device.fingerprint:
        return
    expected, actual = (
        {weight: layout.shape(weight, layout.sizes) for weight in layout.dims}
        for layout in (server, device)
    )
    _check_shapes(expected, actual, name)
    raise ConfigError(
        f"the server's model has the axes {server.fingerprint}; the model {name} on the device has "
        f"weights of the same shapes and the axes {device.fingerprint}. The same versions of "
        "fedquilt and torch would work on both sides."
    )


_SAME_MODEL = "The same code and options of the model would work on both sides."


def _check_shapes(
    expected: Mapping[str, Sequence[int]], actual: Mapping[str, Sequence[int]], name: str
) -> None:
    """Refuse weights that differ from the server's, by a ConfigError with the first of them.

    Args:
        expected: Shapes of the server's weights, by name.
        actual: Shapes of the device's weights.
        name: Name of the device's model, for messages.
    """
    for weight, shape in expected.items():
        if weight not in actual:
            raise ConfigError(
                f"the server's model has {weight} of shape {tuple(shape)}; the model {name} on the "
                f"device does not have it. {_SAME_MODEL}"
            )
        if tuple(actual[weight]) != tuple(shape):
            raise ConfigError(
                f"the server's model has {weight} of shape {tuple(shape)}; the model {name} on the "
                f"device has {tuple(actual[weight])}. {_SAME_MODEL}"
            )
    if additional := [weight for weight in actual if weight not in expected]:
        raise ConfigError(
            f"the model {name} on the device has {additional[0]} of shape "
            f"{tuple(actual[additional[0]])}; the server's does not have it. {_SAME_MODEL}"
        )


def _check_constants(actual: Mapping[str, str], expected: Mapping[str, str], name: str) -> None:
    """Refuse constants that differ from the server's, by a ConfigError with the first of them.

    Args:
        actual: Digests of the device's constants, by name.
        expected: Digests of the server's constants.
        name: Name of the device's model, for messages.
    """
    for constant in dict.fromkeys((*expected, *actual)):
        if actual.get(constant) != expected.get(constant):
            raise ConfigError(
                f"the constant {constant} of the model {name} on the device differs from the "
                "server's. Constants are never sent: those that follow from the same code would "
                "work, and neither random ones nor those of a file of weights."
            )
