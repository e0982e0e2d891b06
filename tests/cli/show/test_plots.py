"""Figures: nothing on top of anything else, few colours, curves that differ in grey too."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

import refattn
from refattn import compare
from refattn.cli.show import plots, style
from refattn.compare import Row, study
from refattn.registry import DEFAULT
from tests.cli.running import run
from validation import plotting, svg
from validation.benchmarks import figures, scaling

SIZES = (8, 32, 128, 512)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """What a function of `cli.show.plots` would write, if it has no faults."""

    def draw(function, *args):
        found = []
        monkeypatch.setattr(style, "save", lambda figure, path: found.append(figure))
        function(*args, tmp_path / "x.png")
        assert faults(found[0]) == []
        return found[0]

    return draw


def rows(names, sizes=SIZES, draws=3):
    """Errors of two heads: most are much alike, as they are of RFA."""
    rng = np.random.default_rng(0)
    found = [
        Row("exact", None, np.full((draws, 2), 2e-7), 1.0),
        Row("mean of v", None, np.full((1, 2), 0.8), None),
    ]
    for i, name in enumerate(names):
        for s in sizes:
            error = (1 + 0.01 * i) * s**-0.1 * np.exp(0.1 * rng.standard_normal((draws, 2)))
            found.append(Row(name, s, error, 1.0))
    return found


def texts(figure):
    """Texts that are seen, with their boxes."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text, text.get_window_extent()


def curves(axes):
    """Those that are named: of estimators, forms, ..."""
    bars = [x[0] for x in axes.containers if isinstance(x, ErrorbarContainer)]
    return bars or [x for x in axes.lines if not x.get_label().startswith("_")]


def faults(figure):
    """What is wrong with a figure."""
    figure.draw_without_rendering()
    seen = list(texts(figure))
    found = [
        f"{a.get_text()!r} is on {b.get_text()!r}"
        for (a, one), (b, other) in itertools.combinations(seen, 2)
        if one.shrunk(0.9, 0.9).overlaps(other.shrunk(0.9, 0.9))
    ]
    for text, box in seen:
        if not all(figure.bbox.padded(1).contains(*corner) for corner in (box.min, box.max)):
            found.append(f"{text.get_text()!r} is cut off")
    for legend in figure.findobj(Legend):
        for axes in figure.axes:
            if any(x.get_window_extent().overlaps(axes.bbox) for x in legend.get_texts()):
                found.append(f"{legend.get_texts()[0].get_text()!r} is on data")
    colours = {to_hex(x.get_color()) for axes in figure.axes for x in axes.lines}
    if len(colours - {style.INK, style.GREY, style.PALE}) > 8:
        found.append(f"{len(colours)} colours")
    for axes in figure.axes:
        marks = [x.get_marker() for x in curves(axes)]
        if len(set(marks)) < len(marks):
            found.append("markers repeat")
    return found


@pytest.mark.long
def test_all_estimators(drawn):
    names = compare.names()
    figure = drawn(plots.plot_comparison, rows(names))
    said = [x.get_texts()[0].get_text() for x in figure.findobj(Legend)]
    assert all(said.count(name) == 1 for name in names)
    assert said.count("exact") == said.count("mean of v") == len(figure.axes)
    assert sum(len(curves(axes)) for axes in figure.axes) == len(names)
    for axes in figure.axes:
        assert 1 <= len(curves(axes)) <= 8
        others = [x for x in axes.lines if x.get_color() == style.PALE]
        assert len(others) == len(names) - len(curves(axes))
        assert list(axes.get_xticks()) == list(SIZES)
    unknown = drawn(plots.plot_comparison, rows([f"unknown-{i}" for i in range(17)]))
    assert [len(curves(axes)) for axes in unknown.axes] == [8, 8, 1]


def test_what_is_wrong_is_found():
    def old(names):
        """All curves in one panel, in colours that repeat, with a legend on top of them."""
        figure = Figure(figsize=(6, 4.5))
        axes = figure.subplots()
        for name in names:
            axes.loglog(SIZES, [s**-0.1 for s in SIZES], marker="o", label=name)
        axes.legend()
        return figure

    found = " ".join(faults(old(compare.names()[:9])))
    assert "is on data" in found
    assert "markers repeat" in found
    assert "colours" in found
    assert "cut off" in " ".join(faults(old(compare.names())))
    crowded, ticks = Figure(figsize=(2, 2)), range(0, 10**6, 10**5)
    crowded.subplots().set_xticks(ticks, map(str, ticks))
    assert any("'100000' is on '200000'" in x for x in faults(crowded))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("factor", [1, 0])
@pytest.mark.parametrize("sizes", [SIZES, (3,), tuple(range(8, 40)), (1, 2, 2**40)])
def test_any_sizes_and_errors_that_are_all_zero(drawn, sizes, factor):
    table = [x._replace(errors=factor * x.errors) for x in rows(list(DEFAULT), sizes)]
    figure = drawn(plots.plot_comparison, table)
    assert set(figure.axes[0].get_xticks()) <= set(sizes)


def test_bars_are_standard_errors(drawn):
    table = rows(list(DEFAULT))
    axes = drawn(plots.plot_comparison, table).axes[0]
    assert "standard error" in axes.get_ylabel()
    own = [row for row in table if row.estimator == DEFAULT[0]]
    _, _, (bars,) = axes.containers[0]
    for row, ((x, low), (_, high)) in zip(own, bars.get_segments(), strict=True):
        assert x == row.samples
        assert high - low == pytest.approx(2 * row.standard_error)
    once = drawn(plots.plot_comparison, rows(list(DEFAULT), draws=1)).axes[0]
    assert not any(x.has_yerr for x in once.containers)


def test_errors_beyond_the_axis_are_said(drawn):
    table = rows(["ra", "rfa-iid", "is", "eva"])
    table += [
        Row("lara-own", 8, np.full((3, 2), 200.0), 1.0),
        Row("lara-balance", 8, np.full((3, 2), 1e-7), 1.0),
        Row("rfa-sobol", 8, np.full((3, 2), math.nan), 1.0),
    ]
    figure = drawn(plots.plot_comparison, table)
    said = {x.get_texts()[0].get_text() for x in figure.findobj(Legend)}
    assert {"lara-own (to 200)", "lara-balance", "rfa-sobol: not finite"} <= said
    first, *_, last = (x.get_text() for x in figure.axes[0].get_yticklabels())
    assert (first, last) == ("≤2e-07", "≥4.8")


@pytest.mark.parametrize("lost", [0, 1])
def test_references_that_are_not_finite_are_said(drawn, lost):
    table = rows(["ra", "rfa-iid"])
    table[lost] = table[lost]._replace(errors=np.full((1, 2), math.nan))
    figure = drawn(plots.plot_comparison, table)
    said = {x.get_texts()[0].get_text() for x in figure.findobj(Legend)}
    assert f"{table[lost].estimator}: not finite" in said
    figure.draw_without_rendering()


def test_what_is_not_finite_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 4)).astype(np.float32)
    np.savez("far.npz", q=1e30 * q, k=1e30 * k, v=v)
    words = ["compare", "far.npz", "--draws", "1", "--features", "4", "--plot", "x.svg"]
    assert run(*words).exit_code == 0
    assert Path("x.svg").exists()  # of the mean of v
    Path("x.svg").unlink()
    lost = [Row(x, 8, np.full((1, 2), math.nan), 1.0) for x in ("exact", "mean of v", "ra")]
    nothing = compare.Comparison(lost, [], 1.0, False, 0, 1)
    monkeypatch.setattr("refattn.compare.measured.measure", lambda *_, **__: nothing)
    done = run(*words)
    said = "Error: there is nothing to draw: no error is finite.\n"
    assert (done.exit_code, done.stderr) == (2, said)
    assert "mean of v" in done.stdout
    assert not Path("x.svg").exists()


@pytest.mark.long(".pdf", ".svg")
@pytest.mark.parametrize("suffix", style.FIGURE_FORMATS)
def test_formats(tmp_path, suffix):
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix.upper()}"
    for path in (first, second):
        plots.plot_comparison(rows(["ra"]), path)
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()  # no dates, no random ids


@pytest.mark.long("all")
@pytest.mark.parametrize("heads", ["all", "one"])
def test_advice(drawn, heads):
    q, k, v = refattn.load_sample()
    found = study(q, k, v) if heads == "all" else study(q[0, 0], k[0, 0])
    figure = drawn(plots.plot_advice, found)
    assert heads == "one" or len(figure.axes) == 3


@pytest.mark.long("heads")
@pytest.mark.parametrize("lead", [pytest.param((), id="one"), pytest.param((2, 3), id="heads")])
def test_verified(monkeypatch, tmp_path, lead):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((*lead, 70, 8), dtype=np.float32) for _ in range(3))
    out = refattn.softmax_attention(q, k, v)
    out[..., 20:40, :] *= 1 + 1e-4
    out[..., 3, 3] = np.nan
    path = tmp_path / "a-file-with-a-name-that-takes-more-than-one-line-of-a-title-to-say.npz"
    np.savez(path, q=q, k=k, v=v, out=out)
    found = []
    monkeypatch.setattr(style, "save", lambda figure, path: found.append(figure))
    result = run("verify", path, "--plot", tmp_path / "x.png")
    assert result.exit_code == 1, result.output
    assert faults(found[0]) == []


def test_times():
    forms = [
        {"name": name, "at": [2**i for i in range(6, 17)], "seconds": [[i, i + 1.0, i + 2.0]] * 11}
        for i, name in enumerate(("RFA, positive", "LARA", "linear attention", "exact"), 1)
    ]
    record = {"case": scaling.LENGTH, "forms": forms}
    ((name, _, figure),) = figures.figures({"scaling": [record]})  # type: ignore[list-item]
    assert name == "tokens"
    assert faults(figure) == []
    assert all(x.has_yerr for x in figure.axes[0].containers)


@pytest.mark.long("2")
@pytest.mark.parametrize("columns", [1, 2])
def test_legends_of_claims_are_off_the_data(columns):
    def figure():
        with plotting.style():
            found, (panels,) = plotting.panels(1, columns)
            for axes in panels:
                for i in range(4):
                    axes.loglog([3, 7], [1 + i, 1e22 + i], "o-", label=f"a rather long name {i}")
                axes.set_xlabel("x")
                axes.legend()
        return found

    assert faults(figure())
    done = figure()
    height = done.get_size_inches()[1]
    svg.draw(done, "x")
    assert faults(done) == []
    assert done.get_size_inches()[1] == height if columns == 1 else True
