"""Reports of ``octavo inspect`` on a record: findings as text; findings and plots as JSON and as a page of HTML.

The page is report.html with report.css, report.js, the JSON and Vega-Lite put into it: it loads nothing from a network.
All three can compare two runs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any, NamedTuple

from octavo.errors import require
from octavo.formats import E4M3, E5M2, Format
from octavo.inspect.findings import FORMAT_SQNR, LIMITS
from octavo.inspect.incidents import MOST_SEVERE, Finding
from octavo.inspect.record import UNWATCHED, Record, np
from octavo.inspect.twin import DIFFERING_COSINE, TWIN_LOSS
from octavo.inspect.verdicts import DIFFERING_STEPS, WINDOW, verdict
from octavo.inspect.weight_updates import GROUP
from octavo.kernels.arguments import Counted
from octavo.recipes import to_json as to_rules
from octavo.scaling.recipe import ROLES

EffectRows = Sequence[Mapping[str, Any]]  # the rows of a WhatIf
STATES = ("new", "worse", "milder", "same", "gone")  # of a finding, compared with another run
EFFECTS_SHOWN = 3  # how many consequences of a finding are printed
COLUMNS = 160  # at most of a heat map; of more recorded steps it shows the worst of each few
POINTS = 1000  # at most of a curve
# the measures of casts' heat maps, and what each is multiplied by; of an SQNR the lowest is the worst
HEAT = {"flushed": 100, "clipped": 100, "sqnr": 1, "assumed": 1}


class Against(NamedTuple):
    """Another run that a run is compared with, by its folder's name."""

    name: str
    record: Record
    findings: Sequence[Finding]


def changes(findings: Sequence[Finding], earlier: Sequence[Finding]) -> list[tuple[str, Finding]]:
    """Return (state, finding) of a run: "new", "worse", "milder" or "same"; then those of another run that are "gone".

    Findings of one kind, layer and role are the same finding, also where it is a consequence in one run; it is worse or
    milder if its severity differs by 1 or more.
    """
    by_severity = sorted(_with_effects(earlier), key=lambda one: one.severity)
    earlier_severities = {_key(one): one.severity for one in by_severity}  # of findings alike the highest

    def state(finding: Finding) -> str:
        severity = earlier_severities.get(_key(finding))
        if severity is None:
            return "new"
        return "worse" if finding.severity >= severity + 1 else "milder" if finding.severity <= severity - 1 else "same"

    keys = {_key(one) for one in _with_effects(findings)}
    gone = [("gone", finding) for finding in earlier if _key(finding) not in keys]
    return [*((state(finding), finding) for finding in findings), *gone]


def _key(finding: Finding) -> tuple[str, str, str]:
    """Return what two runs' findings must share to be the same."""
    return finding.kind, finding.layer, finding.role


def _with_effects(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings, each before its consequences."""
    return (one for finding in findings for one in (finding, *finding.consequences))


def _compared(changed: Sequence[tuple[str, Finding]]) -> str:
    """Return in words how many findings are new, worse and so on."""
    counts = Counter(state for state, _ in changed)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no findings in either run"


def table(record: Record, findings: Sequence[Finding], top: int, against: Against | None = None) -> str:
    """Return the worst findings as text: where, since when, why, and what to change; and how another run differs."""
    if not record.steps:
        return "no step is recorded yet"
    steps = f"{len(record.steps)} of the steps {record.steps[0]} to {record.steps[-1]} recorded"
    number = f"{len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}"
    lines = [f"{len(record.layers)} layers, {steps}, {number}", f"{verdict(record, findings)}."]
    lines += [f"From step {step}: {text}." for step, kind, text in record.events if kind == UNWATCHED]
    for index, finding in enumerate(findings[:top], 1):
        lines += ["", f"{index:>2}  {finding.level} ({finding.severity:.1f} of {MOST_SEVERE:.0f}), {_title(finding)}"]
        indented = [finding.cast, finding.cause, finding.remedy, finding.expected and f"  {finding.expected}"]
        indented += [f"so too: {_title(effect)}" for effect in finding.consequences[:EFFECTS_SHOWN]]
        if (more := len(finding.consequences) - EFFECTS_SHOWN) > 0:
            indented.append(f"and {more} more")
        lines += [f"    {line}" for line in indented if line]
    if len(findings) > top:
        lines += ["", f"and {len(findings) - top} more: --top {len(findings)}"]
    if against is not None:
        changed = changes(findings, against.findings)
        lines += ["", f"against {against.name}: {_compared(changed)}"]
        lines += [f"    {state}: {finding.level}, {_title(finding)}" for state, finding in changed if state != "same"]
    if loads := record.expert_loads():
        lines += ["", "tokens of experts in the last recorded step, worst balanced first"]
        lines += [f"    {load}" for load in sorted(loads, key=lambda load: load.largest_over_mean, reverse=True)[:top]]
        if len(loads) > top:
            lines.append(f"    and {len(loads) - top} more")
    return "\n".join(lines)


def _title(finding: Finding) -> str:
    """Return in words where a finding is, its kind, and its steps."""
    where = f"{finding.layer} {finding.role}".strip() or ("" if finding.products else "the run")
    products = f" of {' and '.join(finding.products)}" if finding.products else ""
    worst = "" if finding.worst == finding.begins else f", worst at {finding.worst}"
    return f"{where}{products}: {finding.kind} from step {finding.begins}{worst}"


def to_json(
    record: Record, findings: Sequence[Finding], what_if: EffectRows = (), against: Against | None = None
) -> str:
    """Return findings, and the numbers that the page draws, as JSON: casts' shares are in %, NaN and inf are null.

    ``what_if``: the rows of a WhatIf of the model.
    """
    starts, of_worst_experts = _starts(len(record.steps), COLUMNS), record.of_worst
    content = {
        "records": len(record.steps),
        "last": record.steps[-1] if record.steps else None,
        "steps": [record.steps[start] for start in starts],
        "layers": record.layers,
        "verdict": verdict(record, findings),
        "findings": [_finding(finding) for finding in findings],
        "limits": {**LIMITS, "twin": (DIFFERING_COSINE, DIFFERING_STEPS, WINDOW), "sqnr": FORMAT_SQNR},
        "against": None if against is None else _against(findings, against),
        "casts": [_casts(of_worst_experts, layer, role, starts) for layer in record.layers for role in ROLES],
        "weights": [row for place in range(len(record.layers)) for row in _weights(record, place, starts)],
        "twins": _twins(record, starts),
        "twin_apart": _twin_apart(record),
        "lowest": Counted.lowest,  # the exponent of a histogram's first bin
        "exponents": [_exponents(of_worst_experts, index, findings) for index in range(len(record.rows))],
        "loads": [{**asdict(load), "mean": sum(load.tokens) / len(load.tokens)} for load in record.expert_loads()],
        "scalars": _curves(record),
        "not_finite": _first_not_finite(record),
        "what_if": what_if,
        "events": [{"step": step, "kind": kind, "text": text} for step, kind, text in record.events],
    }
    return json.dumps(_plain(content), separators=(",", ":"))


def _finding(finding: Finding) -> dict[str, Any]:
    """Return a finding's fields for JSON."""
    rules = json.loads(to_rules(finding.rules))["rules"]
    return {**vars(finding), "rules": rules, "consequences": [_finding(effect) for effect in finding.consequences]}


def _against(findings: Sequence[Finding], other: Against) -> dict[str, Any]:
    """Return the page's data of another run: how findings differ, its curves, and each cast at its worst."""
    record, changed = other.record, changes(findings, other.findings)
    of_worst_experts, first = record.of_worst, _starts(len(record.steps), 1)
    return {
        "name": other.name,
        "compared": _compared(changed),
        "states": [state for state, _ in changed[: len(findings)]],
        "gone": [_finding(finding) for _, finding in changed[len(findings) :]],
        "casts": [_casts(of_worst_experts, layer, role, first) for layer in record.layers for role in ROLES],
        "scalars": _curves(record),
        "not_finite": _first_not_finite(record),
    }


def to_html(
    record: Record, findings: Sequence[Finding], title: str, what_if: EffectRows = (), against: Against | None = None
) -> str:
    """Return a page with all findings and plots, which needs no network.

    Raises:
        MissingExtraError: without vl-convert, which contains Vega-Lite.
    """
    require("inspect", "vl_convert")
    import vl_convert

    folder = resources.files("octavo.inspect")
    page, style, script = (folder.joinpath(f"report.{x}").read_text(encoding="utf-8") for x in ("html", "css", "js"))
    content = {
        "STYLE": style,
        "SCRIPT": script,
        "TITLE": title.replace("&", "&amp;").replace("<", "&lt;"),
        "DATA": to_json(record, findings, what_if, against).replace("<", "\\u003c"),
        "LIBRARY": vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
    }
    for name, text in content.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def _starts(count: int, most: int) -> list[int]:
    """Return the indices where bins of neighbours begin, at most ``most``."""
    return list(range(0, count, max(1, math.ceil(count / most))))


def _worst(values: Any, starts: Sequence[int], lowest: bool = False) -> list[float]:
    """Return the largest (or lowest) value of each bin, from [steps] or [steps, casts]; NaN if there is none."""
    if not starts:
        return []
    ufunc = np.fmin if lowest else np.fmax
    flat = np.asarray(values, dtype="float64").reshape(len(values), -1)
    return ufunc.reduceat(ufunc.reduce(flat, axis=1, initial=math.nan), starts).tolist()


def _casts(record: Record, layer: str, role: str, starts: Sequence[int]) -> dict[str, Any]:
    """Return the worst measures by step of a role's casts; ``amax``: the binary logarithm of the last one."""
    places = [place for place, row in enumerate(record.rows) if (row.layer, row.role) == (layer, role)]
    worst = {
        name: _rounded(factor * x for x in _worst(record.measures[name][:, places], starts, lowest=name == "sqnr"))
        for name, factor in HEAT.items()
    }
    amax = record.measures["amax"][:, places]
    last = np.log2(amax[amax > 0][-1:]).tolist()
    is_delayed = any(record.rows[place].cast.is_delayed for place in places)
    return {"layer": layer, "role": role, **worst, "is_delayed": is_delayed, "amax": last[0] if last else None}


def _rounded(values: Iterable[float]) -> list[float]:
    """Round to three digits, at most three of them after the point: as much as a colour can show."""
    return [round(float(f"{value:.3g}"), 3) if math.isfinite(value) else value for value in values]


def _weights(record: Record, place: int, starts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield updates divided by the weight's resolution, by step: of the weight, and of its master if it has one."""
    for role, name in (("weight", "resolution"), ("master", "master_resolution")):
        ratios = _rounded(_worst(record.weights[name][:, place], starts, lowest=True))
        if role == "weight" or any(map(math.isfinite, ratios)):
            yield {"layer": record.layers[place], "role": role, "resolution": ratios}


def _twins(record: Record, starts: Sequence[int]) -> list[dict[str, Any]]:
    """Return the cosine of each layer's gradient with its twin's, by step."""
    lowest = [_rounded(_worst(cosines, starts, lowest=True)) for cosines in record.weights["twin_cosine"].T]
    pairs = zip(record.layers, lowest, strict=True)
    return [{"layer": layer, "role": "gradient", "cosine": cosines} for layer, cosines in pairs]


def _twin_apart(record: Record) -> dict[str, float] | None:
    """Return where a loss is farthest from its twin's, and how far, as a share of the latter."""
    apart = [
        {"share": abs(loss / twin - 1), "step": step}
        for step, loss, twin in zip(record.steps, record.scalar("loss"), record.scalar(TWIN_LOSS), strict=True)
        if math.isfinite(loss) and math.isfinite(twin) and twin
    ]
    return max(apart, key=lambda each: each["share"], default=None)


def _exponents(record: Record, index: int, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a row's histogram in its worst step (or else the last), in thousandths, and the windows of formats."""
    row = record.rows[index]
    counted = np.flatnonzero(record.measures["amax"][:, index] > 0)
    where = row.layer, row.role, row.products
    worst_steps = (finding.worst for finding in _with_effects(findings) if finding.where == where)
    last = int(counted[-1]) if len(counted) else 0
    at = next(map(record.steps.index, worst_steps), last)
    share, windows = np.zeros(record.exponents.shape[-1]), []
    if len(counted):
        share = 1000 * record.exponents[at, index] / max(1.0, float(record.exponents[at, index].sum()))
        scale_inv, amax = (float(record.measures[name][at, index]) for name in ("scale_inv", "amax"))
        format = row.cast.format
        other = E5M2 if format is E4M3 else E4M3
        windows = [_window(format, scale_inv, " in use"), _window(other, amax / other.max, " of the amax")]
    name = f"{row.layer} {row.role}, {' and '.join(row.products)}, {row.cast}"
    step = record.steps[at] if record.steps else None
    return {"name": name, "layer": row.layer, "step": step, "share": share.round(1).tolist(), "windows": windows}


def _window(format: Format, scale_inv: float, suffix: str) -> dict[str, Any]:
    """Return the binary logarithms from which on numbers have a code, have all digits, and are too large."""
    ends = {"low": format.smallest_subnormal / 2, "normal": format.smallest_normal, "high": format.max}
    is_known = scale_inv > 0 and math.isfinite(scale_inv)
    logarithms = {name: math.log2(end * scale_inv) if is_known else None for name, end in ends.items()}
    return {"format": f"{format}{suffix}", **logarithms}


def _curves(record: Record) -> dict[str, list[dict[str, float]]]:
    """Return each number by step, the largest of each few; of a group's options only those that change."""
    curves = {}
    for name, (steps, values) in record.scalars.items():
        if GROUP not in name or len(steps) > 1:
            largest = _worst(values, starts := _starts(len(steps), POINTS))
            curves[name] = [{"step": steps[at], "value": value} for at, value in zip(starts, largest, strict=True)]
    return curves


def _first_not_finite(record: Record) -> dict[str, int]:
    """Return the first step in which each number was inf or NaN, by its name, of those that ever were."""
    faulty = {name: np.flatnonzero(~np.isfinite(values)) for name, (_, values) in record.scalars.items()}
    return {name: record.scalars[name][0][indices[0]] for name, indices in faulty.items() if len(indices)}


def _plain(value: Any) -> Any:
    """Return nested values for JSON: floats with four digits, as int if they are whole; None for inf and NaN."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")
