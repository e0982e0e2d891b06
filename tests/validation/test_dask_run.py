"""The benchmark of Dask arrays larger than a worker, on arrays that are not."""

import json

import numpy as np
import pytest

pytest.importorskip("distributed")
pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from validation.benchmarks import dask_run  # noqa: E402


@pytest.mark.long
def test_quick(tmp_path):
    out = tmp_path / "dask.json"
    done = testing.CliRunner().invoke(dask_run.main, ["--quick", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text("utf-8"))
    assert found["settings"]["memory_limit"] == 500_000_000
    assert len(found["cases"]) == 3
    for case in found["cases"]:
        large, kill, small = case["large"], case["kill"], case["small"]
        assert large["finite"]
        assert 0 < large["optimised"]["tasks"] <= large["graph"]["tasks"]
        assert large["tasks_per_chunk"] >= 1
        assert len(large["workers"]) == 2
        assert all(0 < w["start"] <= w["rss"] for w in large["workers"])
        assert kill["workers_started"] == 1
        assert kill["workers_lost"] == 1
        assert kill["identical"]
        assert kill["tasks_recomputed"] >= 0
        assert small["difference_eps"] < 100


def test_digests():
    case = dask_run.Case("exact", 12, 5, heads=2, head_size=3, features=0, seed=0)
    q, k, v = case.arrays()
    assert not np.array_equal(q.compute(), k.compute())
    found = dask_run.digests(v).compute(scheduler="synchronous")
    assert found.shape == (2, 3, 3)
    whole = v.compute()
    assert whole.dtype == np.float32
    np.testing.assert_allclose(found[..., 0].sum(), whole.sum(dtype=float))
    assert found[..., 1].max() == np.abs(whole).max()
    np.testing.assert_array_equal(found[1, 2], dask_run.digest(whole[1:, 10:])[0, 0])
