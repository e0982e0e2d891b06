r"""`Profile`, a list of what a kernel rounds and to which types, and the profiles by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...arrays import checks
from ...arrays.words import close
from .formats import FORMATS, Format
from .hardware import IEEE, UNITS, unit_for
from .roundings import Roundings, is_power_of_two

_TYPES = ["scores", "weights", "softmax", "accumulate", "out", "states", "d_weights", "d_scores"]


class Profile(NamedTuple):
    """What a kernel rounds, and to what.

    A type is the name of a dtype (`float64`, `float32`, `tfloat32`, `float16`, `bfloat16`,
    `float8_e4m3fn` or `float8_e5m2`), `storage` for that of queries, keys and values, or None if
    nothing is rounded. With `tfloat32-truncated`, further digits are dropped, not rounded.

    Attributes
    ----------
    scores : str or None
        Type of q . k, of the scaled scores, and of the scores with a cap or a bias; for linear
        attention, of products of features. With it, features are rounded after every step.
    weights : str or None
        Type of the weights in the second product.
    accumulate : str
        Type of the sums of products.
    out : str or None
        Type of the result.
    lanes : int
        Number of partial sums of a sum of products; terms are added to them in turn.
    normalised : bool
        Whether weights are divided by their sum before they are rounded.
    softmax : str
        Type of the differences to the maximum, of the exponentials and of their sum; also of the
        sum that `delta` describes, if it is computed from the weights. For linear attention, of the
        normaliser, and of the sum that is divided by it.
    inputs : str or None
        Type to which queries, keys, values and derivatives with respect to the output are rounded
        before they are multiplied: to nearest, and for 8 bits after a division by a scale that maps
        the largest number of an array to the largest of the type.
    run : int
        Number of terms after which a sum of products is added to the earlier sums and starts anew;
        for a recurrence, the number of tokens of a chunk.
    states : str or None
        Type of the sums over the keys, for random features and linear attention; for a recurrence,
        type of the state between chunks.
    exp : float
        Largest error of an exponential before it is rounded, in unit roundoffs of `accumulate`. The
        error of e^0 and a sixteenth of every other error are systematic, the rest random; of a sum
        of weights an eighth, and all if these are within a power of 2.
    d_weights : str or None
        Type of the derivatives with respect to the weights, d_out . v, in a backward pass.
    d_scores : str or None
        Type of the derivatives with respect to the scores, in their products with queries and keys.
    delta : {"weights", "out", "unrounded"}
        How the sum over the keys of weights times their derivatives is computed: from the weights,
        or as d_out . out, with the output after or before it was rounded. With "out" and
        "unrounded", weights that are not rounded are computed as e^(score - log normaliser).
    again : bool
        Whether a backward pass whose `delta` is "out" or "unrounded" rounds weights before it
        multiplies them by their derivatives.
    scale_first : pair of float
        Queries and keys are multiplied by the scale to these powers before they are rounded to
        `inputs`.
    scaled : bool
        Whether derivatives with respect to the scores are multiplied by the scale before they are
        rounded.
    parts : pair of int or None
        Numbers of queries and of keys after which a running sum of gradients is rounded to the type
        of the result; None if there is one sum.
    by_head : bool
        Whether gradients of keys and values that query heads share are rounded for each query head,
        to the type of the result, before they are added; their sums may also be rounded.
    maximum : bool
        Whether a backward pass differentiates the running maximum of the scores, too. That
        derivative is 0; what rounding leaves of it goes to the keys with the largest scores.
    lags : bool
        Whether a fused kernel rescales its sums only if the running maximum has grown by more than
        8 log 2, so that weights may be up to 2^8 when they are rounded.
    upcast : bool
        Whether a backward pass step by step has the weights as they were before they were rounded.
    accumulator : str or None
        Name of the hardware whose matrix units truncate sums of products of 16-bit and of 8-bit
        numbers, one of `hardware.UNITS`. With None or "ieee" sums are rounded.
    """

    scores: str | None = None
    weights: str | None = None
    accumulate: str = "float32"
    out: str | None = "storage"
    lanes: int = 1
    normalised: bool = False
    softmax: str = "float32"
    inputs: str | None = None
    run: int = 256
    states: str | None = None
    exp: float = 1.0
    d_weights: str | None = None
    d_scores: str | None = None
    delta: str = "weights"
    parts: tuple[int, int] | None = None
    accumulator: str | None = None
    by_head: bool = False
    again: bool = False
    scaled: bool = False
    scale_first: tuple[float, float] = (0.0, 0.0)
    maximum: bool = False
    lags: bool = False
    upcast: bool = False

    @property
    def reading(self) -> tuple[str, tuple[float, float]] | None:
        """The type of `inputs` and the powers of `scale_first`; None if nothing is rounded."""
        return None if self.inputs is None else (self.inputs, self.scale_first)

    def differs(self, scale: float) -> bool:
        """Tell whether, at this scale, the profile differs from one that rounds before scaling."""
        alone = self._replace(scaled=False, scale_first=(0.0, 0.0))
        factors = (scale**x for x in ((1.0,) if self.scaled else self.scale_first))
        return self == alone or self.again or not all(map(is_power_of_two, factors))

    def roundings(self, dtype: str) -> Roundings:
        """Look up the formats for a storage type."""

        def of(name: str | None) -> Format | None:
            return None if name is None else FORMATS[dtype if name == "storage" else name]

        unit = unit_for(self.accumulator, of(self.weights))
        run = unit.run if unit is not None and unit.split and unit.run else self.run
        same = {x: getattr(self, x) for x in Profile._fields if x in Roundings._fields}
        formats: dict[str, Any] = {x: of(same[x]) for x in _TYPES}
        return Roundings(
            **(same | formats | {"run": run}),
            delta_of_out=self.delta != "weights",
            unit=unit,
            score_unit=unit_for(self.accumulator, of(self.inputs or "storage")),
            unrounded=self.delta == "unrounded",
        )


Profile.__module__ = "refattn.judge.rounding"  # where users find it, and so do pickles

_FUSED = Profile(weights="storage", exp=32.0, d_scores="storage", delta="out")
_FUSED_FAST = _FUSED._replace(exp=2048.0)
_STEPWISE = Profile("storage", "storage", normalised=True, d_weights="storage", d_scores="storage")
_TF32 = Profile(weights="tfloat32", inputs="tfloat32", d_scores="tfloat32", delta="out")
_CUT = "tfloat32-truncated"
_TF32_TRUNCATED = _TF32._replace(weights=_CUT, inputs=_CUT, d_scores=_CUT)
_FP8_WEIGHTS = Profile(weights="float8_e4m3fn", d_scores="storage", delta="out")
_FP8 = _FP8_WEIGHTS._replace(inputs="float8_e4m3fn", d_scores="float8_e5m2")
_HALF_SUMS = Profile("float16", "float16", "float16", d_weights="float16", d_scores="float16")
_EAGER: Mapping[str, Any] = {"normalised": True, "delta": "weights"}

PROFILES: Mapping[str, Profile] = {
    # All but the result in float32, sums in runs or one term after the other.
    "math": Profile(),
    "serial": Profile(run=2**40),
    # Fused: weights over the largest are rounded, with a good exponential or a fast one (a cubic).
    "flash": _FUSED,
    "flash-fast": _FUSED_FAST,
    # The same, with sums that are rescaled only where that is needed (only if it is named).
    "flash-lazy": _FUSED_FAST._replace(lags=True),
    # The same, but that gradients are summed by blocks, after which sums are rounded.
    "flash-256": _FUSED_FAST._replace(parts=(256, 512)),
    "flash-64": _FUSED_FAST._replace(parts=(64, 512)),
    "flash-32": _FUSED_FAST._replace(parts=(32, 512)),
    # The same, with derivatives to scores times the scale rounded, the weights before them, too, or
    # with the output as it was before it was rounded.
    "flash-scaled": _FUSED_FAST._replace(scaled=True),
    "flash-again": _FUSED_FAST._replace(scaled=True, again=True),
    "flash-unrounded": _FUSED_FAST._replace(delta="unrounded"),
    # Derivatives of all steps of a forward pass, those to its running maximum too: in float32, or
    # with weights and derivatives to them rounded.
    "math-maximum": Profile(maximum=True),
    "flash-maximum": Profile(
        weights="storage", d_weights="storage", delta="unrounded", maximum=True
    ),
    # As "math", but that weights are e^(score - log normaliser), as those of a fused backward pass.
    "recomputed": Profile(delta="out"),
    # Scores and softmax in float32, then probabilities are rounded.
    "upcast": Profile(weights="storage", normalised=True, d_weights="storage"),
    # Step by step: scores are rounded, and probabilities; or every step of the softmax, too.
    "eager": _STEPWISE,
    "eager-narrow": _STEPWISE._replace(softmax="storage"),
    # The first, with a softmax in float32 whose backward pass has what it gave.
    "eager-upcast": _STEPWISE._replace(upcast=True),
    # Matrix units that round what they are given, in a fused kernel or step by step.
    "tf32": _TF32,
    "tf32-eager": _TF32._replace(**_EAGER),
    # The same with the scale in queries, or its root in queries and keys; or without a rounding.
    "tf32-scaled": _TF32._replace(scale_first=(1.0, 0.0)),
    "tf32-scaled-eager": _TF32._replace(**_EAGER, scale_first=(1.0, 0.0)),
    "tf32-roots-eager": _TF32._replace(**_EAGER, scale_first=(0.5, 0.5)),
    "tf32-truncated": _TF32_TRUNCATED,
    "tf32-truncated-eager": _TF32_TRUNCATED._replace(**_EAGER),
    "fp8-weights": _FP8_WEIGHTS,
    "fp8-weights-eager": _FP8_WEIGHTS._replace(**_EAGER),
    "fp8": _FP8,
    "fp8-eager": _FP8._replace(**_EAGER),
    "half-sums": _HALF_SUMS,
    "half-sums-eager": _HALF_SUMS._replace(normalised=True),
    # The same in float64: errors are those to a result in pairs (`refattn.certified`).
    "math64": Profile(accumulate="float64", softmax="float64"),
    "recomputed64": Profile(accumulate="float64", softmax="float64", delta="out"),
    "serial64": Profile(accumulate="float64", softmax="float64", run=2**40),
}
# Fused kernels whose backward passes differ, the tightest first.
OF_BACKWARD = (
    "flash-scaled", "flash-again", "flash-unrounded", "flash-256", "flash-64", "flash-32",
)  # fmt: skip
# What is read of a cache in 8 bits is rounded to the storage type before it is multiplied.
_CAST = ("math", "flash", "upcast", "flash-fast", "eager", "eager-narrow")
PROFILES = {**PROFILES, **{f"{x}-cast": PROFILES[x]._replace(inputs="storage") for x in _CAST}}
# Keys and values are repeated for the query heads that share them, and gradients are then added.
_BY_HEAD = (
    *_CAST,
    *OF_BACKWARD,
    "eager-upcast",
    "recomputed",
    "serial",
    "math-maximum",
    "flash-maximum",
)
PROFILES = {**PROFILES, **{f"{x}-by-head": PROFILES[x]._replace(by_head=True) for x in _BY_HEAD}}
# Recurrences in chunks of so many tokens: what is multiplied is rounded, states only if told.
CHUNKS = (64, 16, 32, 128, 256)
CHUNKED: Mapping[str, Profile] = {
    **{f"chunk-{x}": _FUSED._replace(run=x) for x in CHUNKS},
    **{f"chunk-{x}-math": Profile(run=x) for x in CHUNKS},
    **{f"chunk-{x}-math64": PROFILES["math64"]._replace(run=x) for x in CHUNKS},
    "chunk-64-eager": _FUSED._replace(run=64, scores="storage"),
    **{f"chunk-{x}-states": _FUSED._replace(run=x, states="storage") for x in CHUNKS},
    "chunk-64-eager-states": _FUSED._replace(run=64, scores="storage", states="storage"),
}

# Linear attention step by step: features, sums and quotients are rounded, and products of features,
# or sums over keys that queries read.
LINEAR: Mapping[str, Profile] = {
    "linear-eager": Profile("storage", "storage", softmax="storage"),
    "linear-states": Profile(weights="storage", softmax="storage", states="storage"),
}
# Gradients whose running sums are rounded after so many tokens.
NARROW_SUMS: Mapping[str, Profile] = {
    f"sums-{x}": _FUSED_FAST._replace(parts=(x, x)) for x in (32, 64, 128)
}
EVERY_PROFILE: Mapping[str, Profile] = {**PROFILES, **CHUNKED, **LINEAR, **NARROW_SUMS}


def profile_of(profile: Any) -> Profile:
    """Check a profile, or the name of one, or of one and of hardware: "flash@hopper"."""
    if isinstance(profile, Profile):
        for field in ("scores", "weights", "accumulate", "out", "softmax", "inputs", "states"):
            _type(field, getattr(profile, field), field not in ("accumulate", "softmax"))
        checks.positive_integer("lanes", profile.lanes)
        checks.positive_integer("run", profile.run)
        check_hardware("profile", profile.accumulator)
        return profile
    if isinstance(profile, str) and "@" in profile:
        name, _, hardware = profile.partition("@")
        return profile_of(profile_of(name)._replace(accumulator=hardware))
    if not isinstance(profile, str) or profile not in EVERY_PROFILE:
        raise ValueError(
            f"`profile` must be a Profile or one of {', '.join(PROFILES)}, got {profile!r}."
            + close(str(profile), PROFILES)
        )
    return EVERY_PROFILE[profile]


def check_hardware(name: str, hardware: Any) -> None:
    """Check the name of the hardware that an argument gives."""
    known = (IEEE, *UNITS)
    if hardware is not None and hardware not in known:
        raise ValueError(f"`{name}` must name hardware of {', '.join(known)}, got {hardware!r}.")


def _type(field: str, name: Any, optional: bool) -> None:
    if (name is None and optional) or name == "storage" or name in FORMATS:
        return
    known = ", ".join(["storage", *FORMATS])
    raise ValueError(f"`profile` must have {field} of {known}, got {name!r}.")
