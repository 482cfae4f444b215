"""A HeteroFL round as the released codes play it: what fedquilt's time and numbers are held
against.

After the training scripts of HeteroFL (Diao et al. 2021) and FedRolex (Alam et al. 2022): a fresh
net and optimizer for every client and round, clients one after another, cuts and the merge by index
grids with a count tensor a weight, norm statistics over the whole training set in batches of the
clients' size, then a test on every client's part and on all. Left out, in their favour: images are
tensors in memory instead of files behind a `DataLoader`, nothing is augmented, logged or saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

Make = Callable[[float], nn.Module]  # a fresh net of a share, with weights of its own
State = dict[str, Tensor]
# of every weight, the positions kept in its first two dimensions
Index = dict[str, tuple[Tensor, ...]]
CLIP = 1.0  # of the norm of a client's gradient


def build(make: Make, share: float, track: bool = False) -> nn.Module:
    """A net whose norms keep no statistics, or the mean over all batches; a narrow one's
    convolutions are scaled up.
    """
    net = make(share)
    for layer in net.modules():
        if isinstance(layer, _BatchNorm):
            layer.momentum, layer.track_running_stats = None, track
            if not track:
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        elif isinstance(layer, _ConvNd) and share != 1:
            layer.register_forward_hook(
                lambda conv, _, outputs: outputs / share if conv.training else outputs
            )
    return net


def split(net: nn.Module) -> Index:
    """The positions a client holds: the first of everything."""
    return {
        name: tuple(torch.arange(size) for size in part.shape[:2])
        for name, part in net.state_dict().items()
    }


def distribute(weights: Mapping[str, Tensor], index: Index) -> State:
    """What a client is sent."""
    return {name: copy.deepcopy(weights[name][_grid(kept)]) for name, kept in index.items()}


def _grid(kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.meshgrid(*kept, indexing="ij")


def train(
    net: nn.Module,
    start: State,
    batches: Sequence[Tensor],
    inputs: Tensor,
    targets: Tensor,
    held: Tensor,
    **settings: Any,
) -> State:
    """A client's local training; logits of classes it does not hold are 0."""
    net.load_state_dict(start)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), **settings)
    for rows in batches:
        optimizer.zero_grad()
        logits = net(inputs[rows]).masked_fill(~held, 0)
        F.cross_entropy(logits, targets[rows]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
    return copy.deepcopy(net.state_dict())


def combine(
    weights: State,
    states: Sequence[Mapping[str, Tensor]],
    indices: Sequence[Index],
    held: Sequence[Tensor],
) -> None:
    """The mean over the clients that hold a position, in place; of the output layer, over those
    that hold the class.
    """
    output = list(weights)[-2:]  # weight and bias of the last layer
    for name, value in weights.items():
        total, count = torch.zeros_like(value), torch.zeros_like(value)
        for state, index, own in zip(states, indices, held, strict=True):
            part, kept = state[name], index[name]
            if name in output:
                rows = own.nonzero().flatten()
                part, kept = part[rows], (kept[0][rows], *kept[1:])
            total[_grid(kept)] += part
            count[_grid(kept)] += 1
        total[count > 0] = total[count > 0].div_(count[count > 0])
        value[count > 0] = total[count > 0]


@torch.no_grad()
def calibrate(make: Make, weights: State, inputs: Tensor, batch_size: int) -> nn.Module:
    """The whole net with norm statistics over all inputs, every batch counting the same."""
    net = build(make, 1.0, track=True)
    net.load_state_dict(weights, strict=False)
    net.train()
    for batch in torch.split(inputs, batch_size):
        net(batch)
    return net


@torch.no_grad()
def evaluate(
    net: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int, held: Tensor | None = None
) -> int:
    """How many predictions are right; `held` hides the classes a client does not have, as in its
    training.
    """
    net.eval()
    right = 0
    for batch, wanted in zip(
        torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True
    ):
        logits = net(batch)
        if held is not None:
            logits = logits.masked_fill(~held, 0)
        right += int((logits.argmax(1) == wanted).sum())
    return right
