"""Check that nets that are computed side by side give the same outputs as stacked nets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import vmap

from fedquilt import noise
from fedquilt.engines.vectorized.group_tensors import GroupTensors
from fedquilt.errors import FedquiltError, first_line
from fedquilt.family.grouped import GroupedNet, GroupingError, Undrawn, agrees
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.step import train_pass


def check_grouped(group: GroupTensors, grouped_net: GroupedNet) -> None:
    """Refuse the layout "grouped" if its logits differ from those of stacked nets.

    A forward pass may treat channels in ways that cannot be read off the layers. A net that
    normalizes a channel by its neighbours would then mix clients. Both are tested by
    `test_nets_that_depend_on_each_other_are_not_trained_side_by_side`.

    Args:
        group: Client group with its member, samples and weights.
        grouped_net: Its nets, side by side in the channels.

    Raises:
        GroupingError: The nets cannot be computed side by side.
    """
    member, mode = group.member, train_pass(group.shape.learner.local)
    if mode.statistics != "batch":
        raise GroupingError("its norms keep statistics")
    if group.shape.learner.changes_samples(member):
        raise GroupingError("its samples are attacked, which takes nets one by one")
    count, size = group.shape.count, group.shape.learner.local.batch_size
    positions = torch.arange(count * size, device=group.rows.device) % len(
        group.engine.data.targets
    )
    inputs, net = group.engine.data.samples(positions.view(count, size)), member.net
    # The weights of clients must differ, or a net that mixes them would not be noticed.
    shaken = {
        name: value
        + 0.1 * noise.uniform(noise.fold_in(group.keys[0], number), value.shape, value.dtype)
        for number, (name, value) in enumerate(group.state.items())
    }
    shares = torch.linspace(0.5, 1.0, count, dtype=group.shares.dtype, device=group.shares.device)
    try:
        with torch.no_grad(), exact():
            stacked_logits = vmap(
                lambda weights, x, share: net(weights, x, mode, group.keys[0], share=share)[0]
            )(shaken, inputs, shares)
            with Undrawn():
                grouped_logits = grouped_net(
                    shaken, inputs, member.class_dim, shares if mode.scaler else None
                )
            leaks = _leaks(group, grouped_net, shaken, inputs)
    except FedquiltError:
        raise
    except Exception as error:  # A user's forward pass may raise anything
        raise GroupingError(
            f"its nets do not run both stacked and side by side: {first_line(error)}"
        ) from error
    if not agrees(grouped_logits, stacked_logits):
        raise GroupingError("side by side its nets give other logits than one by one")
    if leaks:
        raise GroupingError("side by side its nets see each other")


def _leaks(group: GroupTensors, grouped_net: GroupedNet, state: State, inputs: Tensor) -> bool:
    """Return True if the logits of any other client depend on the samples of the first client.

    Even a tiny dependence counts, because it may grow in training. The result is False for samples
    without gradients, such as tokens.

    Args:
        group: Client group with its member.
        grouped_net: Its nets, side by side in the channels.
        state: Weights, with clients in the first dimension.
        inputs: Samples, (client, sample, …).
    """
    if not inputs.is_floating_point():
        return False
    with torch.enable_grad():
        tracked_inputs = inputs.detach().requires_grad_()
        other_logits = grouped_net(state, tracked_inputs, group.member.class_dim)[1:]
        if not other_logits.requires_grad:
            return False
        (slope,) = torch.autograd.grad(other_logits.sum(), tracked_inputs, allow_unused=True)
    return slope is not None and bool(slope[0].any())


@contextmanager
def exact() -> Iterator[None]:
    """Compute products in full precision within the block, whatever precision is set.

    The settings are restored afterwards.
    """
    old_settings = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = old_settings
