"""Runs of the checks: time, scripts that show failures, output, arguments, suspects."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import conformance
from refattn.conformance import Adapter, Failure, check
from refattn.conformance.checks import identities
from refattn.conformance.defects import MUTANTS

long = partial(pytest.param, marks=pytest.mark.long)

# Candidates, which the scripts import


def plain(q, k, v):
    return refattn.softmax_attention(q, k, v)


def unscaled(q, k, v):
    return refattn.softmax_attention(q, k, v, scale=1.0)


def single(q, k, v):
    return plain(q, k, v).astype(np.float32)


def writing(q, k, v):
    out = plain(q, k, v)
    v += 1
    return out


def listed(q, k, v):
    return plain(q, k, v).tolist()


def infinite(q, k, v):
    return plain(q, k, v) * np.inf


def mixed_queries(q, k, v):
    return plain(q, k, v) + np.mean(q, -2, keepdims=True)


def seedless(q, k, v, *, num_features, seed):
    return refattn.random_feature_attention(q, k, v, num_features=num_features, rng=1)


def wide(q, k, v, *, num_features, seed):
    return refattn.random_feature_attention(
        1.2 * q, 1.2 * k, v, num_features=num_features, rng=seed
    )


def exiting(q, k, v):
    sys.exit(3)


def crashing(q, k, v):
    if k.shape[-2] == 1:
        ctypes.string_at(0)
    return plain(q, k, v)


def leaving(q, k, v):
    os._exit(0)


def hanging(q, k, v):
    time.sleep(100)


def contiguous_only(q, k, v):
    return plain(q, k, v) if q.flags.c_contiguous else v


def uncentred(x):
    return x.mean(-2), np.swapaxes(x, -1, -2) @ x / (x.shape[-2] - 1)


class Unscaled:
    def __call__(self, q, k, v):
        return unscaled(q, k, v)

    def method(self, q, k, v):
        return unscaled(q, k, v)


instance, unnamed = Unscaled(), lambda q, k, v: unscaled(q, k, v)


def scripts(fn, estimator, *names, **options):
    adapter = fn if isinstance(fn, Adapter) else Adapter(fn, estimator)
    report = check(adapter, rng=0, checks=names or None, **options)
    found = {r.check: r.reproducer for r in report.results if r.status == "FAIL"}
    assert found
    return found


def pasted(script):
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=600,
    )


def shown(script):
    """What a script shows of the failure: an error that is too large, an exception, a report."""
    result = pasted(script)
    last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1]
    for error, allowed in re.findall(r"error (\S+) allowed (\S+)", result.stdout):
        assert float(error) > float(allowed)
        return "error"
    if "Failure: " in last:
        return last
    if result.stdout.startswith("FAIL: "):
        return "report"
    assert "inf" in result.stdout or "nan" in result.stdout, result
    return "not finite"


# Time


class Counting(identities.Trial):
    """Counts calls, as trials do."""

    calls: int = 0
    since: float | None = None

    def call(self, *arrays, **options):
        self.since = time.monotonic()
        try:
            return super().call(*arrays, **options)
        finally:
            self.calls, self.since = self.calls + 1, None


@pytest.mark.long
def test_a_slow_candidate_is_given_fewer_seeds_within_its_time_limit():
    def slow(q, k, v, *, num_features, seed):
        time.sleep(0.005)
        return refattn.random_feature_attention(q, k, v, num_features=num_features, rng=seed)

    report = check(slow, estimator="rfa", rng=0, checks=["frequency_law"], time_limit=3.0)
    (result,) = report.results
    assert result.status == "UNDERPOWERED", str(report)
    assert 3 <= result.samples < 2000
    assert result.adjusted is not None


def test_time_runs_out_for_a_slow_candidate(monkeypatch):
    from refattn.conformance.verdict import runner

    def slow(q, k, v):
        time.sleep(0.02)
        return plain(q, k, v)

    monkeypatch.setattr(runner, "Trial", Counting)
    report = check(slow, estimator="softmax", rng=0, checks=["weighted_mean"], time_limit=0.3)
    (result,) = report.results
    assert report.verdict == "UNDERPOWERED"
    assert re.fullmatch(r"[1-9]\d* calls in 0\.3 s", result.got)
    assert f"expected an answer within 0.3 s; got {result.got}" in str(report)


@pytest.mark.parametrize("answers", [0, 1])
def test_a_candidate_that_hangs_fails(monkeypatch, answers):
    from refattn.conformance.verdict import runner

    left = [None] * answers

    def hanging(q, k, v):
        while not left:
            time.sleep(0.01)
        left.pop()
        return plain(q, k, v)

    monkeypatch.setattr(runner, "Trial", Counting)
    report = check(hanging, estimator="softmax", rng=0, checks=["contract"], time_limit=0.3)
    assert report.results[0].summary == "expected an answer within 0.3 s; got none"
    assert report.verdict == "FAIL"
    assert "time_limit=0.3)" in report.results[0].reproducer


def test_an_import_is_not_interrupted(tmp_path, monkeypatch):
    (tmp_path / "slow_import.py").write_text(
        "import time\nfor _ in range(100): time.sleep(0.01)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def importing(q, k, v):
        import slow_import  # type: ignore[import-not-found]

        assert slow_import.whole
        return plain(q, k, v)

    (result,) = check(
        importing, estimator="softmax", rng=0, checks=["contract"], time_limit=0.2
    ).results
    assert result.got == "none"
    import slow_import  # here the thread of the check has ended its import, not broken it off

    assert slow_import.whole


def test_time_that_is_over_before_the_first_call_is_no_failure(monkeypatch):
    def slow(self, *sizes, **options):
        time.sleep(0.5)
        raise AssertionError

    monkeypatch.setattr(identities.Trial, "problem", slow)
    (result,) = check(
        plain, estimator="softmax", rng=0, checks=["contract"], time_limit=0.1
    ).results
    assert (result.status, result.got) == ("UNDERPOWERED", "0 calls in 0.1 s")


def test_what_a_late_check_still_finds_does_not_count(monkeypatch):
    def adding(trial):
        while True:  # not in a call, so that nothing interrupts it
            trial.p[f"p {len(trial.p)}"] = 0.5
            trial.power[f"p {len(trial.p)}"] = (lambda alpha: 0.0, 1.0)
            time.sleep(0)
            if len(trial.p) > 10**5:
                return

    late = dataclasses.replace(identities.CHECKS["contract"], run=adding)
    monkeypatch.setitem(identities.CHECKS, "contract", late)
    (result,) = check(
        plain, estimator="softmax", rng=0, checks=["contract"], time_limit=0.05
    ).results
    assert result.status == "UNDERPOWERED"


# Scripts


@pytest.mark.long
def test_scripts_of_wrong_numbers():
    for name, script in scripts(unscaled, "softmax", "reference_values", "value_length").items():
        assert shown(script) == "error", name
    found = scripts(uncentred, "moments", "reference_values", "large_mean")
    assert {shown(script) for script in found.values()} == {"error"}
    assert shown(scripts(infinite, "softmax", "contract")["contract"]) == "not finite"


@pytest.mark.long
def test_scripts_of_comparisons_of_calls_run_the_check_again():
    found = scripts(mixed_queries, "softmax", "queries_apart", "weighted_mean")
    assert shown(found["queries_apart"]) == "report"
    assert shown(scripts(seedless, "rfa", "seeds")["seeds"]) == "report"
    assert shown(scripts(exiting, "softmax", "contract")["contract"]) == "report"


@pytest.mark.long
def test_scripts_of_laws_have_the_level_of_the_run():
    options = {"level": "full", "alpha": 1e-3}
    found = scripts(wide, "rfa", "frequency_law", **options)["frequency_law"]
    assert "rng=0, level='full', alpha=0.001)" in found
    assert shown(found) == "report"


@pytest.mark.long
@pytest.mark.skipif("strict" not in identities.Case._fields, reason="cases do not say")
@pytest.mark.parametrize(
    ("fn", "text"),
    [(single, "float32"), (writing, "other numbers in it"), (listed, "a list")],
    ids=["dtype", "writing", "library"],
)
def test_scripts_of_misbehaviour_raise(fn, text):
    script = scripts(fn, "softmax", "contract")["contract"]
    assert "strict=True)" in script
    assert text in shown(script)


@pytest.mark.long
def test_scripts_find_the_candidate():
    here = __name__.rpartition(".")[2]
    for fn in (instance, instance.method, unnamed, functools.partial(unscaled)):
        script = scripts(fn, "softmax", "contract", "value_length")["value_length"]
        assert "fn = ...  # the callable under test" in script
    for name in ("instance", "instance.method", "unnamed"):
        adapter = Adapter(unscaled, "softmax", source=f"{here}:{name}")
        script = scripts(adapter, "softmax", "value_length")["value_length"]
        assert f"fn = {name}\n" in script
        assert shown(script) == "error"


# Command line


PRINTING = """
import ctypes, os, sys
import refattn

out = sys.stdout

class Model:
    def __call__(self, q, k, v):
        print("from Python")
        out.write("held")
        os.write(1, b"to the file")
        if os.name == "posix":
            ctypes.CDLL(None).puts(b"from C")
        return refattn.softmax_attention(q, k, v, scale=1.0)

model = Model()
print("imported")
"""


def command(folder, *words):
    pytest.importorskip("click")
    (folder / "printing_candidates.py").write_text(PRINTING, encoding="utf-8")
    main = "from refattn.cli import main; main()"
    given = ["printing_candidates:model", "--estimator", "softmax", "--check", "value_length"]
    return subprocess.run(
        [sys.executable, "-c", main, "check", *given, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=600,
    )


def test_json_alone_is_on_standard_output(tmp_path):
    result = command(tmp_path, "--json")
    assert json.loads(result.stdout)["verdict"] == "FAIL", result.stdout
    assert result.returncode == 1
    texts = ("imported", "from Python", "held", "to the file")
    for text in texts + (("from C",) if os.name == "posix" else ()):
        assert text in result.stderr, text


def test_json_alone_without_a_file_below(monkeypatch, tmp_path):
    testing = pytest.importorskip("click.testing")
    from refattn import cli

    (tmp_path / "printing_here.py").write_text(
        "import refattn\n\ndef fn(q, k, v):\n"
        "    print('printed')\n    return refattn.softmax_attention(q, k, v)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["check", "printing_here:fn", "--estimator", "softmax", "--json"]
    result = testing.CliRunner().invoke(cli.commands(), words)
    assert json.loads(result.stdout)["verdict"] == "PASS"
    assert "printed" in result.stderr


def test_scripts_of_the_command_line_import_instances(tmp_path):
    result = command(tmp_path, "--reproducers")
    assert "from printing_candidates import model\n\nfn = model\n" in result.stdout


# Arguments and results


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"capabilities": 5}, TypeError, "`capabilities` must be an iterable of names, got int"),
        ({"capabilities": [["a"]]}, TypeError, "`capabilities` must hold names only, got list"),
        ({"tags": 5}, TypeError, "`tags` must be a mapping of tags to values, got int"),
        ({"tags": {"device": "cpu"}}, ValueError, "device.* must be left out .* got 'cpu'"),
        ({"checks": 5}, TypeError, "`checks` must be an iterable of names, got int"),
        ({"checks": [["a"]]}, TypeError, "`checks` must hold names only, got list"),
        ({"checks": []}, ValueError, "`checks` must name at least one check, got none"),
        ({"on_result": 5}, TypeError, "`on_result` must be callable, got int"),
        ({"rng": 2**1000}, ValueError, "`rng` must be below 2\\*\\*128, got an integer of 1001 b"),
        (
            {"rng": 10**5000},
            ValueError,
            "`rng` must be at most about 10\\*\\*308, .* got about 10\\*\\*5000",
        ),
        ({"tags": {"ddof": 10**5000}}, ValueError, "must be 0 or 1, got an integer of 16610 bits"),
        ({"tags": {"ddof": True}}, ValueError, "`tags\\['ddof'\\]` must be 0 or 1, got True"),
        ({"tags": {"scale": 10**400}}, ValueError, "`tags\\['scale'\\]` must be a positive finite"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        check(plain, estimator="softmax", **arguments)


def test_bad_sources():
    with pytest.raises(TypeError, match="`source` must be a string, got int"):
        Adapter(plain, "softmax", source=5)  # type: ignore[arg-type]
    for source in ("module", "module:", ":name"):
        with pytest.raises(ValueError, match="`source` must be module:name"):
            Adapter(plain, "softmax", source=source)


@pytest.mark.parametrize("strict", [False, True])
def test_results_are_real(strict):
    x = np.ones((2, 2))
    adapter = Adapter(lambda q, k, v: plain(q, k, v) + 0j, "softmax")
    with pytest.raises(Failure, match="complex"):
        adapter(x, x, x, strict=strict)
    moments = Adapter(lambda x: tuple(y + 0j for y in uncentred(x)), "moments")
    with pytest.raises(Failure, match="complex"):
        moments(x, strict=strict)
    report = check(adapter, rng=0)
    assert {r.status for r in report.results} == {"FAIL"}


class Quantity(np.ndarray):
    """An array with a unit, which is lost with its type."""


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: np.ma.MaskedArray(x, True), "a plain array; got a MaskedArray"),
        (lambda x: np.ma.MaskedArray(x), "a plain array; got a MaskedArray"),
        (lambda x: np.ma.masked, "a plain array; got a MaskedConstant"),
        (lambda x: x.view(np.matrix), "a plain array; got a matrix"),
        (lambda x: x.view(np.recarray), "a plain array; got a recarray"),
        (lambda x: x.view(Quantity), "a plain array; got a Quantity"),
        (lambda x: x.astype(object), "dtype object|of dtype object|; got object"),
        (lambda x: x.astype(str), "<U32"),
        (lambda x: x.astype([("re", float)]), "re"),
        (lambda x: x.astype("m8[s]"), "timedelta64"),
        (lambda x: x[0, 0], "array|shape"),
        (lambda x: None, "an array of numpy|real numbers"),
    ],
)
def test_what_is_no_plain_array_of_real_numbers_fails(change, text, strict):
    x = np.ones((2, 2))
    with pytest.raises(Failure, match=text):
        Adapter(lambda q, k, v: change(plain(q, k, v)), "softmax")(x, x, x, strict=strict)
    if "plain" in text:
        moments = Adapter(
            lambda x: tuple(change(np.atleast_2d(y)) for y in uncentred(x)), "moments"
        )
        with pytest.raises(Failure, match=text):
            moments(x, strict=strict)


def test_other_plain_arrays_pass(tmp_path):
    x = np.ones((2, 2))

    def mapped(x):
        out = np.memmap(tmp_path / "x", x.dtype, "w+", shape=x.shape)
        out[:] = x
        return out

    def read_only(x):
        x.flags.writeable = False
        return x[:]

    for change in (mapped, read_only, np.asfortranarray):
        Adapter(lambda q, k, v, c=change: c(plain(q, k, v)), "softmax")(x, x, x, strict=True)


class Proxy:
    """Answers whatever it is asked for, and takes anything."""

    __signature__ = property(lambda self: 1 / 0)

    def __getattr__(self, name):
        if name == "__qualname__":
            return self
        raise AttributeError(name)

    def __call__(self, q, k, v):
        return plain(q, k, v)


def test_names_are_strings():
    assert Adapter(Proxy(), "softmax").name == "Proxy"
    assert check(Proxy(), estimator="softmax", rng=0, checks=["contract"]).verdict == "PASS"
    with pytest.raises(TypeError, match="`name` must be a string, got int"):
        Adapter(plain, "softmax", name=5)  # type: ignore[arg-type]


class Wordless(BaseException):
    def __str__(self):
        raise RuntimeError


def test_exceptions_without_words():
    def fails(q, k, v):
        raise Wordless

    (result,) = check(fails, estimator="softmax", rng=0, checks=["contract"]).results
    assert result.status == "FAIL"
    assert result.got.startswith("Wordless: ")


# Programs


def test_programs_that_write_dtypes_numpy_does_not_have(tmp_path):
    pytest.importorskip("safetensors")
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "head = {'out': {'dtype': 'F8_E4M3', 'shape': [2, 2], 'data_offsets': [0, 4]}}\n"
        "text = json.dumps(head).encode()\n"
        "open(sys.argv[2], 'wb').write(len(text).to_bytes(8, 'little') + text + bytes(4))\n"
    )
    run = conformance.Subprocess([sys.executable, str(program)], format="safetensors")
    with pytest.raises(RuntimeError, match=r"`out` must have a dtype that NumPy has.* got F8_E4M3"):
        run(*np.ones((3, 2, 2)))


def test_programs_and_their_words(tmp_path):
    code = "import sys, numpy as np; np.savez(sys.argv[2], **{sys.argv[3]: np.eye(2)})"
    words = [sys.executable, "-c", code, "{input}", "{output}"]
    run = conformance.Subprocess([*words, "out"], format="npz", timeout=1e300)
    np.testing.assert_array_equal(run(*np.ones((3, 2, 2))), np.eye(2))
    run = conformance.Subprocess([*words, "mean"], format="npz", names=("x",))
    with pytest.raises(RuntimeError, match=r"the program wrote \['mean'\] and not `cov`"):
        run(np.ones((2, 2)))
    with pytest.raises(
        TypeError, match=r"`command` must hold strings only, got (Posix|Windows)Path"
    ):
        conformance.Subprocess([tmp_path])  # type: ignore[list-item]
    with pytest.raises(ValueError, match='`command` must be words as of a shell, got "a \'b"'):
        conformance.Subprocess("a 'b")


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_programs_get_scalars_without_axes(tmp_path, format):
    if format == "safetensors":
        pytest.importorskip("safetensors")
    kept = tmp_path / f"kept.{format}"
    code = f"import shutil, sys; shutil.copy(sys.argv[1], {str(kept)!r})"
    run = conformance.Subprocess([sys.executable, "-c", code], format=format)
    q = np.ones((4, 3, 2))[:, ::2]
    with pytest.raises(RuntimeError, match="wrote no readable result"):
        run(q, q, q, num_features=2, seed=5, causal=True, mask=np.ones((2, 2), bool))
    found = run._read(str(kept))
    assert {name: (x.shape, str(x.dtype)) for name, x in found.items()} == {
        **dict.fromkeys("qkv", ((4, 2, 2), "float64")),
        **dict.fromkeys(("num_features", "seed", "causal"), ((), "int64")),
        "mask": ((2, 2), "uint8"),
    }
    assert found["seed"] == 5


KEPT = """
import ctypes, os, sys, time
import numpy as np

with open("started", "a") as file:
    file.write("x")
print("started", flush=True)
for line in sys.stdin:
    given, target = line.rstrip("\\n").split("\\t")
    seed = int(np.load(given)["seed"])
    if seed == 1:
        sys.stderr.write("last words")
        sys.stderr.flush()
        ctypes.string_at(0)
    if seed == 2:
        time.sleep(100)
    if seed == 3:
        print("error: no such seed", flush=True)
        continue
    if seed == 4:
        os._exit(0)
    if seed == 5:
        sys.stderr.write("x" * 2**20)
        print("noise " * 2**17)
    np.savez(target, out=np.full((2, 2), os.getpid()))
    print("ok", flush=True)
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kept.py").write_text(KEPT, encoding="utf-8")
    command = [sys.executable, "kept.py"]
    with contextlib.closing(conformance.Subprocess(command, format="npz", keep=True)) as run:
        yield run


def gone(process):
    """Whether a process ends within seconds."""
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_program_is_kept_for_many_calls(kept):
    q = np.ones((2, 2))
    processes = {kept(q, q, q, seed=0)[0, 0] for _ in range(50)}
    assert kept(q, q, q, seed=5)[0, 0] in processes  # noise fills no pipe
    with pytest.raises(RuntimeError, match=r"^no such seed$"):
        kept(q, q, q, seed=3)
    processes.add(kept(q, q, q, seed=0)[0, 0])
    assert len(processes) == 1
    assert Path("started").read_text() == "x"


@pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")
def test_a_kept_program_that_ends_is_started_again(kept):
    q = np.ones((2, 2))
    with pytest.raises(RuntimeError, match=r"ended by SIGSEGV \(signal 11\): last words$"):
        kept(q, q, q, seed=1)
    with pytest.raises(RuntimeError, match=r"ended with status 0$"):
        kept(q, q, q, seed=4)
    process = int(kept(q, q, q, seed=0)[0, 0])
    kept.timeout = 0.2
    with pytest.raises(RuntimeError, match=r"took more than 0\.2 s"):
        kept(q, q, q, seed=2)
    assert gone(process)
    kept.timeout = 60.0
    process = int(kept(q, q, q, seed=0)[0, 0])
    os.kill(process, signal.SIGKILL)  # between two calls
    with pytest.raises(RuntimeError, match=r"ended by SIGKILL \(signal 9\)$"):
        kept(q, q, q, seed=0)
    process = int(kept(q, q, q, seed=0)[0, 0])
    kept.close()
    assert gone(process)
    assert Path("started").read_text() == "xxxxx"


def test_a_kept_program_takes_no_paths_as_words():
    with pytest.raises(ValueError, match=r"must leave out {input} and {output} if .* kept, got"):
        conformance.Subprocess("program {input} {output}", keep=True)
    with pytest.raises(RuntimeError, match="could not be started"):
        conformance.Subprocess("/nonexistent", format="npz", keep=True)(*np.ones((3, 2, 2)))


@pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")
@pytest.mark.parametrize("keep", [False, True])
def test_a_crash_of_a_program_is_a_failure(keep):
    code = "import ctypes, sys; sys.argv[1:] or input(); ctypes.string_at(0)"
    run = conformance.Subprocess([sys.executable, "-c", code], format="npz", keep=keep)
    report = check(run, estimator="softmax", rng=0, checks=["contract", "value_length"])
    contract = report.results[0]
    assert (contract.status, contract.severity) == ("FAIL", "contract")
    assert contract.got.startswith("RuntimeError: the program ended by SIGSEGV (signal 11)")
    assert f"keep={keep})" in contract.reproducer


# A process for the candidate


@pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")
def test_a_crash_is_a_failure_of_the_check_that_ran(tmp_path):
    checks = ["contract", "reference_values", "value_length"]
    report = check(crashing, estimator="softmax", rng=0, checks=checks, isolate=True)
    assert [(r.check, r.status) for r in report.results] == [
        ("contract", "PASS"),
        ("reference_values", "FAIL"),
    ]
    assert report.results[1].severity == "contract"
    assert report.results[1].got == "the process ended by SIGSEGV (signal 11)"
    assert report.not_tried["value_length"] == "the candidate crashed"
    script = tmp_path / "script.py"
    script.write_text(report.results[1].reproducer, encoding="utf-8")
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    again = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert again.returncode == 1, again.stderr
    assert "the process ended by SIGSEGV (signal 11)" in again.stdout


def test_an_exit_is_a_failure_whatever_its_status():
    report = check(leaving, estimator="softmax", rng=0, checks=["contract"], isolate=True)
    assert report.results[0].summary == "expected a result; got the process ended with status 0"


def test_a_candidate_that_hangs_is_ended_with_its_process():
    options = {"checks": ["contract"], "isolate": True, "time_limit": 0.3}
    report = check(hanging, estimator="softmax", rng=0, **options)
    assert report.results[0].summary == "expected an answer within 0.3 s; got none"
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("fn", [contiguous_only, *(long(fn) for fn in (writing, single, infinite))])
def test_a_process_of_its_own_changes_no_result(fn):
    names = ["contract", "reference_values", "memory_layouts"]
    apart, here = (
        check(fn, estimator="softmax", rng=0, checks=names, isolate=isolate).results
        for isolate in (True, False)
    )
    assert any(result.status == "FAIL" for result in here)
    for result in (*apart, *here):
        result.seconds, result.reproducer = 0.0, ""
    assert apart == here


def test_candidates_that_no_other_process_can_have():
    with pytest.raises(ValueError, match=r"`isolate` must be left out for a callable that .* got"):
        check(lambda q, k, v: v, estimator="softmax", isolate=True)
    lost = Adapter(plain, "softmax", source="no_such_module:fn")
    with pytest.raises(ValueError, match="got plain: ModuleNotFoundError: No module named 'no_s"):
        check(lost, isolate=True)
    with pytest.raises(ValueError, match="`isolate` must be left out for a program"):
        check(conformance.Subprocess("program"), estimator="softmax", isolate=True)


def test_progress_is_followed_check_by_check():
    seen = []

    def track(checks):
        assert len(checks) == 2
        for item in checks:
            seen.append(item.name)
            yield item
            seen.append("done")

    names = ["contract", "value_length"]
    check(plain, estimator="softmax", rng=0, checks=names, track=track)
    assert seen == ["contract", "done", "value_length", "done"]


# Suspects


@pytest.mark.long
def test_few_failures_are_no_pattern():
    adapter = Adapter(wide, "rfa")
    report = check(adapter, rng=0, checks=["contract", "frequency_law", "seeds"])
    assert [r.check for r in report.results if r.status == "FAIL"] == ["frequency_law"]
    assert not any(r.suspects for r in report.results)
    # Nor are many that thirteen defects share.
    mutant = next(m for m in MUTANTS if m.name == "kernel-box-muller-half")
    adapter = Adapter(mutant.fn, mutant.estimator, mutant.capabilities, mutant.tags)
    report = check(adapter, rng=2)
    assert sum(r.status == "FAIL" for r in report.results) >= 4, str(report)
    assert not any(r.suspects for r in report.results)
