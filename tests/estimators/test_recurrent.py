"""Recurrences: engine, formula, pullback, decoding state and packed sequences say the same."""

from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest

from refattn import naive, packed, recurrences, recurrent_attention, vjp
from refattn.engine import recurrent as engine
from refattn.streaming import RecurrentState
from tests.problems import draw, eps, with_norm

GATES = {  # of each layer
    "retention": ("decay",),
    "gated_linear_attention": ("logs",),
    "state_space_duality": ("log", "write"),
    "delta_rule": ("beta",),
    "gated_delta_rule": ("beta", "log"),
    "kimi_delta_attention": ("beta", "logs"),
    "rwkv7": ("logs", "a", "b"),
}
LAYERS = sorted(GATES)
# Sizes up to and past a leaf (64), and past 16 leaves that are made at once (1024).
SIZES = [0, 1, 5, 64, 100]


def inputs(layer, n, dtype=np.float64, heads=(2, 2), d=4, d_v=3, seed=0):
    """Queries, keys and values, and gates under which states stay bounded."""
    rng, h = np.random.default_rng([seed, n]), heads[1]
    q, v = draw(rng, heads[0], n, d, dtype=dtype), draw(rng, h, n, d_v, dtype=dtype)
    k = with_norm(draw(rng, h, n, d, dtype=dtype), 1)
    logs = -rng.exponential(size=(h, n, d)) * rng.choice([0, 0.1, 1, 1e3], size=(h, n, 1))
    some = {"decay": rng.uniform(size=h), "logs": logs, "log": logs[..., 0], "b": k, "a": -0.7 * k}
    some |= dict.fromkeys(("beta", "write"), rng.uniform(0, 2, (h, n)))
    names = {"logs": "log_decay", "log": "log_decay"}
    return (q, k, v), {names.get(x, x): some[x].astype(dtype) for x in GATES[layer]}


def run(home, layer, q, k, v, a=None, b=None, **gates):
    pair = {} if a is None else {"removal": (a, b)}
    return getattr(home, layer)(q, k, v, **gates, **pair)


def pull(layer, *arrays, a=None, b=None, **gates):
    """Cotangents of a layer, those of a pair in two fields, as all are arrays then."""
    pair = {} if a is None else {"removal": (a, b)}
    out, pullback = vjp(getattr(recurrences, layer), *arrays, **gates, **pair)
    pulled = pullback(tuple(out))
    d_a, d_b = pulled.removal or (None, None)
    return pulled._replace(removal=None, bias=d_a, omega=d_b)


def largest_error(got, want):
    return max(float(np.max(np.abs(x - y), initial=0)) for x, y in zip(got, want, strict=True))


@pytest.mark.sweep(8)
@pytest.mark.long("jax")  # which takes seconds to compile
@pytest.mark.parametrize(
    ("home", "n"), [(naive, 0), (naive, 3), *((recurrences, n) for n in SIZES)]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_leaves_are_the_formula_on_every_library(backend, dtype, layer, home, n):
    arrays, gates = inputs(layer, n, dtype)
    wide = [x.astype(np.longdouble) for x in arrays]
    want = run(naive, layer, *wide, **{x: y.astype(np.longdouble) for x, y in gates.items()})
    got = backend.call(partial(run, home, layer), *arrays, **gates)
    # Sums of some ten terms, as all but the last leaves are forgotten, if there are decays.
    assert largest_error(got, want) <= 20 * eps(arrays[0]) * max(
        1, np.max(np.abs(want.out), initial=0)
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (1, 3)])
@pytest.mark.parametrize("n", [3, 1100])
def test_past_steps_and_in_groups_of_heads(layer, heads, n, monkeypatch):
    """Memory of n tokens only where nothing decays: the delta rule."""
    monkeypatch.setattr(engine, "_LEAVES", 16 * 8)  # leaves of float64
    arrays, gates = inputs(layer, n, heads=heads)
    state = draw(np.random.default_rng(1), heads[1], 4, 3)
    got, want = (run(x, layer, *arrays, **gates, initial_state=state) for x in (recurrences, naive))
    assert got.out.shape == want.out.shape
    assert got.state.shape == want.state.shape
    assert largest_error(got, want) <= 100 * eps(arrays[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_steps_change_no_bit(layer, monkeypatch):
    arrays, gates = inputs(layer, 300)
    want = run(recurrences, layer, *arrays, **gates), pull(layer, *arrays, **gates)
    monkeypatch.setattr(engine, "_LEAVES", 2 * 8)  # two leaves of float64
    got = run(recurrences, layer, *arrays, **gates), pull(layer, *arrays, **gates)
    for x, y in zip(chain(*got), chain(*want), strict=True):
        np.testing.assert_array_equal(x, y)


def as_recurrence(layer, k, gates):
    """The gates of a layer as those of the recurrence, by the table."""
    g, beta = gates.get("log_decay"), gates.get("beta")
    if layer == "retention":
        g = np.broadcast_to(np.log(gates["decay"])[:, None], k.shape[:-1])
    options = {"log_decay": g, "write": gates.get("write", beta)}
    if beta is not None:
        later = 1.0 if g is None else np.exp(g if g.ndim == 3 else g[..., None])
        options["removal"] = (-beta[..., None] * k, later * k)
    if layer == "rwkv7":
        options["removal"] = (gates["a"], gates["b"])
    return {x: y for x, y in options.items() if y is not None}


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_is_the_recurrence(layer):
    """Of the papers' equations, each with the gates of the table."""
    (q, k, v), gates = inputs(layer, 9)
    want = naive.recurrent_attention(q, k, v, **as_recurrence(layer, k, gates))
    assert largest_error(run(naive, layer, q, k, v, **gates), want) <= 20 * eps(q)


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("n", [7, 70])
def test_a_query_may_read_before_its_own_write(read, n):
    (q, k, v), gates = inputs("rwkv7", n)
    options = {"log_decay": gates["log_decay"], "removal": (gates["a"], k), "read": read}
    got, want = (f(q, k, v, **options) for f in (recurrent_attention, naive.recurrent_attention))
    assert largest_error(got, want) <= 20 * eps(q)
    first = v[:, 0] * np.sum(q * k, -1)[:, :1] / 2
    np.testing.assert_allclose(got.out[:, 0], 0 * first if read == "before" else first, atol=1e-15)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("n", [6, 70])
def test_the_pullback_is_the_derivative_of_the_formula(layer, n):
    """Against differences of the formula in extended precision, along a random direction."""
    arrays, gates = inputs(layer, n, heads=(4, 2))
    gates["initial_state"] = draw(np.random.default_rng(2), 2, 4, 3)
    rng, names = np.random.default_rng(3), ["q", "k", "v", *gates]
    points = dict(zip(names, [*arrays, *gates.values()], strict=True))
    along = {x: rng.standard_normal(y.shape) for x, y in points.items()}
    pair = {"removal": (gates["a"], gates["b"])} if "a" in gates else {}
    given = {x: y for x, y in gates.items() if x not in ("a", "b")}
    out, pullback = vjp(getattr(recurrences, layer), *arrays, **given, **pair)
    d_out = [rng.standard_normal(x.shape) for x in out]
    pulled = pullback(tuple(d_out))._asdict()
    pulled |= dict(zip(("a", "b"), pulled["removal"] or (None, None), strict=True))
    got = sum(np.sum(pulled[x] * along[x]) for x in names)

    def moved(h):
        wide = {x: y.astype(np.longdouble) + h * along[x] for x, y in points.items()}
        results = run(naive, layer, **wide)
        return sum(np.sum(x * y) for x, y in zip(results, d_out, strict=True))

    h = np.longdouble(1e-4)  # of the fourth order: errors of 1e-16 and of 1e-19 / h
    want = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
    size = sum(np.sum(np.abs(pulled[x] * along[x])) for x in names)
    assert abs(got - want) <= 1e-12 * size


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_heads_of_values_share_a_head_of_queries_and_keys(layer, heads):
    """As if it were repeated for consecutive ones; gradients are summed over these."""
    (q, k, v), gates = inputs(layer, 9, heads=(heads, 4))
    gates["initial_state"] = draw(np.random.default_rng(2), 4, 4, 3)
    few, times = (q, k[:heads], v), 4 // heads
    many = (*(np.repeat(x, times, 0) for x in few[:2]), v)
    want = run(recurrences, layer, *many, **gates)
    for home, arrays in ((recurrences, few), (recurrences, (many[0], *few[1:])), (naive, few)):
        assert largest_error(run(home, layer, *arrays, **gates), want) <= 20 * eps(q)
    got, want = (pull(layer, *x, **gates) for x in (few, many))
    shared = {x: np.reshape(getattr(want, x), (heads, times, 9, 4)).sum(1) for x in "qk"}
    want = want._replace(**shared)
    for x, y in ((x, y) for x, y in zip(got, want, strict=True) if y is not None):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_shared_heads_decoded_packed_and_refused():
    (q, k, v), gates = inputs("state_space_duality", 9, heads=(2, 4))
    k, g = k[:2], gates["log_decay"]
    want = recurrent_attention(q, k, v, log_decay=g)
    state = RecurrentState.init(k[:, :4], v[:, :4], log_decay=g[:, :4])
    state = state.update(k[:, 4:], v[:, 4:], log_decay=g[:, 4:])
    np.testing.assert_allclose(state.read(q[:, -1:]), want.out[:, -1:], rtol=1e-13, atol=1e-14)
    tokens, cut = [np.moveaxis(x, 1, 0) for x in (q, k, v)], {"per_token": {"log_decay": g.T}}
    cut |= {"q_offsets": [0, 9], "k_offsets": [0, 9]}
    got = packed.varlen(recurrent_attention, *tokens, **cut)
    np.testing.assert_array_equal(np.moveaxis(got.out, 0, 1), want.out)
    with pytest.raises(ValueError, match="`q`, `k` and `v` must have leading axes that broadcast"):
        recurrent_attention(q, k, v[:3])


@pytest.mark.parametrize("layer", LAYERS)
def test_step_by_step_handed_over_and_packed_is_all_at_once(layer):
    arrays, gates = inputs(layer, 90)
    whole = run(recurrences, layer, *arrays, **gates)

    def part(i, state):
        some = {x: y if x == "decay" else y[:, i] for x, y in gates.items()}
        return run(recurrences, layer, *(x[:, i] for x in arrays), **some, initial_state=state)

    for cuts in ([0, 37, 90], range(91)):
        state, outs = None, []
        for start, stop in pairwise(cuts):
            out, state = part(slice(start, stop), state)
            outs.append(out)
        error = largest_error((np.concatenate(outs, 1), state), whole)
        assert error <= 20 * eps(whole.out) * np.max(np.abs(whole.out))
    first, none, last = (part(slice(*x), None) for x in ((0, 30), (30, 30), (30, 90)))
    tokens = [np.moveaxis(x, 1, 0) for x in arrays]
    each = {x: np.moveaxis(y, 1, 0) for x, y in gates.items() if x != "decay"}
    shared = {x: y for x, y in gates.items() if x == "decay"}
    if "a" in each:
        each["removal"] = (each.pop("a"), each.pop("b"))
    cut = {"q_offsets": [0, 30, 30, 90], "k_offsets": [0, 30, 30, 90], "per_token": each}
    got = packed.varlen(getattr(recurrences, layer), *tokens, **cut, **shared)
    np.testing.assert_array_equal(got.out[:30], np.moveaxis(first.out, 0, 1))
    np.testing.assert_array_equal(got.out[30:], np.moveaxis(last.out, 0, 1))
    np.testing.assert_array_equal(got.state, [first.state, none.state, last.state])
    again = packed.varlen(  # one state for each
        getattr(recurrences, layer), *tokens, **cut, **shared, initial_state=got.state
    )
    first, none, last = (
        part(slice(*x), y) for x, y in zip(((0, 30), (30, 30), (30, 90)), got.state, strict=True)
    )
    np.testing.assert_array_equal(again.out[30:], np.moveaxis(last.out, 0, 1))
    np.testing.assert_array_equal(again.state, [first.state, none.state, last.state])


@pytest.mark.parametrize("value", [np.nan, np.inf, -3.0])
@pytest.mark.parametrize("layer", LAYERS)
def test_later_tokens_do_not_change_earlier_results(layer, value):
    arrays, gates = inputs(layer, 90)
    before = run(recurrences, layer, *arrays, **gates).out
    for x in [*arrays[1:], *(y for name, y in gates.items() if name != "decay")]:
        x[:, 70] = value
    after = run(recurrences, layer, *arrays, **gates).out
    np.testing.assert_array_equal(after[:, :70], before[:, :70])
    assert np.all(np.isnan(after[:, 70:])) or value == -3


@pytest.mark.parametrize("name", ["k", "v", "log_decay", "write", "a", "b"])
def test_a_query_reads_no_nan_of_its_own_token_before_its_write(name):
    (q, k, v), gates = inputs("rwkv7", 70)
    gates["write"] = np.ones((2, 70))
    {"k": k, "v": v, **gates}[name][:, 66] = np.nan
    options = {x: gates[x] for x in ("log_decay", "write")} | {"removal": (gates["a"], gates["b"])}
    for f in (recurrent_attention, naive.recurrent_attention):
        spoilt = np.isnan(f(q, k, v, **options, read="before").out)
        np.testing.assert_array_equal(spoilt, np.broadcast_to(np.arange(70)[:, None] > 66, v.shape))


def pull_one_by_one(q, k, v, g, a, b, d_out, before):
    """The chain rule token by token, of one head, for the scale 1 and a cotangent of `out`."""
    n, d = q.shape
    states, back = [np.zeros((d, v.shape[1]))], np.zeros((d, v.shape[1]))
    for t in range(n):
        turn = np.diag(np.exp(g[t])) + np.outer(a[t], b[t])
        states.append(turn @ states[-1] + np.outer(k[t], v[t]))
    pulled = []
    for t in reversed(range(n)):
        d_read, turn = np.outer(q[t], d_out[t]), np.diag(np.exp(g[t])) + np.outer(a[t], b[t])
        back = back if before else back + d_read
        d_turn, read = back @ states[t].T, states[t if before else t + 1]
        d_g = np.diag(d_turn) * np.exp(g[t])
        pulled.append(
            (read @ d_out[t], back @ v[t], back.T @ k[t], d_g, d_turn @ b[t], a[t] @ d_turn)
        )
        back = turn.T @ back + (d_read if before else 0)
    return [np.stack(x[::-1]) for x in zip(*pulled, strict=True)]


@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "a", "b", "d_out"])
@pytest.mark.parametrize("read", ["after", "before"])
def test_nan_goes_to_the_gradients_that_it_is_for(name, read):
    (q, k, v), gates = inputs("rwkv7", 70, heads=(1, 1))
    given = {"q": q, "k": k, "v": v, **gates, "d_out": draw(np.random.default_rng(5), 1, 70, 3)}
    given[name][:, 66] = np.nan
    q, k, v, g, a, b, d_out = given.values()
    options = {"log_decay": g, "removal": (a, b), "scale": 1.0, "read": read}
    got = vjp(recurrent_attention, q, k, v, **options)[1]((d_out, None))
    got = [got.q, got.k, got.v, got.log_decay, *got.removal]
    want = pull_one_by_one(*(x[0] for x in given.values()), read == "before")
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x[0], y, rtol=1e-10, atol=1e-13)


def test_a_decay_is_never_a_ratio():
    """Decays from the start vanish within a leaf; those between neighbours do not."""
    one, g = np.ones((80, 2)), np.full((80, 2), -30.0)
    want = 2 * (1 + np.exp(-30.0)) * np.ones(79)
    for log_decay in (g, g[:, 0]):
        out = recurrent_attention(one, one, one[:, :1], log_decay=log_decay, scale=1.0).out
        np.testing.assert_allclose(out[1:, 0], want, rtol=1e-15)


def test_states_merge_where_tokens_do_not_remove():
    (_, k, v), gates = inputs("gated_linear_attention", 9)
    g, state = gates["log_decay"], RecurrentState.init
    early, late = (state(k[:, i], v[:, i], log_decay=g[:, i]) for i in (slice(4), slice(4, 9)))
    got, want = early.merge(late), early.update(k[:, 4:], v[:, 4:], log_decay=g[:, 4:])
    np.testing.assert_allclose(got.state, want.state, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(got.log_decay, want.log_decay, rtol=1e-14)
    for gate in ({"removal": (-k, k)}, {"initial_state": want.state}):
        with pytest.raises(ValueError, match="`other` must have no initial state and no removal"):
            early.merge(state(k, v, **gate))
    q = draw(np.random.default_rng(4), 4, 2, 4)  # two queries share a state
    np.testing.assert_allclose(want.read(q)[2], q[2] @ want.state[1] / 2, rtol=1e-14)


@pytest.mark.sweep(3)
@pytest.mark.long("jax")
@pytest.mark.parametrize("layer", ["kimi_delta_attention", "retention", "rwkv7"])
def test_pullbacks_are_the_same_on_every_library(backend, layer):
    arrays, gates = inputs(layer, 9, heads=(4, 2))
    gates["initial_state"] = draw(np.random.default_rng(2), 2, 4, 3)
    one = partial(pull, layer)
    got, want = backend.call(one, *arrays, **gates), one(*arrays, **gates)
    assert [x is None for x in got] == [x is None for x in want]
    for x, y in ((x, y) for x, y in zip(got, want, strict=True) if y is not None):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13 * np.max(np.abs(y)))
