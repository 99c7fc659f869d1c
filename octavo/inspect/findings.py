"""The findings of a record, causes before effects: where, since when, why, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from octavo.formats import E4M3
from octavo.inspect import rules
from octavo.inspect.incidents import KINDS, OF_WARNING, Finding, incidents, level_of, severity_of, worst_stretch
from octavo.inspect.record import Record, np
from octavo.inspect.remedies import Exponents, LayerRule, as_text, outcome, percent, remedies, with_cast, without_fp8
from octavo.inspect.rows import Row
from octavo.inspect.verdicts import checked
from octavo.scaling.recipe import OPERANDS, Cast, Dynamic, Recipe

# A cast's measure beyond its limit is a finding; other limits are in rules.FAULT_RULES.
LIMITS = {name: kind.limit for name, kind in KINDS.items() if kind.limit is not None}

# --- limits beside these, of which docs/inspect.md has the SQNR that a cast needs; others were chosen by how many first
# findings of `python -m benchmarks causes` are right; rules.py says how to change one

FORMAT_SQNR = {"E4M3": 31.5, "E5M2": 25.5, "E2M1": 19.0}  # of numbers within the normal range; E2M1's in blocks of 16
STOCHASTIC_E2M1 = 17.0  # of the same, rounded by chance
SLACK = 8.0  # decibels less are enough for gradients, whose errors average out
OUTLIERS = 0.03  # a share of a tensor's numbers: at most so many can be outliers
GAP = 4.0  # octaves between the amax and all other numbers, from which on those above are outliers
SUBNORMAL = 0.25  # a share of the numbers: with more of them below the smallest normal number outliers are a finding
MOST_OF_ONE_RECORD = 2.9  # highest severity of clipping in a single recorded step: just below a warning


def _excess(rows: Sequence[Row], measures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measures that LIMITS' kinds are about, by kind: [..., rows]."""
    room = np.array([2.0**row.cast.margin if row.cast.is_delayed else math.inf for row in rows])
    rounded = np.array([_usual_sqnr(row) for row in rows]) - measures["sqnr"]
    # a block of four bits flushes what is 24 times smaller than its amax, 40 % of a GELU's outputs: its SQNR decides
    is_usual = np.array([row.cast.is_packed for row in rows], dtype=bool) & (rounded <= LIMITS["rounded"])
    return {
        **{kind: measures[kind] for kind in ("nonfinite", "clipped")},
        "flushed": np.where(is_usual, 0.0, measures["flushed"]),
        "stale": measures["assumed"] / room,
        "rounded": rounded,
    }


def _usual_sqnr(row: Row) -> float:
    """Return the SQNR in dB that a role needs: E4M3's; of gradients less; or four bits'."""
    if row.cast.is_packed:
        return STOCHASTIC_E2M1 if row.role == "grad_output" else FORMAT_SQNR["E2M1"]
    return FORMAT_SQNR["E5M2"] - SLACK if row.role == "grad_output" else FORMAT_SQNR["E4M3"]


def _times_limit(kind: str, values: Any) -> Any:
    """Return by how many times a measure exceeds its limit; for one in decibels the ratio of powers."""
    if kind == "rounded":
        return 10 ** ((values - LIMITS[kind]) / 10)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(values, LIMITS[kind])


def largest_times_limit(measures: Mapping[str, Any], rows: Sequence[Row]) -> Any:
    """Return by how many times each row's worst measure exceeds its limit, [rows]; -inf where nothing was counted."""
    by_kind = np.stack([_times_limit(kind, values) for kind, values in _excess(rows, measures).items()])
    return np.where(np.isnan(by_kind), -math.inf, by_kind).max(axis=0)


def diagnose(record: Record) -> list[Finding]:
    """Return one finding for each incident of a record, the worst first, with its effects in ``consequences``.

    Args:
        record: a record that octavo.inspect.load read.

    Returns:
        the findings; none where nothing exceeds its limit. A finding's ``consequences`` are those that it explains.

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
    record = _without_skips(record)
    of_worst_experts = record.of_worst
    excess = _excess(record.rows, of_worst_experts.measures)
    findings = rules.apply_rules(record)
    for index in range(len(record.rows)):
        findings += _DiagnosedCast(of_worst_experts, excess, index).findings()
    return incidents(record, checked(record, findings))


def _without_skips(record: Record) -> Record:
    """Return a record without the steps that a GradScaler skipped, which changed nothing; but for those at the end."""
    if "loss_scale" not in record.scalars:
        return record
    is_skipped = (record.measures["nonfinite"] > 0).any(axis=1) & ~(record.weights["update"] > 0).any(axis=1)
    others = np.flatnonzero(~is_skipped)
    return record.at([at for at in range(len(record.steps)) if not is_skipped[at] or at > max(others, default=-1)])


class _Mend(NamedTuple):
    """The fields of a finding of a cast that say why its measure is beyond its limit, and what mends it."""

    cause: str
    rules: Mapping[str, LayerRule]
    expected: str
    kind: str = ""  # "outliers" where these are why numbers are flushed; "": the measure's


class _DiagnosedCast:
    """A row of a record, whose cast is diagnosed."""

    def __init__(self, record: Record, excess: Mapping[str, Any], index: int) -> None:
        self.record = record
        self.index, self.row = index, record.rows[index]
        self.values = {name: values[:, index] for name, values in record.measures.items()}
        self.cast = self.row.cast
        self.is_finite = ~(np.nancumsum(self.values["nonfinite"]) > 0)  # up to each recorded step
        shown = {kind: self.is_finite | (kind == "nonfinite") for kind in excess}
        self.excess = {kind: np.where(shown[kind], values[:, index], np.nan) for kind, values in excess.items()}
        self.exceeds = {kind: values > LIMITS[kind] for kind, values in self.excess.items()}  # the limit, [records]

    def findings(self) -> list[Finding]:
        """Return findings: inf or NaN; at most one of numbers too large for the scale, and one of numbers too small."""
        large = self._finding("stale") or self._finding("clipped")
        flushed = self._finding("flushed")
        findings = [self._finding("nonfinite"), large, flushed or self._outliers_alone()]
        if large is None and flushed is None:
            findings.append(self._finding("rounded"))
        return list(filter(None, findings))

    def _finding(self, kind: str) -> Finding | None:
        """Return the finding of a measure in its worst stretch; None where it keeps its limit."""
        if not (over := self.exceeds[kind]).any():
            return None
        value = float(np.where(over, self.excess[kind], 0).max())
        begins, at = worst_stretch(over, self.excess[kind])
        lasts = over[begins : begins + 3].sum() == 3
        if kind == "flushed" and self.cast.is_delayed and at == begins and lasts:
            at += 1 + int(self.excess[kind][begins + 1 : begins + 3].argmax())  # a single outlier is over by then
        severity = severity_of(kind, float(_times_limit(kind, value)))
        if kind == "stale":  # as severe as what the scale clips
            clipped = severity_of("clipped", float(self.values["clipped"][at]) / LIMITS["clipped"])
            severity = max(min(severity, 2.0), clipped)
            if self.row.role == "input" and lasts:  # it outgrows its scale again and again
                severity = max(severity, OF_WARNING)
        is_over = at < len(over) - 1 and over.sum() == 1  # after a single recorded step
        if kind in ("stale", "clipped") and is_over:
            severity = min(severity, MOST_OF_ONE_RECORD)
        return self._finding_at(kind, begins, at, severity)

    def _outliers_alone(self) -> Finding | None:
        """Return a finding of outliers that flush little, but leave many numbers subnormal, with fewer digits."""
        exponents = self._exponents(slice(None))
        subnormal = exponents.below(self.cast.format.smallest_normal * self.values["scale_inv"])
        over = self.is_finite & (exponents.octaves_above_all_but(OUTLIERS) >= GAP) & (subnormal > SUBNORMAL)
        if self.cast.is_packed or not over.any():  # a block of 16 keeps its outliers to itself
            return None
        begins, at = worst_stretch(over, subnormal)
        times = float(self.values["flushed"][at]) / LIMITS["flushed"] + float(np.max(subnormal[over]))
        return self._finding_at("outliers", begins, at, severity_of("outliers", times))

    def _finding_at(self, kind: str, begins: int, at: int, severity: float) -> Finding:
        """Return the finding, with a remedy, of a measure over its limit from recorded step ``begins`` on."""
        row, experts = self.row, self.record.experts
        numbers = {name: float(values[at]) for name, values in self.values.items()}
        mend = {"nonfinite": self._nonfinite, "rounded": self._rounded, "stale": self._stale, "clipped": self._stale}
        mend_of_kind = mend.get(kind, self._small)  # numbers are too small where they are flushed, or outliers
        cause, rules, expected, other_kind = mend_of_kind(numbers, at)
        kind = other_kind or kind
        shares = {name: percent(numbers[name]) for name in ("nonfinite", "clipped", "flushed")}
        problem = KINDS[kind].says.format(role=row.role, sqnr=f"{numbers['sqnr']:.0f}", **shares)
        lost = numbers.get(KINDS[kind].lost, 0.0) if severity > MOST_OF_ONE_RECORD else 0.0
        if experts is not None and row.experts:
            expert, over_limit = (int(table[at, self.index]) for table in (experts.worst_expert, experts.beyond))
            tokens = int(experts.tokens[row.layer][at, expert])
            others = f", the worst of {over_limit} beyond a limit" if over_limit > 1 else ""
            cause = f"expert {expert} of {row.experts} ({tokens} tokens{others}): {cause}"
            numbers |= {"expert": expert, "tokens": tokens, "experts_beyond": over_limit}
        begin, worst = self.record.steps[begins], self.record.steps[at]
        sentence = f"{row.layer or 'The layer'} {problem} since step {begin}: {self._advice(rules)}"
        where = row.layer, row.role, row.products, str(self.cast)
        texts = cause, as_text(rules), expected
        return Finding(kind, *where, begin, worst, numbers, *texts, severity, rules, level_of(severity, lost), sentence)

    def _advice(self, rules: Mapping[str, LayerRule]) -> str:
        """Return in plain words what the rules that mend a cast change."""
        (rule,) = rules.values()
        if isinstance(rule, Recipe):
            return f"take recipes.{rule.name}() for it"
        casts = list(filter(None, dict(rule or {}).values()))
        if not casts:
            return "compute it in high precision"
        after = casts[0][OPERANDS[self.row.products[0]].index(self.row.role)]
        if self.cast.is_delayed and not after.is_delayed:
            return "take its scale from its own amax"
        if self.cast.format is not after.format:
            return f"cast it to {after.format}"
        return f"give it a margin of {after.margin}" if after.margin else "give it no margin"

    def _nonfinite(self, numbers: Mapping[str, float], at: int) -> _Mend:
        """Return the cause of inf or NaN, and a remedy."""
        cause = f"{percent(numbers['nonfinite'])} of the numbers are inf or NaN before they are cast"
        expected = "tells whether FP8 is at fault: if it stays, look at the loss, the data or the learning rate"
        return _Mend(cause, without_fp8(self.row), expected)

    def _stale(self, numbers: Mapping[str, float], at: int) -> _Mend:
        """Return the cause of numbers that are too large for the scale, and a remedy."""
        exponents = self._exponents(at)
        amax_over_room = numbers["assumed"] / 2.0**self.cast.margin
        too_large = f"the amax is {amax_over_room:.3g} times the largest number that the scale has room for"
        cause = f"{too_large}, so {percent(numbers['clipped'])} are clipped: the scale is of earlier steps"
        if self.cast.is_delayed:
            margin = self.cast.margin + math.ceil(math.log2(max(amax_over_room, 1)))
            roomy = replace(self.cast, margin=min(margin, 64))
            flushed = exponents.below(roomy.format.smallest_subnormal / 2 * exponents.amax / roomy.format.max * 2)
            if margin <= 3 and flushed < LIMITS["flushed"] and (rule := self._with(roomy, at)):
                return _Mend(cause, rule, f"room for the amax recorded; at most {percent(flushed)} flushed then")
            if rule := self._with(replace(self.cast, rule=Dynamic()), at):
                return _Mend(cause, rule, "nothing is clipped: the scale is the tensor's own")
        return _Mend(cause, without_fp8(self.row), "nothing is clipped")

    def _rounded(self, numbers: Mapping[str, float], at: int) -> _Mend:
        """Return the cause of numbers that are rounded too much, and a remedy."""
        has_digits = self.cast.format is E4M3 or self.row.role == "grad_output"
        why = "few codes hold most of the power" if has_digits else "E5M2 keeps a digit less, for gradients' range"
        cause = f"an SQNR of {numbers['sqnr']:.1f} dB, where one of {self.row.role} needs about "
        cause += f"{_usual_sqnr(self.row)}: {why}"
        scale_inv = numbers["scale_inv"] * self.cast.format.max / E4M3.max
        flushed = float(self._exponents(at).below(E4M3.smallest_subnormal / 2 * scale_inv))
        can_be_finer = self.cast.format is not E4M3 and flushed <= LIMITS["flushed"]
        if can_be_finer and (rule := self._with(replace(self.cast, format=E4M3), at)):
            more = f"{FORMAT_SQNR['E4M3'] - FORMAT_SQNR['E5M2']:.0f} dB"
            return _Mend(cause, rule, f"a digit more, about {more}; {percent(flushed)} flushed")
        return _Mend(cause, without_fp8(self.row), "these are in high precision")

    def _small(self, numbers: Mapping[str, float], at: int) -> _Mend:
        """Return the cause of numbers that are too small for the scale, and a remedy."""
        exponents = self._exponents(at)
        scale_inv, flushed = numbers["scale_inv"], numbers["flushed"]
        subnormal = exponents.below(self.cast.format.smallest_normal * scale_inv)
        why, kind = self._why_small(exponents, scale_inv, flushed)
        cause = f"{why}; {percent(flushed)} are flushed, {percent(subnormal)} below the smallest normal number"
        least, limit = "smallest_normal", SUBNORMAL
        if flushed > LIMITS["flushed"]:
            least, limit = "smallest_subnormal", LIMITS["flushed"]
        options = list(remedies(self.row, self._rows(at), exponents, scale_inv, least))
        chosen = next(option for option in options if option.share <= limit)
        return _Mend(cause, chosen.rules, outcome(chosen, options, least), kind)

    def _why_small(self, exponents: Exponents, scale_inv: float, flushed: float) -> tuple[str, str]:
        """Return why numbers are too small for the scale, and the finding's kind by that, as of a _Mend."""
        cast = self.cast
        if scale_inv == 0:
            why = f"a margin of {cast.margin} or of the amax of earlier steps"
            return f"the scales of all blocks are rounded to 0, because of {why}", ""
        unused = math.log2(cast.format.max * scale_inv / exponents.amax) if scale_inv * exponents.amax > 0 else 0.0
        if unused >= 1 and exponents.below(cast.format.smallest_subnormal / 2 * scale_inv / 2**unused) < flushed / 2:
            why = f"a margin of {cast.margin}" if cast.margin >= unused - 1 else "a scale of earlier steps"
            return f"{why} leaves {unused:.1f} octaves above the amax unused", ""
        if (gap := exponents.octaves_above_all_but(OUTLIERS)) >= GAP:
            share = f"at most {percent(OUTLIERS)} of the numbers"
            return f"{share} make the scale, {gap:.1f} octaves above all others", "outliers"
        return f"the numbers are spread wider than {cast.format} holds with such scales", ""

    def _exponents(self, at: int | slice) -> Exponents:
        """Return the histogram of the row's magnitudes in a recorded step, or in each of several."""
        return Exponents(self.record.exponents[at, self.index], np.nan_to_num(self.values["amax"][at]))

    def _with(self, cast: Cast, at: int) -> dict[str, LayerRule] | None:
        """Return the rule that gives the row another cast in a recorded step; None if no recipe can have it."""
        return with_cast(self.row, self._rows(at), cast)

    def _rows(self, at: int) -> list[Row]:
        """Return the rows of the layer's recipe in a recorded step: those counted in it, and those never counted."""
        is_there = np.isfinite(self.record.measures["amax"])
        rows = zip(self.record.rows, is_there[at] | ~is_there.any(axis=0), strict=True)
        return [row for row, counted in rows if counted and row.layer == self.row.layer]
