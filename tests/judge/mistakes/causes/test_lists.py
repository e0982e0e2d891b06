"""Each listed cause makes its own wrong numbers, and is found in them; none is in right ones."""

import re
from itertools import chain

import numpy as np
import pytest

from refattn.files.tensors import open_tensors
from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.verification.reading import pose_tensors

from refattn.judge.mistakes.causes import trials  # isort: skip  (after `verify`: it imports both)
from refattn.judge.mistakes.causes.sampled import Alternative, Rows  # isort: skip
from refattn.judge.mistakes.causes.slips import NORMALISERS  # isort: skip
from tests.judge.mistakes.causes.kernels import BF16, draw

N, M = 48, 80
Q, K, V, _ = draw(11, heads=4, n=N, m=M)
RNG = np.random.default_rng(3)
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
}


def listed(path, arrays):
    """What is right of a problem, all listed causes of it by text, and one of each kind of them."""
    options = {x: arrays[x] for x in ("causal", "window", "softcap") if x in arrays}
    np.savez(path / "x.npz", out=arrays["q"], **{x: arrays[x] for x in arrays.keys() - options})
    problem = pose_tensors(open_tensors(path / "x.npz", dtype="bfloat16"), **options)
    every = {x.text: x for x in chain(*(x(problem) for x in trials._PLAIN_LISTS))}
    kinds = {re.sub(r"\d+", "#", x): x for x in every}
    return Alternative("", problem), every, kinds


def compute(one, n, name="out"):
    return np.stack([getattr(one.result(Rows((h,), np.arange(n), np.arange(M))), name)
                     for h in range(4)])  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_listed_cause_is_found_in_its_own_numbers(tmp_path, name):
    """Or another one that gives the same, if it is none that makes no difference here."""
    arrays = {"q": Q, "k": K, "v": V} | PROBLEMS[name]
    right, every, kinds = listed(tmp_path, arrays)
    n, given = len(arrays["q"][0]), arrays | {"dtype": "bfloat16", "profile": "flash"}
    out = BF16(compute(right, n))
    assert verify(**given, out=out).verdict == "PASS"
    usual = {} if name == "plain" else listed(tmp_path, {"q": Q, "k": K, "v": V})[2]
    own = 0
    for text in (y for x, y in kinds.items() if x not in usual):
        wrong = BF16(compute(every[text], n))
        found = verify(**given, out=wrong)
        if found.verdict == "FAIL":
            said = found.suspects[0].text.removeprefix("agrees if ")
            own += said == text
            if said.endswith("all numbers are 0, as if they were never computed"):
                assert not np.any(wrong[:, 1:])  # of which any list may say it
                continue
            off = np.abs(compute(every[said], n) - wrong) > 0.02 + 0.02 * np.abs(wrong)
            assert said == text or np.mean(off) < 0.03, (text, said)
    assert own > 1


@pytest.mark.sweep(4)
@pytest.mark.parametrize("words", NORMALISERS)
def test_each_form_of_log_normalisers_is_found(tmp_path, words):
    arrays = {"q": Q, "k": K, "v": V} | PROBLEMS["sinks"]
    right, *_ = listed(tmp_path, arrays)
    results = [right.result(Rows((h,), np.arange(N), np.arange(M))) for h in range(4)]
    pairs = zip(results, arrays["sinks"], strict=True)
    lse = np.stack([NORMALISERS[words](x, sink) for x, sink in pairs]).astype("f4")
    found = verify(**arrays, out=BF16(compute(right, N)), lse=lse, dtype="bfloat16")
    if "vanish" not in words:  # all weights of a row: of none here
        assert (found.verdict, found.suspects[0].text) == ("FAIL", f"agrees if lse is {words}")
