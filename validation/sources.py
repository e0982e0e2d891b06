"""The references by name: what the ids in the claims stand for.

A claim names its source by id and place, such as "000, Proposition 1", and several with semicolons.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from . import texts


class Source(NamedTuple):
    """A short name, who wrote what, and where it can be read: addresses by what they lead to."""

    name: str
    citation: str
    links: Mapping[str, str]


class Place(NamedTuple):
    """Part of one source, "" for all of it."""

    id: str
    source: Source
    part: str

    @property
    def name(self) -> str:
        """Name of the source and the part."""
        return ", ".join(filter(None, (self.source.name, self.part)))


SOURCES = {
    key: Source(**x) for key, x in texts.read(Path(__file__).with_name("sources.toml")).items()
}


def places(text: str) -> list[Place]:
    """The sources that a claim names; one that is not known here goes by its id."""
    found = []
    for one in filter(None, (part.strip() for part in text.split(";"))):
        key, _, part = (piece.strip() for piece in one.partition(","))
        source = SOURCES.get(key, Source(key, "", {}))
        same = part.casefold() == source.name.casefold()
        found.append(Place(key, source, "" if same else part))
    return found


def named(text: str) -> str:
    """The same with names in place of ids.

    >>> named("000, Proposition 1")
    'Random features post, Proposition 1'
    """
    return "; ".join(place.name for place in places(text))
