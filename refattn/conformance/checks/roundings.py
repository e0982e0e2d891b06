"""The check of rounding errors: whether they can be those of a correct kernel."""

from __future__ import annotations

from ...rounding.problems import pose_arrays
from ...verification.findings import Numbers
from ...verification.judging import judge
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure
from ..candidate.limits import Keywords
from ..truth.reference import FEATURE_MAPS
from .trials import CheckRun, add_check, attends, evaluated

_ORDINARY_SIZES = (160, 160, 32)  # queries, keys, coordinates
_ALPHA = 1e-9  # of any statement: nothing beside the level of a run
_WIDE_PROFILES = ("math", "serial")
_LARGE_Z = 8.0  # |z| that no correct kernel has among so many elements


def _has_law(adapter: Adapter) -> bool:
    """Return whether errors have a law: no epsilon, features that are not signed.

    In half precision features are rounded in more ways than profiles have.
    """
    of_features = adapter.has("random-features") and not adapter.waves
    return (
        attends(adapter)
        and evaluated(adapter)
        and adapter["dtype"] != "float64"
        and not adapter["epsilon"]
        and not adapter["causal_only"]
        and (
            adapter.has("exact")
            or (adapter["dtype"] == "float32" and (adapter.has("feature-map") or of_features))
        )
    )


@add_check(
    claim="is off by as much as roundings may add up to, and in no direction", needs=_has_law
)
def rounding_errors(t: CheckRun) -> None:
    """Ordinary numbers: errors over their standard deviations, and along known defects."""
    dtype = t.adapter["dtype"]
    n, m, d = t.fit(*_ORDINARY_SIZES)
    arrays, options = t.problem(n, m, d, 32, lead=t.adapter.lead(3))
    for causal in (False, True) if t.adapter.can("causal") else (False,):
        conventions: Keywords = {"causal": causal, "scale": t.adapter.root(d) ** 2}
        if t.adapter.has("feature-map"):
            conventions = {"causal": causal, "feature_map": FEATURE_MAPS[t.adapter["feature_map"]]}
        elif t.adapter.has("random-features"):
            conventions["features"] = t.adapter["features"]
        q, k, v = arrays
        problem = pose_arrays(q, k, v, **conventions, **options)
        asked: Keywords = options | ({"causal": True} if causal else {})
        got = t.call(*arrays, **asked)
        numbers = Numbers(got.__getitem__, dtype)
        profiles = None if dtype in ("float16", "bfloat16") else _WIDE_PROFILES
        judged = judge(problem, numbers, dtype, profiles, _ALPHA)
        t.error = max(t.error or 0.0, min(1.0, judged.z.largest / _LARGE_Z))
        if judged.verdict == "FAIL":
            words = [x.text for x in judged.suspects[:1]] or [
                f"{x.name} {x.statistic:.3g}, {x.where}" for x in judged.tests[:1]
            ]
            raise Failure(
                f"errors of a correct kernel in {dtype} that adds in float32",
                f"z of root mean square {judged.z.rms:.3g}, largest {judged.z.largest:.3g}; "
                f"{words[0]}",
            )
