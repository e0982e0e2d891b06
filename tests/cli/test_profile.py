"""`refattn profile`, or `moments`: numbers, and one clear line for bad input."""

import json
import math
import re
import sys

import numpy as np
import pytest

from refattn import __version__, adapt, cli, moments, profile, softmax_attention, theory
from tests.validation import guide_blocks

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

WIDE = {"COLUMNS": "120"}  # tables have all columns


def run(*args):
    result = testing.CliRunner().invoke(cli.commands(), ["profile", *map(str, args)], env=WIDE)
    assert result.exit_code == 0, result.output
    known = re.compile(r"(?:estimated time|read as float32): |\w+: \d+ of \d+ after ")
    assert all(map(known.match, result.stderr.splitlines()))
    return result.stdout


def report(folder, *args):
    path = folder / "report.json"
    run(*args, "--json", path)

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def fails(*args):
    result = testing.CliRunner().invoke(cli.commands(), ["moments", *map(str, args)], env=WIDE)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *usage, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert not usage or usage[0] == "Usage: refattn moments [OPTIONS] [FILE]"
    return line


def column(seen, part, name):
    return np.array([head[part][name] for head in seen["heads"]])


def cells(output, title):
    """Rows of the table that follows a line, as cells two spaces apart."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    start = next(i for i in range(start, len(lines)) if lines[i].startswith("─")) + 1
    stop = next(i for i in range(start, len(lines) + 1) if i == len(lines) or "   " not in lines[i])
    return [re.split(r" {2,}", line.strip()) for line in lines[start:stop]]


@pytest.fixture
def arrays():
    """Three heads whose laws are well within their regime at hundreds of features."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 3, 40, 3)) * 0.5
    return {"q": q[:, :30], "k": k, "v": v + 2.0}


@pytest.fixture
def npz(tmp_path, arrays):
    path = tmp_path / "[qkv].npz"
    np.savez(path, **arrays)
    return path


def save(folder, **arrays):
    path = folder / "other.npz"
    np.savez(path, **arrays)
    return path


def test_default_data(monkeypatch):
    monkeypatch.setitem(WIDE, "COLUMNS", "100")
    output = run()
    assert output == run()
    lines = output.splitlines()
    assert lines[0].startswith("minilm_zen128_slice.npz: q (2, 4, 128, 32)")
    assert lines[1] == "scale 0.176777, covariances not shrunk, not causal; n = 128, m = 128"
    assert lines[2] == "N = 128 < d^2 = 1024: covariances are rough"
    assert "effective sample size below 10" in output
    assert lines[-2].startswith("recommended for relative error 0.1, by the laws")
    assert lines[-1] == "exact attention, for 8 of 8 heads"
    assert max(map(len, lines)) <= 100
    assert not any(word in output for word in ("…", "inf", "nan"))


def test_the_guide_shows_the_output(monkeypatch):
    monkeypatch.setitem(WIDE, "COLUMNS", "80")
    page = guide_blocks.page("choose")
    shown = re.search(r"\$ refattn profile\n(minilm.*?)```\n", page, flags=re.DOTALL)
    assert shown is not None
    number = r"-?\d+(?:\.\d*)?(?:e[+-]\d+)?"

    def split(text):
        words = " ".join(re.sub(number, "#", text).split())
        return words, [float(x) for x in re.findall(number, text)]

    (words, numbers), (of_output, expected) = split(shown[1]), split(run())
    assert words == of_output
    np.testing.assert_allclose(numbers, expected, rtol=0.02)


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("shrink", [False, True])
def test_moments_are_those_of_direct_evaluation(tmp_path, npz, arrays, scale, shrink):
    args = ["--shrink"] * shrink + ([] if scale is None else ["--scale", scale])
    seen = report(tmp_path, npz, *args)
    root = math.sqrt(scale or 3**-0.5)
    q, k = root * arrays["q"], root * arrays["k"]
    of = {"q": moments.estimate(q), "k": moments.estimate(k)}
    if shrink:
        of = {name: moments.shrink(m) for name, m in of.items()}
    for name, m in of.items():
        summary = moments.summary(m)
        for part in ("mean_norm", "trace", "condition", "effective_rank"):
            found = column(seen, "moments", f"{part}_{name}")
            np.testing.assert_allclose(found, getattr(summary, part), rtol=1e-10)
        found = column(seen, "eigenvalues", name)
        np.testing.assert_allclose(found, summary.eigenvalues, rtol=1e-10)
    squares = np.sum((q[:, :, None] + k[:, None]) ** 2, -1).reshape(3, -1)
    for percent in (5, 50, 95):
        found = column(seen, "moments", f"quantile_{percent}")
        np.testing.assert_allclose(found, np.percentile(squares, percent, axis=-1), rtol=1e-12)
    proposals = {
        "N(0, I)": None,
        "OPRF": adapt.oprf(**of),
        "SDERF": adapt.sderf(**of),
        "Gaussian": adapt.optimal_gaussian(**of),
        "fit": adapt.fit(**of, scale=1.0),
    }
    for name, proposal in proposals.items():
        expected = adapt.expected_log_excess(of["q"], of["k"], proposal)
        np.testing.assert_allclose(column(seen, "log_excess", name), expected, rtol=1e-9)


def laws_at(name, samples, qkv, scale, fit):
    if name == "ra":
        return theory.randomized_attention_law(*qkv, num_samples=samples, scale=scale)
    law = theory.importance_sampling_law if name == "is" else theory.attention_law
    proposal = fit if name == "rfa-adapted" else None
    return law(*qkv, num_features=samples, scale=scale, proposal=proposal)


@pytest.mark.parametrize("scale", [None, 0.4])
def test_predictions_are_those_of_the_laws(tmp_path, npz, arrays, scale):
    args = ["--features", "4,400", "--target", 0.03]
    seen = report(tmp_path, npz, *args, *([] if scale is None else ["--scale", scale]))
    qkv = tuple(arrays.values())
    fit = adapt.fit(*qkv[:2], scale=scale)
    exact = softmax_attention(*qkv, scale=scale)
    found = {(x["estimator"], x["samples"]): x for x in seen["predictions"]}
    assert list(found) == [
        (name, s) for name in ("rfa", "rfa-adapted", "is", "ra") for s in (4, 400)
    ]
    for s in (4, 400):
        for name in profile.LAWS:
            law = laws_at(name, s, qkv, scale, fit)
            entry, error = found[name, s], theory.relative_error(law, exact)
            np.testing.assert_allclose(entry["error_per_head"], error, rtol=1e-9)
            inside = law.in_regime.mean(-1)
            np.testing.assert_allclose(entry["share_in_regime_per_head"], inside)
            if np.all(inside == 1):
                assert entry["error_mean"] == pytest.approx(error.mean())
            else:
                assert entry["error_mean"] is None
    assert found["rfa", 4]["error_mean"] is None
    assert found["rfa", 400]["error_mean"] is not None
    for name in profile.LAWS:
        by_law = column(seen, "num_features_by_law", name)
        holds_from = column(seen, "law_holds_from", name)
        for head, s in np.ndenumerate(by_law):
            law, less = (laws_at(name, int(x), qkv, scale, fit) for x in (s, max(s - 1, 1)))
            assert theory.relative_error(law, exact)[head] <= 0.03
            assert s == 1 or theory.relative_error(less, exact)[head] > 0.03
        for head, s in np.ndenumerate(holds_from):
            law, less = (laws_at(name, int(x), qkv, scale, fit) for x in (s, max(s - 1, 1)))
            assert np.all(law.in_regime[head])
            assert s == 1 or not np.all(less.in_regime[head])
    assert np.all(column(seen, "law_holds_from", "ra") == 1)


def test_tables_show_the_numbers_of_the_json(tmp_path, npz):
    seen = report(tmp_path, npz, "--features", "4,400")
    output = run(npz, "--features", "4,400")
    labels = [str(i) for i in range(3)]
    for title, part in (("Moments", "moments"), ("Expected", "log_excess")):
        rows = cells(output, title)
        assert [row[0] for row in rows] == [*labels, "median", "worst"]
        for i, name in enumerate(seen["heads"][0][part], 1):
            values = column(seen, part, name)
            worst = np.min(values) if "rank" in name else np.max(values)
            shown = [float(row[i]) for row in rows]
            np.testing.assert_allclose(shown, [*values, np.median(values), worst], rtol=6e-3)
    rows = cells(output, "Predicted")
    assert [row[0] for row in rows] == ["4", "400"]
    for i, row in enumerate(rows):
        for entry, cell in zip(seen["predictions"][i::2], row[1:], strict=True):
            if entry["error_mean"] is None:
                share = np.mean(entry["share_in_regime_per_head"])
                assert cell == f"- ({math.floor(100 * share)}%)"
            else:
                assert float(cell) == pytest.approx(entry["error_mean"], rel=6e-3)
    for head, row in zip(seen["heads"], cells(output, "S by the law"), strict=True):
        by_law, holds_from = head["num_features_by_law"], head["law_holds_from"]
        shown = [x[name] for name in by_law for x in (by_law, holds_from)][:-1]  # not 1, of ra
        assert [float(x) for x in row[1:]] == shown


def test_json_says_what_was_read(tmp_path, npz):
    seen = report(tmp_path, npz, "--target", 0.25)
    heads = seen.pop("heads")
    assert [head["head"] for head in heads] == [[0], [1], [2]]
    assert len(seen.pop("predictions")) == 16
    assert seen.pop("measured") is None
    assert seen.pop("law_queries") == 30
    assert seen == {
        "refattn": __version__,
        "numpy": np.__version__,
        "file": "[qkv].npz",
        "shapes": {"q": [3, 30, 3], "k": [3, 40, 3], "v": [3, 40, 3]},
        "dtype": "float64",
        "scale": 3**-0.5,
        "shrink": False,
        "target": 0.25,
        "count": {"q": 30, "k": 40},
        "advised_count": 9,
        "enough": {"q": True, "k": True},
    }


def test_advice_on_the_number_of_rows(tmp_path, arrays):
    assert "n = 30, m = 40; N > d^2 = 9, as" in run(save(tmp_path, **arrays))
    few = {**arrays, "q": arrays["q"][:, :9]}
    assert "n = 9, m = 40\nN = 9 <= d^2 = 9: covariances are rough\n" in run(save(tmp_path, **few))
    few = {name: x[:, : 5 + i] for i, (name, x) in enumerate(arrays.items())}
    few["v"] = arrays["v"][:, :6]
    assert "\nN = 5 and 6 < d^2 = 9: covariances" in run(save(tmp_path, **few))


def test_recommendation(tmp_path, npz, arrays):
    n, m = 30, 40
    easy = {**arrays, "q": 0.1 * arrays["q"], "k": 0.1 * arrays["k"]}
    easy_path = save(tmp_path, **easy)
    for path, target, name in ((easy_path, 0.2, "rfa"), (npz, 1e-4, "exact attention")):
        seen = report(tmp_path, path, "--target", target)
        for head in seen["heads"]:
            found, by_law = head["recommended"], head["num_features_by_law"]
            needed = {name: max(s, head["law_holds_from"][name]) for name, s in by_law.items()}
            costs = {x: needed[x] * (n + m) / (n * m) for x in ("rfa", "rfa-adapted")}
            best = min(costs, key=lambda x: costs[x])
            if costs[best] < 1:
                assert found == {
                    "estimator": best,
                    "num_features": needed[best],
                    "cost_ratio": pytest.approx(costs[best]),
                }
            else:
                assert found == {
                    "estimator": "exact attention",
                    "num_features": None,
                    "cost_ratio": 1.0,
                }
        assert any(head["recommended"]["estimator"].startswith(name) for head in seen["heads"])
    output = run(npz, "--target", 1e-4)
    assert output.endswith("--measure tries it):\nexact attention, for 3 of 3 heads\n")
    output = run(easy_path, "--target", 0.3)
    price = r"0\.\d+ of the cost of exact attention \(median\)"
    assert re.search(rf"\nrfa(-adapted)? with S = \d+, {price}, for 3 of 3 heads\n$", output)


def test_what_is_measured_is_shown(tmp_path, npz):
    path = tmp_path / "report.json"
    words = [npz, "--measure", "--target", 0.01, "--estimators", "rfa,lara,ra", "--json", path]
    output = run(*words)
    line = "\nmeasured 3 estimators, S = 1, 2, 4, ... up to 160, 4 draws, on 3 heads\n"
    assert line in output
    found = json.loads(path.read_text())["measured"]
    assert (found["heads"], found["draws"], found["most"]) == ([[0], [1], [2]], 4, 160)
    rows = cells(output, "Measured")
    ratios = {"exact attention": 1.0}
    for entry, row in zip(found["estimators"], rows, strict=True):
        last = entry["steps"][-1]
        assert row[:2] == [entry["estimator"], f"{last['samples']}"]
        shown = [float(x) for x in row[2:4]]
        np.testing.assert_allclose(shown[0], last["error_mean"], rtol=6e-3)
        np.testing.assert_allclose(shown[1], last["standard_error"], rtol=0.06)
        assert entry["reached"]
        assert last["error_mean"] <= 0.01 < entry["steps"][-2]["error_mean"]
        ratios[entry["estimator"]] = entry["cost_ratio"]
    best = min(ratios, key=lambda name: ratios[name])
    assert found["recommended"]["estimator"] == best
    title, *answers = output.splitlines()[-3:]
    assert title == "recommended for relative error 0.01, as measured on 3 of 3 heads:"
    assert answers[0].startswith(best)
    assert answers[1].startswith("then ")


def test_measured_on_some_of_the_data(tmp_path, npz, monkeypatch):
    monkeypatch.setattr(profile, "PAIRS", 2 * 30 * 40)
    monkeypatch.setattr(profile, "QUADRATIC_QUERIES", 5)
    output = run(npz, "--measure", "--estimators", "ra,lara", "--most", 16, "--target", 1e-3)
    assert "heads, evenly spaced: 0 2\n" in output
    assert "ra: on 5 evenly spaced queries of each head\n" in output
    assert [row[1] for row in cells(output, "Measured")] == ["> 16", "> 16"]
    assert output.endswith("as measured on 2 of 3 heads:\nexact attention\n")


def test_the_guide_shows_what_is_measured():
    page = guide_blocks.page("choose")
    command, *shown = page.split("$ refattn profile -")[1].split("```")[0].splitlines()
    output = run(*f"-{command}".split())
    pairs = zip(cells("\n".join(shown), "Measured"), cells(output, "Measured"), strict=True)
    for row, printed in pairs:
        assert row[:2] == printed[:2]
        np.testing.assert_allclose(
            [float(x) for x in row[2:5]], [float(x) for x in printed[2:5]], 0.02
        )


def test_moments_is_another_name():
    commands = cli.commands().commands
    assert commands["moments"] is commands["profile"]


def test_any_target(tmp_path, npz):
    easy, easiest = (report(tmp_path, npz, "--target", t) for t in (1e100, 1e300))
    for head, other in zip(easy["heads"], easiest["heads"], strict=True):
        assert head["num_features_by_law"] == other["num_features_by_law"]
        assert set(head["num_features_by_law"].values()) == {1.0}
    for head in report(tmp_path, npz, "--target", 1e-300)["heads"]:
        assert head["recommended"]["estimator"] == "exact attention"


def test_outside_the_regime_no_number_is_shown(tmp_path):
    rng = np.random.default_rng(0)
    q, k, v = 20 * rng.standard_normal((3, 8, 4))
    path = save(tmp_path, q=q, k=k, v=v)
    output = run(path, "--features", "4,16")
    assert all(row[1] == "- (0%)" for row in cells(output, "Predicted"))
    assert "-: outside the regime of the law (effective sample size below 10)" in output
    assert "inf" not in output
    seen = report(tmp_path, path, "--features", 4)
    by_name = {x["estimator"]: x for x in seen["predictions"]}
    assert by_name["rfa"]["error_mean"] is None
    assert by_name["rfa"]["error_per_head"] is None  # infinite; one head, so no list
    assert seen["heads"][0]["num_features_by_law"]["rfa"] is None
    assert cells(output, "S by the law")[0][1] == "-"
    assert seen["heads"][0]["recommended"]["estimator"] == "exact attention"


def test_without_values(tmp_path, npz, arrays):
    full = report(tmp_path, npz)
    path = save(tmp_path, q=arrays["q"], k=arrays["k"])
    output = run(path)
    assert output.endswith(
        "\nFILE has no v: predicted errors and the recommendation are left out.\n"
    )
    assert "Predicted" not in output
    seen = report(tmp_path, path)
    assert seen["predictions"] == []
    for head, other in zip(seen["heads"], full["heads"], strict=True):
        assert head == {key: other[key] for key in head}
        assert set(other) - set(head) == {
            *("num_features_by_law", "law_holds_from", "relative_standard_error", "recommended")
        }


def test_grouped_heads_are_those_of_repeated_keys(tmp_path, arrays):
    q = np.random.default_rng(1).standard_normal((2, 6, 30, 3)) * 0.4
    k, v = arrays["k"], arrays["v"]
    seen = report(tmp_path, save(tmp_path, q=q, k=k, v=v))
    assert [head["head"] for head in seen["heads"]] == [[i, j] for i in range(2) for j in range(6)]
    repeated = {name: np.repeat(x, 2, axis=0) for name, x in (("k", k), ("v", v))}
    other = report(tmp_path, save(tmp_path, q=q, **repeated))
    for name in seen["heads"][0]["moments"]:
        np.testing.assert_allclose(
            column(seen, "moments", name), column(other, "moments", name), rtol=1e-12
        )
    fit = adapt.fit(q, k)  # shared by the heads that share keys
    k, v = repeated["k"], repeated["v"]
    law = theory.attention_law(q, k, v, num_features=512, proposal=fit)
    error = theory.relative_error(law, softmax_attention(q, k, v))
    found = [
        x for x in seen["predictions"] if (x["estimator"], x["samples"]) == ("rfa-adapted", 512)
    ]
    np.testing.assert_allclose(found[0]["error_per_head"], error, rtol=1e-9)
    law = theory.attention_law(q, k, v, num_features=1, proposal=fit)
    np.testing.assert_array_equal(
        column(seen, "num_features_by_law", "rfa-adapted"),
        theory.attention.features_to_reach(0.1, law, softmax_attention(q, k, v)).ravel(),
    )


def test_heads_that_broadcast(tmp_path, arrays):
    path = save(tmp_path, q=arrays["q"][0], k=arrays["k"], v=arrays["v"])
    seen = report(tmp_path, path)
    assert [head["head"] for head in seen["heads"]] == [[0], [1], [2]]
    one = report(tmp_path, save(tmp_path, **{name: x[0] for name, x in arrays.items()}))
    assert one["heads"][0]["head"] == []
    assert one["heads"][0]["moments"] == pytest.approx(seen["heads"][0]["moments"])
    assert one["heads"][0]["recommended"] == seen["heads"][0]["recommended"]


def test_one_row_and_constant_queries(tmp_path, arrays):
    pytest.importorskip("matplotlib")
    k, v = arrays["k"], arrays["v"]
    for rows in (np.ones((1, 3)), np.ones((30, 3))):
        for keys in (k[0], k[0, :1]):
            path = save(tmp_path, q=rows, k=keys, v=v[0, : len(keys)])
            output = run(path, "--plot", tmp_path / "out.png")
            assert "nan" not in output
            first = cells(output, "Moments")[0]
            assert first[7] == "-"  # the effective rank of no variation
            head = report(tmp_path, path)["heads"][0]
            assert head["moments"]["effective_rank_q"] is None
            assert all(math.isfinite(x) for x in head["log_excess"].values())
            if len(keys) == 1:
                assert head["num_features_by_law"]["ra"] == 1


def test_subsamples_are_evenly_spaced_and_said(tmp_path, npz, arrays, monkeypatch):
    assert "evenly spaced" not in run(npz)
    assert "±" not in run(npz)
    monkeypatch.setattr(profile, "QUANTILE_ROWS", 35)
    monkeypatch.setattr(profile, "LAW_QUERIES", 3)
    output = run(npz, "--features", 4000)
    assert "quantiles: over at most 35 evenly spaced queries and keys\n" in output
    assert "laws: of 3 evenly spaced queries of each head, and all keys;\n" in output
    seen = report(tmp_path, npz)
    q, k, v = (arrays[name] for name in "qkv")
    few = q[:, [0, 14, 29]]
    law = theory.randomized_attention_law(few, k, v, num_samples=1)
    error = theory.relative_error(law, softmax_attention(few, k, v))
    by_law = column(seen, "num_features_by_law", "ra")
    np.testing.assert_array_equal(by_law, np.ceil((error / 0.1) ** 2))
    spread = column(seen, "relative_standard_error", "ra")
    shown = [float(x) for x in cells(output, "Predicted")[0][-1].split(" ± ")]
    expected = np.mean(error) / 4000**0.5, np.linalg.norm(error * spread) / (2 * 3 * 4000**0.5)
    np.testing.assert_allclose(shown[0], expected[0], rtol=6e-3)
    np.testing.assert_allclose(shown[1], expected[1], rtol=0.34)  # one digit
    np.testing.assert_array_equal(profile._spaced(np.arange(9), 3), [0, 4, 8])
    np.testing.assert_array_equal(profile._spaced(np.arange(3), 3), [0, 1, 2])
    monkeypatch.setattr(profile, "LAW_QUERIES", 30)  # the bound itself is not exceeded
    assert "laws: of" not in run(npz)


def test_safetensors_and_dtype(tmp_path, npz, arrays):
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "qkv.safetensors"
    numpy.save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path)
    assert report(tmp_path, path)["heads"] == report(tmp_path, npz)["heads"]
    half = save(tmp_path, **{name: x.astype(np.float16) for name, x in arrays.items()})
    assert report(tmp_path, half)["dtype"] == "float32"
    assert report(tmp_path, half, "--dtype", "float64")["dtype"] == "float64"


def test_plot(tmp_path, npz, arrays):
    pytest.importorskip("matplotlib")
    for i, path in enumerate((npz, save(tmp_path, q=arrays["q"], k=arrays["k"]))):
        run(path, "--plot", tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": None}, "FILE must hold arrays q and k: .* has no k"),
        ({"k": np.ones((7, 5))}, "`q` and `k` must have last axes of one length"),
        ({"v": np.ones((8, 4))}, "`k` and `v` must have next-to-last axes of one length"),
        ({"q": np.ones((6, 3), int), "v": None}, "`q` must have dtype .* got int64: cast it first"),
        ({"q": np.full((6, 3), np.nan)}, "`q` must be finite in float64"),
        ({"v": np.zeros((40, 3))}, "exact attention must be finite and not all zero"),
        ({"q": np.ones((0, 3)), "v": None}, "`q` and `k` must have at least one head and one row"),
        ({"q": np.ones((3, 0, 3))}, "`q` and `k` must have at least one head and one row"),
        ({"q": np.eye(3) * 1e200, "v": None}, "must be finite"),
    ],
)
def test_bad_arrays(tmp_path, arrays, changes, message):
    arrays = {name: x for name, x in (arrays | changes).items() if x is not None}
    assert re.search(message, fails(save(tmp_path, **arrays)))


def test_bad_files_and_options(tmp_path, npz, monkeypatch):
    assert "does not exist" in fails(tmp_path / "nothing.npz")
    (tmp_path / "text.npz").write_text("q,k,v\n")
    assert "cannot read " in fails(tmp_path / "text.npz")
    assert "must be positive integers" in fails(npz, "--features", "0")
    for value in ("0", "-1", "nan", "inf"):
        assert "`target` must be a positive finite real number" in fails(npz, f"--target={value}")
        assert "`scale` must be a positive finite real number" in fails(npz, f"--scale={value}")
    assert "below 2**63" in fails(npz, "--features", 10**400)
    assert "must end in .json" in fails(npz, "--json", npz)
    assert "is not in the range 2<=x" in fails(npz, "--draws", 1)
    assert "must be all or of" in fails(npz, "--estimators", "softmax")
    without = tmp_path / "qk.npz"
    np.savez(without, q=np.ones((3, 2)), k=np.ones((3, 2)))
    assert "FILE must hold arrays q, k and v: " in fails(without, "--measure")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    install = "needs `pip install 'refattn[cli]'`"
    assert f"--plot {install}" in fails(npz, "--plot", tmp_path / "out.png")
