"""Make one-line mutants of modules, and print those that the default run does not notice.

`python -m tests.mutants refattn/judge/stats/exact.py --most 20 --reach` changes one
operator, comparison, constant or sign at a time, in a copy of the checkout, and runs the cases of
the default run that reach the line. `--reach` finds these cases by a run with coverage and keeps
them in `.mutants/` for the next call. It needs the extra `mutants`. What runs in new processes only
is unreached; what fails without the mutant too is unknown. mutmut does not mutate the constants of
a module, and cosmic-ray runs every case for each mutant.
"""

import argparse
import ast
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".mutants"
FIRST, MOST = 60, 600  # cases that are run for a mutant, in two runs
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*",
    ast.And: "or", ast.Or: "and", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "maximum": "minimum", "minimum": "maximum", "any": "all"}
NAMES |= {"all": "any", "floor": "ceil", "ceil": "floor", "log": "log2", "exp": "exp2"}


class Mutant(NamedTuple):
    """The file (from the root), line, and the line before and after."""

    file: str
    line: int
    before: str
    after: str


class Edits(ast.NodeVisitor):
    """Every change of one token: (line, first column, last column, new text)."""

    def __init__(self, source):
        self.lines, self.found = source.splitlines(), []
        self.visit(ast.parse(source))

    def visit_Raise(self, node):
        """Nothing: messages, annotations and imports are not mutated."""

    visit_Import = visit_ImportFrom = visit_JoinedStr = visit_Raise

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node):
        for x in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(x)

    def visit_If(self, node):
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def between(self, left, right, operator):
        """The operator between two operands, where it stands in one line."""
        if left.end_lineno == right.lineno:
            columns = left.end_col_offset, right.col_offset
            text = self.lines[right.lineno - 1].encode()[slice(*columns)].decode()
            old = text.strip(" ()")
            if old and "#" not in old:
                self.edit(right.lineno, *columns, text.replace(old, SWAPS[type(operator)]))

    def edit(self, line, start, stop, new):
        self.found.append((line, start, stop, new))

    def visit_Compare(self, node):
        for left, operator, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        ):
            if type(operator) in SWAPS:
                self.between(left, right, operator)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if type(node.op) in SWAPS:
            self.between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.between(*node.values[:2], node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.USub | ast.Not) and node.lineno == node.operand.lineno:
            self.edit(node.lineno, node.col_offset, node.operand.col_offset, "")
        self.generic_visit(node)

    def visit_Constant(self, node):
        new = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: 2 * x}
        if type(node.value) in new and node.lineno == node.end_lineno:
            text = repr(new[type(node.value)](node.value))
            self.edit(node.lineno, node.col_offset, node.end_col_offset, text)

    def visit_Call(self, node):
        name = node.func
        if isinstance(name, ast.Name | ast.Attribute) and name.lineno == name.end_lineno:
            word = name.id if isinstance(name, ast.Name) else name.attr
            if word in NAMES:
                stop = name.end_col_offset
                self.edit(name.lineno, stop - len(word), stop, NAMES[word])
        self.generic_visit(node)


def mutants(file):
    """All that change a file so that it can still be compiled."""
    source = (ROOT / file).read_text("utf-8")
    lines = source.splitlines()
    for line, start, stop, new in sorted(set(Edits(source).found)):
        old = lines[line - 1].encode()
        after = (old[:start] + new.encode() + old[stop:]).decode()
        if after.split() == lines[line - 1].split():  # twice 0.0
            continue
        try:
            compile("\n".join([*lines[: line - 1], after, *lines[line:]]), file, "exec")
        except SyntaxError:
            continue
        yield Mutant(file, line, lines[line - 1], after)


def again(path):
    """The mutants of a file that `--out` wrote, or someone by hand, where their lines are now."""
    for x in json.loads(Path(path).read_text("utf-8")):
        lines = (ROOT / x["file"]).read_text("utf-8").splitlines()
        same = [i for i, line in enumerate(lines, 1) if line == x["before"]]
        if not same:
            raise SystemExit(f"{path}: {x['file']} has no line {x['before'].strip()!r}")
        line = min(same, key=lambda i: abs(i - x["line"]))
        yield Mutant(x["file"], line, x["before"], x["after"])


def chosen(path, most, rng):
    """Mutants of a module, of the modules of a folder, or of a file of mutants."""
    if path.endswith(".json"):
        return [*again(path)]
    files = [Path(path)] if path.endswith(".py") else sorted(Path(path).rglob("*.py"))
    names = [os.path.relpath(x, ROOT) for x in files if x.is_file()]
    if not names or not all(x.startswith("refattn/") for x in names):
        raise SystemExit(f"{path} is no module of refattn, nor a folder of them")
    every = [x for file in names for x in mutants(file)]
    return sorted(rng.sample(every, min(most, len(every))))


def reach(tests):
    """Run the default with coverage; keep which cases reach each line, and their seconds."""
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "--cov=refattn", "--cov-context=test"]
    environment = os.environ | {"COVERAGE_FILE": str(KEPT / "coverage")}
    subprocess.run([*command, "--cov-report=", *tests], cwd=ROOT, env=environment, check=True)
    shutil.copy(ROOT / ".pytest_cache/v/refattn/seconds", KEPT / "seconds")


def coded(code):
    """The lines that instructions of compiled code, and of functions in it, are from."""
    yield from (line for _, _, line in code.co_lines())
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from coded(x)


def first_lines(source):
    """The first line of its statement, for each line without instructions: of folded constants."""
    first, own = {}, set(coded(compile(source, "", "exec")))
    for node in ast.walk(ast.parse(source)):  # what is inside comes later
        if isinstance(node, ast.stmt):
            first |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.lineno)
    return {line: x for line, x in first.items() if line not in own}


def cases_of(file):
    """Cases by line, those of the module's own folder first, the quickest first.

    A line that runs when the module is imported is reached by every case of the module, or of its
    folder if the module has no other lines.
    """
    from coverage import CoverageData

    data, path = CoverageData(str(KEPT / "coverage")), ROOT / file
    data.read()
    if str(path) not in data.measured_files():
        raise SystemExit(f"the last --reach did not see {path}")
    if path.stat().st_mtime > (KEPT / "coverage").stat().st_mtime:
        raise SystemExit(f"{file} was changed after the last --reach: its lines may be others")
    seconds = json.loads((KEPT / "seconds").read_text())
    own = f"tests/{Path(file).parent.relative_to('refattn')}/".replace("/./", "/")

    def order(case):
        return not case.startswith((own, file)), seconds.get(case) or 0.0

    def cases(contexts):
        return {x.rpartition("|")[0] for x in contexts} - {""}

    found = {line: cases(x) for line, x in data.contexts_by_lineno(str(path)).items()}
    for line, first in first_lines(path.read_text("utf-8")).items():
        if first in found:
            found.setdefault(line, found[first])
    every = set().union(*found.values())
    every = every or {x for x in cases(data.measured_contexts()) if x.startswith(own)}
    return {line: sorted(x or every, key=order) for line, x in found.items()}


def failure(cases, copy, limit):
    """The first of the cases that fails, or "time" or a status; None if all pass."""
    (copy / "cases").write_text("\n".join(cases))
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*command, "--tb=no", "@cases"], cwd=copy, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as run:  # fmt: skip
        try:
            out = run.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            return "time"
        finally:  # and what it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    if not run.returncode:
        return None
    lines = [f"{x} - " for x in out.splitlines()]
    failed = [
        x for x in cases if any(y.startswith((f"FAILED {x} - ", f"ERROR {x} - ")) for y in lines)
    ]
    return max(failed, key=len, default=f"status {run.returncode}")


def killer(mutant, cases, copy, limit):
    """What notices a mutant, and whether it is quiet without; None if all cases pass."""
    path, own = copy / mutant.file, (ROOT / mutant.file).read_text("utf-8")
    lines = own.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.after + "\n"
    for batch in filter(None, (cases[:FIRST], cases[FIRST:MOST])):
        path.write_text("".join(lines))
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            cached.unlink()
        try:
            by = failure(batch, copy, limit)
        finally:
            path.write_text(own)
        if by:
            return by, passes((by,) if by in batch else tuple(batch), copy, limit)
    return None


PASSES = {}


def passes(cases, copy, limit):
    """Whether these pass without a mutant."""
    if cases not in PASSES:
        PASSES[cases] = failure(cases, copy, limit) is None
    return PASSES[cases]


class Copies:
    """Copies of the checkout, one for each worker."""

    def __init__(self, folder, count):
        self.free = queue.SimpleQueue()
        for i in range(count):
            for part in ("refattn", "tests", "validation"):
                shutil.copytree(ROOT / part, folder / str(i) / part)
            for part in ("pyproject.toml", "README.md", "CITATION.cff"):
                shutil.copy(ROOT / part, folder / str(i))
            self.free.put(folder / str(i))

    def attempt(self, mutant, cases, limit):
        """What becomes of a mutant, as a record."""
        copy, start = self.free.get(), time.monotonic()
        by, alone = (cases and killer(mutant, cases, copy, limit)) or (None, None)
        self.free.put(copy)
        outcome = "survived" if cases else "unreached"
        if by:
            outcome = "killed" if alone else "unknown"
        seconds = round(time.monotonic() - start, 1)
        return {
            **mutant._asdict(),
            "outcome": outcome,
            "by": by,
            "cases": len(cases),
            "seconds": seconds,
        }


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("paths", nargs="*", help="modules, folders of them, or what --out wrote")
    parser.add_argument("--most", type=int, default=20, help="mutants of each path, by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a run of cases")
    parser.add_argument(
        "--reach", nargs="*", metavar="TESTS", help="run the default, or TESTS, first"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for what became of each")
    given = parser.parse_args()
    if given.reach is not None:
        reach(given.reach)
    rng, records = random.Random(given.seed), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        copies = Copies(Path(folder), given.workers)
        for path in given.paths:
            found = chosen(path, given.most, rng)
            cases = {file: cases_of(file) for file in {x.file for x in found}}
            tasks = [(x, cases[x.file].get(x.line, []), given.limit) for x in found]
            outcomes = Counter()
            for record in pool.map(lambda task: copies.attempt(*task), tasks):
                records.append(record)
                outcomes[record["outcome"]] += 1
                if record["outcome"] != "killed":
                    most = f"{MOST} of " * (record["cases"] > MOST)
                    print("{file}:{line} {outcome} ({}{cases} cases)".format(most, **record))
                    print(
                        f"  - {record['before'].strip()}\n  + {record['after'].strip()}", flush=True
                    )
            print(
                f"{path}: " + ", ".join(f"{n} {name}" for name, n in outcomes.items()), flush=True
            )
    if given.out:
        given.out.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
