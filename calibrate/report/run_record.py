"""The result of `calibrate run` on rows: the verdict, rules side by side, the polynomial."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calibrate.datasets.row_collection import RowCollection
from calibrate.datasets.row_quality import count_bad, share_misranked
from calibrate.evidence.baselines import HARD, is_infinite
from calibrate.evidence.calibration_error import expected_calibration_error, reliability
from calibrate.evidence.estimate import NOTHING
from calibrate.evidence.evidence import PLAIN, Evidence
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, Metric
from calibrate.evidence.verdict import judged_items, main_metric
from calibrate.report.blocks import Block, Facts, Result, Table, Text, as_detail
from calibrate.report.fit_record import FitRecord, usage
from calibrate.report.metric_text import mean_text, metric_title
from calibrate.report.polynomial_record import LABEL, polynomial_blocks, selected_label
from calibrate.report.scores_record import ScoresRecord
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients

PROCEDURE = "procedure"  # the rule of the evidence that is the polynomial of the same rows


@dataclass(frozen=True, eq=False)
class SolvedHead:
    """The solved inputs of a head, and the polynomial that was fitted to them.

    Attributes:
      collection: of the inputs.
      rows: the same, solved.
      polynomial: as it was published; None where misranked inputs are too few.
      why_none: what lacks, if so.
    """

    collection: RowCollection
    rows: Rows
    polynomial: Coefficients | None
    why_none: str = ""

    @property
    def misranked(self) -> dict[int, str]:
        """The number of misranked inputs, by size: "123 of 256 (48.0%)"."""
        return {
            of["size"]: f"{of['misranked']:,} of {of['rows'] - count_bad(of):,} "
            f"({share_misranked(of):.1%})"
            for of in self.collection.manifest["sizes"]
        }

    @property
    def no_polynomial(self) -> str:
        """The sentence that stands in place of a polynomial."""
        return f"No polynomial: {self.why_none}."


def rows_result(fit: FitRecord, scores: ScoresRecord, solved: SolvedHead, report: Result) -> Result:
    """The verdict, rules on what none of them was fitted to, the polynomial, and how to use it."""
    shown: list[Block] = [
        *report.shown,
        *as_detail(fit.evidence()),
        Facts([("scored", scores.scored_items())], detail=True),
        rules_table(scores, fit.coefficients, solved.misranked),
        *as_detail(scores.tables()),
    ]
    if solved.polynomial is None:
        shown.append(Text(f"\n{solved.no_polynomial}"))
    else:
        shown += polynomial_blocks(solved.polynomial)
    shown.append(usage(fit.coefficients))
    record = fit.as_json() | report.found | {"scores": scores.as_json()}
    polynomial = solved.polynomial and FitRecord(solved.polynomial).as_json()
    return Result(shown, record | {"polynomial": polynomial})


def rules_table(scores: ScoresRecord, fit: Coefficients, misranked: Mapping[int, str]) -> Table:
    """The baseline, the published polynomial, this head's, the selected rule and argmax, by n."""
    items, metric = judged_items(scores.evidence), main_metric(scores.evidence)
    own = scores.fits[0]
    names = {
        PLAIN: "baseline",
        "paper": "published polynomial",
        PROCEDURE: LABEL,
        own: f"selected: {selected_label(fit)}",
        HARD: "argmax",
    }
    rules = [rule for rule in names if rule in items.rules]
    rows = [
        (items.span(n), _of_size(misranked, n), *_means(part, rules, metric))
        for n, part in items.by("size").items()
    ]
    n_sizes = len(rows)
    if n_sizes > 1:
        rows.append(("all", "", *_means(items, rules, metric)))
    if metric != LOG_P:
        rows.append(("NLL, nats", "", *_means(items, rules, LOG_P)))
    if CONFIDENCE in items.values:
        errors = (100 * expected_calibration_error(reliability(items, rule)) for rule in rules)
        rows.append(("ECE, %", "", *(f"{error:.1f}" for error in errors)))
    headings = ["\n".join(textwrap.wrap(names[rule], width=18)) for rule in rules]
    note = (
        f"Held out: {items.n:,} {items.of.items.name}. Misranked: collected inputs in which "
        "another item has a higher logit than the target."
    )
    note += f" Selected with q = {fit.quality['q']:.2g}." if fit.quality.get("q") else ""
    title = metric_title(metric, items.of.items)
    marked = range(n_sizes, len(rows))
    return Table(["n", "misranked", *headings], rows, title, note, marked=marked)


def _of_size(misranked: Mapping[int, str], n: int) -> str:
    """The number of misranked inputs of one size, or of the octave that the size is in."""
    if n in misranked:
        return misranked[n]
    octaves = {math.ceil(math.log2(size)): number for size, number in misranked.items()}
    return octaves.get(math.ceil(math.log2(n)), "")


def _means(items: Evidence, rules: Sequence[str], metric: Metric) -> list[str]:
    return [
        NOTHING if is_infinite(rule, metric) else mean_text(items.mean(rule, metric).mean, metric)
        for rule in rules
    ]
