"""What is known of each implementation, right or wrong, and how it comes into the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

NO_TAGS: Mapping[str, Any] = MappingProxyType({})


class Mutant(NamedTuple):
    """An implementation under test; `capabilities` are the optional keywords `fn` understands.

    `effect` is what a user sees, `seen` where the mistake has been met, `tags` what is claimed.
    """

    name: str
    estimator: str
    fn: Callable[..., Any]
    capabilities: tuple[str, ...]
    effect: str
    seen: str = ""
    tags: Mapping[str, Any] = NO_TAGS


class Catalogue:
    """The definition of an estimator, its correct variants and its defects.

    An entry stands on the class or function that it is about: ``@CATALOGUE.defect(name, effect)``
    calls a class without arguments to make the implementation.
    """

    def __init__(
        self,
        estimator: str,
        definition: Any,
        capabilities: tuple[str, ...],
        tags: Mapping[str, Any] = NO_TAGS,
        *,
        name: str | None = None,
    ) -> None:
        self.estimator, self.definition = estimator, definition
        self.capabilities, self.tags = capabilities, tags
        self.variants: list[Mutant] = []
        self.mutants: list[Mutant] = []
        self.variant(name or estimator, "The definition.")(definition)

    def variant(
        self, name: str, effect: str, *, tags: Mapping[str, Any] = NO_TAGS
    ) -> Callable[[T], T]:
        """Enter a correct implementation."""
        return self._enter(self.variants, name, effect, tags=tags)

    def defect(
        self,
        name: str,
        effect: str,
        seen: str = "",
        *,
        only: tuple[str, ...] | None = None,
        lacks: tuple[str, ...] = (),
        tags: Mapping[str, Any] = NO_TAGS,
    ) -> Callable[[T], T]:
        """Enter a wrong one, with all capabilities of the estimator or as said."""
        capabilities = self.capabilities if only is None else only
        kept = tuple(c for c in capabilities if c not in lacks)
        return self._enter(self.mutants, name, effect, seen, kept, tags)

    def _enter(
        self,
        entries: list[Mutant],
        name: str,
        effect: str,
        seen: str = "",
        capabilities: tuple[str, ...] | None = None,
        tags: Mapping[str, Any] = NO_TAGS,
    ) -> Callable[[T], T]:
        has = self.capabilities if capabilities is None else capabilities

        def enter(made: T) -> T:
            fn: Any = made() if isinstance(made, type) else made
            said = {**self.tags, **tags}
            entries.append(Mutant(name, self.estimator, fn, has, effect, seen, said))
            return made

        return enter
