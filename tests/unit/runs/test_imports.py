"""Importing and training need few packages."""

from __future__ import annotations

import json
import subprocess
import sys

_IMPORTED = """
import json, sys
import torch, numpy, safetensors, safetensors.torch
before = set(sys.modules)
import fedquilt
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(new - set(sys.stdlib_module_names) - {"fedquilt"})))
"""


def test_importing_needs_torch_numpy_and_safetensors_alone():
    found = subprocess.run(
        [sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True
    )
    assert set(json.loads(found.stdout)) <= {"torch", "numpy", "safetensors"}


_EMPTY_HANDED = """
import sys
import warnings
optional = "sklearn scipy tyro rich hypothesis flwr ray onnx torch_pruning pandas"
for name in optional.split():
    sys.modules[name] = None  # importing it fails
import torch, fedquilt as fq
from torch import nn
def net():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
family = fq.trace(net, torch.zeros(2, 4))
x, y = torch.randn(12, 4), torch.arange(12) % 3
data = fq.FederatedData.of((x, y), (x, y), [range(6), range(6, 12)])
run = fq.run(fq.methods.FedRolex(), family, data, fq.Fleet.of((1.0, 0.5), 2, 2), rounds=1)
print(run.deploy(fq.Budget(share=0.5))[0].out_features)
"""


def test_training_needs_no_further_packages():
    found = subprocess.run(
        [sys.executable, "-c", _EMPTY_HANDED], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "3"
