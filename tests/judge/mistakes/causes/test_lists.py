"""Each listed cause makes its own wrong numbers, and is found in them; none is in right ones."""

import re
from itertools import chain

import numpy as np
import pytest

from refattn.files.tensors import open_tensors
from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.profiles import PROFILES
from refattn.judge.verification.reading import pose_tensors, read_parts

from refattn.judge.mistakes.causes import trials  # isort: skip  (after `verify`: it imports both)
from refattn.judge.mistakes.causes.backward import Backward, list_candidates  # isort: skip
from refattn.judge.mistakes.causes.sampled import Alternative, Rows  # isort: skip
from refattn.judge.mistakes.causes.slips import NORMALISERS  # isort: skip
from tests.judge.mistakes.causes.kernels import BF16, ahead, backward, draw

N, M = 48, 80
Q, K, V, _ = draw(11, heads=4, n=N, m=M)
GIVEN = {"q": Q, "k": K, "v": V}
RNG = np.random.default_rng(3)
PACKED = {x: np.swapaxes(y, 0, 1) for x, y in GIVEN.items()} | {
    "cu_seqlens_q": np.cumsum([0, 13, 5, 21, 9]),
    "cu_seqlens_k": np.cumsum([0, 17, 5, 30, 28]),
}
IN_BLOCKS = {
    "q": BF16(RNG.standard_normal((3, 4, 2, 16))),
    "k": BF16(RNG.standard_normal((8, 16, 2, 16))),
    "v": BF16(RNG.standard_normal((8, 16, 2, 16))),
    "block_table": np.array([[4, 1, 0], [2, 7, 3], [6, 0, 0]]),
    "cache_seqlens": np.array([21, 40, 11]),
}
PROBLEMS = {
    "plain": {"q": BF16(1.5 * Q)},
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "causal window": {"causal": True, "window": (9, 0)},
    "mask": {"mask": RNG.random((N, M)) < 0.7},
    "lengths": {"mask": np.arange(M) < 37},
    "bias": {"bias": BF16(RNG.standard_normal((4, N, M))), "causal": True},
    "cap": {"softcap": 2.0, "mask": np.arange(M) < 60},
    "sinks": {"sinks": np.array([1.0, 2.0, -1.0, 0.5])},
    "scales": {
        **{x: FORMATS["float8_e4m3fn"].round(y) for x, y in {"k": K, "v": V}.items()},
        "k_scale": np.array([0.5, 0.25, 2.0, 1.0]),
        "v_scale": np.array([1.0, 0.7, 0.3, 2.0]),
    },
    "same": {"q": BF16(1.5 * K), "causal": True, "bias": BF16(RNG.standard_normal((M, M)))},
    "packed": PACKED,
    "packed, causal": PACKED | {"causal": True},
    "packed, window": PACKED | {"window": (9, 3)},
    "blocks": IN_BLOCKS,
    "blocks, causal": IN_BLOCKS | {"causal": True},
}
OF_THREE = ("packed", "packed, causal", "packed, window")  # each has a third of the causes


def posed(path, arrays):
    """A problem, its file, and how results lie in memory."""
    options = {x: arrays[x] for x in ("causal", "window", "softcap") if x in arrays}
    np.savez(
        path / "x.npz", **({"out": arrays["q"]} | {x: arrays[x] for x in arrays.keys() - options})
    )
    tensors = open_tensors(path / "x.npz", dtype="bfloat16")
    return tensors, pose_tensors(tensors, **options)


def listed(path, arrays):
    """A problem, all listed causes of it by text, and one of each kind of them."""
    problem = posed(path, arrays)[1]
    every = {x.text: x for x in chain(*(x(problem) for x in trials._PLAIN_LISTS))}
    return problem, every, {re.sub(r"\d+", "#", x): x for x in every}


def compute(problem, one, name="out"):
    """All numbers, in the layout of the arrays."""
    (n, m, _), lead = problem.shape, problem.lead
    every = [
        getattr(one.result(Rows(x, np.arange(n), np.arange(m))), name) for x in np.ndindex(lead)
    ]
    found = np.reshape(every, (*lead, *every[0].shape))
    return found if problem.packed is None else np.swapaxes(found, -3, -2)


@pytest.mark.long
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_listed_cause_is_found_in_its_own_numbers(tmp_path, name):
    """Or another one that gives the same, if it is none that makes no difference here."""
    arrays = GIVEN | PROBLEMS[name]
    problem, every, kinds = listed(tmp_path, arrays)
    given = arrays | {"dtype": "bfloat16", "profile": "flash"}
    assert verify(**given, out=BF16(compute(problem, Alternative("", problem)))).verdict == "PASS"
    usual = {} if name == "plain" else listed(tmp_path, GIVEN)[2]
    own, texts = 0, [y for x, y in kinds.items() if x not in usual]
    for text in texts[OF_THREE.index(name) :: 3] if name in OF_THREE else texts:
        wrong = BF16(compute(problem, every[text]))
        found = verify(**given, out=wrong)
        if found.verdict == "FAIL":
            said = found.suspects[0].text.removeprefix("agrees if ")
            own += said == text
            if re.search("all numbers are 0|is 0 everywhere", said):
                assert np.mean(np.any(wrong, -1)) < 0.9  # of which any list may say it
                continue
            off = np.abs(compute(problem, every[said]) - wrong) > 0.02 + 0.02 * np.abs(wrong)
            assert said == text or np.mean(off) < 0.03, (text, said)
    assert own > 1


SAME = draw(2, heads=4, n=40)
SHARED = [x[:2] if i in (1, 2) else x for i, x in enumerate(SAME)]
CHOSEN = np.random.default_rng(6).random((40, 40)) < 0.6
BACKWARD = {
    "plain": (SHARED, True, {}),
    "causal": (SAME, ahead(40, 40) <= 0, {"causal": True}),
    "mask": (SAME, CHOSEN, {"mask": CHOSEN}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BACKWARD)
def test_each_listed_backward_pass_is_found_in_its_own_gradients(tmp_path, name):
    """In all parts that fail by it, or another that gives the same."""
    arrays, seen, options = BACKWARD[name]
    given = backward(*arrays, seen) | options
    tensors, problem = posed(tmp_path, given)
    parts = {x: y for x, y in read_parts(tensors, problem).items() if x != "out"}
    back = Backward(parts, dict.fromkeys(parts, (0, 0, 0)), PROFILES["flash"], "bfloat16")
    every = {x.text: x for x in list_candidates(back.first, False)}

    def predict(one, of):
        rows = np.arange(parts[of].problem.shape[0])
        return np.stack(
            [back.predict(one, of, x, rows) for x in np.ndindex(parts[of].problem.lead)]
        )

    kinds = {re.sub(r"\d+", "#", x): x for x in every}
    own, start = 0, [*BACKWARD].index(name)
    for text in [*kinds.values()][start :: len(BACKWARD)]:
        one = every[text]
        wrong = {x: BF16(predict(one, x)) for x in parts if one.to in ("", x)}
        if any(y.shape != given[x].shape for x, y in wrong.items()):
            continue  # of shared heads
        found = verify(**given | wrong, profile="flash").parts
        for of in (x for x in wrong if found[x].verdict == "FAIL"):
            said = found[of].suspects[0].text.removeprefix("agrees if ").split(", but only")[0]
            own += said == text
            if "is 0 everywhere" not in said and said != text:
                off = np.abs(predict(every[said], of) - wrong[of])
                assert np.mean(off > 0.02 + 0.02 * np.abs(wrong[of])) < 0.03, (text, said)
    assert own > 1


@pytest.mark.sweep(4)
@pytest.mark.parametrize("words", NORMALISERS)
def test_each_form_of_log_normalisers_is_found(tmp_path, words):
    arrays = GIVEN | PROBLEMS["sinks"]
    problem, right = posed(tmp_path, arrays)[1], Alternative("", posed(tmp_path, arrays)[1])
    results = [right.result(Rows((h,), np.arange(N), np.arange(M))) for h in range(4)]
    pairs = zip(results, arrays["sinks"], strict=True)
    lse = np.stack([NORMALISERS[words](x, sink) for x, sink in pairs]).astype("f4")
    found = verify(**arrays, out=BF16(compute(problem, right)), lse=lse, dtype="bfloat16")
    if "vanish" not in words:  # all weights of a row: of none here
        assert (found.verdict, found.suspects[0].text) == ("FAIL", f"agrees if lse is {words}")
