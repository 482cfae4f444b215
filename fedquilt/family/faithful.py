"""A check that a member's net, which clients train, computes what the member's module does.

A `Net` runs norms, pooling, attention and random functions by its own code. All engines share it,
so that comparing engines cannot reveal a mistake in it. Here a net is compared with the plain
module that `deploy` returns.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt import noise
from fedquilt.errors import FedquiltError, TraceError, first_line
from fedquilt.errors.faults import is_out_of_memory
from fedquilt.family.dual import set_robustness
from fedquilt.family.net import Pass
from fedquilt.family.randomness import SeededRandomness
from fedquilt.hardware.torch_internals import NormBase
from fedquilt.terms import Weights

if TYPE_CHECKING:
    from fedquilt.family.member import Member

# Precisions to compare in, and the largest difference that counts as rounding, relative to the
# largest value. float32 is fast, and if it agrees, that is enough. If not, float64 decides. Its
# bound is wide because some modules compute parts in float32 (softmax, mean squares). A module that
# does not run in float64 is compared in float32 again, with the bound that deep nets need.
ATTEMPTS = ((torch.float32, 1e-4), (torch.float64, 1e-5), (torch.float32, 1e-3))
BATCH_SIZE = 4  # Samples. With two, a batch norm would leave little more than signs.
KEY = torch.tensor(noise.key(noise.Stream.FAITHFULNESS))
OUTPUTS = "its outputs"
REMEDY = (
    "Let a norm layer of your own call super().forward or F.batch_norm, leave norm layers in "
    "training mode while the module trains, and draw random numbers by torch's functions."
)


def check_net(member: Member, modes: Sequence[Pass]) -> None:
    """Refuse a member whose net computes something else than its module.

    Both get the same weights, samples and random numbers. If the module itself fails, nothing can
    be compared. Then a warning is logged, once for all members of a family that fail in the same
    way.

    Args:
        member: The member.
        modes: Passes to compare, in training or not, on certain norm statistics. The scaler is off.

    Raises:
        TraceError: They differ by more than rounding, or the net fails where the module does not.
    """
    family = member.family
    names = (*member.trainable, *member.statistics, *member.carried)
    weights = family.cutter.gather(family.traced_state(names), member.prefix, names)
    moved = {name: shaken(weights[name]) for name in (*member.trainable, *member.statistics)}
    for mode in modes:
        for robustness in (0.0, 1.0) if family.adjustable else (0.0,):
            _check(member, replace(mode, robustness=robustness), {**weights, **moved})


def _check(member: Member, mode: Pass, weights: Weights) -> None:
    """Compare a member's net and module in one mode, in each precision of `ATTEMPTS` in turn.

    The first precision in which they agree ends the comparison, and float64 decides if it runs. If
    the module fails in all, a warning is logged.

    Args:
        member: The member.
        mode: Pass to compare, with its robustness.
        weights: Weights, statistics and constants of the member, by name.

    Raises:
        TraceError: Net and module differ, or the net fails where the module does not.
    """
    refusal: TraceError | None = None
    failure: Exception | None = None
    for dtype, tolerance in ATTEMPTS:
        inputs = plain(samples(member.family.example_inputs[0]), dtype)
        cast = {name: plain(value, dtype) for name, value in weights.items()}
        pair = _Pair(member, mode, cast, inputs)
        try:
            expected = pair.run_module()
        except FedquiltError:
            raise
        except Exception as error:  # A user's forward may raise anything.
            if is_out_of_memory(error):
                raise
            failure = error
            continue
        refusal = _compare(pair, expected, tolerance)
        if refusal is None:
            return
        if dtype == torch.float64:
            break
    if refusal is not None:
        raise refusal
    assert failure is not None
    try:
        pair.run_net()
    except FedquiltError:  # It says what to do, and is better raised before a run.
        raise
    except Exception:
        pass
    reason = first_line(failure)
    message = "%s was not compared with what clients train in its place, since it fails: %s"
    member.family.once.warning(reason, message, pair.title, reason, kind=mode)


def _compare(pair: _Pair, expected: Mapping[str, Tensor], tolerance: float) -> TraceError | None:
    """Run the net, and return an error if it fails or differs from its module, else None.

    If no output of the module is finite, a warning is logged and None is returned.

    Args:
        pair: The net and its module.
        expected: Results of the module, by name: outputs and norm statistics.
        tolerance: Largest difference that counts as rounding, relative to the largest value.
    """
    if not expected[OUTPUTS].isfinite().any():
        message = "%s was not compared with what clients train in its place: no output is finite"
        pair.member.family.once.warning("", message, pair.title, kind=pair.mode)
        return None
    try:
        results = pair.run_net()
    except FedquiltError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        refusal = TraceError(
            f"{pair.title} runs, but the net that clients would train in its place does not: "
            f"{first_line(error)}. {REMEDY}"
        )
        refusal.__cause__ = error
        return refusal
    for name, value in expected.items():
        difference = _difference(results[name], value)
        scale = _largest(value)
        if not difference <= tolerance * max(scale, 1e-6):
            return TraceError(
                f"{pair.title} is another network than clients would train in its place: {name} "
                f"differ by {difference:.2g}, where they are up to {scale:.2g} and a difference of "
                f"{tolerance * scale:.1g} would be rounding{pair.first_difference(tolerance)}. "
                f"{REMEDY}"
            )
    return None


def _difference(value: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference between finite entries.

    It is infinite if the shapes differ, or if other entries are finite.
    """
    if value.shape != expected.shape or not torch.equal(value.isfinite(), expected.isfinite()):
        return float("inf")
    return _largest(value - expected)


def _largest(value: Tensor) -> float:
    """Return the largest absolute value of the finite entries, or 0 if there are none."""
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if len(finite) else 0.0


@dataclass(frozen=True)
class _Pair:
    """A member as a module and as a net, on the same weights and samples."""

    member: Member
    mode: Pass
    weights: Weights
    inputs: Tensor

    @property
    def title(self) -> str:
        """Return a phrase that names the member and its mode, for the start of a message."""
        family, mode = self.member.family, self.mode
        whole_member = family.member(family.whole)
        size = f"with {self.member.count:,} of {whole_member.count:,} parameters"
        member = "whole" if self.member.arch == whole_member.arch else size
        phase = "training" if mode.train else "evaluation"
        norms = f", norm statistics: {mode.statistics}" if self.member.statistics else ""
        robustness = f", robustness {mode.robustness:g}" if family.adjustable else ""
        return f"{family.title}, {member}, in {phase}{norms}{robustness},"

    def run_module(self, watch: _Watch | None = None) -> dict[str, Tensor]:
        """Run a new module of the member with the random numbers that the net draws.

        Args:
            watch: Keeps the outputs of all layers. None has no effect.

        Returns:
            The outputs by `OUTPUTS`. If the pass tracks statistics, the new ones by name as well.
        """
        mode, member, family = self.mode, self.member, self.member.family
        # Only buffers are copied, because a forward may write to them. Weights are shared.
        buffers = {
            name: self.weights[name].clone() for name in (*member.statistics, *member.carried)
        }
        weights = {**self.weights, **buffers}
        # Weights of a union's nets keep the names that they have in the union.
        extract = not family.layout.nets
        module = family.assemble(member.prefix, weights, shared=True, extract=extract).train(
            mode.train
        )
        if not mode.train and mode.statistics == "batch":
            forget_statistics(module)
        if family.adjustable:
            set_robustness(module, mode.robustness)
        if watch is not None:
            watch.attach(module)
        if not mode.train:
            return {OUTPUTS: run_seeded(module, (self.inputs,))}
        with _TorchsOwn(KEY):
            outputs = run_seeded(module, (self.inputs,))
        new_buffers = dict(module.named_buffers()) if mode.statistics == "track" else {}
        return {
            OUTPUTS: outputs,
            **{name: new_buffers[name] for name in member.statistics if new_buffers},
        }

    def run_net(self, watch: _Watch | None = None) -> dict[str, Tensor]:
        """Run the net as engines do, without statistics where the norm policy stores none.

        Args:
            watch: Keeps the outputs of all layers in this run. None has no effect.

        Returns:
            The outputs by `OUTPUTS`, and all norm statistics after the run by name.
        """
        mode, net = self.mode, self.member.net
        key = KEY if mode.train else None
        tracked = {name: self.weights[name] for name in self.member.statistics}
        stored = tracked if mode.statistics in ("stored", "track") else {}
        weights = {name: value for name, value in self.weights.items() if name not in tracked}

        def run(inputs: Tensor) -> Tensor:
            outputs, new_statistics = net({**weights, **stored}, inputs, mode, key)
            tracked.update(new_statistics)
            return outputs

        handles = watch.attach(net.module) if watch is not None else []
        try:
            return {OUTPUTS: run_seeded(run, (self.inputs,)), **tracked}
        finally:
            for handle in handles:
                handle.remove()

    def first_difference(self, tolerance: float) -> str:
        """Run both again, and name the first layer whose outputs differ, for a message.

        Inner layers come before outer ones. The text is empty if no layer is found.

        Args:
            tolerance: Largest difference that counts as rounding, relative to the largest value.
        """
        net_watch, module_watch = _Watch(), _Watch()
        self.run_module(module_watch)
        self.run_net(net_watch)
        for layer, value in module_watch.outputs.items():
            net_value = net_watch.outputs.get(layer)
            allowed = tolerance * max(_largest(value), 1e-6)
            if net_value is not None and not _difference(net_value, value) <= allowed:
                return f" (the first layer that differs is {layer})"
        return ""


class _Watch:
    """The outputs of a module's layers, in the order in which the layers ended."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}

    def attach(self, module: nn.Module) -> list[Any]:
        """Keep the first output of every layer of a module from now on, and return the hooks.

        The module itself is left out. Only outputs that are one tensor of real numbers are kept.
        """
        return [
            layer.register_forward_hook(partial(self._keep, f"{name!r}, a {type(layer).__name__}"))
            for name, layer in module.named_modules()
            if name
        ]

    def _keep(self, title: str, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor) and outputs.is_floating_point():
            self.outputs.setdefault(title, outputs.clone())


class _TorchsOwn(SeededRandomness):
    """A context in which random numbers are drawn as in a net, and all else is torch's own."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        attention = func is F.scaled_dot_product_attention
        without_dropout = attention and not (
            args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        )
        if without_dropout or func is F.adaptive_avg_pool2d:
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def forget_statistics(module: nn.Module) -> None:
    """Make batch and instance norms of a module use the batch's statistics in evaluation too.

    The module is changed in place: its running statistics are removed.
    """
    for layer in module.modules():
        if isinstance(layer, NormBase):
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            layer.track_running_stats = False


# --- weights, samples and random numbers --------------------------------------------------------


def plain(value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor on the CPU. Real numbers are converted to `dtype`."""
    return value.cpu().to(dtype) if value.is_floating_point() else value.cpu()


def shaken(value: Tensor) -> Tensor:
    """Return a weight whose entries are changed by up to half their size, and zeros by up to 0.1.

    Layers that start as zero or one would hide a mistake in them or in the layers before. The
    changes are the same in every call. Integers are returned as they are.
    """
    if not value.is_floating_point():
        return value
    offsets = torch.rand(min(value.numel(), 9973), generator=torch.Generator().manual_seed(0)) - 0.5
    # Drawing a number for each entry takes long.
    repeats = -(-value.numel() // max(1, len(offsets)))
    offsets = offsets.repeat(repeats)[: value.numel()].reshape(value.shape).to(value)
    return value + torch.where(value == 0, 0.2, value) * offsets


def samples(example: Tensor) -> Tensor:
    """Return `BATCH_SIZE` samples like those of the example (sample, …), always the same.

    Samples of real numbers get noise in [0, 1), so that no two are equal. Of integers, one sample
    is replaced by tokens 0 and 1, and one is halved.
    """
    rows = example.detach()[torch.arange(BATCH_SIZE) % len(example)]
    if example.is_floating_point():
        rows = rows.nan_to_num()
        generator = torch.Generator().manual_seed(0)
        return rows + torch.rand(rows.shape, generator=generator).to(rows)
    # Columns may have different ranges. Half of a number is always in the range of its column.
    return torch.cat([rows[:-2], unlike(rows[:1])[0], rows[-1:] // 2])


def unlike(sample: Tensor) -> list[Tensor]:
    """Return samples that differ from `sample` everywhere, each of its shape.

    Of real numbers there are two, one larger than `sample` and one smaller. Of tokens there is one,
    with 0 and 1, which most vocabularies have.
    """
    if not sample.is_floating_point():
        return [1 - sample.clamp(0, 1)]
    offsets = noise.uniform(torch.tensor(noise.key()), sample.shape, sample.dtype)
    return [sample + offsets, sample - offsets]


def run_seeded(module: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Tensor:
    """Run a module without gradients, with all random generators at the same seeds every time.

    Inputs are copied, so that an in-place operation does not change them. Afterwards the generators
    of Python, NumPy and torch on the CPU have their earlier state.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        random.seed(0)
        np.random.seed(0)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return module(*copy.deepcopy(inputs))
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
