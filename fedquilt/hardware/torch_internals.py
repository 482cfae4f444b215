"""All private functions and classes of torch that fedquilt uses, with the reason for each.

Private names may change with any release of torch. They are gathered here, so that an update has
one file to check. `tests/unit/hardware/test_torch_internals.py` refuses them in other modules.

- Lists of tensors: one kernel launch for many tensors. torch's own optimizers use these functions.
- Fused optimizers: one kernel launch for a whole optimizer step.
- Transforms of functorch: whether a tensor is inside `torch.func.vmap` or `torch.func.grad`.
- Fake tensors and ATen operations: shapes without values, for tracing a model.
- Nested containers: tensors in dictionaries and lists as one flat list.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_flatten, tree_map

__all__ = [
    "FAKE_TENSOR_LOGGER",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "core_aten_decompositions",
    "foreach_add",
    "foreach_add_",
    "foreach_addcdiv",
    "foreach_addcmul_",
    "foreach_copy_",
    "foreach_div",
    "foreach_div_",
    "foreach_lerp",
    "foreach_mul",
    "foreach_norm",
    "foreach_sqrt",
    "foreach_zero_",
    "fused_adam_",
    "fused_adamw_",
    "fused_sgd_",
    "is_functorch_wrapped",
    "is_onednn_enabled",
    "is_vmapped",
    "outside_functorch",
    "set_onednn_enabled",
    "tree_flatten",
    "tree_map",
    "unset_fake_temporarily",
    "unwrapped",
]

# --- lists of tensors -----------------------------------------------------------------------------
#
# A model has hundreds of small weights. On a GPU, launching a kernel for each costs more than the
# arithmetic. These functions change a whole list with a few launches. torch has no public functions
# of lists. A trailing underscore means in-place.

foreach_add = torch._foreach_add  # a + alpha * b, for lists or for a list and a number
foreach_add_ = torch._foreach_add_  # The same, written into a
foreach_mul = torch._foreach_mul  # a * b, where b is a list, a number or a tensor of one number
foreach_div = torch._foreach_div  # a / b
foreach_div_ = torch._foreach_div_  # The same, written into a
foreach_lerp = torch._foreach_lerp  # a + weight * (b - a)
foreach_sqrt = torch._foreach_sqrt  # Square roots
foreach_addcmul_ = torch._foreach_addcmul_  # a + value * b * c, written into a
foreach_addcdiv = torch._foreach_addcdiv  # a + value * b / c
foreach_norm = torch._foreach_norm  # Euclidean norm of every tensor
foreach_copy_ = torch._foreach_copy_  # Copies b into a
foreach_zero_ = torch._foreach_zero_  # Fills with zeros

# --- fused optimizers -----------------------------------------------------------------------------
#
# One launch takes the optimizer step of all weights. The learning rate and the number of steps are
# tensors, so that a captured CUDA graph reads new values at every replay. The public
# `torch.optim.SGD(fused=True)` owns its parameters and state, whereas here both belong to a client.

fused_sgd_ = torch._fused_sgd_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_

# --- transforms of functorch ----------------------------------------------------------------------


def outside_functorch() -> AbstractContextManager[None]:
    """Return a context for creating tensors that outlive a functorch transform.

    A tensor that is created inside of `torch.func.grad` or `torch.func.vmap` belongs to the
    transform and is useless after it. Cached tensors would be such. torch has no public way to
    leave a transform.
    """
    return torch._C._DisableFuncTorch()


def is_functorch_wrapped(value: Tensor) -> bool:
    """Return True if a tensor belongs to a running functorch transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def is_vmapped(value: Tensor) -> bool:
    """Return True if the innermost transform of a tensor is `torch.func.vmap`.

    No public attribute tells it: `value.shape` hides the dimension of vmap.
    """
    return bool(torch._C._functorch.is_batchedtensor(value))


def unwrapped(value: Tensor) -> Tensor:
    """Return the tensor inside of the innermost transform of a wrapped tensor.

    Only the tensor inside of all transforms counts in-place changes, in `Tensor._version`.
    """
    return torch._C._functorch.get_unwrapped(value)


# --- fake tensors and ATen operations -------------------------------------------------------------
#
# A model is traced on fake tensors, which have shapes and types but no values. `torch.export` uses
# them too, but it flattens the model and loses the layers that a trace needs.
#
# - `FakeTensor`, `FakeTensorMode`: such tensors, and the context in which operations return them.
# - `unset_fake_temporarily`: context for computing with real tensors during a trace.
# - `DataDependentOutputException`, `DynamicOutputShapeException`: errors of a forward pass that
#   needs values. Their public base class is RuntimeError, which any layer may raise.
# - `OpOverload`, `OpOverloadPacket`: types of `torch.ops.aten.add.Tensor` and `torch.ops.aten.add`.
# - `core_aten_decompositions`: operations in terms of fewer ones, so that fewer rules are needed.
#   The public `torch.export.default_decompositions` is a table for exported programs, with other
#   entries.

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"  # Logs every forward pass that fails


def is_onednn_enabled() -> bool:
    """Return True if torch uses kernels of oneDNN, Intel's library for CPUs."""
    return bool(torch._C._get_mkldnn_enabled())


def set_onednn_enabled(enabled: bool) -> None:
    """Switch the kernels of oneDNN on or off.

    They hide the products whose axes are traced. The public `torch.backends.mkldnn.flags` is a
    context that also changes the precision of products.
    """
    torch._C._set_mkldnn_enabled(enabled)


# --- nested containers ----------------------------------------------------------------------------
#
# `tree_map` applies a function to all tensors in nested dictionaries, lists and named tuples, and
# `tree_flatten` lists them. `torch.func.vmap` uses the same functions. torch 2.11 has no public
# ones.
