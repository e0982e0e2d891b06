"""A case of another convention in the terms of the package, and back."""

import numpy as np

from tests.judge.vectors.running import package

PACKAGE = {
    "causal": "bottom-right",
    "window": "inclusive, bottom-right",
    "empty_rows": "zero",
    "softcap": "before-bias",
    "mask": "seen",
    "default_scale": "1/sqrt(d)",
    "groups": "contiguous",
    "lse": "e",
    "lse_empty": "-inf",
    "dropout": "1/(1-p)",
    "past": "behind",
}


def row_sees(i, n, m, past, causal, window, said):
    """Which keys query i sees, key by key."""
    corner = {"top-left": 0, "bottom-right": m - n, "behind": past}
    style, corner_of_window = said["window"].split(", ")
    own = i + corner[said["past"] if past else said["causal"]]
    middle, seen = i + corner[corner_of_window], []
    left, right = window or (None, None)
    left = left - 1 if left is not None and style == "exclusive" else left
    for j in range(m):
        inside = left is None or j >= middle - left
        inside &= right is None or j <= middle + right
        seen.append(bool(inside and (not causal or j <= own)))
    return seen


def under_the_package(given, said):
    """Inputs with the same meaning under the package's conventions."""
    given, q = dict(given), given["q"]
    past = given.get("past_k", np.empty((0, 1))).shape[-2]
    if past:
        for name in "kv":
            given[name] = np.concatenate([given.pop(f"past_{name}"), given[name]], -2)
    n, m = q.shape[-2], given["k"].shape[-2]
    if {"causal", "window", "past"} & said.keys():
        causal, window = given.pop("causal"), given.pop("window", None)
        rows = [row_sees(i, n, m, past, causal, window, PACKAGE | said) for i in range(n)]
        given |= {"causal": False, "mask": np.array(rows) & given.get("mask", True)}
    if said.get("mask") == "hidden":
        given["mask"] = ~given["mask"]
    if "default_scale" in said:
        scales = {"1/sqrt(d)": None, "1/d": 1 / q.shape[-1], "1": 1.0}
        given["scale"] = scales[said["default_scale"]]
    if said.get("groups") == "interleaved":
        for name in "kv":
            given[name] = np.concatenate([given[name]] * (len(q) // len(given[name])))
    if "keep" in given:
        kept = 1 - given.pop("dropout_p")
        factor = 1 / kept if said.get("dropout", "1/(1-p)") == "1/(1-p)" else 1.0
        given["dropout"] = (given.pop("keep") * factor).astype(q.dtype)
    if said.get("softcap") == "after-bias":  # scores that are capped are a bias of no others
        factor = q.dtype.type(q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"])
        scores = factor * (q @ given["k"].swapaxes(-1, -2)) + given.get("bias", q.dtype.type(0))
        cap = q.dtype.type(given.pop("softcap"))
        given |= {"bias": cap * np.tanh(scores / cap), "q": 0 * q}
    return given


def after(found, v, said):
    """Results of the package as under another convention."""
    found = {name: np.array(x) for name, x in found.items()}
    empty = np.isneginf(found["lse"])
    rows = {"mean": v.mean(-2), "nan": np.nan}
    found["out"][empty] = rows.get(said.get("empty_rows", ""), found["out"][empty])
    if said.get("lse") == "2":
        found["lse"] /= np.log(2)
    if said.get("lse_empty") == "inf":
        found["lse"][empty] = np.inf
    return found


def under(said, fn=None):
    """The package under other conventions."""

    def run(**given):
        inner = under_the_package(given, said)
        if "d_out" in given:
            return package("softmax")(**inner)
        return after(package("softmax", fn)(**inner | {"return_lse": True}), given["v"], said)

    return run
