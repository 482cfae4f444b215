"""What coding and decoding a change of a million weights takes, by codec: CPU seconds of one
thread.

python bench/codec.py
"""

from __future__ import annotations

import time

import torch
from measure import machine

import fedquilt as fq
from fedquilt.round.link import ChangeSpec

COUNT, TENSORS = 1_000_000, 10
CODECS = {
    name: fq.Link.preset(name).codec for name in ("lq8", "lq4", "lq2", "sp25", "sp10", "lq8+sp25")
}
CODECS |= {
    "lq8, rotated": fq.links.Codec(8, rotate=True),
    "lq8+sp25, rotated": fq.links.Codec(8, 0.25, rotate=True),
}


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    change = 0.01 * torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    shapes = {f"weight {place}": torch.Size([COUNT // TENSORS]) for place in range(TENSORS)}
    spec = ChangeSpec(shapes, change.dtype, change.device)
    for name, codec in CODECS.items():
        assert codec is not None
        taken, sent = [], 0
        for turn in range(4):
            began = time.process_time()
            message = codec.encode(change, spec, (turn, turn + 1))
            codec.decode(message, spec)
            taken.append(time.process_time() - began)
            sent = message.nbytes
        print(f"{name}: {min(taken[1:]):.3f} s, {sent:,} bytes of {change.nbytes:,}")


if __name__ == "__main__":
    main()
