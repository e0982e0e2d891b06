"""A cheap example of every command that prints results; what it computes is computed once."""

import pkgutil
from collections import defaultdict

import pytest

from tests.cli import running

LINES = {
    "compare": "compare qkv.npz --features 4,40 --estimators rfa,lara --draws 2",
    "advice": "compare easy.npz --target 0.1 --features 8,400",
    "measure": "compare easy.npz --target 0.1 --measure --features 8 --estimators ra,lara --most 4",
    "verify": "verify dump.safetensors",
    "tolerance": "tolerance flat.npz --dtype float16 --profile flash --verbose",
    "check": "check refattn:softmax_attention --estimator softmax --check contract --in-process",
}
FUNCTIONS = {
    path: pkgutil.resolve_name(path)
    for path in (
        *("refattn.compare.measured.measure", "refattn.compare.study", "refattn.compare.search"),
        *(
            "refattn.judge.verification.tolerances.find_tolerance",
            "refattn.judge.verification.judging.judge_all",
        ),
        "refattn.conformance.check",
    )
}
RETURNED = defaultdict(dict)  # for each command, what its functions returned


def output(name, *more, width=200):
    """What a command prints: the numbers are the same each time, seconds too."""

    def once(path):
        def replay(*args, **options):
            if path not in RETURNED[name]:
                RETURNED[name][path] = FUNCTIONS[path](*args, **options)
            return RETURNED[name][path]

        return replay

    with pytest.MonkeyPatch.context() as patch:
        for path in FUNCTIONS:
            patch.setattr(path, once(path))
        result = running.run(*LINES[name].split(), *more, width=width)
    assert result.exit_code in (0, 3), result.output
    return result.stdout


def returned(name, function):
    return next(x for path, x in RETURNED[name].items() if path.endswith(f".{function}"))
