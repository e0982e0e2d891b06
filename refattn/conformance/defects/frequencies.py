"""How frequencies are drawn, rightly and wrongly, and how the seed is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy import special

from .catalogue import NO_TAGS, Catalogue

Array = Any
Draw = Callable[[int, int, np.random.Generator], Array]
T = TypeVar("T", bound=Callable[..., Any])

ORTHOGONAL = {"coupling": "orthogonal"}
SIMPLEX = {"coupling": "simplex"}


class Wrong(NamedTuple):
    """A wrong law of frequencies or use of the seed, which every estimator that draws may have."""

    name: str
    made: Callable[..., Any]
    effect: str
    seen: str
    tags: Mapping[str, Any]


LAWS: list[Wrong] = []
SEEDS: list[Wrong] = []


def _enter(entries: list[Wrong], name: str, *about: Any) -> Callable[[T], T]:
    def enter(made: T) -> T:
        entries.append(Wrong(name, made, *about))
        return made

    return enter


def _law(
    name: str, effect: str, seen: str = "", *, tags: Mapping[str, Any] = NO_TAGS
) -> Callable[[T], T]:
    return _enter(LAWS, name, effect, seen, tags)


def _seed(name: str, effect: str, seen: str = "") -> Callable[[T], T]:
    return _enter(SEEDS, name, effect, seen, NO_TAGS)


def normal(count: int, d: int, rng: np.random.Generator) -> Array:
    """Independent standard normal frequencies, shape (count, d): the correct law."""
    return rng.standard_normal((count, d))


def _orthogonal(
    count: int, d: int, rng: np.random.Generator, fix: Callable[[Array, Array], Array]
) -> Array:
    """Rows of blocks of d orthogonal vectors, Q and R being put together by `fix`."""
    blocks = [fix(*np.linalg.qr(rng.standard_normal((d, d)))).T for _ in range(-(-count // d))]
    return np.concatenate(blocks)[:count]


def _directions(count: int, d: int, rng: np.random.Generator) -> Array:
    """Rows of blocks of a Haar-distributed orthogonal matrix."""
    return _orthogonal(count, d, rng, lambda q, r: q * np.sign(np.diagonal(r)))


def _chi(count: int, d: int, rng: np.random.Generator) -> Array:
    """Norms of standard normal vectors of length d, shape (count, 1)."""
    return np.sqrt(rng.chisquare(d, (count, 1)))


def haar(count: int, d: int, rng: np.random.Generator) -> Array:
    """Block-orthogonal frequencies, Haar directions with chi norms: correct as "orthogonal"."""
    return _directions(count, d, rng) * _chi(count, d, rng)


def _corners(count: int, d: int, rng: np.random.Generator) -> Array:
    """Corners of regular simplices about the origin, each turned by a Haar rotation."""
    corners = np.eye(d) - (d > 1) / d
    corners = corners / np.linalg.norm(corners, axis=-1, keepdims=True)
    blocks = [corners @ _directions(d, d, rng) for _ in range(-(-count // d))]
    return np.concatenate(blocks)[:count]


def simplex(count: int, d: int, rng: np.random.Generator) -> Array:
    """Simplex frequencies with chi norms: correct as "simplex"."""
    return _corners(count, d, rng) * _chi(count, d, rng)


@_law(
    "qr-unsigned",
    "Kernel biased by 34 % at d = 2, up to 19 % at 4 and 7 % at 64, which no S removes.",
    "performer-pytorch, google-research performer, scenic, efficient-attention, PyG",
    tags=ORTHOGONAL,
)
def qr_unsigned(count: int, d: int, rng: np.random.Generator) -> Array:
    """Directions from a bare QR, whose signs are LAPACK's convention and not random."""
    return _orthogonal(count, d, rng, lambda q, r: q) * _chi(count, d, rng)


@_law(
    "qr-norms-of-r",
    "Frequencies too short, each of a block more than the one before; the last has length 1.",
    tags=ORTHOGONAL,
)
def qr_norms_of_r(count: int, d: int, rng: np.random.Generator) -> Array:
    """A bare QR, its directions times the size of the diagonal of its R."""
    return _orthogonal(count, d, rng, lambda q, r: q * np.abs(np.diagonal(r)))


@_law(
    "norms-of-the-rows",
    "Norms depend on directions: some coordinates have too heavy tails, others too light ones.",
    tags=ORTHOGONAL,
)
def norms_of_the_rows(count: int, d: int, rng: np.random.Generator) -> Array:
    """Norms of the rows of the matrix whose columns are made orthogonal, which know of these."""

    def fix(q: Array, r: Array) -> Array:
        return q * np.sign(np.diagonal(r)) * np.linalg.norm(q @ r, axis=-1)

    return _orthogonal(count, d, rng, fix)


@_law(
    "norm-of-a-block",
    "Each frequency has the right law, and those of a block are long or short together.",
    tags=ORTHOGONAL,
)
def norm_of_a_block(count: int, d: int, rng: np.random.Generator) -> Array:
    """Haar directions, all of a block having the same chi norm."""
    norms = np.repeat(_chi(-(-count // d), d, rng), d, axis=0)
    return _directions(count, d, rng) * norms[:count]


@_law(
    "fixed-norms",
    "Kernel too small: 5 % at d = 2 and |x + y| = 1, more for longer vectors.",
    "performer-pytorch with scaling 1",
    tags=ORTHOGONAL,
)
def fixed_norms(count: int, d: int, rng: np.random.Generator) -> Array:
    """Haar directions, all of norm sqrt(d)."""
    return _directions(count, d, rng) * math.sqrt(d)


@_law(
    "halved-norms",
    "Frequencies of norm 4 for 8 at d = 64: at |x + y| = 1 the kernel is .69 of what it should be.",
    tags=ORTHOGONAL,
)
def halved_norms(count: int, d: int, rng: np.random.Generator) -> Array:
    """Haar directions, all of norm sqrt(d/4)."""
    return fixed_norms(count, d, rng) / 2


@_law("simplex-fixed-norms", "Kernel too small, as with fixed norms.", tags=SIMPLEX)
def simplex_fixed_norms(count: int, d: int, rng: np.random.Generator) -> Array:
    """Simplex directions, all of norm sqrt(d)."""
    return _corners(count, d, rng) * math.sqrt(d)


@_law(
    "simplex-unscaled-corners",
    "Frequencies too short by sqrt(1 - 1/d): a half of the variance at d = 2, a 64th at 64.",
    tags=SIMPLEX,
)
def simplex_unscaled_corners(count: int, d: int, rng: np.random.Generator) -> Array:
    """Corners that are centred and not brought back to unit length."""
    return simplex(count, d, rng) * (math.sqrt(1 - 1 / d) if d > 1 else 1.0)


@_law("normalised-rows", "Kernel too small, as with fixed norms.")
def normalised_rows(count: int, d: int, rng: np.random.Generator) -> Array:
    """Independent directions, all of norm sqrt(d)."""
    z = rng.standard_normal((count, d))
    return math.sqrt(d) * z / np.linalg.norm(z, axis=-1, keepdims=True)


@_law(
    "shrinking-norms",
    "Features lose their frequencies as S grows: attention tends to the mean value.",
    "teddykoker",
)
def shrinking_norms(count: int, d: int, rng: np.random.Generator) -> Array:
    """Norms sqrt(d/S): the 1/sqrt(S) of the features has gone into the frequencies."""
    return normalised_rows(count, d, rng) / math.sqrt(count)


@_law(
    "norms-of-another-length",
    "Frequencies too short: at |x + y| = 1 the kernel is .79 of what it should be.",
    "xformers, SMReg",
)
def norms_of_another_length(count: int, d: int, rng: np.random.Generator) -> Array:
    """Rows of length d whose norms are drawn for rows of half the length."""
    return _directions(count, d, rng) * _chi(count, (d + 1) // 2, rng)


@_law("rademacher", "The right covariance and the wrong law along an axis.")
def rademacher(count: int, d: int, rng: np.random.Generator) -> Array:
    """Entries +1 or -1."""
    return rng.integers(0, 2, (count, d)) * 2.0 - 1.0


@_law("uniform", "The right covariance and the wrong law along an axis.")
def uniform(count: int, d: int, rng: np.random.Generator) -> Array:
    """Uniform entries of variance 1."""
    return rng.uniform(-math.sqrt(3), math.sqrt(3), (count, d))


@_law("unit-uniform", "Frequencies of mean .5 and variance 1/12.")
def unit_uniform(count: int, d: int, rng: np.random.Generator) -> Array:
    """Uniform entries between 0 and 1: `random` for `standard_normal`."""
    return rng.random((count, d))


@_law("laplace", "Tails too heavy: the kernel is 21 % too large along an axis.")
def laplace(count: int, d: int, rng: np.random.Generator) -> Array:
    """Laplace entries of variance 1."""
    return rng.laplace(scale=math.sqrt(0.5), size=(count, d))


@_law(
    "truncated",
    "Frequencies of variance .77: kernel 12 % too small at |x + y| = 1.",
    "trunc_normal_ initialisers",
)
def truncated(count: int, d: int, rng: np.random.Generator) -> Array:
    """Normal entries truncated at two standard deviations, as weight initialisers do."""
    low = special.ndtr(-2.0)
    return special.ndtri(rng.uniform(low, 1 - low, (count, d)))


@_law(
    "truncated-far",
    "The right variance to .6 %, and no entry above 3.5: large kernels come out too small.",
)
def truncated_far(count: int, d: int, rng: np.random.Generator) -> Array:
    """Normal entries truncated at 3.5 standard deviations."""
    low = special.ndtr(-3.5)
    return special.ndtri(rng.uniform(low, 1 - low, (count, d)))


@_law(
    "twelve-uniforms",
    "The right variance, and tails too light: large kernels come out too small.",
    "generators without a normal law",
)
def twelve_uniforms(count: int, d: int, rng: np.random.Generator) -> Array:
    """The sum of twelve uniform numbers less 6."""
    return rng.random((12, count, d)).sum(0) - 6


@_law("shared", "The variance does not fall with S.")
def shared(count: int, d: int, rng: np.random.Generator) -> Array:
    """One frequency, repeated."""
    return np.tile(rng.standard_normal((1, d)), (count, 1))


@_law("one-duplicate", "The last feature adds nothing: S - 1 with uneven weights.")
def one_duplicate(count: int, d: int, rng: np.random.Generator) -> Array:
    """The last frequency repeats the first."""
    z = rng.standard_normal((count, d))
    z[-1] = z[0]
    return z


@_law("repeated-halves", "Twice the variance.")
def repeated_halves(count: int, d: int, rng: np.random.Generator) -> Array:
    """Two halves, each drawn from a generator with the same seed."""
    half = rng.standard_normal((-(-count // 2), d))
    return np.concatenate([half, half])[:count]


@_law("antithetic", "Frequencies come in opposite pairs, called independent.")
def antithetic(count: int, d: int, rng: np.random.Generator) -> Array:
    """Pairs omega, -omega, not declared."""
    half = rng.standard_normal((-(-count // 2), d))
    return np.concatenate([half, -half])[:count]


def correlated(rho: float) -> Draw:
    """Frequencies with correlation rho between any two of a draw."""

    def draw(count: int, d: int, rng: np.random.Generator) -> Array:
        z = rng.standard_normal((count + 1, d))
        return math.sqrt(1 - rho) * z[1:] + math.sqrt(rho) * z[:1]

    return draw


_law("correlated-.05", "A floor under the variance: at |x + y| = 1, 3 % of that of one feature.")(
    correlated(0.05)
)
_law("correlated-.3", "A floor under the variance.")(correlated(0.3))


def scaled(factor: float) -> Draw:
    """Frequencies multiplied by a factor."""

    def draw(count: int, d: int, rng: np.random.Generator) -> Array:
        return factor * rng.standard_normal((count, d))

    return draw


_law("scale-1.05", "Kernel 5 % too large at |x + y| = 1.")(scaled(1.05))
_law("scale-sqrt-2", "Kernel e^(1/2) too large at |x + y| = 1.")(scaled(math.sqrt(2)))


@_law("mixed-entries", "Entries of a frequency are correlated.")
def mixed_entries(count: int, d: int, rng: np.random.Generator) -> Array:
    """Neighbouring entries of a frequency have correlation about .3."""
    z = rng.standard_normal((count, d + 1))
    return (z[:, :-1] + z[:, 1:] / 3) / math.sqrt(10 / 9)


@_law("shifted", "Frequencies of mean .1: attention as if queries were shifted.")
def shifted(count: int, d: int, rng: np.random.Generator) -> Array:
    """Entries of mean .1."""
    return rng.standard_normal((count, d)) + 0.1


@_law("positive-entries", "All frequencies lie in one orthant.")
def positive_entries(count: int, d: int, rng: np.random.Generator) -> Array:
    """Absolute values of normal entries."""
    return np.abs(rng.standard_normal((count, d)))


@_law("half-precision", "Frequencies collide and carry 11 bits.", "fp16 buffers")
def half_precision(count: int, d: int, rng: np.random.Generator) -> Array:
    """Frequencies rounded to float16."""
    return rng.standard_normal((count, d)).astype(np.float16).astype(np.float64)


@_law("first-entry-zero", "The first coordinate is ignored.")
def first_entry_zero(count: int, d: int, rng: np.random.Generator) -> Array:
    """A loop over the entries that starts at 1."""
    z = rng.standard_normal((count, d))
    z[:, 0] = 0.0
    return z


@_law("box-muller-half", "Odd entries of a frequency are never negative.")
def box_muller_half(count: int, d: int, rng: np.random.Generator) -> Array:
    """Box-Muller with the angle in [0, pi) and so the sine never negative."""
    radius = np.sqrt(-2 * np.log1p(-rng.random((count, d))))
    angle = np.pi * rng.random((count, d))
    return radius * np.where(np.arange(d) % 2, np.sin(angle), np.cos(angle))


@_seed("seed-ignored", "The same seed gives different results.", "efficient-attention")
def fresh_entropy(seed: int | None) -> np.random.Generator:
    """The seed is dropped: every call differs."""
    return np.random.default_rng()


@_seed("seed-constant", "Different seeds give the same result.")
def constant_seed(seed: int | None) -> np.random.Generator:
    """The seed is dropped: every call is the same."""
    return np.random.default_rng(0)


@_seed("seed-mod-16", "Seeds 1 and 17 give the same result.")
def seed_mod_16(seed: int | None) -> np.random.Generator:
    """Four bits of the seed are used."""
    return np.random.default_rng(None if seed is None else seed % 16)


class Sampler:
    """How an implementation draws: a law of frequencies and a way to use the seed."""

    def __init__(
        self,
        draw: Draw = normal,
        generator: Callable[[int | None], np.random.Generator] = np.random.default_rng,
    ) -> None:
        self.draw, self.generator = draw, generator


def wrong_laws(catalogue: Catalogue) -> None:
    """Enter the estimator with each wrong law of frequencies."""
    for law in LAWS:
        entry = catalogue.defect(
            f"{catalogue.estimator}-{law.name}", law.effect, law.seen, tags=law.tags
        )
        entry(catalogue.definition(law.made))


def wrong_seeds(catalogue: Catalogue) -> None:
    """Enter the estimator with each wrong use of the seed."""
    for use in SEEDS:
        entry = catalogue.defect(f"{catalogue.estimator}-{use.name}", use.effect, use.seen)
        entry(catalogue.definition(generator=use.made))
