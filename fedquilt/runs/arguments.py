"""Checks of the arguments of `fedquilt.run`, `fedquilt.prepare` and methods of `Run`."""

from __future__ import annotations

from fedquilt.checks import whole
from fedquilt.errors import ConfigError
from fedquilt.terms import Budget


def budget_of(caller: str, budget: Budget | None, share: float | None) -> Budget:
    """Return the budget that was asked for, directly or by its share.

    Args:
        caller: Name of the function that was called, for messages.
        budget: Budget that was asked for. None: `share` decides.
        share: Share of the model in (0, 1]. None: the whole model, unless `budget` is set.

    Raises:
        ConfigError: Both were asked for.
    """
    if budget is None:
        return Budget(share=1.0 if share is None else share)
    check_argument(caller, budget, Budget, "fq.Budget(share=0.25)")
    if share is not None:
        raise ConfigError(
            f"{caller} was given share={share} and a budget ({budget}); one of them "
            "decides the size."
        )
    return budget


def whole_number(name: str, value: int) -> int:
    """Return a number of rounds or a seed as a Python int, which files and torch need.

    Args:
        name: Name of the argument, for the message.
        value: Whole number from 0 to 2**63 - 1, also of NumPy. Booleans are not accepted.

    Raises:
        ConfigError: It is another value.
    """
    if not whole(value) or value >= 1 << 63:
        raise ConfigError(
            f"{name} = {value!r} was asked for; whole numbers from 0 on fit, below 2**63."
        )
    return int(value)


def check_argument(caller: str, value: object, kind: type, example: str) -> None:
    """Refuse an argument of the wrong type, such as a class in place of an instance.

    Args:
        caller: Name of the function that was called, for messages.
        value: The argument.
        kind: Class that it must be an instance of.
        example: Code that makes such an instance, for messages.
    """
    if not isinstance(value, kind):
        description = f"{type(value).__name__} {str(value)[:40]!r}"
        if isinstance(value, type):
            description = f"the class {value.__name__}"
        raise ConfigError(
            f"{caller} was given {description} where a {kind.__name__} belongs, such as {example}."
        )
