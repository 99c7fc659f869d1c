"""What is wrong in a record, causes before effects: where, since when, why, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.formats import E4M3
from octavo.inspect.record import Record, numpy
from octavo.inspect.remedies import Exponents, as_text, called, outcome, remedies, with_cast, without_fp8
from octavo.inspect.rows import Row
from octavo.scaling.recipe import OPERANDS, Cast, Dynamic, Recipe
from octavo.scaling.recipe_map import RecipeRule

# A measure beyond its limit is a finding.
LIMITS = {
    "nonfinite": 0.0,  # share of infs and NaNs
    "stale": 2.0,  # amax over what a delayed scale has room for
    "clipped": 1e-3,  # share of the numbers
    "outliers": 1e-2,  # share flushed, where few numbers determine the scale
    "flushed": 1e-2,  # share of the numbers
    "rounded": 6.0,  # decibels of the SQNR below the format's own
    "jump": 8.0,  # a step's update over the median of those before
    "unmoved": 0.9,  # share of a weight's numbers that a step does not change
    "second moments": 1e-2,  # share of them flushed
}
FORMAT_SQNR = {"E4M3": 31.5, "E5M2": 25.5}  # decibels, for numbers within the normal range: see docs/inspect.md
OUTLIERS = 0.03  # at most this share of the numbers can be outliers
GAP = 4.0  # outliers lie at least so many octaves above all other numbers
SUBNORMAL = 0.25  # outliers are a finding if they leave more than this share below the smallest normal number
SOON = 2  # a fault that shows elsewhere within so many records is taken as the same
RATES = ("lr", "learning_rate")  # names under which the learning rate is recorded, the second by transformers' Trainer
BEFORE = 8  # a jump is measured against the median of so many records
LEVELS = {
    "critical": "numbers are lost for good: inf or NaN, or more than half of a tensor",
    "warning": "at least four times the limit: the training computes something else than was meant",
    "note": "beyond a limit by less",
}
MOST_SEVERE = 10.0
_WARNING = 3.0  # the severity of four times the limit


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: of LIMITS.
        layer, role, products: of the cast; for weights and moments the layer where they are worst, without products. A
            finding that belongs to no layer (of the learning rate, the data, the loss scale) has "" for layer and role.
        cast: as Python.
        begins, worst: the recorded steps where it was worst, and where that stretch began.
        numbers: the measures at the worst step, by name.
        cause: a sentence.
        remedy: as Python: for a cast its rules, for an update that jumps a line before optimizer.step().
        expected: what the remedy would do, by the recorded numbers.
        severity: from 0 to 10: 1 at the limit, one more for each doubling of the measure; 10 for inf or NaN.
        rules: of a RecipeMap, to mend a cast; see ``octavo.recipes.to_json``.
        level: "critical", "warning" or "note": see LEVELS.
        sentence: the finding in plain words, without a full stop: what happens where, since when, and what to do.
        consequences: findings that this one explains, in the order in which they began.

    Example:
        >>> import tempfile, torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with octavo.inspect.record(layer, folder) as recorder:
        ...         layer(torch.full((16, 64), torch.inf)).sum().backward()
        ...         recorder.step()
        ...     first, *others = octavo.inspect.diagnose(octavo.inspect.load(folder))
        >>> first.kind, first.role
        ('nonfinite', 'input')
    """

    kind: str
    layer: str
    role: str
    products: tuple[str, ...]
    cast: str
    begins: int
    worst: int
    numbers: dict[str, float]
    cause: str
    remedy: str
    expected: str
    severity: float
    rules: Mapping[str, RecipeRule] = field(default_factory=dict)
    level: str = "warning"
    sentence: str = ""
    consequences: tuple[Finding, ...] = ()

    @property
    def where(self) -> tuple[str, str, tuple[str, ...]]:
        """(layer, role, products)."""
        return self.layer, self.role, self.products

    def mended(self, cause: str, rules: Mapping[str, RecipeRule], expected: str) -> Finding:
        """The finding with its cause and with rules that mend it."""
        return replace(self, cause=cause, remedy=as_text(rules), expected=expected, rules=rules)


def verdict(record: Record, findings: Sequence[Finding]) -> str:
    """One sentence on a run: its first finding, or that nothing exceeds its limit.

    Args:
        record, findings: a record and what ``diagnose`` found in it.

    Example:
        >>> import tempfile, torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with octavo.inspect.record(layer, folder) as recorder:
        ...         layer(torch.randn(16, 64)).sum().backward()
        ...         recorder.step()
        ...     found = octavo.inspect.load(folder)
        >>> octavo.inspect.verdict(found, octavo.inspect.diagnose(found))
        'Nothing exceeds its limit in 1 recorded step'
    """
    if findings:
        return findings[0].sentence
    return f"Nothing exceeds its limit in {len(record.steps)} recorded step{'s' * (len(record.steps) != 1)}"


def _in_plain_words(found: Finding, rows: Sequence[Row]) -> Finding:
    """The finding with its severity within bounds, its level and its sentence."""
    severity = MOST_SEVERE if found.severity == math.inf else min(MOST_SEVERE, 1 + math.log2(max(found.severity, 0.5)))
    numbers, of = found.numbers, f"its {found.role}"
    what = {
        "nonfinite": f"has inf or NaN in {called(numbers.get('nonfinite', 0))} of {of}",
        "stale": f"clips {called(numbers.get('clipped', 0))} of {of}, whose scale is of earlier steps",
        "clipped": f"clips {called(numbers.get('clipped', 0))} of {of}",
        "flushed": f"flushes {called(numbers.get('flushed', 0))} of {of} to 0",
        "outliers": f"flushes {called(numbers.get('flushed', 0))} of {of} to 0, as a few outliers determine its scale",
        "rounded": f"rounds {of} to an SQNR of {numbers.get('sqnr', 0):.0f} dB",
        "jump": "changes by one step many times as much as before",
        "unmoved": f"keeps {called(1 - numbers.get('changed', 0))} of its weight as it was in each step",
        "second moments": f"flushes {called(numbers.get('second_flushed', 0))} of its second moments to 0",
    }[found.kind]
    lost = max((numbers.get(name, 0.0) for name in ("clipped", "flushed")), default=0.0) > 0.5
    is_critical = found.kind == "nonfinite" or lost
    level = "critical" if is_critical else "warning" if severity >= _WARNING else "note"
    sentence = f"{found.layer or 'The layer'} {what} since step {found.begins}: {_advice(found, rows)}"
    return replace(found, severity=severity, level=level, sentence=sentence)


def _advice(found: Finding, rows: Sequence[Row]) -> str:
    """A finding's remedy in a few words."""
    if not found.rules:
        return f"try {found.remedy}"
    (rule,) = found.rules.values()
    if isinstance(rule, Recipe):
        return f"take recipes.{rule.name}() for it"
    casts = list(filter(None, dict(rule or {}).values()))
    if not casts:
        return "compute it in high precision"
    before = next(row.cast for row in rows if (row.layer, row.role, row.products) == found.where)
    place = OPERANDS[found.products[0]].index(found.role)
    after = casts[0][place]
    if before.is_delayed and not after.is_delayed:
        return "take its scale from its own amax"
    if before.format is not after.format:
        return f"cast it to {after.format}"
    return f"give it a margin of {after.margin}" if after.margin else "give it no margin"


def _excess(rows: Sequence[Row], measures: Mapping[str, Any]) -> dict[str, Any]:
    """The measure of each kind of a cast's finding, from MEASURES [..., rows]."""
    np = numpy()
    room = np.array([2.0**row.cast.margin if row.cast.is_delayed else math.inf for row in rows])
    usual = np.array([FORMAT_SQNR[row.cast.format.name] for row in rows])
    found = {kind: measures[kind] for kind in ("nonfinite", "clipped", "flushed")}
    return {**found, "stale": measures["assumed"] / room, "rounded": usual - measures["sqnr"]}


def _severity(kind: str, values: Any) -> Any:
    """How severe a measure is: divided by its limit, and if it is in decibels, the ratio of both."""
    np = numpy()
    if kind == "rounded":
        return 10 ** ((values - LIMITS[kind]) / 10)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(values, LIMITS[kind])


def severities(measures: Mapping[str, Any], rows: Sequence[Row]) -> Any:
    """The highest severity of each row, from MEASURES [rows]; -inf where nothing was counted."""
    np = numpy()
    found = np.stack([_severity(kind, values) for kind, values in _excess(rows, measures).items()])
    return np.where(np.isnan(found), -math.inf, found).max(axis=0)


def diagnose(record: Record) -> list[Finding]:
    """What is wrong in a record: one finding for each incident, the worst first, with its effects folded under it.

    Args:
        record: what octavo.inspect.load read.

    Returns:
        the findings; none where nothing exceeds its limit. What a finding explains is in its ``consequences``.

    Example:
        >>> import tempfile, torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with octavo.inspect.record(layer, folder) as recorder:
        ...         layer(torch.randn(16, 64)).sum().backward()
        ...         recorder.step()
        ...     octavo.inspect.diagnose(octavo.inspect.load(folder))
        []
    """
    found, worst = [*_of_weights(record)], record.of_worst
    excess = _excess(record.rows, worst.measures)
    found += [finding for place in range(len(record.rows)) for finding in _CastOf(worst, excess, place).findings()]
    layers = {layer: place for place, layer in enumerate(record.layers)}

    def order(finding: Finding) -> tuple[float, float, float]:
        place = layers.get(finding.layer, -1)
        if finding.kind == "nonfinite" and finding.role == "grad_output":
            place = 2 * len(layers) - place  # computed from the last layer to the first, after all of forward
        return -finding.severity, finding.begins - (finding.kind == "jump"), place

    found = [_in_plain_words(each, record.rows) for each in found]
    return _folded(sorted(found, key=order), record.steps)


def _folded(found: list[Finding], steps: list[int]) -> list[Finding]:
    """Findings in order, those that another one explains folded under it."""
    outliers = {(each.layer, each.begins) for each in found if each.kind == "outliers"}
    found = [each for each in found if each.kind != "jump" or (each.layer, each.begins) not in outliers]

    def explains(each: Finding, later: Finding) -> bool:
        records = steps.index(later.begins) - steps.index(each.begins)
        if each.kind == "nonfinite" == later.kind:
            return 0 <= records <= SOON
        if each.kind == "jump":
            return 0 <= records <= SOON and later.kind in ("stale", "clipped")
        return 0 < records <= SOON and later.layer == each.layer and later.kind != "nonfinite"

    effects: dict[int, list[Finding]] = {}
    firsts: list[Finding] = []
    for each in sorted(found, key=lambda each: (each.begins, each.kind != "jump", found.index(each))):
        cause = next((first for first in firsts if explains(first, each)), None)
        if cause is None:
            firsts.append(each)
        else:
            effects.setdefault(id(cause), []).append(each)
    return [_with(each, effects.get(id(each), [])) for each in found if any(each is first for first in firsts)]


def _with(each: Finding, effects: list[Finding]) -> Finding:
    """A finding with its consequences, of which none is more severe."""
    cause, layers = each.cause, {effect.layer for effect in effects if effect.kind == "nonfinite"}
    if layers:
        many = sum(effect.kind == "nonfinite" for effect in effects)
        where = f"{many} more cast{'s' * (many > 1)} in {len(layers)} layer{'s' * (len(layers) > 1)}"
        cause = f"{cause}; soon those of {where} too"
    severity = max([each.severity, *(effect.severity for effect in effects)])
    return replace(each, cause=cause, severity=severity, consequences=tuple(effects))


def _stretch(over: Any, values: Any) -> tuple[int, int]:
    """(where the run of values over the limit that has the largest one begins, where the largest one is)."""
    worst = begins = int(numpy().where(over, values, -math.inf).argmax())
    while begins > 0 and over[begins - 1]:
        begins -= 1
    return begins, worst


class _CastOf:
    """A row of a record, and what is wrong with it."""

    def __init__(self, record: Record, excess: Mapping[str, Any], place: int) -> None:
        np = numpy()
        self.record, self.place, self.row = record, place, record.rows[place]
        self.values = {name: values[:, place] for name, values in record.measures.items()}
        self.is_finite = ~(np.nancumsum(self.values["nonfinite"]) > 0)  # in this step and all before
        self.excess = {
            kind: np.where(self.is_finite | (kind == "nonfinite"), of[:, place], np.nan) for kind, of in excess.items()
        }
        self.cast = self.row.cast

    def findings(self) -> list[Finding]:
        """Its findings: inf or NaN; at most one of numbers too large for the scale, and one of numbers too small."""
        large, flushed = self._finding("stale") or self._finding("clipped"), self._finding("flushed")
        found = [self._finding("nonfinite"), large, flushed or self._outliers_alone()]
        if large is None and flushed is None:
            found.append(self._finding("rounded"))
        return [each for each in found if each is not None]

    def _finding(self, kind: str) -> Finding | None:
        over = self.excess[kind] > LIMITS[kind]
        if not over.any():
            return None
        value = float(numpy().where(over, self.excess[kind], 0).max())
        return self._at(kind, *_stretch(over, self.excess[kind]), float(_severity(kind, value)))

    def _at(self, kind: str, begins: int, worst: int, severity: float) -> Finding:
        numbers = {name: float(values[worst]) for name, values in self.values.items()}
        row, steps, experts = self.row, self.record.steps, self.record.experts
        if kind == "stale":  # what the scale clips may be more severe
            severity = max(severity, numbers["clipped"] / LIMITS["clipped"])
        where = row.layer, row.role, row.products, str(self.cast)
        found = Finding(kind, *where, steps[begins], steps[worst], numbers, "", "", "", severity)
        describe = {"nonfinite": self._nonfinite, "rounded": self._rounded}
        describe |= dict.fromkeys(("stale", "clipped"), self._stale)
        found = describe.get(kind, self._small)(found, worst)
        if experts is None or not row.experts:
            return found
        expert, beyond = (int(of[worst, self.place]) for of in (experts.worst, experts.beyond))
        tokens = int(experts.tokens[row.layer][worst, expert])
        others = f", the worst of {beyond} beyond a limit" if beyond > 1 else ""
        cause = f"expert {expert} of {row.experts} ({tokens} tokens{others}): {found.cause}"
        numbers = {**found.numbers, "expert": expert, "tokens": tokens, "experts_beyond": beyond}
        return replace(found, numbers=numbers, cause=cause)

    def _nonfinite(self, found: Finding, worst: int) -> Finding:
        return found.mended(
            f"{called(found.numbers['nonfinite'])} of the numbers are inf or NaN before they are cast",
            without_fp8(self.row),
            "tells whether FP8 is at fault: if it stays, look at the loss, the data or the learning rate",
        )

    def _stale(self, found: Finding, worst: int) -> Finding:
        """A scale without room for the amax."""
        beyond, numbers = found.numbers["assumed"] / 2.0**self.cast.margin, self._exponents(worst)
        room = f"the amax is {beyond:.3g} times the largest number that the scale has room for"
        cause = f"{room}, so {called(found.numbers['clipped'])} are clipped: the scale is of earlier steps"
        if self.cast.is_delayed:
            margin = self.cast.margin + math.ceil(math.log2(max(beyond, 1)))
            roomy = replace(self.cast, margin=min(margin, 64))
            flushed = numbers.below(roomy.format.smallest_subnormal / 2 * numbers.amax / roomy.format.max * 2)
            if margin <= 3 and flushed < LIMITS["flushed"] and (rule := self._with(roomy, worst)):
                expected = f"room for the amax recorded; at most {called(flushed)} flushed then"
                return found.mended(cause, rule, expected)
            if rule := self._with(replace(self.cast, rule=Dynamic()), worst):
                return found.mended(cause, rule, "nothing is clipped: the scale is the tensor's own")
        return found.mended(cause, without_fp8(self.row), "nothing is clipped")

    def _rounded(self, found: Finding, worst: int) -> Finding:
        """A low SQNR, though little is clipped or flushed."""
        sqnr, usual = found.numbers["sqnr"], FORMAT_SQNR[self.cast.format.name]
        cause = (
            f"an SQNR of {sqnr:.1f} dB, where {self.cast.format} has about {usual}: few codes hold most of the power"
        )
        scale_inv = found.numbers["scale_inv"] * self.cast.format.max / E4M3.max
        flushed = float(self._exponents(worst).below(E4M3.smallest_subnormal / 2 * scale_inv))
        can_be_finer = self.cast.format is not E4M3 and flushed <= LIMITS["flushed"]
        if can_be_finer and (rule := self._with(replace(self.cast, format=E4M3), worst)):
            more = f"{FORMAT_SQNR['E4M3'] - FORMAT_SQNR['E5M2']:.0f} dB"
            return found.mended(cause, rule, f"a digit more, about {more}; {called(flushed)} flushed")
        return found.mended(cause, without_fp8(self.row), "these are in high precision")

    def _small(self, found: Finding, worst: int) -> Finding:
        """Numbers too small for the format at the scale in use."""
        numbers, scale_inv = self._exponents(worst), found.numbers["scale_inv"]
        subnormal = numbers.below(self.cast.format.smallest_normal * scale_inv)
        unused = math.log2(self.cast.format.max * scale_inv / numbers.amax) if numbers.amax > 0 else 0.0
        gap = numbers.octaves_beyond(OUTLIERS)
        flushed = found.numbers["flushed"]
        if unused >= 1 and numbers.below(self.cast.format.smallest_subnormal / 2 * scale_inv / 2**unused) < flushed / 2:
            of = f"a margin of {self.cast.margin}" if self.cast.margin >= unused - 1 else "a scale of earlier steps"
            cause = f"{of} leaves {unused:.1f} octaves above the amax unused"
        elif gap >= GAP:
            cause = f"at most {called(OUTLIERS)} of the numbers make the scale, {gap:.1f} octaves above all others"
            found = replace(found, kind="outliers")
        else:
            cause = f"the numbers are spread wider than {self.cast.format} holds with such scales"
        cause += f"; {called(flushed)} are flushed, {called(subnormal)} below the smallest normal number"
        least = "smallest_subnormal" if flushed > LIMITS["flushed"] else "smallest_normal"
        limit = LIMITS["flushed"] if least == "smallest_subnormal" else SUBNORMAL
        options = list(remedies(self.row, self._rows(worst), numbers, scale_inv, least))
        chosen = next(option for option in options if option.share <= limit)
        return found.mended(cause, chosen.rules, outcome(chosen, options, least))

    def _outliers_alone(self) -> Finding | None:
        """Outliers that flush little, but leave many numbers subnormal, with fewer digits."""
        np = numpy()
        numbers = self._exponents(slice(None))
        subnormal = numbers.below(self.cast.format.smallest_normal * self.values["scale_inv"])
        over = self.is_finite & (numbers.octaves_beyond(OUTLIERS) >= GAP) & (subnormal > SUBNORMAL)
        if not over.any():
            return None
        found = self._at("outliers", *_stretch(over, subnormal), 0.0)
        return replace(found, severity=found.numbers["flushed"] / LIMITS["flushed"] + float(np.max(subnormal[over])))

    def _exponents(self, at: int | slice) -> Exponents:
        return Exponents(self.record.exponents[at, self.place], numpy().nan_to_num(self.values["amax"][at]))

    def _with(self, cast: Cast, at: int) -> dict[str, RecipeRule] | None:
        return with_cast(self.row, self._rows(at), cast)

    def _rows(self, at: int) -> list[Row]:
        """The rows of the layer's recipe in that step: those counted in it, and those that are never counted."""
        is_there = numpy().isfinite(self.record.measures["amax"])
        rows = zip(self.record.rows, is_there[at] | ~is_there.any(axis=0), strict=True)
        return [row for row, counted in rows if counted and row.layer == self.row.layer]


# --- weights and moments ----------------------------------------------------------------------------------------------


def _of_weights(record: Record) -> Iterator[Finding]:
    """What is wrong with weights and moments: one finding a kind, at the layer where it is worst."""
    np, weights = numpy(), record.weights
    if not record.layers or not record.steps:
        return
    updates = weights["update"]
    before = np.full_like(updates, np.nan)
    for at in range(2, len(record.steps)):
        before[at] = np.median(updates[max(0, at - BEFORE) : at], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        jumps = np.where(before > 0, updates / before, np.nan)
    changed = np.where(updates > 0, weights["changed"], np.nan)
    has_master = weights["master_update"] > 0  # then rounding the weight loses nothing, rounding the master does
    unmoved = 1 - np.where(has_master, weights["master_changed"], changed)
    for kind, values in {"jump": jumps, "unmoved": unmoved, "second moments": weights["second_flushed"]}.items():
        if (values > LIMITS[kind]).any():
            yield _of_weight(record, kind, values)


def _of_weight(record: Record, kind: str, values: Any) -> Finding:
    np, over = numpy(), values > LIMITS[kind]
    layer = int(np.where(over, values, -1).max(axis=0).argmax())
    begins, worst = _stretch(over[:, layer], values[:, layer])
    value, count = float(values[worst, layer]), int(over[worst].sum())
    numbers = {name: float(of[worst, layer]) for name, of in record.weights.items()}
    step, many = record.steps[worst], f"in {count} of {len(record.layers)} layers"
    if kind == "jump":
        rose, remedy, expected = _reason_of_jump(record, begins, worst)
        cause = f"the step changes the weight {value:.3g} times as much as those before{rose}; so {many}"
    elif kind == "unmoved":
        has_master = numbers["master_update"] > 0
        owner = "master" if has_master else "weight"
        seen = f" and {called(1 - numbers['changed'])} of the weight's" * has_master
        cause = f"updates are below the distance of the {owner}'s numbers: {called(value)} of them{seen} stay, {many}"
        remedy = f'octavo.optim.AdamW(model.parameters(), master="{"fp32" if has_master else "split24"}")'
        expected = "keeps all that is rounded off" if has_master else "keeps what is rounded off in 8 more bits"
    else:
        cause = f"{called(value)} of the second moments are flushed where the first are not, {many}"
        remedy = 'octavo.optim.AdamW(model.parameters(), moments="bf16")'
        expected = "bf16 has float32's range: nothing is flushed"
    severity = 1 + math.log2(value / LIMITS[kind]) if kind == "jump" else value / LIMITS[kind]
    name = record.layers[layer]
    return Finding(kind, name, "weight", (), "", record.steps[begins], step, numbers, cause, remedy, expected, severity)


def _reason_of_jump(record: Record, begins: int, worst: int) -> tuple[str, str, str]:
    """(which recorded number rose with an update, a remedy, what the remedy would do)."""
    rate = 'for group in optimizer.param_groups: group["lr"] = min(group["lr"], {:.3g})'
    for name, what, remedy in (
        *((name, "the learning rate", rate) for name in RATES),
        ("grad_norm", "the gradients' norm", "torch.nn.utils.clip_grad_norm_(model.parameters(), {:.3g})"),
    ):
        pairs = zip(*record.scalars.get(name, ([], [])), strict=True)
        values = {step: value for step, value in pairs if math.isfinite(value)}
        then = values.get(record.steps[begins - 1], math.inf)
        now = max(values.get(step, 0.0) for step in record.steps[begins : worst + 1])
        if now > 2 * then:
            rose = f", as {what} rose from {then:.3g} to {now:.3g}"
            return rose, remedy.format(2 * then), "before each optimizer.step(): no more than twice the last record's"
    remedy = "octavo.schedule.Recovery(octavo.schedule.Phase(octavo.recipes.high_precision()))"
    missing = ["lr"] * record.scalars.keys().isdisjoint(RATES) + ["grad_norm"] * ("grad_norm" not in record.scalars)
    more = f"record {' and '.join(missing)} to see what rose" if missing else "neither lr nor grad_norm rose"
    return "", remedy, f"leaves out the steps after it whose loss jumps; {more}"
