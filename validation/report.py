"""The report of a run: a page, a summary, figures and numbers.

`write` makes, in one directory,

- ``report.html``, a page that needs no other file: what is wrong in print, then all claims;
- ``report.md``, the same in short;
- ``figures/NAME.svg``, a figure for each claim that has one;
- ``report.json``, for programs.

``report.json`` is an object with

- ``"version"``: 1; a change that breaks readers adds 1.
- ``"settings"``: those of the run: ``"level"``, ``"seed"``, ``"alpha"`` (probability of any wrong
  verdict by chance), ``"beta"`` (of missing a detectable discrepancy), ``"statements"`` (of the
  whole suite) and versions of what was used.
- ``"counts"``: how many ``"claims"`` and ``"statements"`` there are; how many statements are as
  expected and ``"hold"`` or are ``"refuted"``, how many are ``"underpowered"`` or else
  ``"unexpected"``, how many have another verdict than expected that rests on times (``"timed"``);
  and how many claims ended in ``"errors"``.
- ``"claims"``: the records, as `suite.record` and `runner.run` make them. Each has ``"claim"`` (its
  name), ``"title"``, ``"source"``, ``"method"``, ``"statements"``, ``"seconds"`` and either
  ``"error"`` (a traceback) or ``"alpha"``, ``"errata"``, ``"remark"`` and ``"data"``. A statement
  has ``"name"``, ``"text"``, ``"expected"``, ``"printed"``, ``"timed"`` (whether a clock decides
  it), ``"verdict"``, ``"number"`` and ``"evidence"``; a piece of evidence has ``"name"``,
  ``"kind"`` ("tested", "shown", "compared" or "timed"), ``"verdict"``, ``"margin"`` (above 1 beyond
  its limit, or null), ``"number"``, and the fields of its kind. An erratum has those of
  `suite.Erratum` but the figure.
- ``"sources"``: what the ids in each ``"source"`` stand for: ``"name"``, ``"citation"`` and
  ``"links"``.

Formulas in texts are LaTeX between dollars. Null stands for a number that is not finite. Keys may
be added; those here stay.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from latex2mathml.converter import convert
from markupsafe import Markup, escape

from . import plotting, results, sources, suite, svg

VERSION = 1

Plot = Callable[[dict[str, Any]], Any]

_NONE = "\N{EN DASH}"
_BADGES = {
    "holds": "✓",
    "refuted": "✗",
    "timed": "~",
    "underpowered": "?",
    "unexpected": "!",
    "error": "!",
}
_WRONG = ("printed", "instead", "consequence")  # texts of an erratum
_COLUMNS = {  # of the table of all evidence: key in a row, heading
    "p": "p",
    "adjusted": "adjusted p",
    "opposite": "opposite p",
    "value": "value",
    "bound": "bound",
    "detectable": "detectable",
    "target": "target",
    "unit": "unit",
}


class Figure(NamedTuple):
    """A figure for the page and for a file, or why there is none."""

    page: Markup = Markup()
    file: str = ""
    caption: str = ""
    width: float = 0.0
    height: float = 0.0
    error: str = ""


def write(
    settings: Mapping[str, Any],
    records: list[dict[str, Any]],
    out: Path,
    plots: Mapping[str, Plot | None] | None = None,
    small: Mapping[str, Sequence[Plot | None]] | None = None,
) -> list[Path]:
    """Write the report into a directory and return its files.

    Each file is replaced at once, and none before all are made. A figure that cannot be drawn is
    named in the report and left out. `plots` draw the data of claims, and `small` the figures of
    their errata, by names of claims; those of the suite by default.
    """
    if plots is None:
        plots = {name: claim.plot for name, claim in suite.claims().items()}
    if small is None:
        small = {name: [e.plot for e in claim.errata] for name, claim in suite.claims().items()}
    claims = _views(records, plots, small)
    number = counts(records)
    errata = sorted(
        (e for c in claims for e in c["errata"]),
        key=lambda e: (not e["figure"].page, -e["weight"]),
    )
    known = {place.id: place.source for c in claims for place in c["places"]}
    shared = {
        "settings": dict(settings),
        "run": _options(settings),
        "claims": claims,
        "errata": errata,
        "sources": known,
        "states": {s["state"] for c in claims for s in c["statements"]}
        | {"error" for c in claims if c["error"] is not None},
        "counts": number,
        "lead": _lead(number),
        "scope": _scope(number, settings),
        "problems": sorted(
            (p for c in claims for p in c["problems"]),
            key=lambda p: p["state"] in ("underpowered", "timed"),
        ),
    }
    data = {
        "version": VERSION,
        "settings": settings,
        "counts": number,
        "claims": records,
        "sources": {key: source._asdict() for key, source in sorted(known.items())},
    }
    contents = {
        f"figures/{claim['slug']}.svg": claim["figure"].file
        for claim in claims
        if claim["figure"].file
    }
    contents["report.html"] = _environment().get_template("report.html").render(shared)
    contents["report.md"] = _markdown(shared)
    contents["report.json"] = json.dumps(data, indent=1, allow_nan=False) + "\n"
    for name, text in contents.items():
        results.replace(out / name, text)
    return [out / name for name in contents]


def summary(records: list[dict[str, Any]]) -> str:
    """One line for each statement, marked if its verdict is unexpected, and one of counts.

    The mark is "!", or "~" if the verdict rests on times.
    """
    rows: list[tuple[str, ...]] = []
    for one in records:
        for s in one["statements"]:
            mark = {"holds": " ", "refuted": " ", "timed": "~"}.get(_state(s), "!")
            rows.append((mark, s["verdict"], one["claim"], s["name"], s["number"]))
        if "error" in one:
            rows.append(("!", "ERROR", one["claim"], "", _last_line(one["error"])))
    rows = [tuple(" ".join(cell.split()) for cell in row) for row in rows]
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, _lead(counts(records))])


def counts(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many statements have which verdict."""
    records = list(records)
    states = [_state(s) for one in records for s in one["statements"]]
    return {
        "claims": len(records),
        "statements": len(states),
        "hold": states.count("holds"),
        "refuted": states.count("refuted"),
        "underpowered": states.count("underpowered"),
        "unexpected": states.count("unexpected"),
        "timed": states.count("timed"),
        "errors": sum("error" in one for one in records),
    }


def _state(statement: Mapping[str, Any]) -> str:
    """Return one word for a verdict and whether it is the expected one."""
    verdict = statement["verdict"]
    if verdict != statement["expected"] and statement.get("timed"):
        return "timed"
    if verdict == suite.UNDERPOWERED:
        return "underpowered"
    if verdict != statement["expected"]:
        return "unexpected"
    return "holds" if verdict == suite.HOLDS else "refuted"


def _lead(number: Mapping[str, int]) -> str:
    """Say in one sentence what came of all statements."""
    n = number
    if not n["claims"]:
        return "No claim was tested."
    parts = [f"{n['hold']} {_plural(n['hold'], 'holds', 'hold')}"]
    if n["refuted"]:
        parts.append(f"{n['refuted']} {_plural(n['refuted'], 'is', 'are')} refuted as expected")
    contradict = _plural(max(n["unexpected"], 1), "contradicts", "contradict")
    parts.append(f"{n['unexpected'] or 'none'} {contradict} what is expected")
    if n["underpowered"]:
        parts.append(f"{n['underpowered']} {_plural(n['underpowered'], 'is', 'are')} underpowered")
    if n["timed"]:
        differ = _plural(n["timed"], "timed one differs", "timed ones differ")
        parts.append(f"{n['timed']} {differ} on this machine")
    if n["errors"]:
        parts.append(f"{n['errors']} {_plural(n['errors'], 'claim', 'claims')} ended in an error")
    statements = _plural(n["statements"], "statement", "statements")
    claims = _plural(n["claims"], "claim", "claims")
    begin = f"Of {n['statements']} {statements} of {n['claims']} {claims}, "
    return begin + ", ".join(parts[:-1]) + f" and {parts[-1]}."


def _scope(number: Mapping[str, int], settings: Mapping[str, Any]) -> str:
    """Say what part of the suite this is, if it is not all of it."""
    every = settings.get("statements")
    if every is None or number["statements"] == every:
        return ""
    return f"The suite has {every} statements; {number['statements']} have a verdict here."


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _options(settings: Mapping[str, Any]) -> str:
    """Arguments that make the command line repeat a run."""
    return "".join(f" --{key} {settings[key]}" for key in ("level", "seed") if key in settings)


def _views(
    records: list[dict[str, Any]],
    plots: Mapping[str, Plot | None],
    small: Mapping[str, Sequence[Plot | None]],
) -> list[dict[str, Any]]:
    """Everything that the templates show, with an address for each claim and statement."""
    found: list[dict[str, Any]] = []
    slugs: set[str] = set()
    for record in records:
        slug, name = _slug(record["claim"], slugs), record["claim"]
        title = record.get("title") or name
        view = {
            "slug": slug,
            "name": name,
            "title": title,
            "source": sources.named(record.get("source", "")),
            "places": sources.places(record.get("source", "")),
            "method": record.get("method", ""),
            "remark": record.get("remark", ""),
            "seconds": record.get("seconds"),
            "alpha": record.get("alpha"),
            "error": record.get("error"),
            "figure": _figure(record, f"figure-{slug}--", title, plots.get(name)),
        }
        taken: set[str] = set()
        view["statements"] = [
            _statement(s, f"{slug}--{_slug(s['name'], taken)}") for s in record["statements"]
        ]
        view["errata"] = _errata(record, view, small.get(name, ()))
        view["problems"] = [
            {"id": s["id"], "title": title, "name": s["name"], "state": s["state"],
             "says": s["says"]}
            for s in view["statements"]
            if not s["as_expected"] or s["state"] == "underpowered"
        ]  # fmt: skip
        failures = {"The claim could not be tested": view["error"]}
        failures["It has no figure"] = view["figure"].error or None
        failures |= {f"{e['title']} has no figure": e["figure"].error or None
                     for e in view["errata"]}  # fmt: skip
        for what, error in failures.items():
            if error is not None:
                problem = {"id": f"claim-{slug}", "title": title, "name": "", "state": "error"}
                view["problems"].append({**problem, "says": f"{what}: {_last_line(error)}"})
        found.append(view)
    return found


def _errata(
    record: Mapping[str, Any], view: Mapping[str, Any], small: Sequence[Plot | None]
) -> list[dict[str, Any]]:
    """What this run shows to be wrong in print: errata all of whose statements it refutes."""
    refuted = {s["name"]: s for s in view["statements"] if s["verdict"] == suite.REFUTED}
    found = []
    for i, e in enumerate(record.get("errata", ())):
        if set(e["statements"]) <= set(refuted):
            identifier = f"erratum-{view['slug']}--{i + 1}"
            plot = small[i] if i < len(small) else None
            shown = {
                "id": identifier,
                "claim": view["slug"],
                "source": sources.named(e["source"]),
                "by": [refuted[name] for name in e["statements"]],
                "figure": _figure(record, f"{identifier}--", e["title"], plot),
            }
            found.append({**e, **shown})
    return found


def _statement(s: Mapping[str, Any], identifier: str) -> dict[str, Any]:
    """One statement with its verdict in words, and its evidence in columns."""
    evidence = list(s.get("evidence", ()))
    number = s.get("number", "")
    deciding = next((e for e in evidence if f"{e['name']}: {e.get('number')}" == number), None)
    state, verdict, expected = _state(s), s["verdict"], s["expected"]
    as_expected = verdict == expected
    says = f"{verdict}, as expected" if as_expected else f"{verdict}, expected {expected}"
    columns = {
        key: heading
        for key, heading in _COLUMNS.items()
        if any(e.get(key) not in (None, "") for e in evidence)
    }
    return {
        "id": identifier,
        "name": s["name"],
        "text": s.get("text", ""),
        "wording": _wording(s),
        "state": state,
        "badge": _BADGES[state],
        "verdict": verdict,
        "expected": expected,
        "as_expected": as_expected,
        "says": f"{says} (timed here)" if state == "timed" else says,
        "number": deciding["number"] if deciding else number,
        "by": deciding["name"] if deciding else "",
        "detects": _detects(evidence),
        "columns": columns,
        "evidence": evidence,
    }


def _wording(s: Mapping[str, Any]) -> str:
    """Whose sentence it is, and whether it is about times."""
    derived = "derived" if s["expected"] == suite.HOLDS else "control"
    wording = "as printed" if s.get("printed", True) else derived
    return f"{wording}, timed" if s.get("timed") else wording


def _detects(evidence: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is detected in each unit, by the test that is worst for its target."""
    worst: dict[str, tuple[float, str]] = {}
    for e in evidence:
        found, target, unit = e.get("detectable"), e.get("target"), e.get("unit") or ""
        if found is None:
            continue
        ratio = found / target if target else 0.0
        text = f"{found:.2g} {unit}".rstrip() + (f" (target {target:.2g})" * bool(target))
        worst[unit] = max(worst.get(unit, (-1.0, "")), (ratio, text))
    return [text for _, text in worst.values()]


def _figure(record: Mapping[str, Any], prefix: str, title: str, plot: Plot | None) -> Figure:
    """Draw the data of a claim; whatever goes wrong is a finding, not the end of the report."""
    if plot is None or "data" not in record:
        return Figure()
    try:
        with plotting.style():
            root = svg.draw(plot(record["data"]), record["claim"])
        caption = _caption(plot)
        title = ". ".join(filter(None, (title, caption)))
        width, height = svg.size(root)
        page = Markup(svg.for_page(root, prefix, title))
        return Figure(page, svg.for_file(root, title), caption, width, height)
    except Exception as error:
        return Figure(error=f"{type(error).__name__}: {error}")


def _caption(plot: Callable[..., Any]) -> str:
    """Return the first paragraph of the docstring of what draws a figure."""
    return " ".join((inspect.getdoc(plot) or "").split("\n\n")[0].split())


def _slug(name: str, taken: set[str]) -> str:
    """Make a name into part of an address that no other claim has."""
    base = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or "claim"
    slug, i = base, 1
    while slug.lower() in taken:  # some file systems do not tell upper from lower case
        i += 1
        slug = f"{base}-{i}"
    taken.add(slug.lower())
    return slug


def _last_line(error: str) -> str:
    lines = error.strip().splitlines()
    return lines[-1] if lines else "no message"


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": _number, "formulas": _formulas}
    return environment


@cache
def _formulas(text: str) -> Markup:
    """Text with what is between dollars as MathML, and what is between backticks as code."""
    found = Markup("")
    # A formula keeps the brackets and the punctuation about it on its line.
    parts = r"([(“]*)\$([^$]+)\$([,.;:)”]*)|`([^`]+)`|([^$`(“]+|[$`(“])"
    for before, formula, after, code, plain in re.findall(parts, text):
        if formula:
            found += Markup('<span class="formula">{}{}{}</span>').format(
                before, _mathml(formula), after
            )
        else:
            found += Markup("<code>{}</code>").format(code) if code else escape(plain)
    return found


def _mathml(formula: str) -> Markup:
    """A formula of LaTeX, with the spaces that its names, bars and signs have in print."""
    text = convert(formula).replace("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>")
    text = re.sub(r"<mo>([a-z]{2,}|&#x0221E;)</mo>", r"<mi>\1</mi>", text)
    text = re.sub(r"<mo[^>]*>(?=&#x0007C;)", '<mo stretchy="false" lspace="0" rspace="0">', text)
    first = r"((?:&#x00028;|&#x0002C;|&#x02192;|&#x0003D;)</mo>|<mrow>)<mo>(?=&#x02212;)"
    return Markup(re.sub(first, r'\1<mo form="prefix">', text))


def _number(x: Any) -> str:
    if x is None or x == "":
        return _NONE
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def _markdown(shared: Mapping[str, Any]) -> str:
    """The leading part of the page, in Markdown as GitHub reads it."""
    settings = ", ".join(f"{_plain(k)} {_plain(v)}" for k, v in shared["settings"].items())
    lines = ["# Validation of the claims", "", _plain(shared["lead"])]
    lines += ["", f"Settings: {settings}."] if settings else []
    lines += ["", shared["scope"]] if shared["scope"] else []
    if shared["problems"]:
        lines += ["", "## To look into", ""]
        for p in shared["problems"]:
            name = f", {_plain(p['name'])}" if p["name"] else ""
            lines.append(f"- {_plain(p['title'])}{name}: {_plain(p['says'])}")
    if shared["errata"]:
        lines += ["", "## Wrong in print", ""]
    for e in shared["errata"]:
        head = f"**{_plain(e['title'])}** ({_plain(e['source'])})"
        says = zip(("Printed", "Right", "Effect"), _WRONG, strict=True)
        lines.append(" ".join([f"- {head}.", *(f"{what}: {mixed(e[key])}" for what, key in says)]))
    if shared["claims"]:
        lines += ["", "## Claims", ""]
        lines += ["| Source | Claim | Statement | Verdict | Evidence | Figure |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
    for c in shared["claims"]:
        figure = f"[figure](figures/{c['slug']}.svg)" if c["figure"].file else _NONE
        first = [_plain(c["source"]), _plain(c["title"])]
        rows = [
            [
                f"{_plain(s['name'])} ({s['wording']})",
                f"{s['badge']} {s['says']}",
                _plain(": ".join(filter(None, (s["by"], s["number"])))),
            ]
            for s in c["statements"]
        ]
        if c["error"] is not None:
            rows.append([_NONE, f"{_BADGES['error']} ERROR", _plain(_last_line(c["error"]))])
        for row in rows:
            lines.append(f"| {' | '.join([*first, *row, figure])} |")
    return "\n".join(lines) + "\n"


def mixed(text: str) -> str:
    """Text in one line, with its formulas and code, which GitHub shows as such."""
    line = re.sub(r"\$([^$]+)\$", r"$`\1`$", " ".join(text.split()))
    pieces = re.split(r"(\$?`[^`]+`\$?)", line)
    return "".join(piece if i % 2 else _escaped(piece) for i, piece in enumerate(pieces))


def _plain(text: Any) -> str:
    """Text that Markdown shows as it is, in one line."""
    return _escaped(" ".join(str(text).split()))


def _escaped(words: str) -> str:
    words = re.sub(r"([\\`*\[\]<>|~$#])", r"\\\1", words.replace("&", "&amp;"))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", words)
