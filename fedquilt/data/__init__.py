"""Federated data: where samples come from, how they are dealt to clients, and who holds what."""

from fedquilt.data.federated import FederatedData, Pool, Scale
from fedquilt.data.generated import generated
from fedquilt.data.huggingface import hub
from fedquilt.data.masks import masks
from fedquilt.data.partition import (
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
from fedquilt.data.pictures import images
from fedquilt.data.sources import DATA, diabetes, digits, digits_labels, npz, source
from fedquilt.data.words import text

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
