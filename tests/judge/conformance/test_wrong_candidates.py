"""Wrong candidates fail the checks that are for their mistake, and the report says where."""

import json
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import conformance, naive
from refattn.judge.conformance import check, checks_of
from refattn.judge.conformance.report import runner
from refattn.judge.mistakes.defects import MUTANTS
from tests.judge.conformance import candidates
from tests.judge.conformance.candidates import (
    BY_NAME,
    catalogued,
    changed,
    checked,
    declared,
    failures,
)
from validation import kills

KILLS = json.loads(kills.FILE.read_text("utf-8"))


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


# Checks without a defect that they alone reject, by why they are made all the same.
JUSTIFIED = {
    "says at once what is assumed, or loses digits": "value_length large_logits",
    "needs no reference, whose errors would show": "order_of_keys one_frequency calls_apart "
    "mean_over_frequencies all_keys order_of_given_keys merged_parts outside_of_windows",
    "of a black box, and without a reference": "queries_apart heads_apart visible_part "
    "masked_keys_unseen future_unseen gradients_of_means gradients_are_linear",
    "all there is of the formula, or of gradients, of a black box": "recovered_values one_function "
    "two_proposals gradients_are_slopes gradients_of_hidden gradients_of_hidden_nonsense",
    "a law of a black box where others do not apply": "target_law masked_target_law long_vectors "
    "causal_target_law proposal_noise feature_average unbiased mean_of_samples given_moments_law",
    "tells one use from uses together": "mask mask_broadcasts causal mask_with_causal "
    "batches_of_rows grouped_heads grouped_values frequencies_of_heads keys_of_heads "
    "keys_given_again windows soft_caps weights_of_sinks biases factors_of_dropout",
    "the plainest case, of which the report can be read": "reference_values gradients "
    "gradients_of_extreme_features query_without_keys",
    "of what the catalogue does not have": "same_bits same_bits_in_any_batch log_normalisers "
    "given_moments_weights normaliser_without_keys gradients_of_normalisers gradients_of_layouts "
    "gradients_again",
    "an identity whatever the conventions are, or of states": "tokens_one_by_one "
    "later_tokens_unseen packed_apart state_handed_over states extreme_decays",
    "rejects nothing: it says what is not tested": "unseen_law unseen_weights",
}


def test_every_check_is_needed():
    alone = {k[0] for found in KILLS.values() for k in found.values() if len(k) == 1}
    assert set(conformance.CHECKS) - alone == {*" ".join(JUSTIFIED.values()).split()}


def test_there_are_mistakes_of_gradients_enough():
    back = [m for m in MUTANTS if "vjp" in m.capabilities]
    assert len({(m.estimator, m.fn.over, m.fn.edits) for m in back}) == len(back) >= 40
    assert all(m.effect for m in back)


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
    """And those that are given keys or frequencies by another check, where there is one."""
    for mutant in MUTANTS:
        if "-given" in mutant.name:
            yield pytest.param(mutant, killers(mutant)[-1], id=f"{mutant.name}-again")
        words = {*mutant.name.split("-")}
        long = (words & LONG or cheapest(killers(mutant)) in LONG_CHECKS) and (
            mutant.name not in SHORT
        )
        soak = words & {"coreset", "sampled"}
        marks = pytest.mark.soak if soak else [pytest.mark.long] * bool(long)
        yield pytest.param(mutant, cheapest(killers(mutant)), marks=marks, id=mutant.name)


@pytest.mark.sweep(12)
@pytest.mark.long("seed", "r", "p", "shared", "log2e", "correlated")
@pytest.mark.parametrize(("mutant", "name"), [*defects()])
@pytest.mark.usefixtures("briefly")
def test_defects_fail(mutant, name, monkeypatch):
    """By one check that rejects it, an identity where there is one, at another seed."""
    if mutant.name in SHORT:
        monkeypatch.setitem(runner.LEVELS, "quick", 300)
    level = "full" if name == "large_sizes" else "quick"  # which has time for all sizes
    report = check(catalogued(mutant.name), checks=[name], level=level, rng=1)
    assert report.verdict == "FAIL", str(report)
    assert report.results[0].reproducer


@pytest.mark.long
def test_the_own_proposal_of_lara_is_told_from_the_mixture():
    """The distribution functions are .12 apart; 2,000 seeds show .083: power > .99."""
    own = candidates.seeded(partial(refattn.linear_randomized_attention, weighting="own"))
    report = check(
        own, estimator="lara", tags={"centres": "chunks"}, checks=["proposal_average"], rng=3
    )
    assert report.verdict == "FAIL"


@pytest.mark.parametrize(("power", "verdict"), [(1, "PASS"), (-1, "FAIL"), (0, "FAIL")])
def test_importance_weights_of_given_moments(power, verdict):
    def weighed(q, k, v, *, num_features, seed, mean=None, cov=None):
        proposal = None if mean is None else refattn.sampling.Gaussian(mean, cov)
        omega, log_weight = refattn.sampling.draw(num_features, 3, proposal=proposal, rng=seed)
        weights = {"log_weight": power * log_weight}
        return refattn.random_feature_attention(q, k, v, omega=omega, **weights)

    names = ["given_moments_weights"]
    report = check(weighed, estimator="rfa", capabilities=["moments"], checks=names, rng=2)
    assert report.verdict == verdict, str(report)


def test_no_lara_passes_whose_weights_cannot_be_tested():
    def tested(*capabilities, **tags):
        lara = conformance.Adapter(len, "lara", capabilities, tags)
        return {x.name for x in checks_of(lara)} & {"proposal_average", "unseen_weights"}

    assert tested() == tested(centres="chunks", dtype="float16") == {"unseen_weights"}
    assert tested(centres="chunks") == {"proposal_average"}
    assert tested("omega") == tested("omega_only") == set()
    lara = refattn.linear_randomized_attention
    report = check(lara, estimator="lara", checks=["unseen_weights"])
    assert report.verdict == "UNDERPOWERED"
    assert "no error would be detected, however large" in str(report)
    assert "add --tag centres=chunks" in report.advice


# Those that are written here, of which `wrong_candidates.txt` is the table.


def broken(result):
    return lambda q, k, v: result(refattn.softmax_attention(q, k, v))


def raising(q, k, v):
    raise RuntimeError("no\nGPU")


def every_64th(out, *_):
    out[..., 63::64, :] = out[..., 62::64, :][..., : out[..., 63::64, :].shape[-2], :]
    return out


def rows_of_groups(seen, q, k, options):
    """Every second query head of a group sees the future."""
    shared = options.get("causal") and q.ndim > 2 and q.shape[-3] != k.shape[-3]
    mask = True if options.get("mask") is None else options["mask"]
    odd = np.arange(q.shape[-3])[:, None, None] % 2 == 1 if shared else False
    return np.where(odd, mask, seen)


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


OMEGA = np.random.default_rng(0).standard_normal((32, 8))


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


# Options and log normalisers, forth and back.


def of_one(name, change):
    """Edits the cotangent of a bias or of sinks."""

    def edit(found, given):
        names = [x for x in ("bias", "sinks") if given.get(x) is not None]
        if name in names:
            found[4 + names.index(name)] = change(found[4 + names.index(name)])

    return edit


def more_when(when):
    """Log normalisers that are larger in some calls."""
    return candidates.attending(
        of_lse=lambda lse, q, k, options: lse + 1.0 * bool(when(q, k, options))
    )


def period(axis, length):
    """Random numbers that come again after some."""
    return lambda u: np.take(u, np.arange(u.shape[axis]) % length, axis) if u.ndim > 2 else u


def halved(part, when):
    """One of the output and the cotangents is halved where `when(**given)` holds."""

    def change(found, given):
        found[part] = found[part] * (0.5 if when(given) else 1.0)

    return change


class Counting:
    """Counts its calls."""

    def __init__(self, every=2):
        self.every, self.calls = every, 0

    def __call__(self, *_):
        """Whether this is one of so many."""
        self.calls += 1
        return self.calls % self.every == 0


def drawn(name):
    """A way back of the catalogue as it is where frequencies are drawn inside."""
    fn = BY_NAME[f"rfa-backward-{name}"].fn

    def attention(q, k, v, *, num_features, seed, **options):
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        return fn(q, k, v, omega=omega.astype(q.dtype), **options)

    return attention


def once(found, given):
    """What a key takes of its places is not added."""
    counts = np.sum(given["indices"][..., None] == np.arange(given["k"].shape[-2]), -2)
    found[3] = found[3] / np.maximum(counts, 1)[..., None]


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


def last_bit(when, every=2):
    """Another last bit at every second call in which `when` holds."""
    calls = Counting(every)
    return changed(
        after=lambda out, q, k, v, options: out * (1 + 2.0**-52 * (when(q, k, options) and calls()))
    )


def table():
    for name, *rest in candidates.rows("conformance/wrong_candidates.txt"):
        long = [pytest.mark.long] * name.endswith(" (long)")
        yield pytest.param(*rest, id=name, marks=long)


@pytest.mark.sweep(12)
@pytest.mark.long("lse of a window and a cap", "dropout of 64 keys again")
@pytest.mark.parametrize(("fn", "words", "checks", "said"), [*table()])
@pytest.mark.usefixtures("briefly")
def test_wrong_candidates_fail(fn, words, checks, said, monkeypatch):
    """All checks that are named fail, and the first says all the words, in their order."""
    monkeypatch.setitem(runner.LEVELS, "quick", 300)
    level = "full" if checks in ("gradients_of_many_tokens", "large_sizes") else "quick"  # has time
    report = check(declared(fn, words, globals()), checks=checks.split(), level=level, rng=0)
    assert failures(report) == {*checks.split()}, report
    first = report.results[0]
    message = f"{first.severity} {first.expected} {first.got} {first.statistic}"
    position = 0
    for word in said.split():
        position = message.find(word, position)
        assert position >= 0, (message, said)
    assert "\n" not in message
    assert "not taken" not in message


@pytest.mark.long
@pytest.mark.parametrize(
    ("fn", "words", "checks", "said"),
    [x for x in table() if " behind" in x.id or "gradient of" in x.id],
)
def test_mistakes_of_options_fail_no_other_check(fn, words, checks, said):
    names = ("gradients_of_dropout", "factors_of") if "dropout" in words else candidates.OF_OPTIONS
    assert failures(checked(declared(fn, words, globals()), *names)) == {*checks.split()}
