"""Tables on a fit, from the records in its file: heads, held-out NLL, kinds."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from calibrate.evidence.estimate import Estimate, decimal
from calibrate.evidence.evidence import BASELINE
from calibrate.fitting.fit_rule import N_FOLDS
from calibrate.fitting.options import LEAST_SQUARES
from calibrate.report.blocks import SHOWN_HEADS, Table, and_more
from calibrate.report.labels import THIS_FIT, label
from calibrate.report.rule_text import beta_range, entry_heading, entry_text
from calibrate.report.score_tables import PRACTICE_NOTE
from calibrate.rows.rows import head_label
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

HELD_OUT_KEYS = ("n", "inputs", "nll_before", "nll_after")  # of a record of held-out scores
KINDS_NOTE = (
    f"Held out: {N_FOLDS} folds of whole groups; each is scored under rules that were fitted to "
    "the others. NLL: lower is better. Gain: paired difference in log-likelihood to the baseline, "
    f"or to the kind of this fit, ± standard error. {PRACTICE_NOTE}"
)


def entries_table(fit: Fit) -> Table:
    """A row for each head with a rule: its beta, and its held-out gain if the file has it.

    The heads with the largest gains come first, or those whose beta is farthest from 1.
    """
    gains = _gains_of_heads(fit)

    def rank(entry: Entry) -> float:
        if gains:
            gain = gains.get((entry.layer, entry.head))
            return -gain.mean if gain else math.inf
        return -float(np.abs(np.log(beta_range(fit, entry))).max())

    columns, note = ["head", entry_heading(fit)], and_more(len(fit.entries)).strip()
    if gains:
        columns.append("gain over the baseline ± SE")
        note = f"Gain: held-out log-likelihood over the baseline, nats. {note}".strip()
    rows = []
    for entry in sorted(fit.entries, key=rank)[:SHOWN_HEADS]:
        row = [head_label(entry.layer, entry.head), entry_text(fit, entry)]
        if gains:
            gain = gains.get((entry.layer, entry.head), Estimate(math.nan, math.nan))
            row.append(gain.shown("+.3f"))
        rows.append(row)
    return Table(columns, rows, note=note, left=columns[:2])


def _gains_of_heads(fit: Fit) -> dict[tuple[int | None, int | None], Estimate]:
    """The held-out gain of each head; empty for a fit through a model, which has none by head."""
    return {
        (record.get("layer"), record.get("head")): gain_of(record)
        for record in fit.evidence.get("heads", [])
        if "gain" in record
    }


def gain_of(record: Mapping[str, Any], key: str = "gain", key_of_error: str = "se") -> Estimate:
    """A gain of a record in a file, NaN if the record lacks it or its standard error."""
    return Estimate(record.get(key, math.nan), record.get(key_of_error, math.nan))


def held_out_tables(fit: Fit) -> list[Table]:
    """Held-out NLL by n or length, without and with a fit; no table if the file has none."""
    records = [x for x in fit.evidence.get("held_out", []) if set(HELD_OUT_KEYS) <= x.keys()]
    if not records:
        return []
    n, items, target = ("n", "inputs", "target")
    if fit.of_whole_model:
        n, items, target = ("tokens", "answers", "answer")
    rows = []
    for record in records:
        before, after = record["nll_before"], record["nll_after"]
        gain = Estimate(before - after, record.get("se", math.nan)).shown("+.3f")
        nll = (decimal(before, ".3f"), decimal(after, ".3f"))
        rows.append([f"{record['n']:,}", f"{record['inputs']:,}", *nll, gain])
    columns = [n, items, "baseline", THIS_FIT, "gain over the baseline ± SE"]
    note = f"Held out: {items} that the scored rule was not fitted to. NLL: lower is better."
    return [Table(columns, rows, f"NLL of the {target} in nats, held out", note)]


def kinds_tables(fit: Fit) -> list[Table]:
    """A row for each kind of rule, scored on the same folds; no table if the file has none.

    A fit through a model has none: its file compares the kind with one constant for all heads.
    """
    records = [record for record in fit.evidence.get("kinds", []) if "nll" in record]
    if not records or fit.of_whole_model:
        return []
    is_least_squares = fit.source.get("options", {}).get("loss") == LEAST_SQUARES
    saved = LEAST_SQUARES if is_least_squares else fit.rule.kind
    rows = []
    for record in records:
        kind, over_fit = record["kind"], gain_of(record, "gain_over_fit", "se_over_fit")
        gain = "" if kind == BASELINE else gain_of(record).shown("+.3f")
        last = THIS_FIT if kind == saved else over_fit.shown("+.4f")
        rows.append([label(kind), decimal(record["nll"], ".3f"), gain, last])
    columns = ["kind of rule", "NLL", "gain over the baseline ± SE", f"gain over {THIS_FIT} ± SE"]
    return [Table(columns, rows, "Kinds of rule, held out, nats", KINDS_NOTE, left=columns[:1])]
