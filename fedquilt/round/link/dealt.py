"""Numbers that all clients have in common, or that are dealt to them in turn."""

from __future__ import annotations

from fedquilt.errors import ConfigError

Dealt = (
    float | tuple[float, ...]
)  # one for all, or one a client, by client id; a shorter list begins again


def dealt(value: Dealt, client: int) -> float:
    """A client's own number."""
    return value[client % len(value)] if isinstance(value, tuple) else value


def shown(value: Dealt) -> str:
    """The number, or all that are dealt."""
    return ", ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else f"{value:g}"


def take_lists(owner: object, *names: str) -> None:
    """Of a frozen owner, let lists be tuples: they read alike, and only tuples can be looked up by."""
    for name in names:
        if isinstance(value := getattr(owner, name), list):
            object.__setattr__(owner, name, tuple(value))


def empty(owner: object, *names: str) -> dict[str, str]:
    """What is wrong with fields that are lists of nothing."""
    return {
        name: "an empty list was asked for; one number for all, or a list of one a client, would fit."
        for name in names
        if getattr(owner, name) == ()
    }


def check_dealt(owner: object, num_clients: int, *names: str) -> None:
    """Refuse lists that do not come out even: whose number the last client has would be an accident."""
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, tuple) and num_clients % len(value):
            raise ConfigError(
                f"{type(owner).__name__}: {name} has {len(value)} values for {num_clients} clients; one for all, one a "
                f"client, or as many as divide {num_clients} would fit."
            )
