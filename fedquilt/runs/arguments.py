"""Checks of the arguments of `fedquilt.run`, `fedquilt.prepare` and methods of `Run`."""

from __future__ import annotations

from fedquilt.checks import whole
from fedquilt.errors import ConfigError
from fedquilt.terms import Budget


def budget_of(who: str, budget: Budget | None, share: float | None) -> Budget:
    """Return the budget that was asked for directly or by its share. Default: the whole model."""
    if budget is None:
        return Budget(share=1.0 if share is None else share)
    check_argument(who, budget, Budget, "fq.Budget(share=0.25)")
    if share is not None:
        raise ConfigError(
            f"{who} was given share={share} and a budget ({budget}); one of them says how large it "
            "is."
        )
    return budget


def whole_number(what: str, given: int) -> int:
    """Return a number of rounds or a seed as a Python int, which files and torch need."""
    if not whole(given) or given >= 1 << 63:
        raise ConfigError(
            f"{what} = {given!r} was asked for; whole numbers from 0 on fit, below 2**63."
        )
    return int(given)


def check_argument(who: str, given: object, kind: type, fits: str) -> None:
    """Refuse an argument of the wrong type, such as a class, and name an example that fits."""
    if not isinstance(given, kind):
        description = (
            f"the class {given.__name__}"
            if isinstance(given, type)
            else f"{type(given).__name__} {str(given)[:40]!r}"
        )
        raise ConfigError(
            f"{who} was given {description} where a {kind.__name__} belongs, such as {fits}."
        )
