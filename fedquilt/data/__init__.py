"""Federated data sets and partitions."""

from fedquilt.data.federated import FederatedData
from fedquilt.data.partition import iid, shards
from fedquilt.data.sources import digits

DATA = {"digits": digits}

__all__ = ["DATA", "FederatedData", "digits", "iid", "shards"]
