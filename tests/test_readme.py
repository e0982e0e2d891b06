"""README.md: its length, its links, and what its commands and examples print."""

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import cli
from refattn.rounding.formats import FORMATS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w])"
TIMES = ("seconds", "ratio", "time/exact")  # columns that no run repeats


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands():
    """What is shown of each command of the console."""
    found = [block.partition("\n") for block in blocks("console")]
    return {line.removeprefix("$ "): shown for line, _, shown in found if line[:2] == "$ "}


def test_length():
    assert len(README.split()) <= 1300


def test_links():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 10
    for link in links:
        if not link.startswith("https://arxiv.org/abs/"):
            assert (ROOT / link).is_file(), link


def test_what_a_newcomer_copies():
    """Two commands, each once and on a line of its own: one of them is found there by `.ci/run`."""
    lines = README.splitlines()
    (install,) = [x for x in lines if x.endswith(".venv/bin/refattn compare")]
    (tests,) = [x for x in lines if x.endswith("-m pytest")]
    for line, extra in ((install, "cli"), (tests, "test")):
        assert line.startswith(
            f"python3 -m venv .venv && .venv/bin/pip install -q -e '.[{extra}]' "
        )


def without_times(text):
    """Lines, the columns of times left out of tables."""
    lines, spans = [], []
    for line in text.splitlines():
        if any(f" {name}" in line for name in TIMES) and "estimator" in line:
            names = list(re.finditer(r"\S+(?: \S+)*", line))
            spans = [
                (before.end(), name.end())  # numbers are set right, and may be wider than names
                for before, name in pairwise(names)
                if name.group() in TIMES
            ]
        elif not line.strip():
            spans = []
        lines.append(
            "".join(x for i, x in enumerate(line) if not any(a <= i < b for a, b in spans))
        )
    return lines


def shows(shown, printed):
    """Assert that lines are among those printed, in order; `...` stands for any number of them."""
    left = iter(without_times(printed))
    skipping = False
    for line in without_times(shown):
        if line == "...":
            skipping = True
            continue
        for other in left:
            if same(line, other):
                break
            assert skipping, f"{other!r} is printed where {line!r} is shown"
        else:
            raise AssertionError(f"{line!r} is not printed")
        skipping = False
    rest = list(left)
    assert skipping or not rest, rest


def same(line, other):
    words, others = (re.sub(NUMBER, "#", x).split() for x in (line, other))
    if [x.strip("─") for x in words] != [x.strip("─") for x in others]:
        return False
    values = [[float(x) for x in re.findall(NUMBER, y)] for y in (line, other)]
    rounding = [x < 1e-5 for x in values[0]]  # differs by machine
    return all(
        tiny or np.isclose(x, y, rtol=0.03) for x, y, tiny in zip(*values, rounding, strict=True)
    )


@pytest.mark.parametrize("shown", ["a 1.00\n...\nc\n", "...\nb  2.0\nc\n", "a 1\nb 2\nc\n"])
def test_shows(shown):
    shows(shown, "a 1.01\nb 2\nc\n")
    for other in ("a 1.1\nb 2.1\nc\n", "a 1.01\nb 2\n", "a 1.01\nb 2\nc\nd\n"):
        with pytest.raises(AssertionError):
            shows(shown, other)


def run(words, **options):
    testing = pytest.importorskip("click.testing")
    pytest.importorskip("rich")
    done = testing.CliRunner().invoke(cli.commands(), words, **options)
    assert done.exit_code in (0, 1), done.output
    return str(done.stdout)


def without_key(lost):
    """What a kernel in bfloat16 gives that leaves one key out."""
    to = FORMATS["bfloat16"].round
    q, k, v = (to(x.astype(np.float64)) for x in refattn.load_sample())
    out = refattn.softmax_attention(q, k, v, mask=np.arange(k.shape[-2]) != lost)
    return {"q": q, "k": k, "v": v, "out": to(out)}


@pytest.mark.parametrize("library", ["torch", "flax"])
def test_judging_numbers(library, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    arrays = without_key(77)
    if library == "torch":
        torch = pytest.importorskip("torch")
        given = {x: torch.asarray(y.astype(np.float32)).bfloat16() for x, y in arrays.items()}
    else:
        jax = pytest.importorskip("jax.numpy")
        given = {x: jax.asarray(y.astype(np.float32), jax.bfloat16) for x, y in arrays.items()}
    (code,) = blocks("py")
    monkeypatch.chdir(tmp_path)
    exec(code.replace("safetensors.torch", f"safetensors.{library}"), dict(given))
    (command,) = [x for x in commands() if x.startswith("refattn verify")]
    shows(commands()[command], run(shlex.split(command)[1:]))


def test_judging_code(tmp_path):
    pytest.importorskip("performer_pytorch")
    (code,) = [x for x in blocks("python") if "performer_pytorch" in x]
    (tmp_path / "mine.py").write_text(code)
    (command,) = [x for x in commands() if x.startswith("refattn check")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *shlex.split(command)],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    shows(commands()[command], done.stdout)


def test_comparing():
    (command,) = [x for x in commands() if x.startswith("refattn compare")]
    shows(commands()[command], run(shlex.split(command)[1:]))


def test_every_command_is_tried():
    assert sorted(x.split()[1] for x in commands()) == ["check", "compare", "verify"]


def test_in_python(capsys):
    (match,) = re.finditer(r"```python\n(import numpy.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    exec(match[1], {})
    shows(match[2], capsys.readouterr().out)


def test_the_citation_is_of_this_version():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {refattn.__version__}" in lines
