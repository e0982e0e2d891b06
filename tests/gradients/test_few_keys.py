"""The package's own pullbacks of few keys, and of near and far, pass the checks of gradients."""

from functools import partial

import pytest

import refattn
from refattn.estimators.key_sampling import draw_keys
from tests.conformance.checks.test_gradients import gradients, with_pullback


def drawing(law):
    """A sample of keys, drawn first: a constant of the pullback."""

    def attention(q, k, v, *, num_keys, seed, d_out=None, **options):
        drawn = draw_keys(q, k, v, num_keys=num_keys, law=law, rng=seed, **options)
        fn = partial(refattn.sampled_key_attention, **drawn._asdict(), **options)
        return with_pullback(fn)(q, k, v, d_out=d_out)

    return attention


local = with_pullback(refattn.local_random_feature_attention, window=(8, 8))
mean = with_pullback(refattn.eva_attention, sampled=False)
published = with_pullback(refattn.eva_attention, sampled=False, log_size=False)


@pytest.mark.long("local", "eva", "second")
@pytest.mark.parametrize(
    ("estimator", "fn", "takes"),
    [
        ("rfa-local", local, ("mask", "causal", "gqa", "omega", "omega_per_head")),
        ("eva", mean, ("causal", "gqa")),
        ("eva-published", published, ("causal", "gqa")),
        ("eva-sampled", with_pullback(refattn.eva_attention), ("causal", "gqa")),
        ("second-order", with_pullback(refattn.second_order_attention), ("causal", "gqa")),
        ("sampled-uniform", drawing("uniform"), ("gqa",)),
        ("sampled-softmax", drawing("softmax"), ("gqa",)),
    ],
)
def test_own_pullbacks_pass_the_checks_of_gradients(estimator, fn, takes):
    report = gradients(fn, estimator, *takes)
    assert report.verdict == "PASS", report
