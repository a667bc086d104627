"""The result of `calibrate run` on rows: rules side by side, the polynomial, the verdict."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from calibrate.evidence.evidence import LOG_P, PLAIN, Evidence
from calibrate.evidence.verdict import HARD, judged_items, main_measure
from calibrate.files.bad_rows import share_misranked
from calibrate.files.coefficients import Coefficients
from calibrate.files.rows import RowCollection
from calibrate.report.blocks import Block, Facts, Result, Table, Text, as_detail
from calibrate.report.fit_record import FitRecord, usage
from calibrate.report.polynomial_record import LABEL, polynomial_blocks, selected_label
from calibrate.report.scores_record import SHOWN, TITLES, ScoresRecord
from calibrate.rows.solved_rows import Rows

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
    def misranked(self) -> dict[int, float]:
        """Share of the inputs that are misranked, by size."""
        return {of["size"]: share_misranked(of) for of in self.collection.manifest["sizes"]}


def rows_result(fit: FitRecord, scores: ScoresRecord, solved: SolvedHead, report: Result) -> Result:
    """Rules on what none of them was fitted to, the polynomial, the verdict, and how to use it."""
    shown: list[Block] = [
        *as_detail(fit.evidence()),
        Facts([("scored", scores.scored_items())], detail=True),
        rules_table(scores, fit.coefficients, solved.misranked),
        *as_detail(scores.tables()),
    ]
    if solved.polynomial is None:
        shown.append(Text(f"\nNo polynomial: {solved.why_none}."))
    else:
        shown += polynomial_blocks(solved.polynomial)
    shown += [*report.shown, usage(fit.coefficients)]
    found = fit.as_json() | report.found | {"scores": scores.as_json()}
    polynomial = solved.polynomial and FitRecord(solved.polynomial).as_json()
    return Result(shown, found | {"polynomial": polynomial})


def rules_table(scores: ScoresRecord, fit: Coefficients, misranked: Mapping[int, float]) -> Table:
    """The baseline, the paper's polynomial, this head's, the selected rule, and argmax, by n."""
    items, measure = judged_items(scores.evidence), main_measure(scores.evidence)
    own = scores.fits[0]
    names = {
        PLAIN: "baseline (softmax)",
        "paper": "the paper's published polynomial",
        PROCEDURE: LABEL,
        own: f"selected: {selected_label(fit)}",
        HARD: "argmax",
    }
    rules = [rule for rule in names if rule in items.rules]
    parts: dict[str, Evidence] = {f"{n:,}": part for n, part in items.by("size").items()}
    shares = [f"{misranked[n]:.1%}" if n in misranked else "" for n in items.by("size")]
    if len(parts) > 1:
        parts["all"], shares = items, [*shares, ""]
    rows = [
        (n, share, *(_mean(part, rule, measure) for rule in rules))
        for (n, part), share in zip(parts.items(), shares, strict=True)
    ]
    headings = ["\n".join(textwrap.wrap(names[rule], width=20)) for rule in rules]
    unit = "nats" if measure == LOG_P else "%"
    title = TITLES.get((measure, items.of.items), measure)
    title = title if title.endswith("%") else f"{title}, {unit}"
    note = (
        f"On {items.n:,} held-out {items.of.items}. Misranked: of the inputs collected, those "
        "where another item has a higher logit than the target."
    )
    marked = [len(rows) - 1] if len(rows) > 1 else []
    return Table(["n", "misranked", *headings], rows, title, note, marked=marked)


def _mean(part: Evidence, rule: str, measure: str) -> str:
    factor, digits, *_ = SHOWN[measure]
    return part.mean(rule, measure).shown(f".{digits}f", factor).split(" ±")[0]
