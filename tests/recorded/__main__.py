"""Record all numbers again, and print which changed."""

import gzip
import json

from tests.recorded.cases import CASES, FILE, recorded
from tests.recorded.results import changes, results

old = recorded() if FILE.exists() else {}
new = {name: results(function) for name, function in CASES.items()}
for name, found in new.items():
    changed = changes(name, found, old.get(name, {}))
    print(f"{name}: {len(changed)} of {len(found)} changed", *changed[:20], sep="\n  ")
short = json.loads(json.dumps(new), parse_float=lambda x: float(f"{float(x):.13g}"))
FILE.write_bytes(gzip.compress(json.dumps(short, separators=(",", ":")).encode(), mtime=0))
