"""The package's own pullbacks of few keys, and of near and far, pass the checks of gradients."""

from functools import partial

import pytest

import refattn
from refattn.conformance import Adapter, check, checks_of
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


def verdict(fn, estimator, *capabilities):
    adapter = Adapter(fn, estimator, ("vjp", *capabilities))
    names = [x.name for x in checks_of(adapter) if x.name.startswith("gradients")]
    return check(adapter, checks=names, rng=0)


def drawing(law):
    """A sample of keys, drawn first: a constant of the pullback."""

    def attention(q, k, v, *, num_keys, seed, d_out=None, **options):
        drawn = refattn.estimators.key_sampling.draw_keys(
            q, k, v, num_keys=num_keys, law=law, rng=seed, **options
        )
        fn = partial(refattn.sampled_key_attention, **drawn._asdict(), **options)
        return with_pullback(fn)(q, k, v, d_out=d_out)

    return attention


OWN = {
    "rfa-local": (
        refattn.local_random_feature_attention,
        {"window": (8, 8)},
        ("mask", "causal", "gqa", "omega", "omega_per_head"),
    ),
    "eva": (refattn.eva_attention, {"sampled": False}, ("causal", "gqa")),
    "eva-published": (
        refattn.eva_attention,
        {"sampled": False, "log_size": False},
        ("causal", "gqa"),
    ),
    "eva-sampled": (refattn.eva_attention, {}, ("causal", "gqa")),
    "second-order": (refattn.second_order_attention, {}, ("causal", "gqa")),
}


@pytest.mark.long("published")
@pytest.mark.parametrize("name", OWN)
def test_conformance_of_near_and_far(name):
    fn, fixed, capabilities = OWN[name]
    report = verdict(with_pullback(fn, **fixed), name, *capabilities)
    assert report.verdict == "PASS", report


@pytest.mark.parametrize("law", ["uniform", "softmax"])
def test_conformance_of_samples(law):
    report = verdict(drawing(law), f"sampled-{law}", "gqa")
    assert report.verdict == "PASS", report
