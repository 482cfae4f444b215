"""Federated data: data sources, partitions, and the samples that each client holds."""

from fedquilt.data.federated import FederatedData
from fedquilt.data.partitions import (
    PARTITIONS,
    Dirichlet,
    Domains,
    Flwr,
    Iid,
    Labels,
    Natural,
    Partition,
    Quantity,
)
from fedquilt.data.parts import Parts
from fedquilt.data.pool import Pool
from fedquilt.data.scale import Scale
from fedquilt.data.sources import DATA, diabetes, digits, digits_labels, npz, source
from fedquilt.data.sources.generated import generated
from fedquilt.data.sources.hub import hub
from fedquilt.data.sources.images import images
from fedquilt.data.sources.masks import masks
from fedquilt.data.sources.text import text

__all__ = [
    "DATA",
    "PARTITIONS",
    "Dirichlet",
    "Domains",
    "FederatedData",
    "Flwr",
    "Iid",
    "Labels",
    "Natural",
    "Partition",
    "Parts",
    "Pool",
    "Quantity",
    "Scale",
    "diabetes",
    "digits",
    "digits_labels",
    "generated",
    "hub",
    "images",
    "masks",
    "npz",
    "source",
    "text",
]
