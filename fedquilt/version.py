"""The version, where the build finds it without importing torch."""

__version__ = "0.1.0"
