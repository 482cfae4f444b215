"""`Choice`: a factory by its name, such as a model or a data set, with its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fedquilt.config.schema import parameters
from fedquilt.config.wording import with_article
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.names import said

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(ABC):
    """A factory by its name, with the options that it will be called with.

    A subclass defines where names are looked up. Its further fields are settings beside the
    options. In a file, options and settings are keys of the same table.
    """

    name: str  # Name of the factory, or file.py:function
    # Arguments that the settings have for the factory. Missing ones are filled in by `make`
    options: Mapping[str, Any] = field(default_factory=dict)

    noun: ClassVar[str] = "factory"  # Word for a factory in messages
    # Options that the caller of `make` fills in if the settings leave them out.
    offers: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def find(cls, name: str) -> Callable[..., Any]:
        """Return the factory that has a name, or raise a ConfigError if there is none."""

    def make(self, kind: type[T], offers: Mapping[str, Any] | None = None) -> T:
        """Call the factory with its options, and return what it makes.

        Args:
            kind: Class that the result must be an instance of.
            offers: Values for options that the settings leave out. Those that the factory does not
                take are ignored. None: no such values.

        Raises:
            ConfigError: The factory failed, or returned something else.
        """
        factory = self.find(self.name)
        try:
            takes = parameters(factory)
            open_options = {key: value for key, value in (offers or {}).items() if key in takes}
            product = factory(**{**open_options, **self.options})
        except FedquiltError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.name} was called and failed: {said(error)}") from error
        if not isinstance(product, kind):
            raise ConfigError(
                f"{self.name} was called for a {kind.__name__}; it returned "
                f"{with_article(type(product).__name__)}."
            )
        return product
