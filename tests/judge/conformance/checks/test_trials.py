"""Which checks apply to a candidate, and what they let through."""

import numpy as np
import pytest

import refattn
from refattn.judge.conformance import Failure, checks_of
from refattn.judge.conformance.checks import claims
from refattn.judge.conformance.checks.sizes import describe_places
from refattn.judge.conformance.checks.trials import CHECKS, RUNS, CheckRun
from refattn.registry import ESTIMATORS
from tests.judge.conformance.candidates import of, performer

RA = refattn.randomized_attention
BITS = "deterministic", "batch_invariant"
TARGETS = "target_law masked_target_law causal_target_law"
GIVEN = "contract reference_values weighted_mean calls_apart all_keys own_law"


KEYS = {name: ESTIMATORS[name].fn for name in ("coreset", "sampled-uniform")}
APPLY = [  # a candidate, checks that apply to it, and some that do not
    # Queries with frequencies of their own are put in no other company.
    (of(RA, "ra", "omega_only", *BITS), "same_bits", "same_bits_in_any_batch"),
    (of(performer(), "rfa"), "long_vectors", ""),
    *((of(performer(x), "rfa", epsilon=x), "", "long_vectors") for x in (1e-9, 1e-12, 1e-15)),
    (of(RA, "ra", "mask", "causal"), TARGETS, ""),
    (of(RA, "ra", "mask", "causal", epsilon=1e-12), "", TARGETS),
    *((of(fn, name, "indices", "gqa"), GIVEN, "") for name, fn in KEYS.items()),
    *((of(fn, name), "own_law", "reference_values all_keys") for name, fn in KEYS.items()),
]


@pytest.mark.parametrize(("adapter", "made", "left_out"), APPLY)
def test_which_checks_apply(adapter, made, left_out):
    names = {x.name for x in checks_of(adapter)}
    assert {*made.split()} <= names
    assert not names & {*left_out.split()}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("angle", "wide"), [(1.0, False), (np.pi / 2, True)])
def test_results_beyond_half_precision(dtype, angle, wide):
    """Trigonometric features whose sum all but vanishes may leave the range of float16 only.

    The weight is cos(omega . (q - k)).
    """
    fn = lambda q, k, v, omega: v * np.inf  # noqa: E731
    adapter = of(fn, "rfa", "omega", features="trigonometric", dtype=dtype)
    q, k, v, omega = np.array([[0.0]]), np.array([[angle]]), np.ones((1, 1)), np.ones((1, 1))
    trial = CheckRun(adapter, "values_at_given_frequencies", 0)
    if wide and dtype == "float16":
        trial.compare(q, k, v, omega=omega)
    else:
        with pytest.raises(Failure, match="finite numbers"):
            trial.compare(q, k, v, omega=omega)


def test_every_check_has_a_row_of_the_table():
    assert RUNS.keys() == CHECKS.keys()


@pytest.mark.parametrize("word", ["maks", "-maks", "mask/maks", "library=numpi", "tag=numpy"])
def test_words_of_the_table_are_known(word):
    with pytest.raises(ValueError, match=r"maks|numpi|tag=numpy"):
        claims._condition(word)


def wrong(*index):
    found = np.zeros((3, 8, 4), bool)
    found[index] = True
    return found


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (wrong(...), "every token, every head, every column"),
        (wrong(1, 5, 2), "token 5 (1 of 8), head 1 (1 of 3), column 2 (1 of 4)"),
        (wrong(slice(1, None)), "every token, heads from 1 to 2 (2 of 3), every column"),
        (wrong(0, slice(3, None, 4)), "tokens from 3, every 4th (2 of 8), head 0"),
    ],
)
def test_places_in_words(where, words):
    assert describe_places(where).startswith(words)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(-1, "every token, head 1 (1 of 2)"), (0, "every head"), (-2, "token 1 (1 of 2), every colu")],
)
def test_places_of_gates_that_have_no_columns(tokens, words):
    assert describe_places(np.array([[False] * 3, [True] * 3]), tokens).startswith(words)
