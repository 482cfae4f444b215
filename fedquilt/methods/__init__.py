"""Federated methods, one file per paper.

`METHODS` lists them by name. `api` has everything that an author of a method imports. Some files
have parts of methods:

- `nested`: widths that are drawn for every batch, for FedResCuE and FjORD.
- `partial`: settings in which FedRolex, HeteroFL and Federated Dropout are compared.
- `prototypes`: nets of several sizes in one state, for FedDF, DS-FL and Fed-ET.
- `initial`: initial weights of nets that are cut from larger ones.
- `alignment`, `progfed_stages`: theorem 1 and the stages of ProgFed.
- `rafl_nets`: the nets of RaFL's union.
- `splitmix_settings`: settings in which Split-Mix is compared with other methods.
"""

from fedquilt.methods import api
from fedquilt.methods.dsfl import DSFL
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.fedbn import FedBN
from fedquilt.methods.feddf import FedDF
from fedquilt.methods.feddropout import FedDropout
from fedquilt.methods.fedet import FedET
from fedquilt.methods.fednova import FedNova
from fedquilt.methods.fedopt import FedAdam, FedAvgM, FedYogi
from fedquilt.methods.fedprox import FedProx
from fedquilt.methods.fedrescue import FedResCuE, FedRush, FedSeq, FedSlim
from fedquilt.methods.fedrolex import FedRolex
from fedquilt.methods.fjord import FjORD
from fedquilt.methods.heterofl import HeteroFL
from fedquilt.methods.local_only import LocalOnly
from fedquilt.methods.progfed import ProgFed
from fedquilt.methods.rafl import RaFL
from fedquilt.methods.scaffold import Scaffold
from fedquilt.methods.sheterofl import SHeteroFL
from fedquilt.methods.splitmix import SplitMix
from fedquilt.round.method import Method

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedprox": FedProx,
    "fednova": FedNova,
    "scaffold": Scaffold,
    "fedbn": FedBN,
    "local": LocalOnly,
    "heterofl": HeteroFL,
    "sheterofl": SHeteroFL,
    "feddropout": FedDropout,
    "fedrolex": FedRolex,
    "fedrescue": FedResCuE,
    "fedseq": FedSeq,
    "fedrush": FedRush,
    "fedslim": FedSlim,
    "fjord": FjORD,
    "splitmix": SplitMix,
    "progfed": ProgFed,
    "feddf": FedDF,
    "dsfl": DSFL,
    "fedet": FedET,
    "rafl": RaFL,
}

__all__ = [
    "DSFL",
    "METHODS",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedDF",
    "FedDropout",
    "FedET",
    "FedNova",
    "FedProx",
    "FedResCuE",
    "FedRolex",
    "FedRush",
    "FedSeq",
    "FedSlim",
    "FedYogi",
    "FjORD",
    "HeteroFL",
    "LocalOnly",
    "Method",
    "ProgFed",
    "RaFL",
    "SHeteroFL",
    "Scaffold",
    "SplitMix",
    "api",
]
