"""The references by name: what the ids in the claims stand for.

A claim names its source by id and place, such as "000, Proposition 1", and several with semicolons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["SOURCES", "Place", "Source", "named", "places"]


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


def _arxiv(*ids: str) -> dict[str, str]:
    return {f"arXiv:{i}": f"https://arxiv.org/abs/{i}" for i in ids}


SOURCES: Mapping[str, Source] = {
    "000": Source(
        "Random features post",
        "Approximating self-attention with random features, blog post, on K. Choromanski et al., "
        "Rethinking attention with Performers, ICLR 2021.",
        _arxiv("2009.14794"),
    ),
    "001": Source(
        "Performers post",
        "Performers: the kernel trick, random Fourier features, and attention, blog post with the "
        "code teddykoker/performer, on K. Choromanski et al., Rethinking attention with "
        "Performers, ICLR 2021.",
        {"code": "https://github.com/teddykoker/performer", **_arxiv("2009.14794")},
    ),
    "002": Source(
        "Ye 2023",
        "X. Ye, Adapting linear attention to query/key distributions, research project report, "
        "2023.",
        {"code": "https://github.com/xcy515/high-dim-ml-f23"},
    ),
    "003": Source(
        "Zheng 2022",
        "L. Zheng, Randomized attention: a generalized random feature attention algorithm, blog "
        "post, 2022, on L. Zheng, C. Wang and L. Kong, Linear complexity randomized self-attention "
        "mechanism, ICML 2022.",
        _arxiv("2204.04667"),
    ),
    "004": Source(
        "Linear attention post",
        "Understanding linear attention in Transformers are RNNs, blog post, on A. Katharopoulos "
        "et al., Transformers are RNNs: fast autoregressive Transformers with linear attention, "
        "ICML 2020.",
        _arxiv("2006.16236"),
    ),
    "arXiv:2102.03902": Source(
        "Nyströmformer",
        "Y. Xiong et al., Nyströmformer: a Nyström-based algorithm for approximating "
        "self-attention, AAAI 2021.",
        _arxiv("2102.03902"),
    ),
    "arXiv:2302.04542": Source(
        "EVA",
        "L. Zheng et al., Efficient attention via control variates, ICLR 2023.",
        _arxiv("2302.04542"),
    ),
    "arXiv:2602.10056": Source(
        "Key coresets", "A few keys that stand for all.", _arxiv("2602.10056")
    ),
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
