"""The package's own pullbacks of few keys, and of near and far, pass the checks of gradients."""

from functools import partial

import pytest

import refattn
from refattn.conformance import Adapter, check, checks_of
from refattn.estimators.key_sampling import draw_keys
from refattn.gradients import vjp


def with_pullback(fn, **fixed):
    """The package's own function, with `d_out`."""

    def attention(q, k, v, *, d_out=None, **options):
        if "seed" in options:
            options["rng"] = options.pop("seed")
        if d_out is None:
            return fn(q, k, v, **fixed, **options)
        out, pullback = vjp(fn, q, k, v, **fixed, **options)
        return (out, *pullback(d_out)[:3])

    return attention


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
    adapter = Adapter(fn, estimator, ("vjp", *takes))
    names = [x.name for x in checks_of(adapter) if x.name.startswith("gradients")]
    report = check(adapter, checks=names, rng=0)
    assert report.verdict == "PASS", report
