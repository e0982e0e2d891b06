"""Wrong candidates fail the checks that are for their mistake, and the report says where."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import attend, conformance, naive
from refattn.conformance import check
from refattn.conformance.defects import MUTANTS
from refattn.conformance.verdict import runner
from tests.conformance.candidates import (
    BACK,
    BY_NAME,
    OF_OPTIONS,
    OPTIONS,
    SEES,
    attending,
    averaged,
    catalogued,
    changed,
    checked,
    dropping,
    emptied,
    failures,
    features,
    local,
    of,
    performer,
    pulled,
    scores,
    seeing,
    selecting,
)

RFA, LINEAR = refattn.random_feature_attention, refattn.linear_attention
KILLS = json.loads(
    (Path(conformance.__file__).parent / "verdict" / "kills.json").read_text("utf-8")
)


# The catalogue: each defect by one check that rejects it, as was measured once for all checks.


def killers(mutant):
    return KILLS[mutant.estimator][mutant.name]


def cheapest(names):
    """An identity, but not that of a few seeds, which may differ by chance; or a strong law."""
    weak = {"seeds": 2, "long_vectors": 1, "uses_together": 1, "large_logits": 1}
    if "frequency_pairs" in names:  # the other may take a minute
        weak["frequency_law"] = 1
    return min(
        names, key=lambda name: (conformance.CHECKS[name].layer != "identity", weak.get(name, 0))
    )


def test_every_defect_is_in_the_matrix_and_rejected():
    listed = {(e, name) for e, found in KILLS.items() for name in found}
    assert listed == {(m.estimator, m.name) for m in MUTANTS}
    assert [m.name for m in MUTANTS if not killers(m)] == []
    assert len(MUTANTS) >= 40


# Checks without a defect that they alone reject, and why they are made all the same.
JUSTIFIED = {
    "value_length": "says at once that d_v = d is assumed",
    "large_logits": "tells lost digits from overflow",
    "extreme_logits": "compares digits where weighted_mean knows bounds only",
    "batches_of_rows": "tells a wrong axis from a wrong formula",
    "order_of_keys": "needs no reference, so that an error of the reference would show",
    "queries_apart": "of a black box and without a reference",
    "heads_apart": "of a black box and without a reference",
    "mask": "tells wrong masks from masks that do not broadcast",
    "mask_broadcasts": "tells masks that do not broadcast from wrong ones",
    "masked_keys_unseen": "of a black box; sizes of hidden keys far from those of visible ones",
    "causal": "tells causal attention from its combination with masks",
    "mask_with_causal": "tells their combination from each alone",
    "future_unseen": "all there is for causal LARA, and of any black box",
    "visible_part": "of a black box: causal and masked forms against the plain one",
    "one_frequency": "needs no reference and no recovery, so that it holds in halves",
    "mean_over_frequencies": "needs no reference",
    "calls_apart": "tells memory that is used again from a result that was never right",
    "recovered_values": "all there is of the formula of a black box",
    "feature_average": "unbiasedness itself, and couplings of which no exact law is known",
    "target_law": "of a black box without masks",
    "masked_target_law": "of a black box with masks",
    "causal_target_law": "of a black box that is causal",
    "mean_of_samples": "the formula at S = 2, number by number",
    "two_proposals": "the formula of a black box, whatever its centres",
    "unseen_law": "rejects nothing: it says what is not tested",
    "unbiased": "the claim itself, which the exact laws imply",
    "all_keys": "without a reference, and tells a wrong use of indices from a wrong estimator",
    "order_of_given_keys": "without a reference",
    "keys_of_heads": "tells indices of each head from what else is asked with them",
    "keys_given_again": "tells places that count once from wrong probabilities",
    "reference_values": "ordinary numbers, of which other checks have special cases",
    "query_without_keys": "where causal attention is not taken, and causal_cross not made",
    "one_function": "the formula of frequencies that are drawn once, which no law can tell",
    "long_vectors": "a law far out, where recovered_values has the formula at two frequencies",
    "same_bits": "of calls, which are the same in the catalogue",
    "same_bits_in_any_batch": "of what is declared only",
    "log_normalisers": "of a second output, which the catalogue does not have",
    "normaliser_without_keys": "of the same",
    "merged_parts": "of the same, and without a reference",
    "gradients_of_normalisers": "of the same",
    "windows": "tells windows from what else is asked with them",
    "outside_of_windows": "without a reference",
    "soft_caps": "tells caps from what else is asked with them",
    "weights_of_sinks": "tells sinks from what else is asked with them",
    "biases": "tells biases from what else is asked with them",
    "factors_of_dropout": "of every use, and at p = 0",
    "gradients": "the plainest case, of which the report can be read",
    "gradients_of_hidden": "of a black box",
    "gradients_of_hidden_nonsense": "of what a way back computes with what is hidden",
    "gradients_of_extreme_features": "tells lost digits from a wrong formula",
    "gradients_of_layouts": "of strides, which the catalogue leaves alone",
    "gradients_again": "of memory between calls, which the catalogue does not have",
    "gradients_of_means": "of a black box, and without a reference",
    "gradients_are_linear": "of a black box, and without a reference",
    "gradients_are_slopes": "all there is of the gradients of a black box",
    "proposal_noise": "LARA with proposals of its own, to which proposal_average does not apply",
}


def test_every_check_is_needed():
    alone = {k[0] for found in KILLS.values() for k in found.values() if len(k) == 1}
    assert set(conformance.CHECKS) - alone == set(JUSTIFIED)


def test_there_are_mistakes_of_gradients_enough():
    back = [m for m in MUTANTS if "vjp" in m.capabilities]
    assert len({type(m.fn).__name__ for m in back}) == len(back) >= 40
    assert all(m.effect for m in back)


@pytest.fixture
def briefly(monkeypatch):
    """Nobody looks for what a failure is like, nor what would have to be declared for more."""
    monkeypatch.setattr(runner, "suspect", lambda *_: None)
    monkeypatch.setattr(runner, "diagnose", lambda *_: [])
    monkeypatch.setattr(runner, "_not_tried", lambda *_: {})


# Checks that take over .2 s of CPU, as do all of some estimators, and defects that need the end of
# a long sequence; of each law and of each such check one defect, which shows at few seeds.
LONG_CHECKS = (
    *("frequency_law", "frequency_pairs", "feature_sums", "given_moments_law", "own_law"),
    *("target_law", "choices", "sample_average", "proposal_average", "proposal_noise"),
    *("law_of_dropout", "rounding_errors", "uses_together", "large_sizes"),
)
LONG = {"rfa", "ra", "lara", "kernel", "second", "reset", "16384"}
SHORT = (
    *("kernel-qr-norms-of-r", "kernel-shared", "kernel-correlated-.05", "ra-key-dropped"),
    *("rfa-moments-ignored", "ra-one-component", "ra-noise-shared", "lara-centres-without-keys"),
    *("lara-noise-unscaled", "softmax-dropout-keeps-p", "softmax-dropout-of-one-seed"),
    *("softmax-short-log2e", "linear-mask-in-diagonal-tiles", "linear-head-size-128"),
    *("second-order-diagonal", "rfa-key-norm-dropped"),
)


def defects():
    for mutant in MUTANTS:
        words = {*mutant.name.split("-")}
        long = (words & LONG or cheapest(killers(mutant)) in LONG_CHECKS) and (
            mutant.name not in SHORT
        )
        soak = words & {"coreset", "sampled"}
        marks = pytest.mark.soak if soak else [pytest.mark.long] * bool(long)
        yield pytest.param(mutant, marks=marks, id=mutant.name)


@pytest.mark.parametrize("mutant", [*defects()])
@pytest.mark.usefixtures("briefly")
def test_defects_fail(mutant, monkeypatch):
    """By one check that rejects it, an identity where there is one, at another seed."""
    name = cheapest(killers(mutant))
    if mutant.name in SHORT:
        monkeypatch.setitem(runner.LEVELS, "quick", 300)
    level = "full" if name == "large_sizes" else "quick"  # which has time for all sizes
    report = check(catalogued(mutant.name), checks=[name], level=level, rng=1)
    assert report.verdict == "FAIL", str(report)
    assert report.results[0].reproducer


# Those that are given keys or frequencies: by another check, where there is one.
GIVEN = [m for m in MUTANTS if "-given" in m.name]


@pytest.mark.parametrize("mutant", GIVEN, ids=lambda m: m.name)
@pytest.mark.usefixtures("briefly")
def test_defects_with_what_is_given_fail(mutant):
    report = check(catalogued(mutant.name), checks=[killers(mutant)[-1]], rng=1)
    assert report.verdict == "FAIL", str(report)
    assert report.results[0].reproducer


# Exact attention.


def broken(result):
    return lambda q, k, v: result(refattn.softmax_attention(q, k, v))


def raising(q, k, v):
    raise RuntimeError("no\nGPU")


def exiting(q, k, v):
    sys.exit(3)


def scribbling(q, k, v):
    out = refattn.softmax_attention(q, k, v)
    k *= 2
    return out


def restless(q, k, v, *, num_features, seed):
    return RFA(q, k, v, num_features=num_features)


def every_64th(out, *_):
    out[..., 63::64, :] = out[..., 62::64, :][..., : out[..., 63::64, :].shape[-2], :]
    return out


def rows_of_groups(seen, q, k, options):
    """Every second query head of a group sees the future."""
    shared = options.get("causal") and q.ndim > 2 and q.shape[-3] != k.shape[-3]
    mask = True if options.get("mask") is None else options["mask"]
    odd = np.arange(q.shape[-3])[:, None, None] % 2 == 1 if shared else False
    return np.where(odd, mask, seen)


def first_rows_of_mask(seen, *_):
    """A mask is read anew for each 64 queries."""
    return seen[..., np.arange(seen.shape[-2]) % 64, :]


def state_of_last_head(out, q, k, v, options):
    """From token 65 on a head sees the keys of the head before."""
    if options.get("causal") and q.ndim > 2 and q.shape[-2] > 64:
        k, v = (np.roll(x, 1, -3) for x in (k, v))
        out[..., 64:, :] = naive.softmax_attention(q, k, v, causal=True)[..., 64:, :]
    return out


def one_stride(q, k, v, options):
    """Values are read as if they lay as keys do."""
    if v.strides != k.strides and v.shape == k.shape:
        v = np.ascontiguousarray(np.swapaxes(v, -1, -2)).reshape(v.shape)
    return q, k, v, options


def mask_as_it_lies(q, k, v, options):
    mask = options.get("mask")
    return q, k, v, {} if mask is None else {"mask": mask.ravel("K").reshape(mask.shape)}


def late_coordinate(q, k, v, options):
    return np.where(np.arange(q.shape[-1]) < 40, q, 0.0), k, v, options


def one_key_ahead(q, k, v, options):
    n, m = q.shape[-2], k.shape[-2]
    return q, k, v, {"mask": np.tri(n, m, m - n + 1, dtype=bool) & options.get("mask", True)}


def half_empty(v):
    return np.where(np.arange(v.shape[-1]) % 2, np.nan, 0.0)


def adding(q, k, v, mask=True):
    return averaged(scores(q, k) + np.where(mask, 0.0, -np.inf), v)


EXACT = {
    "raises": (of(raising), "contract", "RuntimeError: no GPU"),
    "exits": (of(exiting), "contract", "SystemExit"),
    "writes": (of(scribbling), "contract memory_layouts", "other numbers in it"),
    "wrong shape": (of(lambda q, k, v: v[..., :1]), "contract", "shape (5, 1)"),
    "wrong dtype": (of(broken(np.float32)), "contract", "float32"),
    "not an array": (of(broken(lambda out: "no")), "contract", "a str"),
    "nothing": (of(broken(lambda out: None)), "contract", "a NoneType"),
    "a list": (of(broken(lambda out: out.tolist())), "contract", "a list"),
    "objects": (of(broken(lambda out: out.astype(object))), "contract", "object"),
    "not a number": (of(broken(lambda out: out * np.nan)), "contract", "NaN"),
    "complex": (of(broken(lambda out: out + 0j)), "contract reference_values", "complex"),
    "a pair": (of(lambda x: x.mean(-2), "moments"), "contract", "a ndarray"),
    "takes no seed": (of(lambda q, k, v: v, "rfa"), "contract", "TypeError"),
    "restless": (of(restless, "rfa"), "contract", ""),
    "late tokens": (catalogued("softmax-causal-late-tokens"), "large_sizes", "formula token 1024"),
    "late keys": (catalogued("softmax-late-keys-dropped"), "large_sizes", "formula"),
    "every 64th": (of(changed(after=every_64th)), "large_sizes", "formula every 64th"),
    "wide heads": (catalogued("softmax-head-size-128"), "large_sizes", "formula"),
    "third member": (catalogued("softmax-batch-of-two"), "large_sizes", "formula head"),
    "of heads": (catalogued("softmax-maximum-of-heads"), "heads_of_other_size", ""),
    "as keys lie": (catalogued("softmax-keys-as-they-lie"), "memory_layouts", ""),
    "workspace": (catalogued("softmax-workspace-handed-out"), "calls_apart", ""),
    "0 times NaN": (catalogued("softmax-hidden-times-zero"), "hidden_nonsense", "range"),
    "values times 0": (of(selecting, "softmax", "mask"), "hidden_nonsense", "range"),
    "keys times 0": (
        of(adding, "softmax", "mask", hidden="finite-values"), "hidden_nonsense", "range"
    ),
    "half sums": (catalogued("softmax-half-precision-sums"), "long_half_sums", ""),
    "many rows": (catalogued("moments-first-4096"), "many_rows", ""),
    "rows of groups": (of(seeing(rows_of_groups), "softmax", *SEES), "grouped_heads", ""),
    "rows of a mask": (of(seeing(first_rows_of_mask), "softmax", "mask"), "mask", ""),
    "last head": (of(changed(after=state_of_last_head), "softmax", "causal"), "causal", ""),
    "one stride": (of(changed(one_stride), "softmax", "mask"), "memory_layouts", ""),
    "mask as it lies": (of(changed(mask_as_it_lies), "softmax", "mask"), "memory_layouts", ""),
    # Within what is declared.
    "coordinate": (
        of(changed(late_coordinate), "softmax", head_sizes=(64, 128)), "reference_values", ""
    ),
    "block": (of(changed(after=every_64th), "softmax", multiple_of=64), "reference_values", ""),
    "future": (of(changed(one_key_ahead), "softmax", "mask", causal_only=True), "causal", ""),
    "half empty": (
        of(emptied(half_empty), "softmax", "mask", empty_rows="nan"), "query_without_keys", ""
    ),
    **{
        f"0 for {other}": (
            of(refattn.softmax_attention, "softmax", "mask", empty_rows=other),
            "query_without_keys",
            "",
        )
        for other in ("nan", "mean")
    },
    "nan for 0": (of(emptied(lambda v: np.nan), "softmax", *SEES), "query_without_keys", ""),
    "mean for 0": (of(emptied(lambda v: v), "softmax", *SEES), "query_without_keys", ""),
}  # fmt: skip


# Random features, kernels and moments.


OMEGA = np.random.default_rng(0).standard_normal((32, 8))


def few_features(q, k, v, *, omega):
    return RFA(q, k, v, omega=omega[..., :1024, :])


def frozen_without_bias(q, k, v):
    """Features of keys without -|k|^2 / 2 weigh some values negatively after a shift."""
    omega = OMEGA * 8**-0.25
    kernel = np.exp(q @ omega.T) @ (np.exp(np.swapaxes(k @ omega.T, -1, -2)) - 0.5)
    return kernel @ v / np.sum(kernel, -1, keepdims=True)


def by_head(q, num_features, seed):
    """Frequencies are divided by the root of the number of heads."""
    heads = q.shape[-3] if q.ndim > 2 else 1
    omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
    return omega * heads**-0.5


CHANGES = {
    "a constant": lambda phi, x: phi + phi.dtype.type(1e-6),
    "clipped": lambda phi, x: np.clip(phi, np.exp(-8.0), np.exp(8.0)),
    "rounded": lambda phi, x: np.round(phi, 5),
}
FROZEN = {"fixed_frequencies": True, "head_sizes": 8}
DRAWN = {
    "few features": (of(few_features, "rfa", "omega"), "large_sizes", ""),
    "scale": (of(partial(RFA, scale=1.0), "rfa", "omega_only"), "reference_values", ""),
    "frozen": (of(frozen_without_bias, "rfa", **FROZEN), "one_function", ""),
    "squares": (
        of(features(lambda phi, x: phi * phi, omega=OMEGA), "rfa", **FROZEN), "one_function", ""
    ),
    "seeds of heads": (catalogued("rfa-seed-plus-head"), "seeds", "the same bit for bit"),
    "law of heads": (of(features(draw=by_head), "rfa"), "frequency_law", "last head"),
    **{
        f"features {change} in {name}": (
            of(features(CHANGES[change]), "rfa", dtype="float32"), name, ""
        )
        for change in CHANGES
        for name in ("one_function", "long_vectors")
    },
    **{
        f"{change} in {dtype}": (of(fn, "rfa", dtype=dtype), "recovered_values", "")
        for dtype in ("float32", "float64")
        for change, fn in (
            ("epsilon", performer(feature=1e-6)),
            ("clip", features(lambda phi, x: np.exp(np.clip(x, -20, 20)))),
        )
    },
    **{
        f"epsilon of {x:g}": (
            of(performer(feature=x, axes=(-2, -1)), "rfa"), "one_function", ""
        )
        for x in (1e-5, 1e-3)
    },
    **{
        f"window of {sides}": (
            of(local(sides, causal=True), "rfa-local", "omega", causal_only=True), "causal", "",
        )
        for sides in ((7, 8), (9, 8))
    },
}  # fmt: skip


# Options and log normalisers, forth and back.


def without(name):
    return lambda options: {k: x for k, x in options.items() if k != name}


def wider_cap(options):
    return options | ({"softcap": 2 * options["softcap"]} if "softcap" in options else {})


def of_one(name, change):
    """Edits the cotangent of a bias or of sinks."""

    def edit(found, given):
        names = [x for x in ("bias", "sinks") if given.get(x) is not None]
        if name in names:
            found[4 + names.index(name)] = change(found[4 + names.index(name)])

    return edit


def raw(lse, *_):
    """Without a maximum."""
    with np.errstate(all="ignore"):
        return np.log(np.exp(lse))


def lse_of(**options):
    return lambda lse, q, k, given: attend(q, k, k, **{"scale": q.shape[-1] ** -0.5} | options).lse


def alone(lse, q, k, given):
    """Without the scale."""
    return attend(q, k, k, **{x: y for x, y in given.items() if x != "scale"}).lse


LSE = {
    "base 2": lambda lse, *_: lse / np.log(2.0),
    "no maximum": raw,
    "the mean, not the sum": lambda lse, q, k, _: lse - np.log(k.shape[-2]),
    "1 more": lambda lse, *_: np.log1p(np.exp(lse)),
    "another sign": lambda lse, *_: -lse,
    "mask left out": lse_of(),
    "of another head": lambda lse, *_: np.roll(lse, 1, -2) if lse.ndim > 1 else lse,
    "infinite without keys": lambda lse, *_: np.where(lse == -np.inf, np.inf, lse),
    "a column": lambda lse, *_: lse[..., None],
    "rounded": lambda lse, *_: lse.astype(np.float16).astype(lse.dtype),
    "without scale": alone,
}
TOGETHER = {
    "one query": lambda q, k, given: q.shape[-2] == 1,
    "with causal": lambda q, k, given: given.get("causal"),
    "groups and a mask": lambda q, k, given: "mask" in given and q.shape[:-2] != k.shape[:-2],
    "a window and a cap": lambda q, k, given: {"window", "softcap"} <= set(given),
}


def more_when(when):
    return lambda lse, q, k, given: lse + 1.0 * bool(when(q, k, given))


def of_first_head(d_lse, options):
    return d_lse if d_lse is None or d_lse.ndim < 2 else d_lse[..., :1, :] + 0 * d_lse


def only_plain(d_lse, options):
    return 0 * d_lse if d_lse is not None and options.get("causal") else d_lse


def period(axis, length):
    """Random numbers that come again after some."""
    return lambda u: np.take(u, np.arange(u.shape[axis]) % length, axis) if u.ndim > 2 else u


def heads_of_a_group(u):
    return u[..., np.arange(u.shape[-3]) // 2 * 2, :, :] if u.ndim > 2 else u


NORMALISED = (*SEES, *OPTIONS, "lse")
WITH_OPTIONS = {
    **{
        f"{name} forgotten behind": (
            of(attending(behind=without(name)), "softmax", *SEES, *OPTIONS, *BACK),
            "gradients_together",
            "",
        )
        for name in OPTIONS
    },
    "half a cap behind": (
        of(attending(behind=wider_cap), "softmax", *SEES, *OPTIONS, *BACK), "gradients_together", ""
    ),
    **{
        f"gradients of {name}, {words}": (
            of(pulled(change=of_one(name, change)), "softmax", *OPTIONS, *BACK),
            "gradients_together",
            f"d_{name}",
        )
        for name in ("bias", "sinks")
        for words, change in (
            ("sign", np.negative), ("a hundredth", lambda x: 1.01 * x), ("none", np.zeros_like),
        )
    },
    "lse without caps": (
        of(attending(of_lse=more_when(lambda q, k, given: "softcap" in given)), "softmax",
           *NORMALISED),
        "log_normalisers uses_together",
        "",
    ),
    **{
        f"lse: {name}": (
            of(attending(of_lse=change), "softmax", *SEES, "lse", "d_lse"),
            "normaliser_without_keys" if "without keys" in name else "log_normalisers",
            "",
        )
        for name, change in LSE.items()
    },
    **{
        f"lse: {name}": (
            of(attending(of_lse=more_when(when)), "softmax", *NORMALISED), "uses_together", ""
        )
        for name, when in TOGETHER.items()
    },
    "lse: no key": (
        of(attending(of_lse=lambda lse, *_: np.where(np.isneginf(lse), 0.0, lse)), "softmax",
           *NORMALISED),
        "normaliser_without_keys", "",
    ),
    "no lse": (
        of(lambda q, k, v, **_: naive.softmax_attention(q, k, v), "softmax", "lse"),
        "log_normalisers", "(out, lse)",
    ),
    "d_lse ignored": (
        of(attending(of_back=lambda d_lse, _: d_lse if d_lse is None else 0 * d_lse), "softmax",
           "vjp", "lse", "d_lse"),
        "gradients_of_normalisers", "",
    ),
    **{
        f"d_lse {name}": (
            of(attending(of_back=change), "softmax", *SEES, *OPTIONS, *BACK, "lse", "d_lse"),
            "gradients_together", "",
        )
        for name, change in (("where causal", only_plain), ("of the first head", of_first_head))
    },
    **{
        f"dropout of {name} again": (
            of(dropping(draw), "softmax", "gqa", "dropout"), "law_of_dropout", ""
        )
        for name, draw in (
            ("64 keys", period(-1, 64)), ("16 keys", period(-1, 16)), ("8 queries", period(-2, 8)),
            ("heads of a group", heads_of_a_group),
        )
    },
    **{
        f"dropout behind, {name}": (
            of(dropping(behind=behind), "softmax", *SEES, "dropout", "vjp"),
            "gradients_of_dropout",
            "",
        )
        for name, behind in (
            ("causal", lambda f, q, k, given: np.roll(f, 1, -1) if given.get("causal") else f),
            ("mask", lambda f, q, k, given: np.roll(f, 1, -2) if "mask" in given else f),
            ("groups", lambda f, q, k, given: (
                f if k.shape[:-2] == q.shape[:-2] else f[..., :1, :, :] + 0 * f)),
        )
    },
}  # fmt: skip


# Gradients.


def halved(part, when):
    """One of the output and the cotangents is halved where `when(**given)` holds."""

    def change(found, given):
        found[part] = found[part] * (0.5 if when(given) else 1.0)

    return change


def as_contiguous(found, given):
    """Read d_out without its strides."""
    if not given["d_out"].flags.c_contiguous:
        found[2] = found[2][..., ::-1, :]


def write_to_d_out(found, given):
    given["d_out"][...] = 0.0


def in_float64(found, given):
    found[1] = found[1].astype(np.float64)


def nan_of_hidden(found, given):
    if "mask" in given:
        found[1] = found[1] + 0.0 * given["k"].sum()


def clamped(found, given):
    found[2] = np.where(given["k"] < -15, 0.0, found[2])


class Counting:
    """Counts its calls."""

    def __init__(self, every=2):
        self.every, self.calls = every, 0

    def __call__(self, *_):
        """Whether this is one of so many."""
        self.calls += 1
        return self.calls % self.every == 0


def drawn(fn):
    """A way back as it is where frequencies are drawn inside."""

    def attention(q, k, v, *, num_features, seed, **options):
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        return fn(q, k, v, omega=omega.astype(q.dtype), **options)

    return attention


def once(found, given):
    """What a key takes of its places is not added."""
    counts = np.sum(given["indices"][..., None] == np.arange(given["k"].shape[-2]), -2)
    found[3] = found[3] / np.maximum(counts, 1)[..., None]


def grouped(given):
    return given["q"].shape[-3] > given["k"].shape[-3] and len(given["q"]) > 1


def back(change, fn=refattn.softmax_attention, estimator="softmax", **tags):
    return of(pulled(fn, change), estimator, "vjp", *SEES, dtype="float32", **tags)


TOKENS = "gradients_of_many_tokens"
GRADIENTS = {
    "layouts": (back(as_contiguous), "gradients_of_layouts", ""),
    "writes": (back(write_to_d_out), "gradients", ""),
    "dtype": (back(in_float64), "gradients", ""),
    "nan of hidden": (back(nan_of_hidden), "gradients_of_hidden_nonsense", ""),
    "clamped": (back(clamped, LINEAR, "linear"), "gradients_of_extreme_features", ""),
    "races": (back(halved(3, Counting(5))), "gradients_again", ""),
    "long heads": (back(halved(1, lambda x: x["q"].shape[-1] > 64)), TOKENS, ""),
    "long values": (back(halved(3, lambda x: x["v"].shape[-1] > 128)), TOKENS, ""),
    "groups": (back(halved(2, grouped)), TOKENS, ""),
    "ten heads": (back(halved(1, lambda x: x["q"].shape[:-2] == (1, 10))), "gradients", ""),
    "large ones": (
        back(halved(1, lambda x: abs(x["d_out"]).max() > 99)), "gradients_are_linear", ""
    ),
    "counted once": (
        of(pulled(refattn.sampled_key_attention, once), "sampled-uniform", "indices_only", "vjp"),
        "gradients", "",
    ),
    **{
        f"{name} drawn": (of(pulled(fn, halved(3, bool)), name, "vjp"), failing, "")
        for name, fn, failing in (
            ("lara", refattn.linear_randomized_attention, "gradients_of_means"),
            ("rfa-trigonometric", partial(RFA, features="trigonometric"), "gradients_are_slopes"),
        )
    },
    **{
        f"{name} drawn in {dtype}": (
            of(drawn(BY_NAME[f"rfa-backward-{name}"].fn), "rfa", "vjp", *SEES, dtype=dtype),
            seen_by,
            "",
        )
        for dtype in ("float32", "float64")
        for name, seen_by in {
            "delta-dropped": "gradients_of_means",
            "mask-ignored": "gradients_of_hidden",
            "cotangents-are-ones": "gradients_are_linear",
            **dict.fromkeys(
                (
                    *("normaliser-constant-for-keys", "norm-forgotten", "mask-of-first-query"),
                    *("causal-ahead", "causal-top-left", "group-not-summed", "group-interleaved"),
                    "root-missing",
                ),
                "gradients_are_slopes",
            ),
        }.items()
    },
    "the output alone": (
        of(lambda q, k, v, *, d_out=None: refattn.softmax_attention(q, k, v), "softmax", "vjp"),
        "gradients", "(out, dq, dk, dv) a ndarray",
    ),
    "without the output": (
        of(pulled(change=lambda found, given: found[1:]), "softmax", "vjp"),
        "gradients", "(out, dq, dk, dv) a tuple of 3",
    ),
    "transposed": (
        of(pulled(change=lambda found, given: [*found[:2], found[2].mT, found[3]]), "softmax",
           "vjp"),
        "gradients", "shape (6, 4) shape (4, 6)",
    ),
}  # fmt: skip


# The last bit.


def split(pieces):
    """Sums over keys in as many parts as `pieces` says."""

    def attention(q, k, v):
        done = [
            refattn.attend(q, *part, scale=q.shape[-1] ** -0.5)
            for part in zip(
                np.array_split(k, pieces(q), -2), np.array_split(v, pieces(q), -2), strict=True
            )
        ]
        while len(done) > 1:
            done = [refattn.merge(done[0], done[1]), *done[2:]]
        return done[0].out

    return attention


def last_bit(when):
    """Another last bit at every second call in which `when` holds."""
    calls = Counting()
    return lambda out, q, k, v, given: out * (1 + 2.0**-52 * (when(q, k, given) and calls()))


def of_values(calls):
    def change(found, given):
        found[3] = found[3] * (1 + 2.0**-52 * calls())

    return change


second, fourth = Counting(), Counting()
BATCH = "same_bits_in_any_batch"
BITS = {
    "by queries": (of(split(lambda q: 1 if q.shape[-2] < 8 else 3), "softmax", "batch_invariant"),
                   BATCH, ""),
    "by batch": (of(split(len), "softmax", "batch_invariant"), BATCH, ""),
    "by calls": (of(split(lambda q: 1 + second()), "softmax", "deterministic"), "same_bits", ""),
    "of gradients": (
        of(pulled(change=of_values(fourth)), "softmax", "deterministic", "vjp"), "same_bits", ""
    ),
    **{
        f"of {name}": (
            of(changed(after=last_bit(when)), "softmax", "deterministic", *SEES), "same_bits", ""
        )
        for name, when in (
            ("groups", lambda q, k, given: q.shape[-3] != k.shape[-3]),
            ("masks", lambda q, k, given: np.any(given.get("mask"))),
            ("causal", lambda q, k, given: np.any(given.get("causal"))),
        )
    },
    "of few with masks": (
        of(
            changed(after=lambda out, q, k, v, given: (
                out * (1 + 2.0**-52 * (q.shape[-2] < 8 and given.get("mask") is not None))
            )),
            "softmax", "batch_invariant", "mask",
        ),
        BATCH, "",
    ),
}  # fmt: skip


ROWS = EXACT | DRAWN | WITH_OPTIONS | GRADIENTS | BITS
LONG_ROWS = (  # over .2 s of CPU
    *("late tokens", "law of heads", "lse: one query", "lse without caps", "lse: with causal"),
    *(f"dropout of {x} again" for x in ("16 keys", "8 queries", "heads of a group")),
    "lse: groups and a mask",
)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] * (x in LONG_ROWS)) for x in ROWS]
)
@pytest.mark.usefixtures("briefly")
def test_wrong_candidates_fail(name, monkeypatch):
    """All checks that are named fail, and every word is in what the first says."""
    monkeypatch.setitem(runner.LEVELS, "quick", 300)
    adapter, checks, words = ROWS[name]
    level = "full" if checks in (TOKENS, "large_sizes") else "quick"  # which has time for all sizes
    report = check(adapter, checks=checks.split(), level=level, rng=0)
    assert failures(report) == {*checks.split()}, report
    first = report.results[0]
    said = f"{first.severity} {first.expected} {first.got} {first.statistic}"
    position = 0
    for word in words.split():
        position = said.find(word, position)
        assert position >= 0, (said, words)
    assert "\n" not in said
    assert "not taken" not in said


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [x for x in WITH_OPTIONS if "behind" in x or "gradients" in x or x.endswith("caps")]
)
def test_mistakes_of_options_fail_no_other_check(name):
    adapter, checks, _ = ROWS[name]
    names = OF_OPTIONS if "dropout" not in name else ("gradients_of_dropout", "factors_of")
    assert failures(checked(adapter, *names)) == {*checks.split()}
