"""Private names of torch are used in one module, and do there what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.func import grad, vmap

import fedquilt
from fedquilt.hardware import torch_internals
from fedquilt.hardware.torch_internals import (
    in_place_version,
    is_functorch_wrapped,
    is_onednn_enabled,
    is_vmapped,
    outside_functorch,
    overload_name,
    qualified_name,
    schema_of,
    set_onednn_enabled,
    storage_id,
    unwrapped,
)

PACKAGE = Path(fedquilt.__file__).parent
# `torch._C`, `from torch._ops import …`, `from torch.utils._pytree import …` and
# `from torch.nn.modules.conv import _ConvNd`, but not `torch.__version__`, and not operations such
# as `torch.ops.aten._unsafe_view`. The last group has private attributes of tensors and operations.
# The dictionaries `_modules`, `_parameters` and `_buffers` that every module has are not in it.
PRIVATE = re.compile(
    r"\btorch\._[a-zA-Z]"
    r"|\bfrom torch\S*\._[a-zA-Z]"
    r"|\bfrom torch\S* import .*\b_[a-zA-Z]"
    r"|\._(cdata|schema|version|qualified_op_name|overloadname)\b"
)


def test_no_other_module_uses_private_names_of_torch():
    uses = [
        f"{file.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file != Path(torch_internals.__file__)
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert uses == []


@pytest.mark.parametrize(
    ("line", "is_private"),
    [
        ("torch._foreach_add(a, b)", True),
        ("from torch._ops import OpOverload", True),
        ("from torch import Tensor, _foreach_add", True),
        ("from torch.utils._pytree import tree_map", True),
        ("from torch.utils import _pytree as pytree", True),
        ("from torch.nn.modules.conv import _ConvNd", True),
        ("tensor.untyped_storage()._cdata", True),
        ("torch.__version__", False),
        ("torch.ops.aten._unsafe_view", False),
        ("from torch import Tensor", False),
    ],
)
def test_private_names_of_torch_are_recognized(line, is_private):
    assert bool(PRIVATE.search(line)) == is_private


def test_every_name_of_the_list_exists():
    assert [name for name in torch_internals.__all__ if not hasattr(torch_internals, name)] == []


def test_tensors_inside_of_vmap_are_recognized_and_unwrapped():
    seen = []

    def look(value: torch.Tensor) -> torch.Tensor:
        inside = unwrapped(value)
        seen.append((is_functorch_wrapped(value), is_vmapped(value), tuple(inside.shape)))
        return value

    vmap(look)(torch.zeros(3, 2))
    assert seen == [(True, True, (3, 2))]
    assert not is_functorch_wrapped(torch.zeros(3, 2))


def test_views_share_the_id_of_their_storage_and_its_version():
    base = torch.zeros(4)
    view = base[1:]
    assert storage_id(view.untyped_storage()) == storage_id(base.untyped_storage())
    assert storage_id(view.untyped_storage()) != storage_id(torch.zeros(4).untyped_storage())
    view.add_(1)
    assert (in_place_version(base), in_place_version(view)) == (1, 1)


def test_operations_are_described():
    op = torch.ops.aten.add_.Tensor
    assert (qualified_name(op.overloadpacket), overload_name(op)) == ("aten::add_", "Tensor")
    assert schema_of(op).is_mutable
    assert not schema_of(torch.ops.aten.add.Tensor).is_mutable


def test_tensors_made_outside_of_functorch_outlive_a_transform():
    cached = {}

    def loss(value: torch.Tensor) -> torch.Tensor:
        with outside_functorch():
            cached["outside"] = torch.ones(2)
        return (value * cached["outside"]).sum()

    grad(loss)(torch.zeros(2))
    assert not is_functorch_wrapped(cached["outside"])
    assert torch.equal(cached["outside"] + 1, torch.full((2,), 2.0))


def test_onednn_can_be_switched_off_and_on():
    before = is_onednn_enabled()
    try:
        set_onednn_enabled(False)
        assert not is_onednn_enabled()
    finally:
        set_onednn_enabled(before)
    assert is_onednn_enabled() == before
