"""Whether a refit is unchanged: no new version is written for it."""

from calibrate.files.coefficients import Coefficients
from calibrate.files.fit_difference import EntryRule, largest_change

SAME_BETA = 1e-6  # a fit is unchanged if its beta differs by less than this over the domain
N_POINTS = 1024


def same_fit(newest: Coefficients, new: Coefficients) -> bool:
    """Whether a refit has the same source as the newest version, and the same beta."""
    if newest.source != new.source or newest.rule != new.rule:
        return False
    if [(e.layer, e.head) for e in newest.entries] != [(e.layer, e.head) for e in new.entries]:
        return False
    for pair in zip(newest.entries, new.entries, strict=True):
        old, now = (EntryRule(new.rule, entry) for entry in pair)
        if not largest_change(old, now, now.domain, n_points=N_POINTS).largest < SAME_BETA:
            return False
    return True
