"""Which check rejects which defect: the kill matrix of the conformance checks.

Run as ``python validation/kills.py``. Every catalogued defect is checked at the quick level with
alpha 1e-6 and seed 0; the matrix is printed, and with ``--write`` kept as ``kills.json`` in
``refattn/judge/conformance/report``, from which reports name the defects that a failure looks
like.
With ``--seeds N`` the file is read instead, and each defect checked at seeds 0 to N - 1: by one
after the other of the checks that reject it there, and by all where none of these does.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from refattn import conformance
from refattn.judge.mistakes.defects import MUTANTS, VARIANTS, Mutant

FILE = Path(conformance.__file__).parent / "report" / "kills.json"


def entry(name: str) -> Mutant:
    """The entry of the catalogue, which other processes are told by its name."""
    return next(m for m in (*MUTANTS, *VARIANTS) if m.name == name)


def adapter(mutant: Mutant) -> conformance.Adapter:
    """The mutant with all it can do, declared."""
    capabilities = set(mutant.capabilities)
    if mutant.estimator == "rfa" and "omega" in capabilities:
        capabilities.add("omega_per_head")
    tags = dict(mutant.tags)
    if mutant.estimator == "lara":
        tags["centres"] = "chunks"
    return conformance.Adapter(mutant.fn, mutant.estimator, capabilities, tags, mutant.name)


def verdict(name: str) -> tuple[str, list[str], float]:
    """Verdict, failed checks and seconds."""
    candidate = adapter(entry(name))
    report = conformance.check(candidate, rng=0, checks=of_gradients(candidate))
    failed = [r.check for r in report.results if r.status == "FAIL"]
    return report.verdict, failed, sum(r.seconds for r in report.results)


def of_gradients(candidate: conformance.Adapter) -> list[str] | None:
    """The checks to make of a way back, whose way forth is that of another entry."""
    names = [c.name for c in conformance.checks_of(candidate) if c.name.startswith("gradients")]
    return names or None


def rejected(name: str, known: list[str], seed: int) -> str:
    """The check that rejects a defect at a seed, of those known to first; empty if none does."""
    candidate = adapter(entry(name))
    for checks in (*([check] for check in known), of_gradients(candidate)):
        report = conformance.check(candidate, rng=seed, checks=checks)
        if failed := [r.check for r in report.results if r.status == "FAIL"]:
            return failed[0]
    return ""


def at_seeds(chosen: list[Mutant], seeds: int, workers: int) -> None:
    """Print which defects are not rejected at each of so many seeds."""
    kills = json.loads(FILE.read_text("utf-8"))
    known = [kills.get(m.estimator, {}).get(m.name, []) for m in chosen]
    pairs = [(m.name, checks, s) for m, checks in zip(chosen, known, strict=True)
             for s in range(seeds)]  # fmt: skip
    with ProcessPoolExecutor(workers) as pool:
        found = list(pool.map(rejected, *zip(*pairs, strict=True)))
    for (name, checks, seed), check in zip(pairs, found, strict=True):
        if not check:
            print(f"seed {seed}: not rejected: {name}")
        elif check not in checks:
            print(f"seed {seed}: {name}: {check} in place of {', '.join(checks) or 'none'}")
    print(f"{sum(map(bool, found))} of {len(found)} runs reject: {len(chosen)} defects, each at "
          f"{seeds} seeds")  # fmt: skip


def written(kills: dict[str, dict[str, list[str]]]) -> str:
    """JSON with a line for each defect."""
    estimators = []
    for estimator, defects in sorted(kills.items()):
        lines = (f"  {json.dumps(name)}: {json.dumps(checks)}"
                 for name, checks in sorted(defects.items()))  # fmt: skip
        estimators.append(f" {json.dumps(estimator)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(estimators) + "\n}\n"


def main() -> None:
    """Print the matrix."""
    parser = argparse.ArgumentParser(description="Check every known bug of the catalogue.")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, help="check each at so many seeds")
    parser.add_argument("names", nargs="*", help="these only")
    options = parser.parse_args()
    chosen = [m for m in (*MUTANTS, *VARIANTS) if not options.names or m.name in options.names]
    if options.seeds:
        return at_seeds([m for m in chosen if m in MUTANTS], options.seeds, options.workers)
    with ProcessPoolExecutor(options.workers) as pool:
        found = list(pool.map(verdict, [m.name for m in chosen]))
    kills: dict[str, dict[str, list[str]]] = {}
    if options.names:  # the others stay as they are
        kills = json.loads(FILE.read_text("utf-8"))
    correct = {m.name for m in VARIANTS}
    for mutant, (outcome, failed, seconds) in zip(chosen, found, strict=True):
        print(f"{outcome:12} {mutant.name:36} {seconds:5.1f} s  {' '.join(failed)}")
        if mutant.name not in correct:
            kills.setdefault(mutant.estimator, {})[mutant.name] = failed
    pairs = list(zip(chosen, found, strict=True))
    dead = sum(o == "FAIL" for m, (o, _, _) in pairs if m.name not in correct)
    alive = [m.name for m, (o, _, _) in pairs if m.name not in correct and o != "FAIL"]
    wronged = [m.name for m, (o, _, _) in pairs if m.name in correct and o != "PASS"]
    print(f"\n{dead} of {dead + len(alive)} defects rejected; not: {', '.join(alive) or 'none'}")
    print(f"correct variants not accepted: {', '.join(wronged) or 'none'}")
    only: dict[str, list[str]] = {}
    for mutant, (_, failed, _) in pairs:
        if len(failed) == 1:
            only.setdefault(failed[0], []).append(mutant.name)
    for check in conformance.CHECKS:
        count = int(np.sum([check in failed for _, failed, _ in found]))
        print(f"{check:24} rejects {count:4}, alone {', '.join(only.get(check, ['none']))}")
    if options.write:
        FILE.write_text(written(kills), encoding="utf-8")


if __name__ == "__main__":
    main()
