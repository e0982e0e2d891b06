"""Where the formula of a group comes from, and which libraries have its convention."""

from __future__ import annotations

from ...registry import ESTIMATORS
from ..conformance.conventions import CONVENTIONS, OPTIONS
from .cases import Convention
from .hard import POWERS

_REFERENCES = {
    "000": "Approximating self-attention with random features, blog post",
    "001": "Performers: the kernel trick, random Fourier features, and attention, blog post",
    "002": "X. Ye, Adapting linear attention to query/key distributions, 2023",
    "003": "L. Zheng, Randomized attention: a generalized random feature attention algorithm, 2022",
    "004": "Understanding linear attention in Transformers are RNNs, blog post",
}
_EXACT = ("003: softmax attention",)
_GRADIENTS = "the chain rule, in dual numbers"

# Of kinds that have no record, by the type of a group without what says that it has gradients.
_FORMULAS: dict[str, tuple[str, ...]] = {
    "kernel-hyperbolic": ("Choromanski et al., arXiv:2009.14794, hyperbolic features",),
    "kernel-positive": ("002: eqs. (7) and (9)",),
    "kernel-trigonometric": ("002: eqs. (7) and (8)",),
    "rfa-hyperbolic": ("002: eq. (10)", "Choromanski et al., arXiv:2009.14794"),
    "rfa-positive": ("002: eqs. (9) and (10)", "003: RFA"),
    "rfa-trigonometric": ("002: eqs. (8) and (10)", "001: attention_hat"),
    "softmax-alibi": (*_EXACT, "Press et al., arXiv:2108.12409, section 3"),
    "softmax-bias": (*_EXACT, "Raffel et al., arXiv:1910.10683, section 2.1"),
    "softmax-dropout": (*_EXACT, "Dao et al., arXiv:2205.14135, appendix B.3"),
    **{f"softmax-hard-{family}": _EXACT for family in POWERS},
    "softmax-lse": (*_EXACT, "Dao, arXiv:2307.08691, section 3.1: L = m + log l"),
    "softmax-sinks": (*_EXACT, "Xiao et al., arXiv:2309.17453", "OpenAI, arXiv:2508.10925"),
    "softmax-softcap": (*_EXACT, "Gemma 2, arXiv:2408.00118, section 2"),
    "softmax-window": (*_EXACT, "Beltagy et al., arXiv:2004.05150, section 3.1"),
    "softmax-tile-causal": _EXACT,
    "softmax-tile-window": (*_EXACT, "Beltagy et al., arXiv:2004.05150, section 3.1"),
}
_FORMULAS["softmax-combined"] = tuple(
    dict.fromkeys(
        x for name in ("window", "sinks", "softcap") for x in _FORMULAS[f"softmax-{name}"]
    )
)


def sources(kind: str, convention: Convention | None = None) -> list[str]:
    """List reference and equation of a group, or library, version and their source.

    Examples
    --------
    >>> sources("lara")[0].rpartition(": ")[2]
    'LARA'
    >>> sources("softmax-convention-lse-2", Convention("lse", "2"))[-1]
    'lse: base of the log normaliser it returns, of scaled, biased scores; here 2'
    """
    plain = kind.removesuffix("-gradients")
    record = ESTIMATORS.get(plain)
    known = _FORMULAS.get(plain, record.source if record else _EXACT if convention else ())
    texts = [_written(x) for x in known]
    if plain != kind:
        texts.append(_GRADIENTS)
    if convention is None:
        return texts
    for name in libraries(convention):
        row = CONVENTIONS[name]
        texts.append(f"{name}, {row.version}: {row.cells[convention.option].source}")
    option = OPTIONS[convention.option]
    words = [convention.value, option.values[convention.value]]
    return [*texts, f"{convention.option}: {option.meaning}; here {', '.join(filter(None, words))}"]


def libraries(convention: Convention) -> list[str]:
    """Return the functions of `CONVENTIONS` that have a convention.

    Examples
    --------
    >>> libraries(Convention("empty_rows", "mean"))
    ['hf-eager', 'jax-dpa', 'keras']
    """
    return sorted(
        name
        for name, row in CONVENTIONS.items()
        if convention.option in row.cells and row.cells[convention.option].value == convention.value
    )


def _written(source: str) -> str:
    number, _, place = source.partition(": ")
    return f"{_REFERENCES[number]}: {place}" if number in _REFERENCES else source
