"""Verdicts on recurrences: a chunked kernel in NumPy, right and with defects."""

import numpy as np
import pytest

from refattn import naive, verify, vjp
from refattn.judge.mistakes.causes.places import as_suspect
from refattn.judge.mistakes.causes.states import keep_common
from refattn.judge.rounding.formats import FORMATS
from refattn.recurrences import rwkv7, state_space_duality
from tests.cli.running import run

NAMES = {True: "gated-delta-rule", False: "state-space-duality"}


def longer(x):
    return x * np.linspace(0.5, 2, x.shape[-2])[:, None]


def normal(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def later(x):
    """What the token before has, and 0 for the first."""
    return np.concatenate([0 * x[:, :1], x[:, :-1]], 1)


def sooner(x):
    return later(x[:, ::-1])[:, ::-1]


def exchanged(x):
    return x[[1, 0, 2]]


def kernel(q, k, v, g, beta, state, to, c, defect=""):
    """Chunks of c tokens in float32, whose products are of numbers of a type."""
    single = np.float32
    q, k, v, g = (x.astype(single) for x in (q, k, v, g))

    def rounded(x):
        return FORMATS[to].round(x).astype(single)

    state, rows = state.astype(single), []
    for i in (slice(s, min(s + c, len(q))) for s in range(0, len(q), c)):
        sums, read = np.cumsum(g[i], dtype=single)[:, None], rounded(state)
        later = np.tril(np.ones((len(sums), len(sums)), single))
        decay, to_end = later * np.exp((sums - sums.T) * later), np.exp(sums[-1] - sums)
        if defect == "clipped":
            decay = later * np.exp(sums) * np.exp(np.minimum(-sums, single(4))).T
            to_end = np.exp(sums[-1]) * np.exp(np.minimum(-sums, single(4)))
        lower, y = np.tril(k[i] @ k[i].T * decay, -1), v[i]
        if defect == "decay of its own write":
            decay, to_end = decay * np.exp(g[i]), to_end * np.exp(g[i])[:, None]
        if beta is not None:
            b = beta[i, None].astype(single)
            off = b * b if defect == "beta twice" else b
            right = b * v[i] - off * (rounded(np.exp(sums) * k[i]) @ read)
            y = rounded(np.linalg.solve(np.eye(len(b), dtype=single) + off * lower, right))
        out = np.exp(sums) * (q[i] @ read) + rounded(q[i] @ k[i].T * decay) @ y
        state = np.exp(sums[-1]) * state + rounded(to_end * k[i]).T @ y
        out = 0 * out if defect == "last chunk" and i.stop == len(q) else out
        if defect == "bfloat16 state":
            state = FORMATS["bfloat16"].round(state).astype(single)
        rows.append(rounded(out * single(q.shape[1] ** -0.5)))
    return np.concatenate(rows), state


def made(
    to="bfloat16", c=64, defect="", removes=True, seed=0, n=150, heads=3, slow=1.0, kept="float32"
):
    rng, d = np.random.default_rng(seed), 16
    q, k, v = rng.standard_normal((3, heads, n, d))
    q, k, v = (FORMATS[to].round(x) for x in (q, normal(k), v))
    sizes = slow * np.arange(1, heads + 1)[:, None]
    g = np.float32(-np.exp(rng.standard_normal((heads, n)) - 3) * sizes)
    beta = np.float32(rng.uniform(0.1, 1, (heads, n))) if removes else None
    first = np.float32(FORMATS[kept].round(rng.standard_normal((heads, d, d))))
    betas = [None] * heads if beta is None else beta
    of_heads = zip(q, k, v, g, betas, first, strict=True)
    results = [kernel(*x, to, c, defect) for x in of_heads]
    arrays = {"q": q, "k": k, "v": v, "log_decay": g, "initial_state": first}
    arrays |= {"beta": beta} if removes else {}
    arrays["out"], arrays["state"] = (np.stack(x) for x in zip(*results, strict=True))
    return {**arrays, "estimator": NAMES[removes], "dtype": to}


def judge(*args, **options):
    return verify(**made(*args, **options)).parts


@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("c", [16, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("to", ["bfloat16", "float32"])
def test_a_right_kernel_passes(to, c, removes):
    found = judge(to, c, removes=removes, n=2 * c + 1, heads=2)
    assert {x.verdict for x in found.values()} <= {"PASS", "UNDERPOWERED"}
    assert 0.75 < found["out"].z.rms < 1.15


def drifting(seed, mean, c=256, wrong=1.0):
    """Log decays that add up to 80, whose sums are rounded in float32, and states of one sign."""
    rng, d, to = np.random.default_rng(seed), 16, FORMATS["float32"].round
    q, k, v = (to(x) for x in rng.standard_normal((3, 1, c, d)) + mean)
    k, g = to(normal(k)), np.float32(-0.3 * rng.exponential(size=(1, c)))
    out, state = kernel(q[0], k[0], v[0], g[0], None, np.zeros((d, d)), "float32", c)
    arrays = {"q": q, "k": k, "v": v, "log_decay": g, "write": np.ones((1, c)), "out": out[None]}
    arrays["state"] = (wrong * state[None]).astype(np.float32)
    return arrays | {"estimator": NAMES[False], "dtype": "float32"}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("seed", "mean"), [(0, 0.0), (0, 2.0), pytest.param(1, 2.0, marks=pytest.mark.long)]
)
def test_one_rounding_of_a_sum_of_log_decays_scales_a_head(seed, mean):
    """A sum of 80 has an ulp of 8e-6, and all tokens before it share its error."""
    found = verify(**drifting(seed, mean), profile="chunk-256-math")
    assert {x.verdict for x in found.parts.values()} <= {"PASS", "UNDERPOWERED"}
    assert found.parts["out"].z.rms < 1.2
    wrong = verify(**drifting(seed, mean, wrong=1 + 1e-4), profile="chunk-256-math")
    assert wrong.parts["state"].verdict == "FAIL"


def pulled(q, k, v, g, d_out, to="float32", c=64):
    """Output, and gradients of the values, of chunks of c tokens: the decays are those forward."""
    single, scale = np.float32, np.float32(q.shape[1] ** -0.5)

    def narrow(x):
        return FORMATS[to].round(x).astype(single)

    state = np.zeros((q.shape[1], v.shape[1]), single)
    cut, kept, out, dv = [slice(s, s + c) for s in range(0, len(q), c)], [], [], []
    for i in cut:
        sums = np.cumsum(g[i], dtype=single)[:, None]
        pairs = np.tril(q[i] @ k[i].T) * np.exp(np.minimum(sums - sums.T, 0))
        ends, whole = narrow(np.exp(sums[-1] - sums) * k[i]), np.exp(sums[-1])
        reads = narrow(np.exp(sums) * q[i])
        kept.append((narrow(pairs), ends, reads, whole))
        out.append(scale * (reads @ narrow(state) + narrow(pairs) @ v[i]))
        state = whole * state + ends.T @ v[i]
    later = 0 * state
    for i, (pairs, ends, reads, whole) in zip(reversed(cut), reversed(kept), strict=True):
        dv.append(scale * (pairs.T @ d_out[i] + ends @ narrow(later)))
        later = whole * later + reads.T @ d_out[i]
    return narrow(np.concatenate(out)), narrow(np.concatenate(dv[::-1])), state


def of_values(to, seed=3, n=256, d=16, wrong=()):
    """Gradients of the values with log decays that add up to 64 in a chunk."""
    rng, rows, size = np.random.default_rng(seed), *(wrong or (slice(0, 0), 1.0))
    q, k, v, d_out = (FORMATS[to].round(x).astype("f4") for x in rng.standard_normal((4, n, d)))
    g = np.float32(-rng.exponential(size=n))
    out, dv, state = pulled(q, k, v, g, d_out, to)
    dv[rows] = FORMATS[to].round(size * dv[rows].astype(np.float64))
    arrays = {"q": q, "k": k, "v": v, "log_decay": g, "d_out": d_out, "out": out, "dv": dv}
    arrays = {x: y[None] for x, y in arrays.items()} | {"state": state[None]}
    return verify(**arrays, estimator=NAMES[False], dtype=to).parts


@pytest.mark.parametrize("to", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_have_the_sums_of_log_decays_of_the_forward_pass(to, seed):
    """They are largest at the end of a chunk, and so are their roundings, back in time too."""
    assert {x.verdict for x in of_values(to, seed).values()} <= {"PASS", "UNDERPOWERED"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "wrong"),
    [
        ("float32", (100, 1 + 2e-5)),
        ("float32", (slice(None), 1 + 1e-5)),
        ("bfloat16", (slice(None), 1.01)),
        ("bfloat16", (100, 1.1)),
    ],
)
def test_wrong_gradients_of_strong_decays_fail(to, wrong):
    assert of_values(to, wrong=wrong)["dv"].verdict == "FAIL"


def of_operands(seed, d, wrong=""):
    """A gated delta rule in chunks of 64 of which every operand of a product is rounded."""
    rng, single = np.random.default_rng(seed), np.float32

    def narrow(x):
        return FORMATS["bfloat16"].round(x).astype(single)

    def product(x, y):
        return narrow(x) @ narrow(y)

    q, k, v = rng.standard_normal((3, 128, d))
    q, k, v = (narrow(x) for x in (q, k / np.linalg.norm(k, axis=-1, keepdims=True), v))
    beta, g = narrow(rng.uniform(size=128)), single(-0.3 * rng.exponential(size=128))
    first = single(0.5 * rng.standard_normal((d, d)))
    state, rows = first, []
    for i in (slice(0, 64), slice(64, 128)):
        sums, b = np.cumsum(g[i], dtype=single)[:, None], beta[i, None]
        decay = np.tril(np.exp(np.minimum(sums - sums.T, 0)))
        of_q = q[i] * single(d**-0.5)
        lower = np.tril(product(k[i] * b, k[i].T) * decay, -1)
        inverse = np.linalg.inv(np.eye(64, dtype=single) + lower)
        right = product(inverse, narrow(k[i] * b) * np.exp(sums))
        y = narrow(product(inverse, narrow(v[i] * b)) - product(right, state))
        if wrong == "late" and i.start:
            of_q = of_q * np.exp(-g[i, None])
        out = product(of_q * np.exp(sums), state) + product(product(of_q, k[i].T) * decay, y)
        state = state * np.exp(sums[-1]) + product((k[i] * np.exp(sums[-1] - sums)).T, y)
        rows.append(narrow(out))
    arrays = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": g, "initial_state": first}
    arrays["out"] = np.concatenate(rows)
    return {x: y[None] for x, y in arrays.items()} | {"estimator": NAMES[True], "dtype": "bfloat16"}


@pytest.mark.parametrize(("seed", "d"), [(0, 16), (0, 32), (1, 32)])
def test_queries_times_a_scale_that_is_no_power_of_2_are_rounded(seed, d):
    own = verify(**of_operands(seed, d), profile="chunk-64-eager")
    assert own.verdict != "FAIL"
    assert 0.75 < own.z.rms < 1.1
    assert verify(**of_operands(seed, d)).verdict != "FAIL"
    assert verify(**of_operands(seed, d, "late"), explain=False).verdict == "FAIL"  # no decay


CAUSES = {
    "all arrays are read from the next head": {"out": lambda x: x[[1, 2, 0]]},
    "each row holds the output of the token before": {"out": lambda x: np.roll(x, 1, -2)},
    "the last state is transposed": {"state": lambda x: x.mT},
    "q is normalised to length 1": {"q": normal},
    "q and k are normalised to length 1": {"q": normal, "k": normal},
    "beta is doubled": {"beta": lambda x: 2 * x},
    "log decays are multiplied by log2(e)": {"log_decay": lambda x: x / np.log(2)},
    "log decays are read as logarithms to base 2": {"log_decay": lambda x: x * np.log(2)},
    "q and k are read from other heads": {"q": exchanged, "k": exchanged},
    "decays are read from the head before": {"log_decay": lambda x: np.roll(x, 1, 0)},
    "the decay of tokens 0 to 69 is that of the next token": {
        "log_decay": lambda x: np.roll(x, -1, -1)
    },
    "the initial state is ignored": {"initial_state": np.zeros_like},
    "k is read from other heads": {"k": exchanged},
    "v is read from other heads": {"v": exchanged},
    "initial states are read from other heads": {"initial_state": exchanged},
    "each token uses the key of the token before": {"k": later},
    "each token uses the key of the next token": {"k": sooner},
    "each token uses the value of the token before": {"v": later},
    "each token uses the beta of the token before": {"beta": later},
    "each token uses the beta of the next token": {"beta": sooner},
    "each token uses the query of the token before": {"q": later},
    "each token uses the key and value of the token before": {"k": later, "v": later},
    "log decays are doubled": {"log_decay": lambda x: 2 * x},
    "beta is the sigmoid of beta": {"beta": lambda x: 1 / (1 + np.exp(-x))},
    "the first token of each chunk of 32 does not decay the state": {
        "log_decay": lambda x: x * (np.arange(x.shape[-1]) % 32 > 0)
    },
    "the last token of each chunk of 32 is not written to the state": {
        "k": lambda x: x * (np.arange(x.shape[-2]) % 32 < 31)[:, None]
    },
    "multiplied by a number of each head: 0.8 in head 0, 0.6 in head 1, 0.4 in head 2": {
        "initial_state": lambda x: x * np.array([0.8, 0.6, 0.4], np.float32)[:, None, None]
    },
    "decays e^g and beta are rounded to bfloat16": {
        "log_decay": lambda x: np.log(FORMATS["bfloat16"].round(np.exp(x))),
        "beta": FORMATS["bfloat16"].round,
    },
    "log decays are rounded to float16": {"log_decay": FORMATS["float16"].round},
    "the initial state is multiplied by 3": {"initial_state": lambda x: 3 * x},
    "beta is halved, but only in head 1": {
        "beta": lambda x: x * np.array([1, 0.5, 1], np.float32)[:, None]
    },
    "the state stays the initial one": {"beta": np.zeros_like, "log_decay": np.zeros_like},
    "6 of 210 rows, the first is head 0, row 68: each row is the exact row times a number, 0": {
        "out": lambda x: x * (np.arange(70) < 68)[:, None]
    },
    "each row is the exact row times a number": {"q": longer},
    "the scale is 1": {"q": lambda x: 4 * x},
}


# Those that a first head without a decay, that starts from 0, does not show.
LATER = [x for x in CAUSES if "initial" in x or "to base 2" in x]


@pytest.mark.long
@pytest.mark.parametrize(
    ("cause", "later"), [*((x, False) for x in CAUSES), *((x, True) for x in LATER)]
)
def test_what_a_right_kernel_is_given_instead_is_named(cause, later):
    """With states and removal, in float32; keys are longer than 1 where they are normalised."""
    arrays, changes = made("float32", n=70), dict(CAUSES[cause])
    if "k" in changes and "q and k are n" in cause:
        arrays["k"] = np.float32(1.2 * arrays["k"])
    if later:
        arrays["log_decay"][0], arrays["initial_state"][0] = 0, 0
    arrays |= of_other_arrays(arrays, changes)
    arrays |= {x: f(arrays[x]) for x, f in changes.items() if x in ("out", "state")}
    part = verify(**arrays).parts["state" if "state" in changes else "out"]
    assert part.verdict == "FAIL"
    assert cause in part.suspects[0].text, part.suspects


def of_other_arrays(arrays, changes):
    """What a right kernel gives for changed arrays."""
    given = arrays | {x: np.float32(f(arrays[x])) for x, f in changes.items() if x in arrays}
    names = ("q", "k", "v", "log_decay", "beta", "initial_state")
    results = [kernel(*x, "float32", 64) for x in zip(*map(given.get, names), strict=True)]
    return dict(zip(("out", "state"), map(np.stack, zip(*results, strict=True)), strict=True))


def test_a_recurrence_without_heads_is_explained():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 70, 8))
    given = {"q": q, "k": k / np.linalg.norm(k, axis=-1, keepdims=True), "v": v}
    given |= {"beta": rng.random(70), "log_decay": -rng.random(70)}
    out = naive.gated_delta_rule(**given | {"beta": given["beta"] / 2}).out
    found = verify(**given, out=out, estimator="gated-delta-rule")
    assert found.suspects[0].text == "agrees if beta is halved"


def test_other_recurrences_are_named():
    """With a removal that is no delta rule, decays by coordinate, and factors on values."""
    rng = np.random.default_rng(0)
    q, k, a, b, v = rng.standard_normal((5, 1, 40, 8)).astype("f4")
    a, g = 0.1 * a, -rng.exponential(size=(1, 40, 8)).astype("f4") / 8
    write = rng.uniform(0.5, 1, (1, 40)).astype("f4")
    same = {"a": (later(a), b, g, 1), "first": (a, b, g[..., :1] + 0 * g, 1)}
    same |= {"mean": (a, b, np.mean(g, -1, keepdims=True) + 0 * g, 1)}
    same |= {"factor": (a, b, g[..., :1] + 0 * g, write)}
    words = {
        "a": "each token uses the removal_a of the token before",
        "first": "all coordinates have the decay of the first",
        "mean": "all coordinates have their mean log decay",
        "factor": "log decays are multiplied by the factor on v",
    }
    for name, (of_a, of_b, decay, by) in same.items():
        given = {"q": q, "k": k, "v": v, "estimator": "rwkv7"}
        given |= {"log_decay": g, "removal": (a, b)}
        made = rwkv7(q, k, v, log_decay=decay, removal=(of_a, of_b)).out
        if name == "factor":
            given = {"q": q, "k": k, "v": v, "estimator": "state-space-duality"}
            given |= {"log_decay": g[..., 0], "write": write}
            decay = by * g[..., 0]
            made = state_space_duality(q, k, v, log_decay=decay, write=write).out
        found = verify(**given, out=made)
        assert (found.verdict, name) == ("FAIL", name)
        assert words[name] in found.suspects[0].text


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_nothing_is_said_where_squares_are_beyond_float64(size):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 40, 8))
    arrays = {"q": q, "k": k, "v": size * v, "log_decay": -rng.exponential(size=(2, 40))}
    out, state = state_space_duality(**arrays)
    arrays["estimator"] = "state-space-duality"
    for factor in (1, 1.01):
        parts = verify(**arrays, out=factor * out, state=factor * state).parts
        assert {x.verdict for x in parts.values()} == {"UNDERPOWERED"}


@pytest.mark.long
def test_states_of_the_other_batch_member_are_no_rounding():
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 2, 2, 50, 8)).astype("f4")
    first = rng.standard_normal((2, 2, 8, 8)).astype("f4")
    arrays = {"q": q, "k": k, "v": v, "log_decay": -np.full((2, 2, 50), 0.15, "f4")}
    out, state = state_space_duality(**arrays, initial_state=first[::-1])
    given = {**arrays, "initial_state": first, "out": out, "state": state}
    parts = verify(**given, estimator="state-space-duality").parts
    for part in parts.values():
        assert "initial states are read from the next batch member" in part.suspects[0].text
    state *= np.array([0.5, 0.9], "f4")[:, None, None]
    part = verify(**{**given, "out": None}, estimator="state-space-duality")
    assert "norm of q" not in str(part)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("first", "cause"),
    [
        (1, "no state is passed on between chunks of 64"),
        (0, "neither the initial state nor the states between chunks of 64 are used"),
    ],
)
def test_chunks_that_start_with_no_state(first, cause):
    """The first one with its own, or not."""
    arrays, parts = made("float32", n=70, heads=1), []
    for i in (slice(0, 64), slice(64, 70)):
        names = ("q", "k", "v", "log_decay", "beta")
        some = arrays | {x: arrays[x][:, i] for x in names}
        some["initial_state"] = (first > i.start) * some["initial_state"]
        parts.append(of_other_arrays(some, {}))
    arrays |= {"out": np.concatenate([x["out"] for x in parts], 1), "state": parts[1]["state"]}
    assert verify(**arrays).parts["out"].suspects[0].text == f"agrees if {cause}"


def test_heads_of_several_members_are_told_apart():
    """Of one of two members, two heads are exchanged."""
    one = made("float32", n=70)
    arrays = {x: np.stack([y, y]) if isinstance(y, np.ndarray) else y for x, y in one.items()}
    arrays["out"][1] = one["out"][[1, 0, 2]]
    text = verify(**arrays).parts["out"].suspects[0].text
    assert text.endswith("other heads: head (1, 0) from head (1, 1), head (1, 1) from head (1, 0)")


DEFECTS = {
    "decay of its own write": "the decay of a token also applies to its own",
    "clipped": "is clipped at e^4",
    "beta twice": "beta also multiplies the state",
    "bfloat16 state": "the state is kept in bfloat16",
    "last chunk": "the last chunk of 64 is left out",
}


@pytest.mark.long
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails_and_is_named(defect):
    """Of the state in bfloat16 a kernel in float32 says most."""
    to = "float32" if defect == "bfloat16 state" else "bfloat16"
    found = judge(to, defect=defect, slow=4.0 if defect == "clipped" else 1.0)["out"]
    assert found.verdict == "FAIL"
    assert DEFECTS[defect] in found.suspects[0].text


@pytest.mark.long("True")
@pytest.mark.parametrize("removes", [True, False])
def test_a_state_in_bfloat16_passes_where_states_are(removes):
    """One that starts in float32 has 2^-24 of the numbers of bfloat16 by chance, if it is right."""
    options = {"defect": "bfloat16 state", "removes": removes, "n": 70, "heads": 2}
    found = judge(**options)["state"]
    assert found.verdict == "FAIL"
    assert "all numbers are bfloat16, in an array of float32" in found.suspects[0].text
    found = judge(**options, kept="bfloat16")
    assert {x.verdict for x in found.values()} <= {"PASS", "UNDERPOWERED"}
    assert found["state"].out_dtype == "bfloat16"


@pytest.mark.long
def test_a_state_in_bfloat16_of_long_memory():
    """Its roundings add up: outputs show them, and only where states are in bfloat16 may they."""
    options = {"defect": "bfloat16 state", "removes": False, "n": 1024, "heads": 2, "slow": 0.01}
    found = judge(c=16, **options)["out"]
    assert found.verdict == "FAIL"
    assert "kept in bfloat16 between chunks of about 16" in found.suspects[0].text
    found = judge(c=16, **options, kept="bfloat16")["out"]
    assert (found.verdict != "FAIL", found.profile) == (True, "chunk-16-states")
    assert "fits a kernel whose state is kept in bfloat16 between chunks" in found.remarks


@pytest.mark.parametrize("n", [1, 2])
def test_of_few_tokens_nothing_is_named_that_few_rows_cannot_show(n):
    arrays = made("float32", n=n, heads=2)
    found = verify(**arrays | {"out": arrays["out"] + np.float32(0.5)}).parts["out"]
    assert (found.verdict, found.suspects) == ("FAIL", [])


def test_a_state_that_says_little_asks_for_one_thing():
    found = str(verify(**made(defect="bfloat16 state", n=40, heads=1, kept="bfloat16")))
    assert "state: UNDERPOWERED: a state that is 1 % too large would also pass" in found
    assert "worst: state at " in found
    assert "next: use more sequences: each has a last state for each head" in found


@pytest.mark.parametrize("name", ["out", "state"])
def test_results_that_are_all_0_are_said_to_be_so(name):
    arrays = made(n=40, heads=2)
    found = verify(**arrays | {name: 0 * arrays[name]}).parts[name]
    assert found.verdict == "FAIL"
    assert "all numbers are 0, as if they were never computed" in found.suspects[0].text


def test_heads_of_values_that_share_keys(tmp_path):
    """Gradients are judged of arrays that no heads share; a file has the same verdict."""
    (q, k), (v, d_out) = (np.random.default_rng(i).standard_normal((2, i, 9, 4)) for i in (2, 4))
    arrays = {"q": q, "k": k, "v": v, "log_decay": -np.ones((4, 9))}
    result, pullback = vjp(state_space_duality, **arrays)
    back, options = pullback((d_out, None)), {"estimator": "state-space-duality"}
    arrays |= {"out": result.out, "state": result.state, "d_out": d_out, "dv": back.v}
    found = verify(**arrays, **options, dtype="float64").parts
    assert {x: y.verdict for x, y in found.items()} == dict.fromkeys(("out", "state", "dv"), "PASS")
    with pytest.raises(ValueError, match="of an array that heads share"):
        verify(**arrays, dq=back.q, **options)
    np.savez(tmp_path / "dump.npz", **arrays)
    words = ["verify", tmp_path / "dump.npz", "--estimator", options["estimator"]]
    printed = run(*words).stdout
    for name, part in found.items():
        assert f"{name}: PASS" in printed
        assert f"rms {part.z.rms:.3g}" in printed


def test_what_is_refused():
    arrays = made(n=4, heads=2)
    in_pairs = {"estimator": "rwkv7", "beta": None, "removal": (arrays["k"], arrays["k"] + np.nan)}
    of_heads = {"estimator": "retention", "decay": -1.0} | dict.fromkeys(("beta", "log_decay"))
    for change, words in (
        ({"beta": None}, "`beta` must be given for gated-delta-rule"),
        ({"mask": np.ones((4, 4), bool)}, "`mask` must not be given"),
        ({"estimator": "softmax"}, "`beta` must not be given for softmax"),
        ({"d_out": arrays["out"], "dq": arrays["q"]}, "`dq` is not judged"),
        ({"beta": arrays["beta"] + np.nan}, "`beta` must be finite"),
        (in_pairs, "`removal` must be finite"),
        (of_heads, "`decay` must not be negative, got -1.0"),
        ({"state": arrays["state"][:1]}, "`state` must have the shape"),
    ):
        with pytest.raises(ValueError, match=words):
            verify(**{**arrays, **change})


def test_a_narrow_state_is_no_cause_of_one_part_alone():
    def said(*forms):
        return [as_suspect(f"agrees if the state is kept in {x} between tokens") for x in forms]

    other = as_suspect("agrees if there is no decay")
    both = {"out": [*said("bfloat16"), other], "state": said("bfloat16"), "dv": [other]}
    assert keep_common(both) == both
    assert keep_common(both | {"state": said("float16")}) == both | {"out": [other], "state": []}
    assert keep_common({"out": said("bfloat16")}) == {"out": said("bfloat16")}
