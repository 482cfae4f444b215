"""Settings that are one number for all clients, or a list that is assigned to clients in turn."""

from __future__ import annotations

from fedquilt.errors import ConfigError

# One number for all clients, or numbers by client id. A shorter list is repeated.
PerClient = float | tuple[float, ...]


def value_of(value: PerClient, client: int) -> float:
    """Return the number that a client has.

    Args:
        value: One number for all clients, or a tuple that is repeated over client numbers.
        client: Number of the client, from 0.
    """
    return value[client % len(value)] if isinstance(value, tuple) else value


def as_text(value: PerClient) -> str:
    """Return the number, or all numbers of a tuple with commas between them, as text."""
    return (
        ", ".join(f"{number:g}" for number in value) if isinstance(value, tuple) else f"{value:g}"
    )


def convert_lists(owner: object, *names: str) -> None:
    """Convert list-valued fields of a frozen dataclass to tuples, which are hashable, in-place.

    Args:
        owner: The dataclass.
        *names: Names of its fields. Values that are no lists stay as they are.
    """
    for name in names:
        if isinstance(value := getattr(owner, name), list):
            object.__setattr__(owner, name, tuple(value))


def empty_lists(owner: object, *names: str) -> dict[str, str]:
    """Return an error message for each field that is an empty tuple, by the field's name.

    Args:
        owner: Object that has the fields, after `convert_lists`.
        *names: Names of the fields to check.
    """
    return {
        name: "an empty list was asked for; "
        "one number for all clients, or a list with one per client, would fit."
        for name in names
        if getattr(owner, name) == ()
    }


def check_lengths(owner: object, num_clients: int, *names: str) -> None:
    """Raise a ConfigError if the length of a list does not divide the number of clients.

    Otherwise some numbers would be used by one client more than others, by accident.

    Args:
        owner: Object that has the fields.
        num_clients: Number of clients of the fleet.
        names: Names of the fields to check. Single numbers are accepted.
    """
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, tuple) and num_clients % len(value):
            raise ConfigError(
                f"{type(owner).__name__}: {name} has {len(value)} values for {num_clients} "
                f"clients; one for all, one a client, or as many as divide {num_clients} would fit."
            )
