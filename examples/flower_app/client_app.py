"""A node: it trains with the samples of its partition, or with those that its owner names."""

from fedquilt.deployment.flower import client_app

app = client_app()
