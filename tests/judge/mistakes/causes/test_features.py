"""Wrong kernels of linear attention and of random features: their weights tell the cause."""

import numpy as np
import pytest

from refattn.judge import verify

N, D = 96, 8
Q, K, V = np.random.default_rng(7).standard_normal((3, 1, N, D)).astype("f4")
OMEGA = np.random.default_rng(8).standard_normal((32, D)).astype("f4")
AHEAD = np.arange(N) - np.arange(N)[:, None]


def elu(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def positive(x):
    x = x / D**0.25
    return np.exp(x @ OMEGA.T - np.sum(x * x, -1, keepdims=True) / 2)


def attend(seen, features=elu, more=0.0, divide=True):
    weights = np.where(seen, features(Q.astype(float)) @ features(K.astype(float)).mT, 0.0)
    total = np.sum(weights, -1, keepdims=True) + more
    return (weights @ V / (np.where(total == 0, 1, total) if divide else 1)).astype("f4")


CAUSES = {
    "a query does not see its last key": lambda x: attend(AHEAD < 0, x),
    "a query also sees the next key": lambda x: attend(AHEAD <= 1, x),
    "keys 80 to 95 are left out": lambda x: attend((AHEAD <= 0) & (np.arange(N) < 80), x),
    "there is a window of 20 keys to the left": lambda x: attend((AHEAD <= 0) & (AHEAD >= -20), x),
}
OF_LINEAR = {
    "features are relu(x)": lambda: attend(AHEAD <= 0, lambda x: np.maximum(x, 0)),
    "features are exp(x)": lambda: attend(AHEAD <= 0, np.exp),
    "the output is not divided by the sum of the weights": lambda: attend(AHEAD <= 0, divide=False),
    "1 is added to the sum of the weights (like one more key of weight 1)": lambda: attend(
        AHEAD <= 0, more=1.0
    ),
    "outputs are multiplied by the sum of the weights, not divided": lambda: (
        attend(AHEAD <= 0, divide=False)
        * np.sum(np.where(AHEAD <= 0, elu(Q) @ elu(K).mT, 0), -1, keepdims=True)
    ),
}


@pytest.mark.sweep(6)
@pytest.mark.long(*(f"rfa+{x}" for x in list(CAUSES)[1:]))  # weights have no estimator
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("estimator", ["linear", "rfa"])
def test_keys_that_queries_see_by_mistake(estimator, cause):
    options = {"estimator": estimator, "causal": True}
    options |= {"omega": OMEGA} if estimator == "rfa" else {}
    features = elu if estimator == "linear" else positive
    found = verify(q=Q, k=K, v=V, out=CAUSES[cause](features), **options)
    assert found.verdict == "FAIL"
    assert found.suspects[0].text == f"agrees if {cause}"
    assert found.place


@pytest.mark.parametrize("estimator", ["linear", "rfa"])
def test_keys_that_queries_see_pass(estimator):
    options = {"estimator": estimator, "causal": True}
    options |= {"omega": OMEGA} if estimator == "rfa" else {}
    right = attend(AHEAD <= 0, elu if estimator == "linear" else positive)
    assert verify(q=Q, k=K, v=V, out=right, **options).verdict != "FAIL"


@pytest.mark.sweep(5)
@pytest.mark.parametrize("cause", OF_LINEAR)
def test_weights_of_linear_attention(cause):
    found = verify(q=Q, k=K, v=V, out=OF_LINEAR[cause](), estimator="linear", causal=True)
    assert (found.verdict, found.suspects[0].text) == ("FAIL", f"agrees if {cause}")


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_normaliser_that_sums_over_heads(causal):
    """Over heads up to its own, or over all; all heads together make the text's sums."""
    q, k, v = np.random.default_rng(3).standard_normal((3, 3, 24, 8))
    of_heads = np.cumsum(elu(k), 0) if causal else np.sum(elu(k), 0)
    weights = np.where(~np.array(causal) | np.tri(24, dtype=bool), elu(q) @ elu(k).mT, 0)
    out = weights @ v / np.sum(elu(q) * of_heads, -1, keepdims=True)
    found = verify(q=q, k=k, v=v, out=out, estimator="linear", causal=causal)
    words = "agrees if the normaliser sums the features of a query's own key over heads"
    assert found.suspects[0].text.startswith(words)


def test_weights_that_may_be_negative_have_no_logarithm():
    """Only options and features are tried."""
    options = {"estimator": "linear", "feature_map": lambda x: x, "causal": True}
    found = verify(q=Q, k=K, v=V, out=attend(AHEAD < 0, lambda x: x), **options)
    assert (found.verdict, found.suspects) == ("FAIL", [])
