"""The commands `refattn verify` and `refattn tolerance`: judge the numbers of a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..arrays.words import close
from .options import (
    Answer,
    Unusable,
    alpha_option,
    causal_option,
    examples,
    file_argument,
    file_option,
    format_option,
    hardware_option,
    installed,
    known_option,
    many_heads,
    mistakes_option,
    needed,
    one_line,
    pages_layout_option,
    plot_option,
    profile_option,
    publish,
    scale_option,
    softcap_option,
    window_option,
    words_of,
)
from .progress import Work

if TYPE_CHECKING:
    from ..judge.verification.findings import Part
    from ..judge.verification.verdict import Verdict
    from .show.verdicts import Verified

_VERIFY = """Judge whether a correct kernel can have produced the numbers in a file.

FILE (.safetensors or .npz) holds the inputs q, k and v of the kernel and its output out, each in
its own dtype, and optionally lse, mask, bias, sinks and omega. If it holds d_out, the gradients dq,
dk and dv are also judged. Arrays in FP8 or int8 are multiplied by q_scale, k_scale and v_scale:
one number, or one for each head, token or block. Keys that queries chose are indices, and outputs
of parts of the keys are part_out, part_lse and part_keys. The allowed error of each element follows
from q, k, v and from what the kernel rounds. The exit status is 0 if all files PASS, 1 if one
FAILs, 3 if one is UNDERPOWERED, and 2 after an error.

\b
Write such a file from torch:
  from safetensors.torch import save_file
  arrays = dict(q=q, k=k, v=v, out=out)  # and d_out=d_out, dq=q.grad, dk=k.grad, dv=v.grad
  save_file({x: y.contiguous() for x, y in arrays.items()}, "dump.safetensors")
from JAX:
  from safetensors.flax import save_file
  save_file(dict(q=q, k=k, v=v, out=out), "dump.safetensors")
from C:
  uint64_t size = sprintf(text, "{\\"q\\":{\\"dtype\\":\\"BF16\\",\\"shape\\":[8,512,64],"
                                "\\"data_offsets\\":[0,524288]},...}");
  fwrite(&size, 8, 1, file), fwrite(text, 1, size, file), fwrite(q, 2, 262144, file), ...
The file is a length of 8 bytes, a header in JSON, and the arrays one after the other. The guide has
the whole program (validation/site/guide/numbers.md).
"""


def _parse_types(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> str | dict[str, str] | None:
    from ..arrays.stored import list_types
    from ..files.tensors import DTYPES

    if value is None:
        return value
    if "=" not in value:
        if value not in DTYPES:
            raise Unusable(
                f"--dtype must be one of {', '.join(DTYPES)}, got {value!r}.{close(value, DTYPES)}"
            )
        return value
    named = dict(pair.partition("=")[::2] for pair in value.split(","))
    with one_line(False):
        return list_types({x.strip(): y.strip() for x, y in named.items()}, DTYPES)


estimator_option = known_option(
    "--estimator",
    known=lambda: needed("judge.verification.reading").list_judged(),
    metavar="NAME",
    default="softmax",
    show_default=True,
    help="What was computed: softmax, rfa (omega from FILE, positive features), linear (elu+1), a "
    "recurrence such as gated-delta-rule (beta, log_decay, ... from FILE), or ra, lara, rfa-local, "
    "performer-relu, importance-sampling, eva, second-order or coreset (omega, centres, indices "
    "from FILE).",
)
dtype_option = click.option(
    "--dtype",
    metavar="NAME",
    callback=_parse_types,
    shell_complete=words_of(lambda: needed("files.tensors").DTYPES),
    help="Dtype of the kernel, if FILE stores wider arrays; or one for each of q, k, v, out and "
    "weights (in the product with v), as in q=NAME,out=NAME.  [default: that of FILE]",
)
empty_rows_option = known_option(
    "--empty-rows",
    known=lambda: needed("judge.verification.empty_rows").EMPTY_ROWS[:-1],
    aliases=lambda: needed("judge.verification.empty_rows").EMPTY_ROWS,
    metavar="[zero|nan|mean|any]",
    default="zero",
    show_default=True,
    help="Output of the kernel for a query that sees no key.",
)


def judging_options(command: Any) -> Any:
    """Add the options of commands that judge numbers of files."""
    every = click.option(
        "--all", "everything", is_flag=True, help="Test all rows of large files, not a sample."
    )
    no_cause = click.option(
        "--no-cause", is_flag=True, help="Do not search for causes of wrong numbers."
    )
    numbers = (
        estimator_option,
        dtype_option,
        profile_option,
        hardware_option("try ieee, then the others"),
    )
    attention = causal_option, scale_option, window_option, softcap_option, pages_layout_option
    verdict = every, empty_rows_option, alpha_option("kernel"), no_cause, format_option
    for option in reversed((*numbers, *attention, *verdict)):
        command = option(command)
    return command


@click.command(
    "verify",
    help=_VERIFY,
    epilog=examples(
        "refattn verify dump.safetensors",
        "refattn verify dump.safetensors --causal --window 128,0 --profile flash",
        "refattn verify dump.safetensors --layout bnhd --format csv",
    ),
)
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
)
@judging_options
@click.option("--chunk", type=int, metavar="N", help="Tokens of a chunk, for eva and second-order.")
@click.option(
    "--proposals",
    "num_proposals",
    type=int,
    metavar="N",
    help="Number of proposals, for lara.  [default: that of the frequencies]",
)
@click.option(
    "--kernel-epsilon",
    type=float,
    metavar="X",
    help="What is added to features, for performer-relu.  [default: 0.001]",
)
@known_option(
    "--normalise",
    known=lambda: needed("judge.rounding.norms").NORMALISED,
    metavar="[qk|q|k]",
    help="What the kernel divides by the norms of its rows itself: queries, keys or both.",
)
@click.option(
    "--norm-eps", type=float, metavar="X", help="Epsilon of these norms.  [default: tried]"
)
@click.option(
    "--strict",
    is_flag=True,
    help="Reject numbers that only sums narrower than float32 explain, whatever the profile.",
)
@mistakes_option
@click.option("--verbose", is_flag=True, help="Print all causes, all failed tests, and remarks.")
@file_option("json", "Write the verdict; for several files, a list.")
@file_option("html", "Write the verdict as a standalone page.")
@plot_option("Plot each error of the worst head divided by its standard deviation.")
@click.pass_context
def verify(
    context: click.Context,
    /,
    files: tuple[Path, ...],
    kind: str,
    json_path: Path | None,
    html_path: Path | None,
    plot_path: Path | None,
    verbose: bool,
    mistakes: Path | None,
    **options: Any,
) -> None:
    from ..arrays.threads import Interrupted
    from ..judge.mistakes.defects.catalogue import read_mistakes
    from .show import plots, verdicts

    if html_path is not None:
        installed("--html", "jinja2")
    interruption = None
    judged_files: list[Verified] = []
    with one_line(plot_path is not None):
        if plot_path is not None and len(files) > 1:
            raise ValueError(f"`--plot` must come with one FILE, got {len(files)}.")
    with one_line(False):
        options["mistakes"] = () if mistakes is None else read_mistakes(mistakes)
    for number, path in enumerate(files):
        with one_line(False):
            try:
                judged_files.append(_judge_file(path, **options))
            except Interrupted as stop:
                judged_files.append(stop.found)
                interruption = stop
            except (TypeError, ValueError) as error:
                if len(files) > 1:
                    error.args = (f"{path.name}: {error}",)
                raise
        if kind in ("table", "markdown"):
            publish(_answer_of_files(judged_files[-1:], number > 0, verbose), kind)
        if interruption is not None:
            break
    rest = _answer_of_files(judged_files, False, verbose)
    if kind in ("table", "markdown"):
        rest = rest._replace(show=lambda page: None)
    if html_path is not None:
        rest = rest._replace(to_html=partial(verdicts.verdicts_to_html, judged_files, verbose))
    plot = partial(plots.plot_verified, judged_files[0])
    publish(rest, kind, json_path, plot_path, plot, html_path)
    if interruption is not None:
        raise interruption
    words = {x.verdict.verdict for x in judged_files}
    context.exit(1 if "FAIL" in words else 3 if "UNDERPOWERED" in words else 0)


def _answer_of_files(judged_files: list[Verified], after: bool, verbose: bool) -> Answer:
    from .show import verdicts

    return Answer(
        partial(verdicts.print_verdict, judged_files[-1], after, verbose),
        lambda: [verdicts.verdicts_table(judged_files)],
        partial(verdicts.verdicts_to_json, judged_files),
    )


def _judge_file(path: Path, *, layout: str, **options: Any) -> Verified:
    """Judge what a file holds; if it fails and may be transposed, also in the other layout."""
    from ..judge.verification.door import try_other_layout

    judged = _judge_layout(path, layout=layout, **options)

    def judge_in(other: str) -> Verdict:
        return _judge_layout(path, layout=other, **options | {"no_cause": True}).verdict

    about = judged.problem, judged.verdict, layout, judge_in
    return judged._replace(verdict=try_other_layout(*about, "--layout {}"))


def _judge_layout(
    path: Path,
    *,
    dtype: Any,
    layout: str,
    profile: str | None,
    everything: bool = False,
    no_cause: bool = False,
    empty_rows: str = "zero",
    **options: Any,
) -> Verified:
    from ..arrays.threads import Interrupted
    from ..files.tensors import open_tensors
    from ..judge.kinds.normalised import check_norms, judge_norms
    from ..judge.verification.door import check_alpha, check_sums
    from ..judge.verification.empty_rows import settle
    from ..judge.verification.inputs import name_profiles
    from ..judge.verification.judging import judge_all
    from ..judge.verification.reading import list_gates, pose_tensors, read_parts
    from .show.verdicts import Verified

    alpha, hardware = check_alpha(options.pop("alpha")), options.pop("hardware", None)
    strict, mistakes = options.pop("strict", False), options.pop("mistakes", ())
    norms = options.pop("normalise", None), options.pop("norm_eps", None)
    also = list_gates(options["estimator"])
    with Work("Verifying") as work:
        tensors = open_tensors(path, dtype=dtype, layout=layout, required=(), also=also)
        check_sums("--strict", "float32" if strict else None, profile, tensors.dtype)
        problem = pose_tensors(tensors, **options)
        check_norms(*norms, tensors.shapes, problem.kind, tensors.dtype)
        parts = read_parts(tensors, problem)
        if tensors.lead and tensors.sequences is None:
            many_heads(tensors.lead[-1], max(problem.shape[:2]), layout)
        work.expect(len(list(problem.items())))

        def shown(part: Part) -> Part:
            def out(index: tuple[int, ...]) -> Any:
                work.tick()
                return part.numbers.out(index)

            return part._replace(numbers=part.numbers._replace(out=out))

        judged = settle({name: shown(part) for name, part in parts.items()}, empty_rows)
        scaled = bool(tensors.scales) or norms[0] is not None
        types = tensors.dtypes, tensors.dtype
        names = name_profiles(profile, problem.kind, *types, scaled, parts)
        asked = (tensors.dtype, names, alpha, everything, hardware, not no_cause, strict, mistakes)
        try:
            verdict = judge_norms(judged, norms, lambda x: judge_all(x, *asked))
        except Interrupted as stop:  # with what is known, for as much as that is
            stop.found = Verified(tensors, problem, parts, stop.found)
            raise
    return Verified(tensors, problem, parts, verdict)


@click.command(
    "tolerance",
    epilog=examples(
        "refattn tolerance --dtype bfloat16",
        "refattn tolerance qkv.npz --dtype float16 --atol 1e-3 --rtol 1e-2 --verbose",
        "refattn tolerance qkv.npz --layout bnhd --format markdown",
    ),
)
@file_argument
@known_option(
    "--dtype",
    known=lambda: needed("judge.verification.tolerances").USUAL,
    aliases=lambda: needed("files.tensors").DTYPES,
    metavar="[float32|float16|bfloat16]",
    help="Dtype of the arrays of the kernel.  [default: that of FILE]",
)
@profile_option
@hardware_option("ieee")
@click.option(
    "--atol", type=float, help="Absolute tolerance to test.  [default: that of torch.testing]"
)
@click.option("--rtol", type=float, help="Relative tolerance to test.")
@causal_option
@scale_option
@window_option
@softcap_option
@pages_layout_option
@click.option("--verbose", is_flag=True, help="Also print each head, and simulate known bugs.")
@format_option
@file_option("json", "Write all numbers, of every head.")
def tolerance_command(
    file: Path | None,
    dtype: str | None,
    profile: str | None,
    hardware: str | None,
    atol: float | None,
    rtol: float | None,
    layout: str,
    verbose: bool,
    kind: str,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Compute the tolerance that a correct kernel needs.

    FILE (.npz or .safetensors) holds q, k, v of shape (..., n, d), and optionally mask, bias and
    sinks; the default is a sample from a sentence encoder that comes with the package. The arrays
    are rounded to --dtype first. A tolerance allows |got - exact| <= atol + rtol |exact|. With
    --verbose, and as CSV or JSON, kernels with known bugs are simulated. Each is tested at --atol
    and --rtol, at the tolerance that a correct kernel needs, and by `refattn verify`.
    """
    from ..files.arrays import find_sample
    from ..files.tensors import open_tensors
    from ..judge.verification.reading import pose_tensors
    from ..judge.verification.tolerances import USUAL, find_tolerance
    from .show import tolerances

    with one_line(False):
        path = file or find_sample()
        tensors = open_tensors(path, layout=layout, required=())
        problem = pose_tensors(tensors, **options)
        kept = dtype or tensors.dtype
        if kept not in USUAL:
            raise ValueError(
                f"{'--dtype' if dtype else 'the dtype of FILE, without --dtype,'} must be one of "
                f"{', '.join(USUAL)}, got {kept!r}: `refattn verify` needs no tolerance."
            )
        if tensors.lead and tensors.sequences is None:
            many_heads(tensors.lead[-1], max(problem.shape[:2]), layout)
        with Work("Trying") as work:
            needed = find_tolerance(
                problem,
                kept,
                profile=profile,
                hardware=hardware,
                atol=atol,
                rtol=rtol,
                bugs=verbose or kind in ("csv", "json") or json_path is not None,
                track=work.track,
            )
    publish(
        Answer(
            partial(tolerances.print_tolerance, tensors, problem, needed, verbose),
            needed.tables,
            partial(tolerances.tolerance_to_json, tensors, problem, needed),
        ),
        kind,
        json_path,
    )
