"""Split-Mix: one local epoch of ten clients with 1 to 8 base nets each, against one net after
another, in one run.

    python bench/splitmix.py [--device cuda] [--precision tf32,bf16] [--batch-size 10,128]

PreResNet-18, base nets of share 1/8, forty of them in all. The baseline is eager: a module and a
fused SGD for each net built once, data on the device, the same precision; a client's nets see the
same batch. Medians, warm.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from measure import batch_norms, cohort, median, versus

import fedquilt as fq
from fedquilt.engines.vectorized.engine import Vectorized
from fedquilt.hardware.precision import Precision
from fedquilt.methods import SplitMix
from fedquilt.round.federation import World
from fedquilt.runs.prepare import placed
from fedquilt.terms import Client, Job

SHARES = tuple(count / 8 for count in (8, 8, 8, 4, 4, 2, 2, 2, 1, 1))
IMAGES = 500


def compare(
    family: fq.Family, batch_size: int, precision: Precision, device: str, times: int
) -> None:
    local = fq.LocalTraining(
        optimizer=fq.optimizers.SGD(lr=0.01, momentum=0.9, weight_decay=5e-4),
        batch_size=batch_size,
        last_batch="drop",
    )
    method, data = SplitMix(local=local), cohort(len(SHARES), IMAGES)
    world = World(family, precision=precision)
    engine = Vectorized(data, torch.device(device), precision)
    federation, server = (
        fq.methods.api.Federation(world, method),
        placed(method.init(world), engine.device),
    )
    clients = [Client(id, fq.Budget(share=share), IMAGES, id) for id, share in enumerate(SHARES)]
    jobs = [Job(client, net, 0) for client in clients for net in method.plan(server, client, world)]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    nets = [batch_norms(family.module(job.submodel.arch)).to(device).train() for job in jobs]
    settings = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
    optimizers = [torch.optim.SGD(net.parameters(), fused=True, **settings) for net in nets]
    here = engine.data

    def one_by_one() -> None:
        for job, net, optimizer in zip(jobs, nets, optimizers, strict=True):
            first = job.client.id * IMAGES
            for start in range(first, first + IMAGES // batch_size * batch_size, batch_size):
                rows = torch.arange(start, start + batch_size, device=device)
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                    loss = F.cross_entropy(net(here.samples(rows)), here.targets[rows])
                loss.backward()
                optimizer.step()

    base = median(one_by_one, times, 1)
    began = time.perf_counter()
    engine.train(federation, server, jobs, method.fold(server, world))
    print(f"    first epoch {time.perf_counter() - began:.1f} s", flush=True)
    ours = median(
        lambda: engine.train(federation, server, jobs, method.fold(server, world)), times, 1
    )
    print(
        f"{len(jobs)} nets of {len(SHARES)} clients, batches of {batch_size}, {precision}: one "
        "after another "
        f"{base:.0f} ms an epoch, ours {ours:.0f} ms: {base / ours:.1f} times",
        flush=True,
    )


def main() -> None:
    asked, precisions = versus(batch_size="10,128")
    family = fq.trace(fq.models.MODELS["preresnet18"].factory, torch.zeros(2, 3, 32, 32))
    for precision in precisions:
        for batch_size in asked.batch_size.split(","):
            compare(family, int(batch_size), precision, asked.device, asked.times)


if __name__ == "__main__":
    main()
