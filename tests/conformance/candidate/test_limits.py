"""What a candidate is declared to take is all that it is asked; defects within it still show."""

import numpy as np
import pytest

import refattn
from refattn.conformance import CHECKS, SPECS, TAGS, Adapter, check
from refattn.conformance.candidate.failures import Beyond
from refattn.conformance.truth import reference

ABLE = ("mask", "causal", "gqa")
RNG = np.random.default_rng(0)
OMEGA = RNG.standard_normal((32, 8))


def only(condition):
    if not condition:
        raise ValueError("not taken")


def softmax(taken, **fixed):
    """Exact attention that takes some problems only."""

    def attention(q, k, v, **options):
        only(taken(q, k, v))
        return refattn.softmax_attention(q, k, v, **options, **fixed)

    return attention


def size(q, k, v):
    return q.shape[-1] in (64, 128)


def multiple(q, k, v):
    return q.shape[-2] % 64 == 0 and k.shape[-2] % 64 == 0


def square(q, k, v):
    return bool(q.shape[-2] == k.shape[-2])


def same_length(q, k, v):
    return bool(q.shape[-1] == v.shape[-1])


def everything(q, k, v):
    return size(q, k, v) and multiple(q, k, v) and square(q, k, v) and same_length(q, k, v)


def small(q, k, v):
    k = np.repeat(k, q.shape[-3] // k.shape[-3], -3) if k.ndim > 2 else k
    with np.errstate(invalid="ignore"):
        logits = np.abs(q @ np.swapaxes(k, -1, -2)) / np.sqrt(q.shape[-1])
    return bool(np.nanmax(logits, initial=0.0) <= 20)


def empty_rows(value):
    """Exact attention that gives queries without keys something else than 0."""

    def attention(q, k, v, mask=True, causal=False):
        n, m = q.shape[-2], k.shape[-2]
        seen = mask & np.tri(n, m, m - n if causal else m, dtype=bool)
        out = refattn.softmax_attention(q, k, v, mask=seen)
        return np.where(np.any(seen, -1)[..., None], out, value(v))

    return attention


def mean_of_all(v):
    return np.mean(v, -2, keepdims=True)


def at_omega(q, k, v, omega, **options):
    return refattn.random_feature_attention(q, k, v, omega=omega, **options)


def frozen(q, k, v, **options):
    only(q.shape[-1] == 8)
    return refattn.random_feature_attention(q, k, v, omega=OMEGA, **options)


def orthogonal(q, k, v, *, num_features, seed, **options):
    only(q.shape[-1] == 16)
    return refattn.random_feature_attention(
        q, k, v, num_features=num_features, rng=seed, coupling="orthogonal", **options
    )


def causal_ra(q, k, v, **options):
    only(q.shape[-1] == 8)
    given = {"rng" if name == "seed" else name: x for name, x in options.items()}
    return refattn.randomized_attention(q, k, v, causal=True, **given)


def shifted(q, k, v, *, num_features, seed, mean=None, cov=None):
    only(q.shape[-1] == 16)
    omega = np.random.default_rng(seed).standard_normal((num_features, 16))
    if mean is not None:
        omega = mean + omega @ np.linalg.cholesky(cov).T
    return refattn.random_feature_attention(q, k, v, omega=omega)


def elu(q, k, v, **options):
    only(q.shape[-1] == 16)
    return refattn.linear_attention(q, k, v, **options)


def lara(q, k, v, *, num_proposals, seed, **options):
    only(q.shape[-2] % 8 == 0 and k.shape[-2] % 8 == 0)
    return refattn.linear_randomized_attention(
        q, k, v, num_proposals=num_proposals, rng=seed, **options
    )


def causal_lara(q, k, v, *, num_proposals, seed):
    return refattn.linear_randomized_attention(
        q, k, v, num_proposals=num_proposals, rng=seed, causal=True
    )


def top_left(q, k, v):
    """Always causal, aligned at the first token."""
    return refattn.softmax_attention(q, k, v, mask=np.tri(q.shape[-2], k.shape[-2], dtype=bool))


LIMITED = {
    "head sizes": (softmax(size), "softmax", ABLE, {"head_sizes": (64, 128)}),
    "multiple": (softmax(multiple), "softmax", ABLE, {"multiple_of": 64}),
    "square": (softmax(square), "softmax", ABLE, {"self_attention": True}),
    "same length": (softmax(same_length), "softmax", ABLE, {"same_value_size": True}),
    "causal": (
        softmax(lambda q, k, v: True, causal=True),
        "softmax",
        ("mask", "gqa"),
        {"causal_only": True},
    ),
    "everything": (
        softmax(everything, causal=True),
        "softmax",
        ("mask",),
        {
            "head_sizes": "64,128",
            "multiple_of": "64",
            "self_attention": "true",
            "same_value_size": "true",
            "causal_only": "true",
        },
    ),
    "nan": (empty_rows(lambda v: np.nan), "softmax", ABLE[:2], {"empty_rows": "nan"}),
    "mean": (empty_rows(mean_of_all), "softmax", ABLE[:2], {"empty_rows": "mean"}),
    "undefined": (empty_rows(lambda v: 3.0), "softmax", ABLE[:2], {"empty_rows": "undefined"}),
    "logits": (softmax(small), "softmax", ABLE, {"max_logit": 20}),
    "omega only": (at_omega, "rfa", (*ABLE, "omega_only", "omega_per_head"), {}),
    "frozen": (frozen, "rfa", ABLE, {"fixed_frequencies": True, "head_sizes": 8}),
    "orthogonal": (orthogonal, "rfa", ABLE, {"head_sizes": 16, "coupling": "orthogonal"}),
    "elu": (elu, "linear", ABLE, {"head_sizes": 16}),
    "moments of frequencies": (shifted, "rfa", ("moments",), {"head_sizes": 16}),
    "LARA": (lara, "lara", ("mask",), {"multiple_of": 8}),
    "causal LARA": (causal_lara, "lara", (), {"causal_only": True}),
    "top-left": (top_left, "softmax", (), {"causal_only": True, "causal": "top-left"}),
    "causal RA": (
        causal_ra,
        "ra",
        ("omega",),
        {"causal_only": True, "self_attention": True, "head_sizes": 8},
    ),
}


@pytest.mark.soak(
    *("head sizes", "multiple", "omega only", "orthogonal", "moments of frequencies", "logits"),
    *("square", "mean", "undefined", "causal LARA", "LARA", "elu", "causal RA"),
)
@pytest.mark.long(
    "everything",
    "head sizes",
    "multiple",
    "omega only",
    "causal RA",
    "orthogonal",
    "LARA",
    "causal LARA",
    "moments of frequencies",
    "logits",
    "undefined",
    "elu",
    "mean",
    "nan",
    "square",
    "causal",
    "same length",
)
@pytest.mark.parametrize("name", LIMITED)
def test_correct_candidates_are_asked_no_more_than_they_take(name):
    fn, estimator, capabilities, tags = LIMITED[name]
    report = check(fn, estimator=estimator, capabilities=capabilities, tags=tags)
    assert report.verdict != "FAIL", str(report)
    assert any(r.check == "contract" and r.status == "PASS" for r in report.results)


# Those that take a call without what they declare, and give another result or none is wrong.
IDLE = ("causal", "omega only", "causal LARA", "top-left")


@pytest.mark.parametrize("name", [n for n in LIMITED if n not in IDLE])
def test_undeclared_it_fails(name):
    """Else the declaration would be idle, and the test above with it."""
    fn, estimator, capabilities, tags = LIMITED[name]
    first = ["contract", "reference_values", "query_without_keys", "value_length", "large_logits"]
    kept = {k: x for k, x in tags.items() if k in ("causal_only", "coupling")}
    adapter = Adapter(fn, estimator, capabilities, kept)
    names = [c.name for c in refattn.conformance.checks_of(adapter) if c.name in first]
    assert check(adapter, checks=names).verdict == "FAIL"


def late_coordinate(q, k, v, **options):
    """Coordinates from 40 on are left out."""
    return softmax(size)(np.where(np.arange(q.shape[-1]) < 40, q, 0.0), k, v, **options)


def last_of_block(q, k, v, **options):
    """The last query of each 64 gets the result of another."""
    out = np.array(softmax(multiple)(q, k, v, **options))
    out[..., 63::64, :] = out[..., 62::64, :]
    return out


def off_by_one(q, k, v, mask=None):
    """Causal, but a query sees the next key too."""
    n, m = q.shape[-2], k.shape[-2]
    seen = np.tri(n, m, m - n + 1, dtype=bool) & (True if mask is None else mask)
    return refattn.softmax_attention(q, k, v, mask=seen)


def half_empty(v):
    return np.where(np.arange(v.shape[-1]) % 2, np.nan, 0.0)


def wrong_scale(q, k, v, omega):
    return refattn.random_feature_attention(q, k, v, omega=omega, scale=1.0)


def frozen_without_bias(q, k, v):
    """Features of keys without -|k|^2 / 2 weigh some values negatively after a shift."""
    omega = OMEGA * 8**-0.25
    a, b = np.exp(q @ omega.T), np.exp(np.swapaxes(k @ omega.T, -1, -2)) - 0.5
    kernel = a @ b
    return kernel @ v / np.sum(kernel, -1, keepdims=True)


WRONG = {
    "coordinate": (late_coordinate, "softmax", (), {"head_sizes": (64, 128)}),
    "block": (last_of_block, "softmax", (), {"multiple_of": 64}),
    "future": (off_by_one, "softmax", ("mask",), {"causal_only": True}),
    "empty": (empty_rows(half_empty), "softmax", ("mask",), {"empty_rows": "nan"}),
    "zero for nan": (empty_rows(lambda v: 0.0), "softmax", ("mask",), {"empty_rows": "nan"}),
    "zero for mean": (empty_rows(lambda v: 0.0), "softmax", ("mask",), {"empty_rows": "mean"}),
    "scale": (wrong_scale, "rfa", ("omega_only",), {}),
    "frozen": (frozen_without_bias, "rfa", (), {"fixed_frequencies": True, "head_sizes": 8}),
}


@pytest.mark.parametrize("name", WRONG)
def test_defects_within_the_limits_show(name):
    fn, estimator, capabilities, tags = WRONG[name]
    report = check(fn, estimator=estimator, capabilities=capabilities, tags=tags)
    assert report.verdict == "FAIL", str(report)
    assert all("not taken" not in r.got for r in report.results), str(report)


def test_a_verdict_names_its_limits():
    adapter = Adapter(
        frozen, "rfa", ABLE, {"fixed_frequencies": "yes", "head_sizes": "8", "epsilon": 0.0}
    )
    assert adapter.limits == {
        "head_sizes=8": "no other length of queries and keys was asked",
        "fixed_frequencies=true": "the law of its frequencies was not tested",
    }
    report = check(adapter, checks=["contract"])
    assert "needs frequencies of its own for each seed" in report.not_tried["frequency_law"]


def test_nothing_asked_is_no_pass():
    """Where the limits leave no case of a check, it is not tried."""
    adapter = Adapter(refattn.softmax_attention, "softmax", ["mask"], {"max_logit": 0.5})
    report = check(adapter, checks=["heads_of_other_size"])
    assert report.results == []
    assert report.verdict == "UNDERPOWERED"
    assert report.not_tried["heads_of_other_size"] == "beyond the declared `max_logit`"


@pytest.mark.parametrize(
    ("estimator", "tags", "words"),
    [
        ("softmax", {"head_sizes": "64,x"}, "positive integers"),
        ("softmax", {"head_sizes": 0}, "positive integers"),
        ("softmax", {"multiple_of": 0}, "positive integer"),
        ("softmax", {"multiple_of": 1.5}, "positive integer"),
        ("softmax", {"self_attention": "maybe"}, "true or false"),
        ("softmax", {"empty_rows": "one"}, "empty_rows"),
        ("softmax", {"max_logit": 0}, "max_logit"),
        ("softmax", {"fixed_frequencies": True}, "no frequencies are drawn"),
        ("lara", {"fixed_frequencies": True, "x": 1}, "tags"),
        ("kernel", {"self_attention": True}, "kernel"),
        ("moments", {"head_sizes": 64}, "moments"),
    ],
)
def test_unusable_limits(estimator, tags, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Adapter(len, estimator, (), tags)


@pytest.mark.parametrize("name", SPECS)
def test_bundles_are_of_known_tags(name):
    assert set(SPECS[name]) <= set(TAGS)
    Adapter(len, "softmax", (), SPECS[name])


def test_what_the_limits_leave_is_compared():
    """Logits are made small enough; every check with ordinary numbers is made."""
    adapter = Adapter(softmax(small), "softmax", ABLE, {"max_logit": 20})
    names = ["reference_values", "large_logits", "mask", "causal", "grouped_heads", "value_length"]
    report = check(adapter, checks=names)
    assert [r.check for r in report.results if r.status == "PASS"] == [
        name for name in CHECKS if name in names
    ]


def test_causal_attention_is_not_moved():
    """Tokens that are added must leave the alignment, or nothing is asked."""
    q, k, v = (RNG.standard_normal((n, 4)) for n in (7, 4, 4))
    for tags in ({"multiple_of": 8, "causal": "top-left"}, {"multiple_of": 8}):
        adapter = Adapter(refattn.softmax_attention, "softmax", ["causal"], tags)
        with pytest.raises(Beyond, match="multiple_of"):
            adapter(q, k, v, causal=True)


def test_logits_of_every_head_count():
    adapter = Adapter(refattn.softmax_attention, "softmax", ["gqa"], {"max_logit": 10})
    q, k = np.ones((4, 2, 4)), np.ones((2, 3, 4))
    k[1] *= 30
    with pytest.raises(Beyond, match="max_logit"):
        adapter(q, k, np.ones((2, 3, 4)))


def test_tolerances_are_of_the_keys_that_queries_see():
    """Aligned at the first token, the first query sees one key, and that of a small feature."""
    q, k, v = np.zeros((2, 1)), np.array([[-8.0], [0.0], [0.0]]), np.ones((3, 1))

    def allowed(alignment):
        tags = {"causal": alignment, "epsilon": 1e-6}
        adapter = Adapter(refattn.linear_attention, "linear", {"causal"}, tags)
        seen = adapter.visible(2, 3, {"causal": True, "mask": np.array([True, True, False])})
        assert np.sum(seen, -1).tolist() == ([1, 2] if alignment == "top-left" else [2, 2])
        return reference.declared(adapter, (q, k, v), {"causal": True})

    assert allowed("top-left") == pytest.approx(2 * 2e-6 / np.exp(-8), rel=1e-2)
    assert allowed("bottom-right") == pytest.approx(2 * 4e-6, rel=1e-2)


@pytest.mark.parametrize("mask", [None, np.array([True, False, True]), np.ones((2, 3), bool)])
def test_tolerances_of_frequencies_of_each_query(mask):
    """The largest weight of a query is 1 for each of its frequencies, whatever it sees."""
    rng = np.random.default_rng(0)
    q, k, v = np.zeros((2, 1)), np.zeros((3, 1)), np.ones((3, 1))
    adapter = Adapter(refattn.randomized_attention, "ra", {"omega", "causal"}, {"epsilon": 1e-6})
    options = {"omega": rng.standard_normal((2, 5, 1)), "causal": True}
    if mask is not None:
        options["mask"] = mask
    seen = np.sum(adapter.visible(2, 3, options), -1)
    # Each key adds an epsilon, and so does the sum of each frequency, of which there may be a mean.
    want = max((count + len(options["omega"])) / count for count in seen)
    assert reference.declared(adapter, (q, k, v), options) == pytest.approx(2e-6 * want)


def test_sums_of_keys_that_come_many_times():
    """Five keys come 64 times each to a kernel of blocks, which adds them in turn."""

    def running(q, k, v):
        only(multiple(q, k, v))
        scores = np.einsum("...id,...jd->...ij", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - np.max(scores, -1, keepdims=True))
        return np.einsum("...ij,...jv->...iv", weights, v) / np.sum(weights, -1, keepdims=True)

    for seed in range(30):
        report = check(
            running,
            estimator="softmax",
            tags={"multiple_of": 64},
            rng=seed,
            checks=["value_length"],
        )
        assert report.verdict == "PASS", (seed, report)


def beside(window=(8, 8), **fixed):
    """Features beside a window, perhaps causal whatever is asked, perhaps of some sizes only."""

    def attention(q, k, v, *, seed=None, **options):
        options = {name: x for name, x in options.items() if name not in fixed}
        local = refattn.local_random_feature_attention
        return local(q, k, v, window=window, rng=seed, **options, **fixed)

    return attention


def in_fours(q, k, v, **options):
    only(q.shape[-2] % 4 == 0 == k.shape[-2] % 4)
    return beside()(q, k, v, **options)


def summed_up(q, k, v, **options):
    return refattn.eva_attention(q, k, v, sampled=False, **options | {"causal": True})


def top_left(q, k, v, *, causal=False, **options):
    """Summaries of chunks whose query i is level with key i."""
    n, m = q.shape[-2], k.shape[-2]
    if causal and n < m:
        k, v = k[..., :n, :], v[..., :n, :]
    if causal and n > m:
        k, v = (np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n - m), (0, 0)]) for x in (k, v))
        options["mask"] = np.arange(n) < m
    return refattn.eva_attention(q, k, v, sampled=False, causal=causal, **options)


PLACES = {
    "causal": (beside(causal=True), "rfa-local", ("omega", "mask"), {"causal_only": True}),
    "fours": (in_fours, "rfa-local", ("omega", "causal"), {"multiple_of": 4}),
    "chunks": (summed_up, "eva", ("causal",), {"causal_only": True}),
    "corner": (top_left, "eva", ("causal",), {"causal": "top-left"}),
}


@pytest.mark.long("causal", "fours")
@pytest.mark.parametrize("name", PLACES)
def test_near_keys_are_not_asked_at_other_places(name):
    fn, estimator, capabilities, tags = PLACES[name]
    report = check(fn, estimator=estimator, capabilities=capabilities, tags=tags)
    assert report.verdict == "PASS", str(report)
    passed = {x.check for x in report.results if x.status == "PASS"}
    assert {"reference_values", "causal", "future_unseen"} <= passed
    if "causal_only" in tags:
        assert {"value_length", "large_logits", "heads_apart", "weighted_mean"} <= passed


@pytest.mark.parametrize("sides", [(7, 8), (9, 8)])
def test_other_windows_within_the_limits_show(sides):
    report = check(
        beside(sides, causal=True),
        estimator="rfa-local",
        capabilities=("omega",),
        tags={"causal_only": True},
        checks=["reference_values", "causal"],
    )
    assert report.verdict == "FAIL"
