"""The cause of a failed check is the one that `verify` finds in a larger call of the same kind."""

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.judge.conformance import check
from refattn.judge.conformance.checks.trials import Call, CheckRun
from refattn.judge.conformance.report import causes
from tests.judge.conformance.candidates import changed, entry, of


def against(q, k, v, options):
    return q, k, v, options | ({"bias": -options["bias"]} if "bias" in options else {})


def not_rescaled(q, k, v, size=32):
    """Online softmax whose running output is not rescaled."""
    scores = q @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
    top, total, out = np.full((*scores.shape[:-1], 1), -np.inf), 0.0, 0.0
    for j in range(0, scores.shape[-1], size):
        tile = scores[..., j : j + size]
        new = np.maximum(top, np.max(tile, -1, keepdims=True))
        weights = np.exp(tile - new)
        total = total * np.exp(top - new) + np.sum(weights, -1, keepdims=True)
        out, top = out + weights @ v[..., j : j + size, :], new
    return out / total


def in_base_2(q, k, v, *, log_decay, beta):
    log_decay = np.log(2) * log_decay
    return refattn.recurrences.gated_delta_rule(q, k, v, log_decay=log_decay, beta=beta).out


CASES = {
    "strict": (
        *(entry("linear-causal-strict"), "linear", ["causal"], "causal"),
        "a query does not see its last key",
    ),
    "against": (
        *(changed(against), "softmax", ["bias"], "biases"),
        "the bias has the wrong sign",
    ),
    "tiles": (
        *(not_rescaled, "softmax", [], "large_sizes"),
        "the running output is not rescaled when the maximum grows (tiles of 32 keys)",
    ),
    "base": (
        *(in_base_2, "gated-delta-rule", [], "reference_values"),
        "log decays are read as logarithms to base 2",
    ),
    "features": (
        *(entry("linear-elu-without-one"), "linear", [], "reference_values"),
        "features are elu(x), without + 1",
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.long("features", "against", "base")
@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_named(case):
    fn, estimator, able, name, cause = CASES[case]
    report = check(fn, estimator=estimator, capabilities=able, checks=[name])
    assert [x.partition(" ± ")[0] for x in report.diagnosis] == [f"cause: {cause}"]
    # Small problems make mistakes alike: only those of the same numbers in large ones are named.
    assert not any("nearly" in x or "bucket" in x for x in report.results[0].suspects)


def asked_about(fn, estimator, *able, **options):
    trial = CheckRun(of(fn, estimator, *able), "diagnosis", 0)
    arrays, drawn = trial.problem(3, 3, 4, 4)
    trial.case = Call(arrays, drawn | options)
    return trial, causes.ask_again(trial, [trial])


def test_nothing_is_asked_where_the_candidate_is_right():
    assert asked_about(refattn.linear_attention, "linear", "causal", causal=True)[1] == []


@pytest.mark.long
def test_a_candidate_that_is_wrong_in_more_ways_than_are_known_has_no_cause():
    """Two mistakes that no row makes at once."""

    def odd(q, k, v):
        return naive.softmax_attention(np.sin(3 * q), k, np.tanh(v))

    trial, asked = asked_about(odd, "softmax")
    assert len(asked) == 1
    assert causes.name_cause(trial, asked) == []


def test_numbers_are_the_same_to_rounding():
    _, (asked,) = asked_about(entry("linear-causal-strict"), "linear", "causal", causal=True)
    fns = {x: of(entry(x), "linear", "causal") for x in BUGS}
    assert {x: asked.is_given_by(fn) for x, fn in fns.items()} == BUGS


BUGS = {"linear-causal-strict": True, "linear-causal-bucket-excluded": False}


def third_keys(q, k, v):
    return refattn.softmax_attention(
        q, k, v, bias=np.log(1 - (np.arange(k.shape[-2]) % 3 == 0) / 2)
    )


def test_mistakes_of_a_user_are_tried(tmp_path):
    """A file that cannot be read is refused before anything runs."""
    path = tmp_path / "mine.diff"
    path.write_text(
        "third: softmax\nEvery third key has half of its weight.\n@ softmax_attention\n"
        "- hide(s, seen)\n+ hide(s - math.log(2) * (integers(0, k.shape[-2], q) % 3 == 0), seen)\n"
    )
    asked = {"estimator": "softmax", "checks": ["reference_values"], "rng": 0}
    found = check(third_keys, **asked, mistakes=path)
    assert found.diagnosis == ["cause: every third key has half of its weight"]
    path.write_text("third")
    with pytest.raises(ValueError, match=r"mine\.diff: third: a row must"):
        check(third_keys, **asked, mistakes=path)


def of_queries(q, k, v, **options):
    return naive.softmax_attention(q, k, v)


def never_forgotten(q, k, v, *, log_decay, beta):
    return refattn.recurrences.gated_delta_rule(
        q, k, v, log_decay=-1.0 + 0 * log_decay, beta=beta
    ).out


def black_box(q, k, v, *, num_features, seed, causal=False):
    return refattn.random_feature_attention(q, k, v, num_features=num_features, rng=seed)


def without_d_lse(q, k, v, *, d_out=None, d_lse=None, return_lse=False):
    if d_out is None:
        out, lse, *_ = refattn.attend(q, k, v)
        return (out, lse) if return_lse else out
    out, pull = refattn.vjp(refattn.softmax_attention, q, k, v)
    return (out, *pull(d_out)[:3])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("fn", "estimator", "able", "names", "ignored"),
    [
        (never_forgotten, "gated-delta-rule", [], ["reference_values"], "log_decay"),
        (black_box, "rfa", ["causal"], ["future_unseen"], "causal"),
        (without_d_lse, "softmax", ["lse", "vjp", "d_lse"], ["gradients_of_normalisers"], "d_lse"),
    ],
)
def test_an_option_that_is_ignored_is_the_cause(fn, estimator, able, names, ignored):
    report = check(of(fn, estimator, *able), checks=names, rng=0)
    (found,) = report.diagnosis
    assert found.startswith(f"cause: `{ignored}` is ignored: results do not depend on it")


def test_beside_what_an_option_is_ignored_is_said():
    def either(q, k, v, *, causal=False, mask=None):
        options = {"causal": True} if causal else {"mask": mask}
        return naive.softmax_attention(q, k, v, **options)

    trial = CheckRun(of(either, "softmax", "causal", "mask"), "mask_with_causal", 0)
    arrays, mask = tuple(np.random.default_rng(0).standard_normal((3, 5, 4))), np.eye(5) > 0
    trial.case = Call(arrays, {"causal": True, "mask": mask})
    (found,) = causes.name_ignored(trial, [trial])
    assert found.endswith("`mask` is ignored: results do not depend on it, in calls with `causal`")


def test_a_default_of_the_same_value_is_not_ignored():
    def always(q, k, v, *, causal=True):
        return naive.softmax_attention(q, k, v, causal=causal) + 1

    trial = CheckRun(of(always, "softmax", "causal"), "causal", 0)
    trial.case = Call(tuple(np.random.default_rng(0).standard_normal((3, 5, 4))), {"causal": True})
    assert [*causes.name_ignored(trial, [trial])] == []


def test_an_option_without_effect_is_not_called_ignored():
    """A mask that hides nothing, in a call that is wrong in another way."""
    arrays = tuple(np.random.default_rng(0).standard_normal((3, 5, 4)))
    trial = CheckRun(of(of_queries, "softmax", "mask"), "mask", 0)
    for mask, said in ((np.ones((5, 5), bool), 0), (np.eye(5, dtype=bool), 1)):
        trial.case = Call(arrays, {"mask": mask})
        assert len([*causes.name_ignored(trial, [trial])]) == said
