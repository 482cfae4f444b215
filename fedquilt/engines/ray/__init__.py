"""The engine on the workers of a Ray cluster."""
