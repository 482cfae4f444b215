"""All private functions and classes of torch that fedquilt uses, with the reason for each.

Private names may change with any release of torch. They are gathered here, so that an update has
one file to check. `tests/unit/hardware/test_torch_internals.py` refuses them in other modules.

- Lists of tensors: one kernel launch for many tensors. torch's own optimizers use these functions.
- Fused optimizers: one kernel launch for a whole optimizer step.
- Base classes of layers: all convolutions, dropouts or norms, whatever their number of dimensions.
- Transforms of functorch: whether a tensor is inside `torch.func.vmap` or `torch.func.grad`.
- Fake tensors and ATen operations: shapes without values, for tracing a model.
- Storages and versions: which tensors share memory, and which were written in-place.
- Nested containers: tensors in dictionaries and lists as one flat list.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._C import FunctionSchema
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

__all__ = [
    "FAKE_TENSOR_LOGGER",
    "BatchNormBase",
    "ConvNd",
    "ConvTransposeNd",
    "DataDependentOutputException",
    "DropoutNd",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "InstanceNormBase",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
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
    "in_place_version",
    "is_functorch_wrapped",
    "is_onednn_enabled",
    "is_vmapped",
    "outside_functorch",
    "overload_name",
    "qualified_name",
    "schema_of",
    "set_onednn_enabled",
    "storage_id",
    "tree_flatten",
    "tree_leaves",
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

# --- base classes of layers -----------------------------------------------------------------------
#
# torch has public classes for each number of dimensions (`nn.Conv1d`, `nn.Conv2d`, …), and private
# ones that these inherit from. A list of all public ones would miss a layer that a user derives
# from a private one, as torch's own lazy and synchronized layers do.

ConvNd = _ConvNd  # Convolutions, transposed ones included
ConvTransposeNd = _ConvTransposeNd  # Transposed convolutions
DropoutNd = _DropoutNd
NormBase = _NormBase  # Batch norms and instance norms: norms that may track statistics
BatchNormBase = _BatchNorm  # Batch norms, synchronized ones included
InstanceNormBase = _InstanceNorm

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

    Only the tensor inside of all transforms counts in-place changes: see `in_place_version`.
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
# - `TorchDispatchMode`: context that receives every ATen operation, to record or count it.

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"  # Logs every forward pass that fails


def schema_of(op: OpOverload) -> FunctionSchema:
    """Return the declared arguments and results of an ATen operation.

    The schema also says which arguments the operation writes and which results are views.
    """
    return op._schema


def qualified_name(packet: OpOverloadPacket) -> str:
    """Return the name of an ATen operation without its overload, such as "aten::add"."""
    return str(packet._qualified_op_name)


def overload_name(op: OpOverload) -> str:
    """Return the name of an operation's overload, such as "Tensor" of `aten.add.Tensor`."""
    return str(op._overloadname)


def is_onednn_enabled() -> bool:
    """Return True if torch uses kernels of oneDNN, Intel's library for CPUs."""
    return bool(torch._C._get_mkldnn_enabled())


def set_onednn_enabled(enabled: bool) -> None:
    """Switch the kernels of oneDNN on or off.

    They hide the products whose axes are traced. The public `torch.backends.mkldnn.flags` is a
    context that also changes the precision of products.
    """
    torch._C._set_mkldnn_enabled(enabled)


# --- storages and versions ------------------------------------------------------------------------


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all tensors of one storage, while it is alive.

    The public `data_ptr` is no such number: fake tensors have none, and it is 0 if empty.
    """
    return int(storage._cdata)


def in_place_version(value: Tensor) -> int:
    """Return how often a tensor, or a view of it, was written in-place.

    Autograd counts these writes. Inference tensors have no count, so that this raises RuntimeError.
    """
    return int(value._version)


# --- nested containers ----------------------------------------------------------------------------
#
# `tree_map` applies a function to all tensors in nested dictionaries, lists and named tuples, and
# `tree_flatten` and `tree_leaves` list them. `torch.func.vmap` uses the same functions. torch 2.11
# has no public ones.
