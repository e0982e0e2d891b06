"""Which check rejects which defect: the kill matrix of the conformance checks.

Run as ``python validation/kills.py``. Every catalogued defect is checked at the quick level with
alpha 1e-6 and seed 0; the matrix is printed, and with ``--write`` kept in
``refattn/conformance/kills.json``, from which reports name the defects that a failure looks like.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from refattn import conformance
from refattn.conformance.defects import MUTANTS, VARIANTS, Mutant

FILE = Path(conformance.__file__).with_name("kills.json")


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
    mutant = next(m for m in (*MUTANTS, *VARIANTS) if m.name == name)
    report = conformance.check(adapter(mutant), rng=0)
    failed = [r.check for r in report.results if r.status == "FAIL"]
    return report.verdict, failed, sum(r.seconds for r in report.results)


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
    parser = argparse.ArgumentParser(description="Check every catalogued defect.")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("names", nargs="*", help="these only")
    options = parser.parse_args()
    chosen = [m for m in (*MUTANTS, *VARIANTS) if not options.names or m.name in options.names]
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
