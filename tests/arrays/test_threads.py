"""Blocks on several threads: same results, nothing left behind."""

import linecache
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import refattn
from refattn.arrays import threads as arrays_threads
from refattn.arrays.arithmetic import Tree
from refattn.arrays.threads import Sequencer, _blas, available, for_each, one_blas_thread
from refattn.engine import attend
from refattn.engine import causal as engine_causal
from refattn.judge.rounding import problems

MANY = 40_000  # keys
OMEGA = np.random.default_rng(1).standard_normal((30, 4))
MASK = np.arange(MANY) % 5000 > 4100


def blas_threads():
    """Of the libraries that are controlled: others may have been loaded since, with torch say."""
    return [library.num_threads for library in _blas().lib_controllers]


@pytest.fixture(autouse=True)
def several():
    """BLAS with two threads, whatever the machine has and whichever thread had control of it."""
    before = blas_threads()
    arrays_threads._set_blas_threads([2] * len(before))
    if max(blas_threads()) < 2:
        pytest.skip("BLAS has one thread only")
    yield
    arrays_threads._set_blas_threads(before)


@pytest.fixture
def large():
    return np.random.default_rng(0).standard_normal((3, 2, 1300, 8))


def run(function, items, most=2):
    for_each(lambda: function, items, most=most)


def test_items_run_at_the_same_time():
    both = threading.Barrier(2)
    run(lambda item: both.wait(timeout=30) and None, range(2))


def test_threads_are_those_of_the_first_call_while_blas_has_one():
    both, found = threading.Barrier(2), []

    def work(item):
        both.wait(timeout=30)
        found.append((available(), blas_threads()))

    with one_blas_thread():
        one = [1] * len(blas_threads())
        assert (available(), blas_threads()) == (2, one)
        run(work, range(2))
        assert found == 2 * [(1, one)]
        assert (available(), blas_threads()) == (2, one)
    assert (available(), blas_threads()) == (2, [2] * len(one))


def test_functions_are_called_in_the_order_of_their_places():
    called, queue = [], Sequencer()
    for place in np.random.default_rng(0).permutation(200):
        queue.add(place, lambda place=place: called.append(place))
    assert called == [*range(200)]


def test_sums_of_blocks_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(problems, "_BLOCK_ROWS", 16)
    q, k, v = np.random.default_rng(1).standard_normal((3, 2, 70, 16)).astype(np.float32)
    given = {"q": q, "k": k, "v": v, "out": refattn.softmax_attention(q, k, v)}
    expected, most = refattn.verify(**given), []

    def last_first(worker, items, **options):
        most.append(len(items := [*items]))
        for item in items[::-1]:
            worker()(item)

    monkeypatch.setattr(problems, "for_each", last_first)
    found = refattn.verify(**given)
    assert found.tests == expected.tests
    assert found.z == expected.z
    assert max(most) == 10


@pytest.mark.parametrize("most", [0, 1, 1000])
def test_every_item_is_done_once_and_every_thread_has_its_own_function(most):
    done, workers = [], []

    def worker():
        workers.append(threading.get_ident())
        return done.append

    for_each(worker, range(1000), most=most)
    assert sorted(done) == list(range(1000))
    assert len(workers) == (2 if most > 1 else 1)


def test_results_do_not_depend_on_threads(large):
    parallel = refattn.attend(*large, causal=True)
    with threadpool_limits(1, user_api="blas"):
        alone = refattn.attend(*large, causal=True)
    for a, b in zip(parallel, alone, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("fn", "options"),
    [(refattn.linear_attention, {}), (refattn.random_feature_attention, {"omega": OMEGA})],
)
def test_threads_have_workspaces_of_their_own(fn, options, causal):
    q, k, v = np.random.default_rng(0).standard_normal((3, 16, 3000, 4))
    together = fn(q, k, v, causal=causal, **options)
    first = fn(q[:1], k[:1], v[:1], causal=causal, **options)
    np.testing.assert_allclose(together[:1], first, rtol=0, atol=1e-12)
    assert np.all(np.isfinite(together))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (refattn.linear_attention, {}),
        (refattn.random_feature_attention, {"omega": OMEGA[:2], "features": "trigonometric"}),
    ],
)
def test_blocks_of_tokens_do_not_depend_on_threads(fn, options, causal, monkeypatch):
    """Threads share heads, and few heads have longer blocks: sums must not be cut by these."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 16, 3000, 4))
    found = []
    for count in (1, 3, 16):
        monkeypatch.setattr(engine_causal, "available", lambda count=count: count)
        found.append(fn(q[:, :500], k, v, causal=causal, **options))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def leaves(tree):
    return [tree] if isinstance(tree, int) else leaves(tree[0]) + leaves(tree[1])


def height(tree):
    return 0 if isinstance(tree, int) else 1 + max(map(height, tree))


@pytest.mark.parametrize("count", [*range(1, 18), 100])
def test_a_tree_merges_neighbours_in_one_way_whoever_brings_them(count):
    def merged(places):
        tree, found = Tree(lambda a, b: (a, b), count), []
        run(lambda place: found.append(tree.add(place, place)), places)
        (whole,) = [x for x in found if x is not None]
        return whole

    rng, want = np.random.default_rng(count), merged(range(count))
    assert leaves(want) == list(range(count))
    assert height(want) == (count - 1).bit_length()
    for _ in range(10):
        assert merged(rng.permutation(count).tolist()) == want


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": MASK}])
@pytest.mark.parametrize("items", [1, 4, 128])
def test_results_do_not_depend_on_how_keys_are_shared_among_threads(options, items, monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 4)) for n in (9, MANY, MANY))
    monkeypatch.setattr(attend, "_MOST_SPANS", 1)
    monkeypatch.setattr(attend, "available", lambda: 1)
    whole = refattn.attend(q, k, v, **options)
    monkeypatch.setattr(attend, "_MOST_SPANS", items)
    spans = attend._spans_of_keys(MANY, 4096, 1)
    assert len(spans) == {1: 1, 4: 3, 128: 10}[items]
    for a, b in zip(refattn.attend(q, k, v, **options), whole, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shift", [-3000, 0, 500])
def test_causal_queries_see_no_key_of_most_spans(threads, shift, monkeypatch):
    monkeypatch.setattr(attend, "_MOST_SPANS", 256)
    n = 6000
    q, (k, v) = np.zeros((n, 2)), np.ones((2, n + shift, 2))
    assert len(attend._spans_of_keys(n + shift, 1024, n // 512 + 1)) > 2
    with threadpool_limits(threads, user_api="blas"):
        out, lse = refattn.attend(q, k, v, causal=True)
    seen = np.maximum(np.arange(1, n + 1) + shift, 0)
    np.testing.assert_array_equal(out[:, 0] > 0.5, seen > 0)
    np.testing.assert_allclose(np.exp(lse), seen, rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_does_not_grow_with_the_keys_of_a_few_queries(threads):
    def peak(m):
        q, k, v = np.ones((512, 4)), np.ones((m, 4)), np.ones((m, 64))
        tracemalloc.start()
        try:
            refattn.attend(q, k, v)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with threadpool_limits(threads, user_api="blas"):
        assert peak(2**18) < 1.2 * peak(2**15)


def test_calls_from_several_threads_agree_and_blas_gets_its_threads_back(large):
    before = blas_threads()
    expected = refattn.softmax_attention(*large)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: refattn.softmax_attention(*large), range(8)))
    for result in results:
        np.testing.assert_array_equal(result, expected)
    assert blas_threads() == before


def test_an_error_reaches_the_caller_ends_the_other_thread_and_gives_blas_back():
    before, done = blas_threads(), []

    def function(item):
        if item == 3:
            raise ZeroDivisionError("item 3")
        done.append(item)

    with pytest.raises(ZeroDivisionError, match="item 3"):
        run(function, iter(range(10**9)))
    assert len(done) < 10**7
    assert blas_threads() == before


def test_threads_see_the_error_state_of_numpy():
    seen = []
    with np.errstate(over="raise", under="call"):
        run(lambda _: seen.append(np.geterr()), range(4))
        assert seen == [np.geterr()] * 4


def test_blas_has_one_thread_from_whatever_thread_a_call_comes(large):
    seen, before = [], blas_threads()
    want = refattn.softmax_attention(*large)  # threadpoolctl lets this thread set limits, only

    def call():
        run(lambda _: seen.extend(blas_threads()), range(4))
        return refattn.softmax_attention(*large)

    with ThreadPoolExecutor(1) as pool:
        np.testing.assert_array_equal(pool.submit(call).result(), want)
    assert set(seen) == {1}
    assert blas_threads() == before


def test_blas_keeps_one_thread_until_the_last_call_ends():
    before, first, second, seen = blas_threads(), threading.Event(), threading.Event(), []

    def early(_):
        assert second.wait(60)

    def late(_):
        second.set()
        assert first.wait(60)
        seen.extend(blas_threads())

    with ThreadPoolExecutor(2) as pool:
        a = pool.submit(run, early, range(1))
        for _ in range(6000):
            if blas_threads() == [1] * len(before):
                break
            time.sleep(0.01)
        b = pool.submit(run, late, range(1))
        a.result()
        first.set()
        b.result()
    assert set(seen) == {1}
    assert blas_threads() == before


def test_one_thread_where_there_is_no_blas_to_control(monkeypatch, large):
    monkeypatch.setattr(_blas(), "lib_controllers", [])
    assert refattn.softmax_attention(*large).shape == (2, 1300, 8)


def test_a_worker_that_fails_ends_the_other_thread():
    done, workers, failed = [], [], threading.Event()

    def worker():
        workers.append(None)
        if len(workers) == 2:
            failed.set()
            raise MemoryError
        return function

    def function(item):
        assert failed.wait(timeout=30)
        done.append(item)

    with pytest.raises(MemoryError):
        for_each(worker, range(10**6), most=2)
    assert len(done) < 10**6


@pytest.mark.parametrize("started", [0, 1])
def test_without_new_threads_the_caller_does_the_work(started, monkeypatch):
    done, before, submit = [], blas_threads(), ThreadPoolExecutor.submit

    def refuse(pool, *args):
        nonlocal started
        started -= 1
        if started < 0:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(pool, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    run(done.append, range(1000))
    assert sorted(done) == list(range(1000))
    assert blas_threads() == before


def output(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout, done.stderr


def test_attention_while_the_interpreter_shuts_down():
    code = """
import atexit, numpy, refattn
from threadpoolctl import threadpool_limits

def run():
    with threadpool_limits(2, user_api="blas"):
        x = numpy.ones((2, 1300, 8))
        print(round(refattn.softmax_attention(x, x, x).mean(), 12))

atexit.register(run)
refattn.attend(*numpy.ones((3, 1, 1)))
"""
    assert output(code) == ("1.0\n", "")


def test_limits_are_set_while_no_other_call_reads_them(monkeypatch):
    held, set_threads = [], arrays_threads._set_blas_threads

    def watched(numbers):
        held.append(arrays_threads._lock.locked())
        set_threads(numbers)

    monkeypatch.setattr(arrays_threads, "_set_blas_threads", watched)
    run(lambda item: None, range(2), most=1)
    assert held == [True, True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="as of POSIX")
def test_a_process_forked_in_a_call_ends_it_once():
    code = """
import os, numpy
from refattn.arrays import threads

with threads.one_blas_thread():
    child = os.fork()
if child == 0:
    os._exit(threads._find_control().calls)
print(os.waitpid(child, 0)[1], threads._find_control().calls)
"""
    assert output(code) == ("0 0\n", "")


def test_an_interrupt_while_limits_are_set_leaves_none(monkeypatch):
    before, set_threads = blas_threads(), arrays_threads._set_blas_threads

    def interrupted(numbers):
        set_threads(numbers)
        monkeypatch.setattr(arrays_threads, "_set_blas_threads", set_threads)
        raise KeyboardInterrupt

    monkeypatch.setattr(arrays_threads, "_set_blas_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(lambda item: None, range(2))
    assert blas_threads() == before
    control = arrays_threads._find_control()
    assert (control.calls, control.taken) == (0, False)


@pytest.mark.parametrize("name", ["SIGINT", "SIGALRM"])
@pytest.mark.parametrize("most", [1, 2])
def test_interrupts_at_any_line_leave_no_limit(most, name):
    """At each call, line and return of the module in turn, in the thread that interrupts come to.

    The interpreter looks for none where a `try` begins, and where a `with` of a lock ends.
    """
    before, control = blas_threads(), arrays_threads._find_control()
    if not hasattr(signal, name):
        pytest.skip("the system has no such signal")
    number = getattr(signal, name)
    handler = signal.signal(number, signal.default_int_handler)
    interrupted, left = 0, 0

    def trace(frame, *_):
        nonlocal left
        if frame.f_code.co_filename != arrays_threads.__file__:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if not line.strip().startswith(("with ", "try:")):
            left -= 1
            if left == 0:
                signal.raise_signal(number)
        return trace

    tracing = sys.gettrace()
    try:
        while left <= 0:
            left = interrupted + 1
            sys.settrace(trace)
            try:
                run(lambda item: None, range(3), most=most)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(tracing)
            assert blas_threads() == before
            assert (control.calls, control.taken) == (0, False)
            assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, handler)
    assert interrupted > 50


def test_an_interrupt_leaves_errors_of_numpy_as_they_were(monkeypatch):
    """Even one that comes before what was set is set back."""

    def interrupted(*_):
        raise KeyboardInterrupt

    before, x = np.geterr(), np.ones((2, 3))
    monkeypatch.setattr(np.errstate, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refattn.softmax_attention(x, x, x)
    assert np.geterr() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="as of POSIX")
def test_a_process_forked_during_a_call_has_its_threads():
    code = """
import os, threading
from threadpoolctl import ThreadpoolController, threadpool_limits
from refattn.arrays.threads import for_each

def threads():
    blas = ThreadpoolController().select(user_api="blas")
    return [library.num_threads for library in blas.lib_controllers]

import numpy
started, end = threading.Event(), threading.Event()

def wait(_):
    started.set()
    end.wait(60)

with threadpool_limits(2, user_api="blas"):
    before = threads()
    call = threading.Thread(target=for_each, args=(lambda: wait, range(1)), kwargs={"most": 1})
    call.start()
    started.wait(60)
    if (child := os.fork()) == 0:
        for_each(lambda: lambda _: None, range(1), most=1)
        os._exit(threads() != before)
    status = os.waitpid(child, 0)[1]
    end.set()
    call.join()
    print(status, threads() == before)
"""
    assert output(code) == ("0 True\n", "")
