"""Checks of the last bit, where it is declared."""

import numpy as np

import refattn
from refattn.conformance import Adapter, check, checks_of


def bits(fn, name, *capabilities):
    return check(Adapter(fn, "softmax", capabilities), checks=[name], rng=0)


def by_rows(q, k, v):
    """Each query by itself, with sums whose order depends on nothing else."""
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    for at in np.ndindex(q.shape[:-1]):
        keys, values = k[at[:-1]], v[at[:-1]]
        scores = (keys * q[at]).sum(-1) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max())
        out[at] = (weights[:, None] * values).sum(0) / weights.sum()
    return out


def split(pieces):
    """The same, but for sums over keys in as many parts as `pieces` says."""

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


class Counting:
    calls = 0

    def __call__(self, q):
        self.calls += 1
        return 1 + self.calls % 2


def test_right_ones_pass():
    assert bits(by_rows, "same_bits_in_any_batch", "batch_invariant").verdict == "PASS"
    assert bits(refattn.softmax_attention, "same_bits", "deterministic").verdict == "PASS"


def test_others_do_not():
    """Parts of keys as the number of queries has it, of the batch, and as calls come."""
    by_queries = split(lambda q: 1 if q.shape[-2] < 8 else 3)
    assert bits(by_queries, "same_bits_in_any_batch", "batch_invariant").verdict == "FAIL"
    by_batch = split(lambda q: len(q))
    assert bits(by_batch, "same_bits_in_any_batch", "batch_invariant").verdict == "FAIL"
    assert bits(split(Counting()), "same_bits", "deterministic").verdict == "FAIL"


def test_gradients_too():
    calls = Counting()

    def attention(q, k, v, *, d_out=None):
        out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v)
        if d_out is None:
            return out
        found = list(pullback(d_out)[:3])
        found[2] = found[2] * (1 + 2.0**-52 * (calls(q) - 1))
        return (out, *found)

    assert bits(attention, "same_bits", "deterministic", "vjp").verdict == "FAIL"


def test_bits_of_other_uses():
    """Sums whose order depends on the call in groups, masked or causal only."""
    for when in ("groups", "mask", "causal"):
        calls = Counting()

        def attention(q, k, v, when=when, calls=calls, **given):
            used = q.shape[-3] != k.shape[-3] if when == "groups" else bool(np.any(given.get(when)))
            out = refattn.softmax_attention(q, k, v, **given)
            return out * (1 + 2.0**-52 * (calls(q) - 1)) if used else out

        assert (
            bits(attention, "same_bits", "deterministic", "mask", "causal", "gqa").verdict == "FAIL"
        )

    def masked(q, k, v, *, mask=None):
        few = q.shape[-2] < 8 and mask is not None
        return refattn.softmax_attention(q, k, v, mask=mask) * (1 + 2.0**-52 * few)

    assert bits(masked, "same_bits_in_any_batch", "batch_invariant", "mask").verdict == "FAIL"


def test_queries_with_frequencies_of_their_own_are_not_put_in_other_company():
    """Each would need its frequencies there; RA itself was said to be wrong."""
    names = {"deterministic": "same_bits", "batch_invariant": "same_bits_in_any_batch"}
    candidate = Adapter(refattn.randomized_attention, "ra", ["omega_only", *names])
    chosen = {x.name for x in checks_of(candidate)} & {*names.values()}
    assert chosen == {"same_bits"}
    assert check(candidate, checks=chosen, rng=0).verdict == "PASS"
