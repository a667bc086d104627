"""The verdict on a rule: use it, use it at some sizes only, or leave softmax as it is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.evidence.baselines import constant_of, described, label
from calibrate.evidence.chance import evident_among
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import KL, LOG_P, PLAIN, RIGHT, Evidence, P, Stratum
from calibrate.evidence.prior import ALLOWED_LOSS, LEAST_GAIN

GAIN, LOSS, SAME, UNKNOWN = "gain", "loss", "no difference", "unknown"
# Rules that are simpler than a fit: one of them that does as well is named.
SIMPLER = ("constant", "log-n", "paper", "kappa-log-n", "one constant", "one line in log n")
HARD = "hard"
OF_KL = "nats a token of KL from plain softmax"
WHY_HARD = "hard attention is also sure where it is wrong, which log p counts and accuracy does not"
MOST_RIVALS = 3  # in a sentence
NOT_JUDGED = (
    "The model was not judged, and may lose where its heads gain: `calibrate model evaluate` "
    "judges it by its answers"
)


class Promise(NamedTuple):
    """A part of the items where a fit may cost little, and what it does there."""

    where: str
    gain: Estimate  # of log p over plain softmax
    unit: str
    allowed: float  # nats that the mean may fall by; NaN where that is not known

    @property
    def kept(self) -> bool:
        """Whether the mean falls by no more than is allowed."""
        return not self.gain.mean < -self.allowed

    def __str__(self) -> str:
        may = f" (it may lose {self.allowed:g})" if self.allowed >= 0 else ""
        may = may if self.kept else f" (more than the {self.allowed:g} that it may lose)"
        kl = self.gain._replace(mean=-self.gain.mean)
        shown = kl.shown(".4f") if self.unit == OF_KL else self.gain.shown("+.4f")
        return f"{self.where}: {shown} {self.unit}{may}"


class Verdict(NamedTuple):
    """What a rule does beyond chance."""

    outcome: str  # GAIN, LOSS, SAME, or UNKNOWN where items are too few to tell
    measure: str  # by which it was judged
    better: list[int]  # sizes at which it is better beyond chance, among so many sizes
    worse: list[int]

    @property
    def use(self) -> bool:
        """Whether to use it at all."""
        return self.outcome == GAIN


def judge(evidence: Evidence, rule: str) -> Verdict:
    """Judges a rule by log p where it is known, else by right answers."""
    answers = judged_items(evidence)
    measure = main_measure(evidence)
    whole, by_size = answers.gain(rule, measure), answers.by("size")
    gains = {n: part.gain(rule, measure) for n, part in by_size.items()}
    evident = evident_among([float(gain.p) for gain in gains.values()])
    clear = [n for n, is_evident in zip(gains, evident, strict=True) if is_evident]
    least = LEAST_GAIN if measure == LOG_P else 0.0  # a size where nobody notices is not named
    better, worse = ([n for n in clear if up * gains[n].mean > least] for up in (1, -1))
    word = outcome(whole)
    if better:
        word = GAIN
    elif worse and word != GAIN:
        word = LOSS
    return Verdict(word, measure, better, worse)


def require_gain(evidence: Evidence, rule: str, name: str = "") -> None:
    """Raises QualityError, with the verdict, unless that is to use the rule.

    Args:
      evidence: of the rule, on items that were held out.
      rule: its name in the evidence.
      name: the same, for people.
    """
    if not judge(evidence, rule).use:
        verdict = sentence(evidence, rule, name).removesuffix(".")
        raise QualityError(f"{verdict}; give more {evidence.of.items} to tell")


def judged_items(evidence: Evidence) -> Evidence:
    """The items that decide: all but protected text, or that if there are no others.

    Where some are of templates that no fit was made of, these decide.
    """
    answers = evidence.answers
    return answers.unseen if answers.n else evidence.unseen


def main_measure(evidence: Evidence) -> str:
    """The measure that decides: log p where it is known."""
    return LOG_P if LOG_P in evidence.values else RIGHT


def outcome(gain: Estimate) -> str:
    """What a gain says in a word."""
    if not np.isfinite(gain.error):
        return UNKNOWN
    return {1: GAIN, -1: LOSS}.get(int(gain.sign), SAME)


def heads_moved(evidence: Evidence, rule: str) -> tuple[int, int, int]:
    """Numbers of heads with an entry that (gain, lose, do neither) beyond chance among them all."""
    measure, heads = main_measure(evidence), judged_items(evidence).by("head")
    gains = [part.gain(rule, measure) for h, part in heads.items() if evidence.names(rule, h)]
    evident = evident_among([float(gain.p) for gain in gains])
    signs = [np.sign(g.mean) if clear else 0 for g, clear in zip(gains, evident, strict=True)]
    return signs.count(1), signs.count(-1), signs.count(0)


def promises(evidence: Evidence, rule: str) -> list[Promise]:
    """What a rule does to protected text, and at the sizes that its file says were trained."""
    fit, text, found = evidence.fits.get(rule), evidence.text.unseen, list[Promise]()
    options, items = fit.source.get("options", {}) if fit else {}, evidence.of.items
    of_model = items in ("answers", "batches")
    numbers = {key: x for key, x in options.items() if type(x) in (int, float)}
    allowed = numbers.get("allowed_loss", np.nan if of_model else ALLOWED_LOSS)
    if text.n and evidence.answers.n:
        loss, kl = text.gain(PLAIN, LOG_P, rule), text.mean(rule, KL)
        where = f"protected text, whose loss changes by {loss.shown('+.4f')}"
        where = "protected batches" if items == "batches" else where  # their loss is not known
        found.append(Promise(where, kl._replace(mean=-kl.mean), OF_KL, allowed))
    if fit and fit.of_whole_model == of_model:  # else items are no tokens, or tokens no items
        found += where_trained(evidence, rule, numbers.get("trained_up_to", 0), allowed)
    return found


def where_trained(
    evidence: Evidence, rule: str, up_to: float, allowed: float = ALLOWED_LOSS
) -> list[Promise]:
    """What a rule does at the sizes that its head was trained on; empty without such items.

    Of rows each size is held: one that loses more than is allowed stands for all of them.
    """
    held = np.array([s.size <= up_to and not s.protected for s in evidence.strata], bool)
    part = evidence.where(held[evidence.stratum])
    if not part.n or LOG_P not in part.values:
        return []
    gain, (size, unit) = part.gain_a_token(rule), ("lengths", "nats a token")
    where = f"at {{}} up to {up_to:,}, where it was trained"
    if part.tokens is None:
        size, unit = "sizes", "nats"
        gains = {n: of_size.gain(rule, LOG_P) for n, of_size in part.by("size").items()}
        worst = min(gains, key=lambda n: float(gains[n].mean))
        if gains[worst].mean < -allowed:
            gain, where = gains[worst], f"at size {worst:,}, where it was trained"
    return [Promise(where.format(size), gain, unit, allowed)]


# --- in words ------------------------------------------------------------------------------------


def sentences(evidence: Evidence, rule: str, name: str = "", rivals: bool = True) -> list[str]:
    """What to do and why; and where there is something to say, on heads, promises and rivals.

    Args:
      evidence: of the rule, plain softmax and rivals.
      rule: its name in the evidence.
      name: the same, for people.
      rivals: say which other rules do better, or as well.
    """
    told = (
        sentence(evidence, rule, name), _on_seen(evidence, rule), _on_heads(evidence, rule),
        *(f"{_capital(str(promise))}." for promise in promises(evidence, rule)),
        _on_rivals(evidence, rule) if rivals else "",
    )  # fmt: skip
    return [text for text in told if text]


def sentence(evidence: Evidence, rule: str, name: str = "") -> str:
    """What to do with a rule, and the numbers that decide, in one sentence."""
    items, verdict = judged_items(evidence), judge(evidence, rule)
    numbers = [_change(items, rule, verdict.measure)]
    if verdict.measure == LOG_P:
        numbers += [_change(items, rule, m) for m in (P, RIGHT) if m in items.values]
    seen = f"on {items.n:,} {items.of.items}{_whose(evidence, rule)}"
    name, fit = name or label(rule), evidence.fits.get(rule)
    if fit is not None and (words := described(fit)):
        name = f"{name} ({words})"
    return f"{_advice(items, verdict, name)}: {', '.join(numbers)} {seen}."


def _advice(items: Evidence, verdict: Verdict, name: str) -> str:
    if verdict.outcome == UNKNOWN:
        groups = f" of {items.n_groups:,} groups" if items.n_groups else ""
        return f"Unknown: {items.n:,} {items.of.items}{groups} are too few to tell what {name} does"
    if verdict.outcome == SAME:
        return f"Leave softmax as it is: {name} makes no difference beyond chance"
    if verdict.outcome == LOSS:
        return f"Leave softmax as it is: {name} makes it worse"
    if not verdict.better:
        return f"Use {name}" + (
            f", but not {_where(items, verdict.worse)}" if verdict.worse else ""
        )
    where = _where(items, verdict.better)
    if verdict.worse:
        return f"Use {name} only {where}"
    everywhere = len(verdict.better) == len(items.by("size"))
    return f"Use {name}" + ("" if everywhere else f", which gains {where}")


def _change(items: Evidence, rule: str, measure: str) -> str:
    """A measure before and after: "log p -1.234 -> -0.834 (+0.400 ± 0.003 nats)"."""
    shape, factor, unit = _units(measure)
    before, after = (factor * items.mean(name, measure).mean for name in (PLAIN, rule))
    change = f"{before:{shape[1:]}} -> {after:{shape[1:]}}{'' if measure == LOG_P else ' %'}"
    what = {LOG_P: "log p", P: "p of the target", RIGHT: "right"}[measure]
    if measure == P:
        return f"{what} {change}"
    gain = items.gain(rule, measure)
    known = "" if np.isfinite(gain.error) else ", error unknown"
    return f"{what} {change} ({gain.shown(shape, factor)} {unit}{known})"


def _whose(evidence: Evidence, rule: str) -> str:
    """What the items are of, and whether a fit was made of them, or their templates."""
    of, fit = evidence.of, evidence.fits.get(rule)
    name = f" of {of.name}" if of.name else ""
    if any(stratum.unseen for stratum in evidence.strata):
        n = len({stratum.template for stratum in _strata_of(judged_items(evidence))})
        name += f" in {n} {_verb(n, 'template', 'templates')} that it has not seen"
    if fit is None or of.items != "rows":
        return name
    held_out = evidence.is_held_out(rule)
    return name + (", which it was not made of" if held_out else ", the very rows it was made of")


def _units(measure: str) -> tuple[str, int, str]:
    return ("+.3f", 1, "nats") if measure == LOG_P else ("+.1f", 100, "points")


def _on_heads(evidence: Evidence, rule: str) -> str:
    """How many heads gain and lose, and how many have no rule; "" of rows that name none."""
    if evidence.heads == ((None, None),):
        return ""
    if len(evidence.heads) == 1:
        return f"{NOT_JUDGED}."
    up, down, same = heads_moved(evidence, rule)
    n_rules = up + down + same
    heads = judged_items(evidence).by("head")
    others = sum(not evidence.names(rule, head) for head in heads)
    unchanged = (
        f"; {others:,} without a rule {_verb(others, 'is', 'are')} unchanged" if others else ""
    )
    return (
        f"{up:,} of {n_rules:,} {_verb(n_rules, 'head', 'heads')} with a rule "
        f"{_verb(up, 'gains', 'gain')}, {down:,} {_verb(down, 'loses', 'lose')} and {same:,} "
        f"{_verb(same, 'does', 'do')} neither beyond chance among them all{unchanged}. "
        f"{NOT_JUDGED}."
    )


def _on_rivals(evidence: Evidence, rule: str) -> str:
    """Rules that do better, and simpler ones that do as well; "" without any."""
    items, measure = judged_items(evidence), main_measure(evidence)
    rivals = [other for other in items.not_behind(rule, measure) if other != PLAIN]
    gains = {other: items.gain(other, measure, rule) for other in rivals}
    ahead = sorted((r for r in rivals if gains[r].sign > 0), key=lambda r: -gains[r].mean)
    level = [r for r in rivals if r not in ahead and _is_simpler(r)]
    shape, factor, unit = _units(measure)
    better = [f"{label(r)} ({factor * gains[r].mean:{shape}} {unit})" for r in ahead[:MOST_RIVALS]]
    told = []
    if better:
        told.append(f"{_join(better)} {_verb(len(better), 'does', 'do')} better")
    if level:
        names = [_with_number(evidence, rule) for rule in level]
        told.append(f"{_join(names)} {_verb(len(level), 'does', 'do')} as well")
    text = ", and ".join(told)
    why = f"; {WHY_HARD}" if HARD in ahead and measure == RIGHT else ""
    return f"{_capital(text)}{why}." if text else ""


def _with_number(evidence: Evidence, rule: str) -> str:
    """The name of a rule, and of one constant what it comes to."""
    fit = evidence.fits.get(rule)
    beta = constant_of(fit.rule, fit.entries[0]) if fit and not fit.has_heads else None
    return label(rule) if beta is None else f"{label(rule)} (`query = {beta:.3g} * query`)"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_simpler(rule: str) -> bool:
    return rule in SIMPLER or rule.startswith(("constant ", "log n / "))


def _strata_of(evidence: Evidence) -> list[Stratum]:
    """Those that have items."""
    return [evidence.strata[i] for i in np.unique(evidence.stratum)]


def _on_seen(evidence: Evidence, rule: str) -> str:
    """What new prompts gain of the templates that a fit was made of; "" without others."""
    answers = evidence.answers
    seen, measure = answers.seen, main_measure(evidence)
    if seen.n in (0, answers.n):
        return ""
    n = len({stratum.template for stratum in _strata_of(seen)})
    changes = [_change(seen, rule, m) for m in (measure, RIGHT) if m in seen.values]
    return (
        f"In the {n} {_verb(n, 'template', 'templates')} that it was made of, on {seen.n:,} new "
        f"{evidence.of.items}: {', '.join(dict.fromkeys(changes))}."
    )


def _where(items: Evidence, chosen: Sequence[int]) -> str:
    """ "from 64 to 256 and at 1,024 items", "from 256 items on": neighbours make a range."""
    sizes, unit = list(items.by("size")), "tokens" if items.of.items == "answers" else "items"
    runs: list[list[int]] = []
    for i in (sizes.index(n) for n in chosen):
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    if len(runs) == 1 and runs[0][-1] == len(sizes) - 1 and 0 < runs[0][0] < len(sizes) - 1:
        return f"for long inputs, from {sizes[runs[0][0]]:,} {unit} on"
    ranges = [
        f"from {sizes[run[0]]:,} to {sizes[run[-1]]:,}" if run[1:] else f"at {sizes[run[0]]:,}"
        for run in runs
    ]
    return f"{_join(ranges)} {unit}"


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _join(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
