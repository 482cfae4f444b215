"""Checks of a method: budgets, engines, links, resume, determinism and export."""
