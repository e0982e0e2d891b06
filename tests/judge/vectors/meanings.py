"""What the ids of golden vectors mean, for good: an id always names the same case."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from refattn.judge.vectors import Case


@cache
def known_meanings() -> dict[str, str]:
    """Load what ids have meant, those of earlier versions too."""
    return dict(json.loads(Path(__file__).with_name("ids.json").read_text("ascii")))


def meaning(case: Case) -> str:
    """Hash what the case asks by SHA-256: its convention, arguments and inputs."""
    content = {
        "arguments": {name: _as_json(x) for name, x in case.arguments.items()},
        "convention": case.convention and list(case.convention),
        "estimator": case.estimator,
        "inputs": {
            name: [list(x.shape), [_as_json(e) for e in x.ravel().tolist()]]
            for name, x in case.inputs.items()
        },
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()


def _as_json(x: Any) -> Any:
    """Write floats to the last bit, and pairs as lists."""
    if isinstance(x, tuple):
        return list(x)
    return x.hex() if isinstance(x, float) else x
