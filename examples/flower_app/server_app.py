"""The server: it trains the run that `pyproject.toml` describes."""

from fedquilt.deployment.flower import server_app

app = server_app()
