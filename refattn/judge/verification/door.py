"""`verify`: check arguments, pose the problem, and judge the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from ...arrays import checks, qkv
from ...arrays.library import Doubles
from ...arrays.stored import SCALES, mask_of_members
from ...arrays.words import with_known_keywords
from ...features import elu_features
from ...files.sequences import LAYOUTS, PAGES_HEADS_FIRST, Sequences, take_sequences
from ...files.tensors import fits_other_layout, view_heads_first
from ...typing import Features
from ..kinds.chosen import choose_keys
from ..kinds.normalised import check_norms, judge_norms
from ..kinds.parts import pose_parts
from ..kinds.sequences import keep_sequences, limit_sequences, mask_whole
from ..mistakes.defects.catalogue import read_mistakes
from ..rounding.formats import check_all_hold, dtype_of, widen
from ..rounding.layers import pose_recurrence
from ..rounding.problems import Problem, check_holds, pose_arrays
from ..rounding.profiles import Profile, check_hardware, profile_of
from .choice import has_wide_sums
from .empty_rows import EMPTY_ROWS, settle
from .findings import UNUSED_D_OUT
from .inputs import name_profiles, narrowest, read_inputs, type_of_states, unlimited
from .judging import judge_all
from .reading import (
    gates_of,
    gather_parts,
    gather_recurrent,
    kind_of,
    pose_by_text,
    refuse_options,
    refuse_sequences,
)
from .verdict import Verdict

# Whether arrays are judged in another layout than was declared: they are tried in no further one.
_IN_OTHER_LAYOUT: ContextVar[bool] = ContextVar("in_other_layout", default=False)


@with_known_keywords
def verify(
    *,
    q: Any,
    k: Any,
    v: Any,
    out: Any = None,
    lse: Any = None,
    d_out: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    omega: Any = None,
    log_weight: Any = None,
    estimator: str = "softmax",
    dtype: str | Mapping[str, str] | None = None,
    profile: str | Profile | None = None,
    alpha: float = 1e-6,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    features: Features = "positive",
    feature_map: Callable[[Any], Any] | None = None,
    hardware: str | None = None,
    everything: bool = False,
    explain: bool = True,
    mistakes: str | os.PathLike[str] | None = None,
    accumulate: str | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    empty_rows: str = "zero",
    beta: Any = None,
    log_decay: Any = None,
    write: Any = None,
    removal: Any = None,
    decay: Any = None,
    initial_state: Any = None,
    state: Any = None,
    num_proposals: int | None = None,
    kernel_epsilon: float | None = None,
    centres: Any = None,
    indices: Any = None,
    index_q: Any = None,
    index_k: Any = None,
    part_out: Any = None,
    part_lse: Any = None,
    part_keys: Any = None,
    normalise: str | None = None,
    norm_eps: float | None = None,
    cu_seqlens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    block_table: Any = None,
    cache_seqlens: Any = None,
    layout: str = "bhnd",
) -> Verdict:
    """Judge whether a correct kernel can have produced these numbers.

    The numbers are compared with exact attention, and their errors with the rounding errors that
    `rounding.predict` predicts. The docstring of `refattn.judge.rounding` states the assumptions.
    Profiles are tried from the likeliest until one explains the numbers.

    Parameters
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Inputs of the kernel, of any floating-point dtype and library, or int8.
    out : array, shape (..., n, d_v), optional
        Output of the kernel.
    lse : array, shape (..., n) or (..., n, 1), optional
        Its log normalisers (natural logarithms), for softmax attention.
    d_out : array, shape (..., n, d_v), optional
        Input of the backward pass: the gradient of the loss with respect to the output. It has the
        type of `out` or, without `out`, the storage type.
    dq, dk, dv : arrays, shapes of `q`, `k` and `v`, optional
        Gradients that the backward pass returned, for softmax attention. The backward pass is
        assumed to use the numbers of `out`, if you pass them, and to sum over heads that share
        keys. For recurrences without shared heads: `dv`, and also `dq` and `dk` if nothing is
        removed and all coordinates share the decay.
    omega, log_weight : arrays, shapes (..., S, d) and (..., S), optional
        Frequencies of random-feature attention, and their log weights. They are in kernel
        coordinates, those of queries and keys times the root of the scale. "ra" takes those of each
        query, (..., n, S, d), and "eva" one of each chunk, (..., C, d), or none.
    estimator : {"softmax", "rfa", "linear"} or str
        What the kernel computes, or the name of a recurrence, such as "gated-delta-rule", or one of
        "ra", "ra-mean", "mean-of-ratios", "lara", "lara-own", "lara-query", "lara-mean",
        "rfa-local", "performer-relu", "is", "eva", "second-order" and "coreset", whose laws are
        derived step by step: without gradients, in float32, bfloat16 and float16, and of large
        arrays only for some rows.
    dtype : str or dict of str, optional
        The storage type: what the numbers of `q`, `k` and `v` were rounded to, if the arrays have a
        wider type. It is also the type of `out`, if it holds all numbers of `out`. By default each
        array has its own type. An array of a wider type than `out` is assumed to be in the type of
        `out`, if that type holds all its numbers. If `q`, `k`, `v` and `out` hold only bfloat16 or
        only float16 numbers, all are assumed to be in that type. A dict names the types of `q`,
        `k`, `v`, `out` and `weights`, the type to which weights are rounded before they multiply
        the values (by default that of `q`).
    profile : str or Profile, optional
        What the kernel rounds, if that is known. No other profile is tried, except that gradients
        of heads that share keys may also be rounded by head.
    alpha : float, default 1e-6
        Largest probability that a correct kernel fails.
    scale, bias, mask, causal, window, softcap, sinks, features, feature_map
        As in `rounding.predict`; for linear attention the map is `elu_features` by default. A mask
        (batch, m) masks the keys of each batch member, and -1 in a window means no limit. For "eva"
        and "second-order" the window is the number of tokens of a chunk.
    hardware : str, optional
        Hardware on which the kernel ran, if its matrix units truncate sums: "volta", "turing",
        "ampere", "ada", "hopper", "hopper-promoted" (sums of 128 products in 8 bits, added in
        float32) or "blackwell"; "ieee" if sums are rounded. By default rounded sums are tried
        first, and then these units if no profile with rounded sums explains the numbers.
    everything : bool, default False
        Whether all rows of large arrays are tested, for all known bugs. If not, the verdict reports
        which share of the rows was tested.
    explain : bool, default True
        Whether causes of wrong numbers are searched for, which takes about as long as the verdict.
    mistakes : path, optional
        A file of known bugs of your own that are tried first as causes, written as edits of the
        formulas. It is executed: give no file that you would not run as a test. Those of softmax
        and its gradients are tried, on heads of up to 4096 queries and keys.
    accumulate : "float32", optional
        The narrowest type of sums. With "float32", numbers fail that only narrower running sums
        explain, and numbers that these explain far better. By default sums may be in the storage
        type where a profile says so (`eager-narrow`, `flash-64`, ...), and the result has
        `narrow_sums` if other narrow sums may pass as well.
    q_scale, k_scale, v_scale : float or arrays, optional
        Factors on arrays in 8 bits: one number, or arrays of shape (..., heads), (..., n), or with
        all axes of the array, for each head, token, block of tokens or columns, or element; of a
        paged cache also (blocks, heads), or with its four axes.
    empty_rows : {"zero", "nan", "mean", "any", "undefined"}
        Output of the kernel for a query that sees no key: 0 with a log normaliser of -inf, NaN,
        the mean of all values, or anything ("any" and "undefined" are the same).
    beta, log_decay, write, removal, decay : arrays, optional
        For a recurrence, the arguments that its function in `refattn.recurrences` needs.
    initial_state, state : arrays, shape (..., d, d_v), optional
        For a recurrence, the state before the first token, and the last one, which is judged. A
        kernel may round its state between chunks to bfloat16 only if these arrays are bfloat16:
        with bfloat16 `q`, a float32 `state` that holds only bfloat16 numbers fails.
    kernel_epsilon : float, optional
        For "performer-relu", what is added to features, 0.001 by default.
    num_proposals, centres : int and array, shape (..., C, d), optional
        For "lara", the number of proposals, S by default, or their means in kernel coordinates.
    indices : array of int, shape (..., S) or (..., rows, S), optional
        For "coreset", the keys that are attended to. For softmax attention, the keys that each
        query chose, or each block of n / rows queries; -1 for none.
    index_q, index_k : arrays, shapes (..., n, d_i) and (..., m or blocks, d_i), optional
        Vectors whose products rank the keys, for blocks of queries one for each block: whether
        rounded products allow the choice in `indices` is a part `indices` of the verdict. If
        `index_k` has fewer rows than m, `indices` are blocks of equally many keys.
    part_out, part_lse, part_keys : arrays, shapes (P, ..., n, d_v), (P, ..., n) and (P + 1,)
        For softmax attention, outputs and log normalisers of P parts of the keys, and the first key
        of each part and the end. Each part and the merge to `out` are parts of the verdict; if
        parts are in 16 bits, `out` is judged by its merge alone.
    normalise : {"qk", "q", "k"}, optional
        Which arrays the kernel divides by the norms of their rows, for softmax attention in
        bfloat16 and float16. The norm is max(|x|, eps), sqrt(|x|^2 + eps) or sqrt(|x|^2 / d + eps),
        whichever explains the numbers. Gradients in these arrays are not judged.
    norm_eps : float, optional
        The eps of these norms; by default 1e-12 in the first and 1e-6 or 1e-5 in the others.
    cu_seqlens, cu_seqlens_q, cu_seqlens_k : integers, shape (sequences + 1,), optional
        For softmax attention, where each sequence begins among tokens, and the end: arrays are
        (tokens, heads, size), `lse` is (heads, tokens), and each sequence attends only to itself.
        The last query of each is level with its last key, for causal attention and windows.
    block_table, cache_seqlens : integers, shapes (batch, blocks) and (batch,), optional
        For softmax attention, the blocks of keys and values of each sequence, in order, and how
        many keys it has: `k` and `v` are (blocks, block size, heads, size), or in layout "hnd"
        (blocks, heads, block size, size), and all else is (batch, n, heads, size), with `lse`
        (batch, heads, n) or (batch, n, heads).
    layout : {"bhnd", "bnhd", "hnd"}
        Whether heads come before tokens; in `mask`, `bias`, `sinks`, `omega`, states and factors of
        arrays they always do. Packed and paged sequences have tokens before heads.

    Returns
    -------
    Verdict
        PASS, FAIL or UNDERPOWERED, the profile that explains the numbers, and the causes.

    Raises
    ------
    TypeError, ValueError
        As in `rounding.predict`; also if there is nothing to judge, if shapes of results do not
        match, if gradients come without `d_out`, or if the estimator does not have an option.

    Examples
    --------
    >>> import numpy as np
    >>> import refattn
    >>> q, k, v = (x[0, :1] for x in refattn.load_sample())
    >>> out = refattn.softmax_attention(q, k, v)
    >>> refattn.verify(q=q, k=k, v=v, out=out).profile
    'math'
    >>> off = refattn.softmax_attention(q, k, v, scale=32**-0.5 * 1.00001)
    >>> found = refattn.verify(q=q, k=k, v=v, out=off)
    >>> found.verdict, found.suspects[0].name
    ('FAIL', 'scale')
    """
    arrays = {"q": q, "k": k, "v": v, "d_out": d_out, "state": state, "out": out, "lse": lse}
    arrays |= {"dq": dq, "dk": dk, "dv": dv}
    checks.choice("layout", layout, LAYOUTS)
    offsets = {"cu_seqlens": cu_seqlens, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    offsets |= {"block_table": block_table, "cache_seqlens": cache_seqlens}
    offsets = {x: y for x, y in offsets.items() if y is not None}
    declared_layout, layout = layout, "bnhd" if offsets else layout
    arrays = {x: y for x, y in arrays.items() if y is not None or x in "qkv"}
    views = view_heads_first(arrays, layout)
    scales = {"q": q_scale, "k": k_scale, "v": v_scale}
    sequences: Sequences | None = None

    def lay_out(raw: dict[str, Any]) -> Mapping[str, Any]:
        nonlocal sequences, mask
        masked = raw | ({} if mask is None else {"mask": mask})
        sequences = take_sequences(masked, offsets, declared_layout)
        mask = masked.pop("mask", None)
        if not sequences:
            return masked
        own = {x: masked.pop(x) for x, y in raw.items() if x in SCALES.values() and masked[x] is y}
        return view_heads_first(masked, layout) | own  # which have heads first

    of_inputs = {x: arrays[x] if offsets else views[x] for x in "qkv"}
    results: dict[str, Any] = {x: views[x] for x in ("out", "d_out") if x in views}
    inputs = read_inputs(of_inputs, results, dtype, scales, lay_out)
    q, k, v = (inputs.numbers[name] for name in "qkv")  # in float64, times their scales
    settings: dict[str, Any] = {"bias": bias, "mask": mask, "causal": causal}
    if mask is not None:
        checks.is_array("mask", mask)
        settings["mask"] = mask_of_members(mask, q, k, v)
    settings["window"] = unlimited(window)
    gates = {"beta": beta, "log_decay": log_decay, "write": write, "decay": decay}
    gates = {x: y for x, y in gates.items() if y is not None}
    kind = kind_of(estimator)
    refuse_sequences(sequences, kind, estimator)
    # Pose the problem: what the exact result is, and of what.
    if kind == "recurrent":
        refused = {"omega": omega, "log_weight": log_weight, "feature_map": feature_map}
        refused |= {"bias": bias, "mask": mask, "window": settings["window"], "sinks": sinks}
        refused |= {"softcap": softcap, "lse": lse, "hardware": hardware}
        refused["kernel_epsilon"] = kernel_epsilon
        refuse_options(estimator, refused)

        def view(given: Mapping[str, Any]) -> dict[str, Any]:
            views = view_heads_first({"q": arrays["q"], **given}, layout)
            return {name: views[name] for name in given}

        pair = None if removal is None else tuple(view({"a": x})["a"] for x in removal)
        gates = view(gates) | {"removal": pair, "initial_state": initial_state}
        gates = gates_of(estimator, gates)
        problems = pose_recurrence(
            q, k, v, gates, record=estimator, scale=scale, d_out=views.get("d_out")
        )
    elif kind == "text":
        refused = {"feature_map": feature_map, "bias": bias, "sinks": sinks, "softcap": softcap}
        refused |= {"lse": lse, "hardware": hardware, "removal": removal, "state": state}
        refuse_options(estimator, refused | {"initial_state": initial_state})
        taken = {**gates, "window": settings["window"], "num_proposals": num_proposals}
        taken["kernel_epsilon"] = kernel_epsilon
        of_text = {"q": q, "k": k, "v": v, "mask": settings["mask"], "omega": omega}
        of_text |= {"log_weight": log_weight, "centres": centres, "indices": indices}
        problems = {"out": pose_by_text(estimator, of_text, taken, inputs.storage, scale, causal)}
    else:
        gates |= {"removal": removal, "initial_state": initial_state, "state": state}
        gates |= {"num_proposals": num_proposals, "centres": centres}
        gates["kernel_epsilon"] = kernel_epsilon
        chosen = {"indices": indices, "index_q": index_q, "index_k": index_k}
        refuse_options(estimator, gates if kind == "scores" else gates | chosen)
        limits = causal, qkv.window(settings["window"])
        see = limit_sequences(sequences, (q.shape[-2], k.shape[-2]), *limits)
        if see is not None:
            settings |= {"causal": False, "window": None, "mask": mask_whole(mask, see)}
        posed = pose_arrays(
            q,
            k,
            v,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            features=features,
            **settings,
            **_options_of_estimator(estimator, omega, log_weight, feature_map),
        )
        posed = posed.with_scales(inputs.scales)
        if sequences is not None:
            posed = keep_sequences(posed, sequences, *limits)
        problems = {"out": posed if indices is None else choose_keys(posed, chosen)}
    problems = {x: y._replace(storage=inputs.storage) for x, y in problems.items()}
    problem = problems["out"]
    alpha = check_alpha(alpha)
    check_hardware("hardware", hardware)
    checks.flag("everything", everything)
    checks.flag("explain", explain)
    rows = () if mistakes is None else read_mistakes(mistakes)
    check_sums("accumulate", accumulate, profile, inputs.storage)
    check_norms(normalise, norm_eps, arrays | {"part_out": part_out}, kind, inputs.storage)
    checks.choice("empty_rows", empty_rows, EMPTY_ROWS)
    # Read the results, whose shapes follow from the problem, and find the type of each.
    n, _, d_v = problem.shape
    of_result = "the result"
    shapes = {
        "out": ((*problem.lead, n, d_v), of_result),
        "lse": ((*problem.lead, n), of_result),
        "d_out": ((*problem.lead, n, d_v), of_result),
        "dq": (tuple(q.shape), "`q`"),
        "dk": (tuple(k.shape), "`k`"),
        "dv": (tuple(v.shape), "`v`"),
    }
    if kind == "recurrent":
        axes = (*problems["state"].lead, problems["state"].shape[0], d_v)
        shapes["state"] = (axes, "the last state")
    got: dict[str, Doubles] = {}
    for name in (x for x in shapes if x in views):
        got[name] = widen(name, views[name])
        shape, of = shapes[name]
        if got[name].shape != shape:
            given = {x: arrays[x] for x in ("q", "k", "v", *got)}
            other = not offsets and fits_other_layout(given, layout, kind == "recurrent")
            raise ValueError(
                f"`{name}` must have the shape of {of}, {shape}, got {got[name].shape}."
                + (f" These shapes fit layout={other!r}." if other else "")
            )
    check_holds(problem, inputs.unchecked)
    storage = inputs.storage
    types = {x: narrowest(got[x], storage, dtype_of(views[x], x)) for x in got}
    if "out" in inputs.types and "out" in got:
        types["out"] = inputs.types["out"]
        check_all_hold("out", got["out"], (), types["out"])
    if "lse" in got and (problem.kind != "scores" or "out" not in got):
        raise ValueError("`lse` must come with `out`, of softmax attention.")
    gradients = [x for x in ("dq", "dk", "dv") if x in got]
    if gradients and "d_out" not in got:
        raise ValueError(f"`{gradients[0]}` must come with `d_out`, got None.")
    if not gradients and not {"out", "state"} & {*got}:
        raise ValueError("`out`, `dq`, `dk` or `dv` must be given, to be judged; got none.")
    # Pair results with problems, choose profiles, and judge.
    read = {x: y.__getitem__ for x, y in got.items()}
    if kind == "recurrent":
        named = {"state": state, "initial_state": initial_state}
        states = {x: widen(x, y) for x, y in named.items() if y is not None}
        own = {x: dtype_of(y, x) for x, y in {"q": arrays["q"], **named}.items() if y is not None}
        parts = gather_recurrent(problems, read, types, type_of_states(states, own, storage))
    else:
        declared = "out" in inputs.types
        parts = gather_parts(problem, read, types, {x: y.shape for x, y in got.items()}, declared)
        of_parts = {"part_out": part_out, "part_lse": part_lse, "part_keys": part_keys}
        if part_out is not None and "out" in parts:
            parts = pose_parts(parts, of_parts)
    scaled = any(x is not None for x in (*scales.values(), normalise))
    names = name_profiles(profile, kind, inputs.types, storage, scaled, parts)
    asked = (storage, names, alpha, everything, hardware, explain, accumulate is not None, rows)
    settled = settle(parts, empty_rows)
    verdict: Verdict = judge_norms(settled, (normalise, norm_eps), lambda x: judge_all(x, *asked))
    if "d_out" in got and not gradients:
        verdict = verdict.with_remark(UNUSED_D_OUT)

    def judge_in(other: str) -> Verdict:
        return verify(
            **arrays, omega=omega, log_weight=log_weight, estimator=estimator, dtype=dtype,
            profile=profile, alpha=alpha, scale=scale, bias=bias, causal=causal,
            window=window, softcap=softcap, sinks=sinks, features=features,
            feature_map=feature_map, hardware=hardware, everything=everything, explain=False,
            mistakes=mistakes, accumulate=accumulate, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, empty_rows=empty_rows, beta=beta, log_decay=log_decay, write=write,
            removal=removal, decay=decay, initial_state=initial_state,
            num_proposals=num_proposals, centres=centres, kernel_epsilon=kernel_epsilon,
            indices=indices, index_q=index_q, index_k=index_k, part_out=part_out,
            part_lse=part_lse, part_keys=part_keys, normalise=normalise, norm_eps=norm_eps,
            layout=other, mask=None if sequences else mask, **offsets,
        )  # fmt: skip

    return try_other_layout(problem, verdict, declared_layout, judge_in, "layout={!r}")


def try_other_layout(
    problem: Problem, verdict: Verdict, layout: str, judge_in: Callable[[str], Verdict], option: str
) -> Verdict:
    """Judge arrays that fail and may be transposed in the other layout, which may be the cause."""
    n, m, _ = problem.shape
    other = {"bhnd": "bnhd", "bnhd": "bhnd"}.get(layout)
    looks_transposed = problem.lead[-1:] > (max(n, m),)
    if problem.packed is not None:  # blocks may be, whatever their sizes
        looks_transposed = problem.packed.table is not None
        other = PAGES_HEADS_FIRST if layout != PAGES_HEADS_FIRST else "bhnd"
    if not looks_transposed or other in (None, layout) or verdict.verdict != "FAIL":
        return verdict
    if _IN_OTHER_LAYOUT.get():  # from which this one would be the other
        return verdict
    token = _IN_OTHER_LAYOUT.set(True)
    try:
        return verdict.in_layout(option.format(other), judge_in(other))
    except (TypeError, ValueError):  # shapes that have no such layout
        return verdict
    finally:
        _IN_OTHER_LAYOUT.reset(token)


def check_sums(name: str, accumulate: Any, profile: Any, storage: str) -> None:
    """Check the narrowest type of sums, beside a profile that is given."""
    if accumulate is None:
        return
    checks.choice(name, accumulate, ("float32",))
    if profile is not None and not has_wide_sums(profile_of(profile), storage):
        raise ValueError(
            f"`{name}` must come with a profile with sums in float32 or wider, got {profile!r}."
        )


def check_alpha(alpha: Any) -> float:
    """Check a level."""
    level = float(checks.real("alpha", alpha, positive=True))
    if level >= 1:
        raise ValueError(f"`alpha` must be between 0 and 1, got {level}.")
    return level


def _options_of_estimator(
    estimator: Any, omega: Any, log_weight: Any, feature_map: Any
) -> dict[str, Any]:
    """Check what the estimator takes beside queries, keys and values."""
    kind = kind_of(estimator)
    if kind == "scores":
        of_features = {"omega": omega, "log_weight": log_weight, "feature_map": feature_map}
        for option, x in of_features.items():
            if x is not None:
                raise ValueError(f"`{option}` must not be given for softmax.")
        return {}
    if kind == "map":
        return {"feature_map": elu_features if feature_map is None else feature_map}
    if omega is None:
        raise ValueError("`omega` must be given for rfa: frequencies (..., S, d), got None.")
    return {"omega": omega, "log_weight": log_weight}
