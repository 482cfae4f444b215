"""The settings in which Split-Mix's paper compares methods (Hong et al. 2022, appendix A.2)."""

from __future__ import annotations

from dataclasses import replace

from fedquilt.round.method import Presets
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Cosine, Steps

SPLITMIX_SGD = SGD(lr=0.01, momentum=0.9, weight_decay=5e-4)

# In all compared methods norms use batch statistics. The loss is masked if clients lack some
# classes (A.2).
DIGITS = LocalTraining(optimizer=replace(SPLITMIX_SGD, lr=0.1), schedule=Cosine(400))
CIFAR10 = LocalTraining(
    optimizer=SPLITMIX_SGD,
    schedule=Steps((150, 250), 0.1),
    epochs=5,
    batch_size=128,
    masked="client",
)
DOMAINNET = LocalTraining(optimizer=SPLITMIX_SGD)


def compared_presets(scaler: bool) -> Presets:
    """Return the presets that Split-Mix and the methods it is compared with have in common.

    They are `digits`, `cifar10` and `domainnet`, each with its local training.

    Args:
        scaler: Divide layer outputs by the share in training. True for Split-Mix ("rescale layer"
            in Table 4) and for HeteroFL, by definition. False for FedAvg, whose nets have one
            width, and for SHeteroFL, where the released code rescales but the paper mentions no
            rescaling.
    """
    settings = {"digits": DIGITS, "cifar10": CIFAR10, "domainnet": DOMAINNET}
    return {name: {"local": replace(local, scaler=scaler)} for name, local in settings.items()}
