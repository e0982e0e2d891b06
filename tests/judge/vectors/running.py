"""Running a case of the golden vectors: what is given for it, and how far off that is."""

import numpy as np

import refattn
from refattn import attend, attention, registry, vjp
from refattn.judge.vectors import recipes
from refattn.judge.vectors.cases import GRADIENTS

FILES = {recipe.id: recipe.file for recipe in recipes.all_recipes()}
FUNCTIONS = {  # those of the registry draw keys, and take no weights
    "sampled-keys": refattn.sampled_key_attention,
    "kernel": refattn.kernels.estimate,
}


def of_file(cases, *names):
    return [case for case in cases if FILES[case.id] in names]


def of_options(cases):
    """With gradients and without: the package's conventions."""
    return of_file(cases, "softmax-options", "softmax-tiles")


def of_package(case):
    """Without the gradient of proposals, which the package does not return."""
    return only(case, *(name for name in case.expected if name != "d_centres"))


def forward(cases):
    return [case for case in cases if "d_out" not in case.inputs]


def package(estimator, fn=None):
    """A function of the package, with inputs, arguments and outputs by the names of vectors."""
    fn = fn or FUNCTIONS.get(estimator) or registry.ESTIMATORS[estimator].fn

    def run(d_out=None, d_lse=None, return_lse=False, feature_map="elu", **given):
        assert feature_map == "elu"
        if estimator == "moments":
            return refattn.moments.estimate(**given)._asdict()
        if "slopes" in given:
            given["bias"] = attention.alibi(given.pop("slopes"))
        called = attend if return_lse or d_lse is not None else fn
        if called is attend and given["scale"] is None:
            given["scale"] = given["q"].dtype.type(given["q"].shape[-1]) ** -0.5
        if d_out is None:
            return named(called(**given))
        out, pullback = vjp(called, **given)
        pulled = pullback((d_out, d_lse) if called is attend else d_out)._asdict()
        gradients = {GRADIENTS[name]: x for name, x in pulled.items() if name in GRADIENTS}
        return named(out) | {name: x for name, x in gradients.items() if x is not None}

    return run


def named(out):
    """Results by name."""
    return out._asdict() if hasattr(out, "_asdict") else out if type(out) is dict else {"out": out}


def error(case, run, dtype="float64", allowed=None):
    """Largest error over the allowed error; infinite for another shape and NaN."""
    inputs = {n: x.astype(dtype) if x.dtype.kind == "f" else x for n, x in case.inputs.items()}
    allowed = case.tolerance[dtype] if allowed is None else allowed
    with np.errstate(all="ignore"):
        got = named(run(**inputs, **case.arguments))
    worst, wide = 0.0, np.longdouble
    for name, want in case.expected.items():
        value, known = np.asarray(got[name]), np.isfinite(want)
        if value.shape != want.shape or not np.all(np.isfinite(value[known])):
            return np.inf
        if not np.array_equal(value[~known], want[~known], equal_nan=True):
            return np.inf
        low, size = (np.broadcast_to(getattr(case, part)[name], want.shape)[known]
                     for part in ("expected_low", "size"))  # fmt: skip
        off = np.abs(value[known].astype(wide) - want[known].astype(wide) - low)
        bound = allowed * size
        if np.any(off[bound == 0] != 0):
            return np.inf
        worst = max(worst, float(np.max(off[bound > 0] / bound[bound > 0], initial=0)))
    return worst


def missed(case, run, dtypes=("float32", "float64")):
    """Whether what is run misses the case in some dtype."""
    return any(error(case, run, dtype) > 1 for dtype in dtypes if dtype in case.tolerance)


def only(case, *names):
    """The case with some of its outputs."""
    return case._replace(expected={name: case.expected[name] for name in names})


# --- mistakes -------------------------------------------------------------------------------------


def changed(run, **edits):
    """Replace arguments by functions of all of them, where they are given."""
    return lambda **x: run(**x | {name: edit(x) for name, edit in edits.items() if name in x})


def without(run, *names):
    """Ignore arguments."""
    nothing = {"causal": False, "v": None}
    return changed(run, **{name: lambda x, n=name: nothing.get(n) for name in names})


def spoilt(run, **edits):
    """Replace results by functions of them and of the arguments."""

    def wrong(**x):
        found = named(run(**x))
        return found | {name: edit(found[name], x) for name, edit in edits.items() if name in found}

    return wrong


def at_others(run, **edits):
    """Take gradients at other arguments than the output."""

    def wrong(**x):
        right = named(run(**x))
        return changed(run, **edits)(**x) | {n: right[n] for n in ("out", "lse") if n in right}

    return wrong


# --- the catalogue of defects ---------------------------------------------------------------------


def takes(case):
    """Whether implementations of the catalogue take what the case gives."""
    signed = case.arguments.get("features", "positive") != "positive"
    plain = case.arguments.get("scale") is None and case.arguments.get("ddof", 1) == 1
    return plain and not signed and not {"d_lse", "log_weight"} & set(case.inputs)


def catalogued(entry):
    """An implementation of the catalogue, with what `package` takes and gives."""

    def run(scale=None, features=None, feature_map=None, weighting=None, ddof=1, **given):
        x = given.pop("x", None)
        rows = () if x is None else (x,) if "y" not in given else (x, given.pop("y"))
        out = entry.fn(*rows, **given)
        if entry.estimator == "moments":
            return dict(zip(("mean", "cov"), out, strict=True))
        if "vjp" in entry.capabilities:
            return dict(zip(("out", "dq", "dk", "dv"), out, strict=True))
        return {"out": out}

    return run
