"""The app that `fedquilt serve` submits. Both sides need fedquilt installed."""

from fedquilt.deployment.app import client, server

__all__ = ["client", "server"]
