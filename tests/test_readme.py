"""README.md: its length, its links, and what its commands and examples print."""

import contextlib
import io
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn.judge.rounding.formats import FORMATS
from tests.validation import guide_blocks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = [*guide_blocks.blocks(README)]
TEXTS = [x.text for x in BLOCKS if x.language == "console"]
CONSOLE = dict(pair for text in TEXTS for pair in guide_blocks.commands(text))


def code(word):
    """The text of the block with a word, and of the block after it."""
    found = [x for x in pairwise(BLOCKS) if x[0].language[:2] == "py" and word in x[0].text]
    ((block, after),) = found
    return block.text, after.text


def shows(word, folder, *, without=None):
    """Assert that a command prints what is shown, or does without an estimator and its lines."""
    pytest.importorskip("click")
    pytest.importorskip("rich")
    (line,) = [x for x in CONSOLE if x.startswith(f"refattn {word}")]
    shown = CONSOLE[line]
    if without:
        line = line.replace(f",{without}", "")
        shown = re.sub(rf"^{without} .*\n", "", shown, flags=re.MULTILINE)
        shown = shown.replace(f" and {without} beat", " beats")
    printed = guide_blocks.command(line, folder)
    assert not guide_blocks.difference(shown, printed, atol=1e-5)  # rounding differs by machine


def test_length():
    assert len(README.split()) <= 800
    assert len(README.splitlines()) <= 110


def test_links():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link.partition("#")[0]).is_file(), link


def test_what_a_newcomer_copies():
    """Two commands, each once and on a line of its own: one of them is found there by `.ci/run`."""
    for end, extra in ((".venv/bin/refattn compare", "cli"), ("-m pytest", "test")):
        (line,) = [x for x in README.splitlines() if x.endswith(end)]
        start = f"python3 -m venv .venv && .venv/bin/pip install -q --no-compile -e '.[{extra}]' "
        assert line.startswith(start)


def without_key(lost):
    """What a kernel in bfloat16 gives that leaves one key out."""
    to = FORMATS["bfloat16"].round
    q, k, v = (to(x.astype(np.float64)) for x in refattn.load_sample())
    out = refattn.softmax_attention(q, k, v, mask=np.arange(k.shape[-2]) != lost)
    return {"q": q, "k": k, "v": v, "out": to(out)}


@pytest.mark.sweep(2)
@pytest.mark.docs("flax")
@pytest.mark.parametrize("library", ["numpy", "torch", "flax"])
def test_judging_numbers(library, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    arrays = {x: y.astype(np.float32) for x, y in without_key(77).items()}
    if library == "torch":
        torch = pytest.importorskip("torch")
        given = {x: torch.asarray(y).bfloat16() for x, y in arrays.items()}
    elif library == "flax":
        jax = pytest.importorskip("jax.numpy")
        given = {x: jax.asarray(y, jax.bfloat16) for x, y in arrays.items()}
    else:
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
        given = {x: y.astype(bfloat16) for x, y in arrays.items()}
    monkeypatch.chdir(tmp_path)
    exec(code("save_file")[0].replace("safetensors.torch", f"safetensors.{library}"), given)
    shows("verify", tmp_path)


def test_judging_code(tmp_path):
    pytest.importorskip("performer_pytorch")
    page = guide_blocks.blocks(guide_blocks.page("performer"))
    (mine,) = [x.text for x in page if "import FastAttention" in x.text]
    (tmp_path / "mine.py").write_text(mine)
    shows("check", tmp_path)


@pytest.mark.docs("all")
@pytest.mark.parametrize("without", [None, "ra"], ids=["all", "fast"])
def test_comparing(without, tmp_path):
    shows("compare", tmp_path, without=without)


def test_every_command_is_tried():
    assert sorted(x.split()[1] for x in CONSOLE) == ["check", "compare", "verify"]


def test_in_python():
    text, shown = code("import numpy")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(text, {})
    assert not guide_blocks.difference(shown, printed.getvalue())


def test_the_citation_is_of_this_version():
    lines = (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
    assert f"version: {refattn.__version__}" in lines
    page = guide_blocks.page("cite")
    title = next(x for x in lines if x.startswith("title: ")).removeprefix("title: ").strip('"')
    assert f"title = {{{title}}}" in page
    assert f"version = {{{refattn.__version__}}}" in page
    assert f"refattn-{refattn.__version__}-py3" in page
    assert "git+https" not in page  # nothing is published


def test_the_guide_names_what_the_package_requires():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = " ".join(guide_blocks.page("index").split())
    *most, last = project["dependencies"]
    python = project["requires-python"].removeprefix(">=")
    assert f"needs Python {python} or later, {', '.join(most)} and {last}." in page
