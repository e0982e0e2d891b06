"""One record for each estimator, of another package too: where it is found, what is refused."""

import ast
import dataclasses
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import conformance, naive, registry, vjp
from refattn.judge.vectors import recipes
from refattn.registry import ESTIMATORS, TRAITS, Estimator, register
from refattn.registry.record import load
from tests.cases import agrees
from tests.judge.mistakes.defects.probes import gates
from tests.quiet import QUIET, pull_quiet, quiet_attention, quiet_formula


@pytest.fixture(autouse=True)
def spare(monkeypatch):
    """The records as they are, whatever a test adds."""
    records = dict(ESTIMATORS)
    monkeypatch.setattr(ESTIMATORS, "_records", records)
    return records


def uniform(q, k, v, *, scale=None):
    return np.broadcast_to(np.mean(v, axis=-2, keepdims=True), (*q.shape[:-1], v.shape[-1]))


UNIFORM = Estimator(
    "uniform", uniform, uniform, traits=["normalised", "nonnegative"], aliases=("flat",)
)


def test_every_record_of_the_package_is_right():
    for name, record in ESTIMATORS.items():
        assert name in (record.name, *record.aliases)
        assert callable(record.fn)
        for given in (load(record.vjp), load(record.vectors)):
            assert given is None or callable(given)
        assert record.has(*record.traits)
        assert record.takes(*record.options)
        assert set(record.traits) <= set(TRAITS)
    used = {trait for record in ESTIMATORS.values() for trait in record.traits}
    assert used == set(TRAITS)
    assert {"softmax", "kernel", "rfa", "ra", "lara", "linear", "moments"} <= set(ESTIMATORS)
    assert all(ESTIMATORS[name].approximates for name in registry.DEFAULT)


def test_function_and_formula_agree():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 6, 4))
    for record in dict.fromkeys(ESTIMATORS.values()):
        options = {}
        if record.arrays != ("q", "k", "v"):
            continue
        if record.takes("omega"):
            shape = (6, 3, 4) if record.has("per-query") else (3, 4)
            options["omega"] = rng.standard_normal(shape)
            options |= record.sized(2) if record.has("chunked") else {}  # of which there are 3
        elif record.takes("indices"):
            options["indices"] = np.array([4, 0, 5])
            if record.takes("log_probability"):
                options["log_probability"] = rng.standard_normal(3)
        elif record.has("random"):
            continue  # it gives its frequencies to nobody
        else:
            options |= record.sized(2)
        options |= gates(record.name, k)
        want = record.naive(q, k, v, **options)
        got = (record.evaluate or record.fn)(q, k, v, **options)
        if record.has("recurrent"):
            want, got = (np.concatenate(x, axis=-2) for x in (want, got))
        np.testing.assert_allclose(got, want, rtol=1e-10, err_msg=record.name)


def test_a_record_is_found_by_all_its_names():
    kept = register(UNIFORM)
    assert kept.traits == ("normalised", "nonnegative")
    assert ESTIMATORS["uniform"] is ESTIMATORS["flat"] is kept
    assert {"uniform", "flat"} <= set(ESTIMATORS)
    assert kept.sized(3) == {}
    assert kept._replace(size="num_keys").sized(3) == {"num_keys": 3}


# --- entry points ---------------------------------------------------------------------------------


MODULE = """
import numpy as np
from refattn.registry import Estimator, register

def uniform(q, k, v):
    return np.broadcast_to(v.mean(axis=-2, keepdims=True), (*q.shape[:-1], v.shape[-1]))

ONE = Estimator("one", uniform, uniform, traits=("normalised", "nonnegative"))
TWO = [Estimator("two", uniform, uniform), Estimator("three", uniform, uniform)]
FOUR = register(Estimator("four", uniform, uniform))
TAKEN = Estimator("ra", uniform, uniform)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package whose entry points are these, and forget that they were read."""

    def install(**points):
        folder = tmp_path / "other_estimators-1.0.dist-info"
        folder.mkdir()
        (tmp_path / "other_estimators.py").write_text(MODULE, encoding="utf-8")
        (folder / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: other-estimators\nVersion: 1.0\n", encoding="utf-8"
        )
        lines = [f"[{registry.record.GROUP}]", *(f"{name} = {x}" for name, x in points.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "other_estimators", raising=False)
        monkeypatch.setattr(ESTIMATORS, "_complete", False)

    return install


def test_entry_points_are_read_at_the_first_look(installed, spare):
    installed(a="other_estimators:ONE", b="other_estimators:TWO", c="other_estimators:FOUR")
    register(UNIFORM)
    assert "other_estimators" not in sys.modules
    assert {"one", "two", "three", "four", "uniform"} <= set(ESTIMATORS)
    assert ESTIMATORS["one"].traits == ("normalised", "nonnegative")


UNREADABLE = {
    "other_estimators:NONE": "AttributeError: .*'NONE'",
    "no_such_estimators:ONE": "ModuleNotFoundError: .*no_such_estimators",
    "other_estimators:TAKEN": "ValueError: `name` and `aliases` must be new, got 'ra'",
    "other_estimators:uniform": "TypeError: it must be an Estimator or several, got function",
    "other_estimators:__name__": "TypeError: `record` must be an Estimator, got str",
}


@pytest.mark.parametrize("place", UNREADABLE)
def test_entry_points_that_cannot_be_read_are_said(installed, place):
    installed(bad=place, good="other_estimators:ONE")
    said = f"the entry point bad = {re.escape(place)} of other-estimators adds no estimator: "
    with pytest.warns(RuntimeWarning, match=said + UNREADABLE[place]) as found:
        assert ESTIMATORS["one"].name == "one"
    assert [x.filename for x in found] == [place.partition(":")[0]]
    assert ESTIMATORS["ra"] is not None


# --- an estimator of another package --------------------------------------------------------------


def pooled(q, k, v, *, num_segments, scale=None, defect=0.0):
    """Softmax attention to the mean keys and values of contiguous segments."""
    parts = (np.array_split(x, num_segments, axis=-2) for x in (k, v))
    k, v = (np.stack([np.mean(x, axis=-2) for x in found], axis=-2) for found in parts)
    return naive.softmax_attention(q, k, v, scale=scale) + defect


POOLED = Estimator(
    "pooled", pooled, pooled, size="num_segments", options=("scale",), traits=("normalised",)
)


def shifted(q, k, v, *, omega=None, rng=None, **options):
    """Random features at frequencies N(0, I) moved by a step."""
    num_features, step = options.pop("num_features", None), options.pop("step", 0.5)
    if omega is None:
        omega = step + np.random.default_rng(rng).standard_normal((num_features, q.shape[-1]))
    return naive.random_feature_attention(q, k, v, omega=omega, **options)


SHIFTED = Estimator(
    "shifted",
    shifted,
    naive.random_feature_attention,
    size="num_features",
    options=("scale", "mask", "causal", "omega"),
    traits=("normalised", "nonnegative", "random", "seeds-differ", "data-free", "unlimited-size"),
)


def checked(fn, estimator, *capabilities, **options):
    report = conformance.check(fn, estimator=estimator, capabilities=capabilities, rng=0, **options)
    return {"verdict": report.verdict, **{r.check: r.status for r in report.results}}


def test_an_implementation_of_it_is_checked():
    register(POOLED)
    found = checked(pooled, "pooled")
    assert set(found.values()) == {"PASS"}
    assert {"contract", "reference_values", "weighted_mean", "heads_apart"} <= set(found)
    assert not {"seeds", "order_of_keys", "queries_apart", "own_law"} & set(found)
    found = checked(partial(pooled, defect=1e-10), "pooled")
    assert found["verdict"] == found["reference_values"] == "FAIL"
    with pytest.raises(ValueError, match='must be one of "batch_invariant", "deterministic", got'):
        checked(pooled, "pooled", "mask")


@pytest.mark.long
def test_a_random_one_is_held_to_the_law_of_its_function():
    register(SHIFTED)
    right = checked(shifted, "shifted", "omega", "mask", "causal")
    assert set(right.values()) == {"PASS"}
    assert {"seeds", "own_law", "mask", "causal", "reference_values"} <= set(right)
    wrong = checked(partial(shifted, step=0.0), "shifted", "omega")
    assert [name for name, status in wrong.items() if status == "FAIL"] == ["verdict", "own_law"]


def test_options_are_those_of_the_package():
    known = {*registry.record._KEYWORDS, *registry.record._ABILITIES}
    given = {x for record in ESTIMATORS.values() for x in {*record.options} - {*record.gates}}
    assert {x for x in given | {*conformance.CAPABILITIES} if x[:2] != "d_"} <= known | {
        "indices_only",
        "omega_only",
    }
    with pytest.raises(ValueError, match="`options` must hold options of refattn, got 'heat'"):
        register(POOLED._replace(options=("scale", "heat")))


def test_its_pullback_is_found_and_is_the_slope_of_its_formula():
    rng = np.random.default_rng(0)
    arrays = {x: rng.standard_normal((2, 6, 4)) for x in "qkv"}
    with pytest.raises(TypeError, match=r"`fn` must be one of attend, .*eva_attention"):
        vjp(quiet_attention, **arrays)
    register(QUIET)
    options = {"causal": True, "mask": np.arange(6) != 2}
    for fn in (quiet_attention, partial(quiet_attention, scale=0.3)):
        formula = partial(quiet_formula, **getattr(fn, "keywords", {}))
        agrees(fn, formula, arrays, options, rng)
    out, pullback = vjp(quiet_attention, **arrays, **options)
    with pytest.raises(ValueError, match=r"`d_out` must have the shape of the result, \(2, 6, 4\)"):
        pullback(out[..., :1])
    assert ESTIMATORS["quiet"].differentiable is quiet_attention


def test_its_pullback_may_be_named(spare):
    """It is imported when it is used; a record with the same function takes it, too."""
    register(QUIET._replace(vjp="tests.quiet:pull_quiet"))
    other = QUIET._replace(name="louder", fn=partial(quiet_attention, scale=1.0), vjp=None)
    assert register(other).differentiable.keywords == {"scale": 1.0}
    x = np.ones((2, 3))
    assert vjp(other.fn, x, x, x)[1](x).q.shape == (2, 3)
    spare.clear()
    register(QUIET._replace(vjp="tests.quiet:no_such_name", options=()))
    with pytest.raises(AttributeError, match="no_such_name"):
        vjp(quiet_attention, x, x, x)


def candidate(q, k, v, *, d_out=None, forgets=False, scale=None, mask=None, causal=False):
    options = {"scale": scale, "mask": mask, "causal": causal, "forgets": forgets}
    out, pullback = pull_quiet(q, k, v, **options)
    return out if d_out is None else (out, *pullback(d_out)[:3])


@pytest.mark.usefixtures("briefly")
def test_a_wrong_pullback_fails():
    register(QUIET)
    able, some = ("mask", "causal", "vjp"), ["reference_values", "gradients", "gradients_of_hidden"]
    right = checked(candidate, "quiet", *able, checks=some)
    assert set(right.values()) == {"PASS"}
    wrong = checked(partial(candidate, forgets=True), "quiet", *able, checks=some)
    assert [name for name, status in wrong.items() if status == "FAIL"] == ["verdict", "gradients"]


def fails(*arrays, **options):
    return 1 / 0


@pytest.mark.parametrize(
    ("place", "said"), [("no.such:name", "ModuleNotFoundError"), (fails, "ZeroDivisionError")]
)
def test_what_a_record_gets_wrong_is_not_the_candidates_fault(place, said):
    register(QUIET._replace(name="louder", vjp=place))
    with pytest.raises(ValueError, match=f"`vjp` of the record of louder must work, got {said}"):
        checked(candidate, "louder", "vjp", checks=["gradients"])
    register(QUIET._replace(name="loudest", vjp=None, options=(), vectors=place))
    with pytest.raises(ValueError, match=f"`vectors` of loudest must give recipes, got {said}"):
        recipes.estimators()


def test_vectors_need_a_formula_of_the_package():
    """Not one of its name either: 50 digits would be those of the other."""
    for formula in (quiet_formula, softmax_attention):
        other = QUIET._replace(name=formula.__name__, naive=formula, vectors=recipes.usual)
        register(other._replace(vjp=None, options=()))
        with pytest.raises(ValueError, match=f"got {formula.__name__} of tests"):
            recipes.all_recipes()
        ESTIMATORS._records.pop(formula.__name__)


def test_its_state_decodes_it():
    state, (q, k, v) = register(QUIET).state, np.random.default_rng(0).standard_normal((3, 7, 4))
    parts = [state.init(k[i], v[i]) for i in (slice(0, 3), slice(3, 6))]
    whole = parts[0].merge(parts[1]).update(k[6:], v[6:])
    want = quiet_attention(q, k, v, causal=True)[6:]
    np.testing.assert_allclose(whole.read(q[6:]), want, rtol=1e-14)


def softmax_attention(q, k, v):
    """Another formula than the package's of this name."""
    return naive.softmax_attention(q, k, v, scale=0.25)


def quarter(q, k, v):
    return softmax_attention(q, k, v)


QUARTER = partial(refattn.softmax_attention, scale=0.25)


@pytest.mark.parametrize(
    ("fn", "formula"),
    [
        (QUARTER, softmax_attention),
        (QUARTER, quarter),
        (quarter, partial(naive.softmax_attention, scale=0.25)),
    ],
)
@pytest.mark.usefixtures("briefly")
def test_gradients_are_compared_with_those_of_its_own_function(fn, formula):
    register(
        Estimator("quarter", fn, formula, options=["vjp"], traits=["normalised", "nonnegative"])
    )

    def candidate(q, k, v, *, d_out=None, scale=0.25):
        out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v, scale=scale)
        return out if d_out is None else (out, *pullback(d_out)[:3])

    names = ["gradients", "gradients_together"]
    assert checked(candidate, "quarter", "vjp", checks=names)["verdict"] == "PASS"
    whole = partial(candidate, scale=1.0)
    assert checked(whole, "quarter", "vjp", checks=names)["verdict"] == "FAIL"


def test_one_without_claims_is_compared_with_its_formula():
    register(Estimator("plain", uniform, uniform))
    assert checked(uniform, "plain")["verdict"] == "PASS"
    found = checked(lambda q, k, v: uniform(q, k, v) + 1e-9, "plain")
    assert found["reference_values"] == "FAIL"


@pytest.fixture
def compared(tmp_path):
    """Run `refattn compare` on small tensors with two more estimators: rows, and what was said."""
    from tests.cli.running import run

    register(POOLED)
    register(UNIFORM)
    register(QUIET)
    path = tmp_path / "qkv.npz"
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    np.savez(path, q=q, k=k, v=v)

    def compared(*words):
        words = ["compare", str(path), "--features", "2,5", "--draws", "1", "--estimators", *words]
        done = run(*words)
        assert done.exit_code == 0, done.output
        table, *_ = done.stdout.split("\nstandard_error:")
        return [line.split() for line in table.splitlines()[4:]], done.stderr.splitlines()

    return compared


def test_comparison_shows_it(compared):
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    exact = naive.softmax_attention(q, k, v)
    found, _ = compared("pooled,flat")
    error = np.linalg.norm(pooled(q, k, v, num_segments=5) - exact) / np.linalg.norm(exact)
    names = ["exact", "mean", "pooled", "pooled", "uniform"]
    assert [row[0] for row in found] == names  # one that has no size appears once
    assert float(found[3][2]) == pytest.approx(error, rel=6e-3)
    assert float(found[4][1]) == pytest.approx(float(found[1][3]), rel=6e-3)
    found, said = compared("pooled,quiet,rfa", "--causal")
    assert [row[0] for row in found] == ["exact", "mean", "quiet", "rfa-iid", "rfa-iid"]
    assert said == ["skipped: S = 2, 5 of pooled (does not take `causal`)"]


@pytest.mark.long
def test_comparison_shows_it_among_all(compared):
    assert {"pooled", "uniform"} <= {row[0] for row in compared("all")[0]}


@pytest.mark.long("pooled,flat")
@pytest.mark.parametrize("words", ["flat", "pooled,flat"])
def test_comparison_plots_it(words, compared, tmp_path):
    pytest.importorskip("matplotlib")
    compared(words, "--plot", str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").stat().st_size > 0


# --- nothing is not a pass ------------------------------------------------------------------------


def refuses(*arrays, **options):
    raise RuntimeError("no")


def refusing(name, able=None):
    if able is None:
        able = [x for x in conformance.CAPABILITIES if ESTIMATORS[name].takes(x)]
    return conformance.Adapter(refuses, name, able)


# Each check, with the first estimator that it is for; long are those that need a capability.
FIRST = {x.name: e for e in [*ESTIMATORS][::-1] for x in conformance.checks_of(refusing(e))}
PLAIN = {x.name for e in ESTIMATORS for x in conformance.checks_of(refusing(e, ()))}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "check", [pytest.param(x, marks=[pytest.mark.long] * (x not in PLAIN)) for x in FIRST]
)
@pytest.mark.usefixtures("briefly")
def test_a_candidate_that_raises_fails_every_check_alone(check):
    report = conformance.check(refusing(FIRST[check]), rng=0, checks=[check])
    assert report.verdict == "FAIL"


@pytest.mark.parametrize("name", dict.fromkeys(x.name for x in ESTIMATORS.values()))
@pytest.mark.usefixtures("briefly")
def test_a_candidate_that_raises_fails(name):
    assert conformance.check(refusing(name), rng=0).verdict == "FAIL"


def test_what_compares_nothing_is_no_pass(monkeypatch):
    idle = dataclasses.replace(conformance.CHECKS["value_length"], run=lambda t: None)
    monkeypatch.setitem(conformance.CHECKS, "value_length", idle)
    adapter = conformance.Adapter(ESTIMATORS["softmax"].fn, "softmax")
    report = conformance.check(adapter, rng=0, checks=["value_length"])
    assert report.verdict == report.results[0].status == "UNDERPOWERED"
    mark = conformance.parametrize_with_checks([adapter])
    run = next(p.values[0] for p in mark.args[1] if p.id.endswith("value_length"))
    with pytest.raises(pytest.skip.Exception, match="underpowered"):
        run()


@pytest.mark.parametrize("which", ["either", "neither", "wrong"])
@pytest.mark.usefixtures("briefly")
def test_a_mask_with_causal_may_be_refused_only_by_what_takes_each(which):
    def either(q, k, v, mask=None, causal=False):
        if mask is not None and causal:
            raise ValueError("not both")
        return ESTIMATORS["softmax"].fn(q, k, v, mask=mask, causal=causal)

    def neither(q, k, v, mask=None, causal=False):
        if mask is not None or causal:
            raise ValueError("not even one")
        return ESTIMATORS["softmax"].fn(q, k, v)

    def wrong(q, k, v, mask=None, causal=False):
        return either(q, k, v, mask=mask, causal=causal and mask is not None)

    fn = {"either": either, "neither": neither, "wrong": wrong}[which]
    found = checked(fn, "softmax", "mask", "causal", checks=["mask_with_causal"])
    assert found["verdict"] == ("PASS" if which == "either" else "FAIL")


# --- no module knows an estimator by name ---------------------------------------------------------


def test_no_module_branches_on_the_name_of_an_estimator():
    """No comparison, dictionary that is indexed at once, or `match`, of a name with a literal."""
    names = set(ESTIMATORS) | {"exact"}
    package = Path(refattn.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(f'"{name}"' in text for name in names):
            continue
        for node in ast.walk(ast.parse(text)):
            parts = []
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
                parts = [node.slice, *(x for x in node.value.keys if x is not None)]
            words = [getattr(x, "attr", getattr(x, "id", "")) for x in parts]
            literals = {
                x.value for part in parts for x in ast.walk(part) if isinstance(x, ast.Constant)
            }
            if {"estimator", "name"} & set(words) and names & literals:
                found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert found == []
