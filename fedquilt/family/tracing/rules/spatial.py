"""Rules of operations on the last dimensions: pooling, upsampling and sampling."""

from __future__ import annotations

from fedquilt.family.tracing.atoms import Facts, plain
from fedquilt.family.tracing.rules.operands import pin_all
from fedquilt.family.tracing.rules.registry import Dims, Rule, aten, rule
from fedquilt.family.tracing.run import AtenCall


def _spatial(count: int) -> Rule:
    """Return the rule of operations that change the last `count` dimensions, such as pooling.

    The rule pins these dimensions and keeps all others.
    """

    def pooled(call: AtenCall, facts: Facts) -> list[Dims]:
        x = call.inputs[0]
        pin_all(x.dims[-count:])
        return [(*x.dims[:-count], *(plain(n) for n in out.shape[-count:])) for out in call.outs]

    return pooled


for _count, _names in {
    1: "avg_pool1d max_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_linear1d max_pool1d_with_indices",
    2: "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_avg_pool2d "
    "adaptive_max_pool2d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_bicubic2d _upsample_bicubic2d_aa grid_sampler_2d fractional_max_pool2d max_unpool2d",
    3: "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_avg_pool3d "
    "adaptive_max_pool3d grid_sampler_3d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_trilinear3d",
}.items():
    rule(*(getattr(aten, _name) for _name in _names.split() if hasattr(aten, _name)))(
        _spatial(_count)
    )
