"""The page on a fit: its verdict, scores, rule and provenance, for heads, logits and models."""

from pathlib import Path

from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import Heading
from calibrate.report.page import (
    Page,
    provenance_section,
    rule_section,
    usage_section,
    write_page,
)
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.selection import selection_section


def write_fit_page(path: Path, fit: Coefficients, scores: ScoresRecord) -> None:
    """Writes the page, whole or not at all.

    Args:
      path: of the page.
      fit: what was calibrated; the first of the fits that were scored.
      scores: of items that it was, if possible, not made of.
    """
    of = scores.evidence.of
    blocks = [
        *usage_section(fit),
        Heading("Scores"),
        *scores.tables(),
        *selection_section(fit),
        *rule_section(fit),
        *provenance_section(fit, f"{of.name} ({of.fingerprint}): {scores.scored_items()}"),
    ]
    subtitle = f"Calibration of adaptive-temperature softmax, scored on {of.name}"
    verdict = " ".join(scores.verdicts().values())
    write_page(path, Page(fit.reference, subtitle, verdict, blocks))
