"""Attention over Dask arrays: equal to that of one machine, whatever the chunks."""

import math
import os
import pickle
import signal
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn
from refattn import adapt, distributed, naive, sampling
from refattn.attention import alibi

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

D, D_V, S = 3, 2, 5
OMEGA = np.random.default_rng(9).standard_normal((S, D))
WEIGHT = np.random.default_rng(8).standard_normal(S)
CHUNK = st.integers(1, 9)


def cut_anywhere(draw, x):
    return da.from_array(x, chunks=tuple(draw(CHUNK) for _ in x.shape))


@st.composite
def arrays(draw):
    """q, k, v with heads of their own, or that share keys, and the same in chunks of any size."""
    n, m = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    dtype, outer = draw(st.sampled_from(["float32", "float64"])), draw(st.sampled_from([(), (2,)]))
    groups = draw(st.none() | st.integers(1, 3))
    lead = outer if groups is None else (*outer, groups * draw(st.integers(1, 3)))
    own = outer if groups is None else (*outer, groups)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = ((*lead, n, D), (*own, m, D), (*own, m, D_V))
    host = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return host, [cut_anywhere(draw, x) for x in host]


SIDE = st.none() | st.integers(0, 12)


@st.composite
def with_options(draw):
    """Arrays, and any options of exact attention for them, once more in chunks of any size."""
    both = draw(arrays())
    q, k, _ = both[0]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    lead, scores = q.shape[:-2], (*q.shape[:-1], k.shape[-2])

    def shape(most):
        """One that broadcasts to the largest."""
        whole = [draw(st.booleans()) for _ in most]
        kept = tuple(n if x else 1 for n, x in zip(most, whole, strict=True))
        return kept[draw(st.integers(0, len(kept))) :]

    def normal(most):
        return np.asarray(rng.standard_normal(shape(most)), dtype=q.dtype)

    def some(most):
        return np.asarray(rng.random(shape(most)) < 0.7)

    plain = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.tuples(SIDE, SIDE)),
        "softcap": draw(st.none() | st.just(0.8)),
    }
    chunked = dict(plain)
    for name, array in {
        "bias": normal(scores),
        "mask": some(scores),
        "dropout": some(scores) / q.dtype.type(0.7),
        "sinks": normal(lead),
    }.items():
        if draw(st.booleans()):
            plain[name], chunked[name] = array, cut_anywhere(draw, array)
    if draw(st.booleans()):
        slopes = abs(normal(lead))
        plain["bias"], chunked["bias"] = alibi(slopes), alibi(cut_anywhere(draw, slopes))
    return both, plain, chunked


def agree(got, want):
    """One array, or a tuple of some, computed at once."""
    pairs = [(got, want)] if hasattr(got, "shape") else [*zip(got, want, strict=True)]
    computed = dask.compute(*(x for x, _ in pairs), scheduler="synchronous")
    for found, (lazy, y) in zip(computed, pairs, strict=True):
        assert lazy.shape == y.shape
        assert lazy.dtype == found.dtype == y.dtype
        np.testing.assert_allclose(found, y, rtol=0, atol=64 * np.finfo(y.dtype).eps)


FEW_EXAMPLES = pytest.mark.parametrize("examples", [12, pytest.param(None, marks=pytest.mark.long)])


@FEW_EXAMPLES
def test_attention_with_any_options_is_that_of_one_machine(examples):
    """Windows narrower and wider than chunks, a sink that enters once, queries that see nothing."""

    @settings(max_examples=examples or settings.default.max_examples)
    @given(with_options())
    def check(problem):
        ((q, k, v), cut), plain, chunked = problem
        want = refattn.attend(q, k, v, scale=0.7, **plain)
        got = distributed.attend(*cut, scale=0.7, **chunked)
        out = distributed.softmax_attention(*cut, scale=0.7, **chunked)
        agree((*got, out), (*want, refattn.softmax_attention(q, k, v, scale=0.7, **plain)))

    check()


@given(
    tokens=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    chunks=st.tuples(CHUNK, CHUNK),
    window=st.none() | st.tuples(SIDE, SIDE),
    causal=st.booleans(),
)
def test_chunks_that_are_not_seen_are_not_read(tokens, chunks, window, causal):
    """There is a task for each pair of chunks of which some query sees some key, and no other."""
    q, k = (da.ones((n, D), chunks=(c, D)) for n, c in zip(tokens, chunks, strict=True))
    out = distributed.attend(q, k, k, causal=causal, window=window).out
    seen = naive.visible(*(np.ones((n, D)) for n in tokens), causal=causal, window=window)
    seen = np.broadcast_to(True if seen is None else seen, tokens)
    want = sum(
        bool(np.any(seen[i : i + chunks[0], j : j + chunks[1]]))
        for i in range(0, tokens[0], chunks[0])
        for j in range(0, tokens[1], chunks[1])
    )
    assert len(tasks(out.__dask_graph__(), "_attend_chunk")) == want


def tasks(graph, name):
    """Tasks that call a function."""
    return [key for key in map(str, graph) if key.startswith(f"{name}-")]


def local(x, **options):
    return distributed.softmax_attention(x, x, x, window=(6, 3), **options)


def random_features(x):
    return distributed.random_feature_attention(x, x, x, omega=OMEGA)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "call",
    [local, partial(local, causal=True), partial(local, sinks=da.zeros(())), random_features],
)
def test_tasks_grow_linearly_with_the_tokens(call):
    """In windows, and with random features, whose frequencies stand in the graph once."""
    graphs = [call(da.ones((4 * n, D), chunks=(4, D))).__dask_graph__() for n in (16, 32, 64)]
    sizes = [*map(len, graphs)]
    assert math.isclose(sizes[2] - sizes[1], 2 * (sizes[1] - sizes[0]), rel_tol=0.1)
    if call is not random_features:
        assert len(tasks(graphs[2], "_attend_chunk")) <= 64 * 4


def test_no_chunk_of_pairs_is_made():
    """A window and ALiBi take no memory for pairs, within chunks neither."""
    n = 30_000
    x = da.zeros((n, 1), chunks=(n // 2, 1), dtype="float32")
    options = {"window": (2, 0), "bias": alibi(da.full((), math.log(2.0), dtype="float32"))}
    tracemalloc.start()
    lse = distributed.attend(x, x, x, **options).lse.compute(scheduler="synchronous")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(lse[2:], math.log(1 + 1 / 2 + 1 / 4), rtol=0, atol=1e-6)
    assert peak < (n // 2) ** 2 / 4  # bytes; a mask of two chunks has four times as many


@FEW_EXAMPLES
def test_random_feature_attention_is_that_of_one_machine(examples):
    @settings(max_examples=examples or settings.default.max_examples)
    @given(arrays(), st.booleans())
    def check(both, causal):
        (q, k, v), cut = both
        weighted = {"omega": OMEGA.astype(q.dtype), "log_weight": WEIGHT.astype(q.dtype)}
        options = {"scale": 0.7, "causal": causal, **weighted}
        agree(
            distributed.random_feature_attention(*cut, **options),
            refattn.random_feature_attention(q, k, v, **options),
        )

    check()


STRETCHED = np.random.default_rng(0).standard_normal((6, 30, D)) * [1.0, 2.0, 0.5]
FITTED = adapt.fit(STRETCHED[0], STRETCHED[1])  # with a gauge
SHIFTED = sampling.Gaussian(np.full(D, 0.1), 1.2 * np.eye(D))


@pytest.mark.long("6")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(
    "options",
    [{"proposal": SHIFTED}, {"proposal": SHIFTED, "coupling": "orthogonal"}, {"proposal": FITTED}],
)
def test_draws_are_those_of_one_machine(options, heads, causal):
    """Also of heads that share keys."""
    assert FITTED.gauge is not None
    q, k = STRETCHED[:heads], STRETCHED[-2:]
    cut = [da.from_array(x, chunks=(4, 7, 2)) for x in (q, k, k)]
    options = {"num_features": 4, "rng": 3, "causal": causal, **options}
    agree(
        distributed.random_feature_attention(*cut, **options),
        refattn.random_feature_attention(q, k, k, **options),
    )


def test_no_keys_no_queries_and_no_heads():
    q, k, v = (da.zeros((n, D), chunks=2) for n in (5, 0, 0))
    assert np.all(np.isneginf(distributed.attend(q, k, v).lse.compute()))
    assert not np.any(distributed.attend(q, k, v, causal=True).out.compute())
    got = distributed.random_feature_attention(q, k, v, omega=OMEGA, causal=True)
    assert not np.any(got.compute())
    assert distributed.softmax_attention(k, q, q).compute().shape == (0, D)
    x = da.ones((0, 4, D))
    assert distributed.attend(x, x, x).out.compute().shape == (0, 4, D)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 6, 12])
def test_heads_that_share_keys_share_their_states(chunk):
    """Keys are attended to once for each group, however the query heads are cut."""
    q, k = da.ones((12, 4, D), chunks=(chunk, 2, D)), da.ones((3, 4, D), chunks=(3, 2, D))
    out = distributed.random_feature_attention(q, k, k, omega=OMEGA)
    cuts = set(np.cumsum(out.chunks[0]))
    assert cuts >= set(np.cumsum(q.chunks[0]))
    whole = {1: 3, 2: 3, 3: 3, 4: 3, 6: 3, 12: 1}[chunk]  # chunks of key heads
    assert len(tasks(out.__dask_graph__(), "_state")) == 2 * whole


def test_nothing_is_computed_before_the_result_is():
    def fail(x):
        raise AssertionError("computed")

    x = da.ones((6, D), chunks=(2, D)).map_blocks(fail, dtype=float, meta=np.ones((0, 0)))
    out = distributed.random_feature_attention(x, x, x, omega=OMEGA, causal=True)
    with pytest.raises(AssertionError, match="computed"):
        out.compute(scheduler="synchronous")


@pytest.fixture(scope="module")
def client():
    """Two processes of one thread each."""
    dask_distributed = pytest.importorskip("distributed")
    with (
        dask_distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="1GB", dashboard_address=":0"
        ) as cluster,
        dask_distributed.Client(cluster) as found,
    ):
        yield found


def dies_once(x, path, block_id=None):
    """Kill the process that works on one chunk, the first time."""
    if block_id == (3, 0) and not os.path.exists(path):
        open(path, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.mark.long
def test_the_validation_suite_on_a_cluster(client, tmp_path):
    runner = pytest.importorskip("validation.runner")
    names = ["proposition_1", "lara_cases"]
    data = []
    for executor in (client.get_executor(), ThreadPoolExecutor(1)):
        with executor:
            records = runner.run(
                names, executor, level="tiny", seed=0, results=tmp_path / "results.jsonl"
            )
        data.append([record["data"] for record in records])
    assert data[0] == data[1]


@pytest.mark.long
@pytest.mark.parametrize("causal", [False, True])
def test_a_worker_that_dies(client, tmp_path, causal):
    q, k, v = np.random.default_rng(0).standard_normal((3, 400, D))
    cut = [da.from_array(x, chunks=(50, D)) for x in (q, k, v)]
    flag = str(tmp_path / "died")
    cut[1] = cut[1].map_blocks(dies_once, flag, dtype=float, meta=np.ones((0, 0)))
    options = {"omega": OMEGA, "causal": causal}
    got = client.compute(distributed.random_feature_attention(*cut, **options)).result(timeout=120)
    assert os.path.exists(flag)
    want = refattn.random_feature_attention(q, k, v, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


def shipped(x):
    """What arrives at another worker: arrays that begin at any byte, here at an odd one."""
    buffers = []
    head = pickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(head, buffers=[memoryview(b"\0" + b.raw().tobytes())[1:] for b in buffers])


def moving(task, *args, **options):
    return task(*shipped(args), **shipped(options))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", [0, 16])
def test_bits_do_not_depend_on_where_tasks_run(causal, features, monkeypatch):
    rng = np.random.default_rng(0)
    cut = [
        da.from_array(rng.standard_normal((2, 256, 64), dtype=np.float32), chunks=(1, 64, 64))
        for _ in "qkv"
    ]

    options = {
        "sinks": da.from_array(rng.standard_normal(2, dtype=np.float32), chunks=1),
        "bias": da.from_array(rng.standard_normal((256, 256), dtype=np.float32), chunks=64),
    }

    def attend():
        if not features:
            found = distributed.attend(*cut, causal=causal, **options)
            return found.out.compute(scheduler="synchronous")
        return distributed.random_feature_attention(
            *cut, num_features=features, rng=0, causal=causal
        ).compute(scheduler="synchronous")

    want = attend()
    for name in ("_attend_chunk", "_no_keys", "_state", "_read_state"):
        task = getattr(distributed, name)
        moved = partial(moving, task)
        monkeypatch.setattr(distributed, name, moved)
    np.testing.assert_array_equal(attend(), want)


def test_a_sink_of_queries_whose_chunk_sees_no_key():
    """Their log normaliser is the sink."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3)) for n in (8, 4, 4))
    sinks = np.array([0.5, -1.0])
    chunked = [da.from_array(x, chunks=(1, 2, 3)) for x in (q, k, v)]
    want = refattn.attend(q, k, v, causal=True, sinks=sinks)
    agree(distributed.attend(*chunked, causal=True, sinks=da.from_array(sinks, chunks=1)), want)
    np.testing.assert_array_equal(want.lse[:, :4], np.broadcast_to(sinks[:, None], (2, 4)))
