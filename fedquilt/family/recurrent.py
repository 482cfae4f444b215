"""Recurrent layers on few time steps, for runs that count costs or need only shapes.

torch runs a recurrent layer step by step, so that recording a GRU over 128 steps takes as long as
recording 128 layers. All steps after the first compute the same. Operations and saved tensors
therefore grow linearly with the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedquilt.hardware.torch_internals import storage_id, tree_leaves

SHORT = (2, 3)  # Time steps on which a layer is counted. The first step may differ from all others.
_FUNCTIONS = (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)
_OPERATIONS = (
    torch.ops.aten.gru.input,
    torch.ops.aten.lstm.input,
    torch.ops.aten.rnn_tanh.input,
    torch.ops.aten.rnn_relu.input,
)
# input, hx, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first
_NUM_ARGUMENTS = 9


@dataclass(frozen=True, eq=False)
class RecurrentCall:
    """A call of a recurrent function of torch, for sequences of equal length."""

    function: Callable[..., Any]  # Function or ATen operation
    args: tuple[Any, ...]  # Its arguments

    @staticmethod
    def of(
        function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> RecurrentCall | None:
        """Return the call if it has more time steps than are needed to count it, else None.

        None is returned for functions that are not recurrent, and for packed sequences. These have
        batch sizes where others have the hidden state, and their weights come later.

        Args:
            function: Function or ATen operation that is called.
            args: Its positional arguments.
            kwargs: Its keyword arguments, if there are any.
        """
        if function not in _FUNCTIONS and function not in _OPERATIONS:
            return None
        if kwargs or len(args) != _NUM_ARGUMENTS or not isinstance(args[2], (list, tuple)):
            return None
        call = RecurrentCall(function, tuple(args))
        return call if call.num_steps > max(SHORT) else None

    @property
    def _time(self) -> int:
        """Return the dimension of the input that is time."""
        return 1 if self.args[-1] else 0

    @property
    def num_steps(self) -> int:
        """Return the number of time steps."""
        return int(self.args[0].shape[self._time])

    @property
    def storages(self) -> dict[int, Any]:
        """Return the storages of all tensors among the arguments, by their addresses."""
        tensors = [leaf for leaf in tree_leaves(self.args) if isinstance(leaf, Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {storage_id(storage): storage for storage in storages}

    def run(self, num_steps: int) -> tuple[Tensor, ...]:
        """Return outputs and hidden states of the layer on the first `num_steps` time steps."""
        results: tuple[Tensor, ...] = self.function(
            self.args[0].narrow(self._time, 0, num_steps), *self.args[1:]
        )
        return results

    def lengthened(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the results of a shorter run with outputs for all time steps of this call.

        Hidden states do not depend on the length. Outputs are in memory with the time first, as
        torch has them. Their values are repeated, because they do not matter.
        """
        first = results[0].transpose(0, self._time).narrow(0, 0, 1)  # (1, sample, channel)
        outputs = first.expand(self.num_steps, -1, -1).clone(memory_format=torch.contiguous_format)
        return (outputs.transpose(0, self._time), *results[1:])
