"""Synthetic evidence: rules that gain so much in each stratum, and fits whose files say so."""

import numpy as np

from calibrate.core.rule import RuleForm
from calibrate.evidence.evidence import Evidence, Scored, Stratum
from calibrate.evidence.metrics import KL, LOG_P, RIGHT, ROWS, P
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

SIZES = (16, 64, 256, 1024)
BY_SIZE = tuple(map(Stratum, SIZES))
CELLS = (
    Stratum(64, "list"),
    Stratum(128, "list"),
    Stratum(64, "towns"),
    Stratum(128, "book", protected=True),
)


def evidence_of_gains(gains, items=ROWS, count=200, strata=BY_SIZE, heads=1, **fields):
    """Rules that add so much in each stratum to log p, and to the share that is right.

    Args:
      gains: by rule, (strata,) numbers, or (strata, heads).
      items: their kind.
      count: of items in each stratum.
    """
    rng = np.random.default_rng(1)
    stratum = np.repeat(np.arange(len(strata)), count)
    head = np.arange(len(stratum)) % heads

    def of_items(gain):
        return np.broadcast_to(np.transpose(gain), (heads, len(strata)))[head, stratum]

    baseline = rng.normal(-2, 1, len(stratum))
    noise = rng.normal(0, 0.1, (len(gains), len(stratum)))
    added = [of_items(gain) + e for gain, e in zip(gains.values(), noise, strict=True)]
    values = {LOG_P: np.array([baseline, *(baseline + x for x in added)], np.float32)}
    if items == ROWS:
        values[P] = np.exp(values[LOG_P])
    else:
        u = rng.random(len(stratum))
        if any(s.protected for s in strata):
            values[KL] = np.array([u * 0, *(0.05 * u for _ in gains)])
        right = [u < 0.5, *(u < 0.5 + of_items(gain) for gain in gains.values())]
        values[RIGHT] = np.array(right, float)
    return Evidence(
        ("baseline", *gains),
        values,
        strata,
        stratum,
        np.full(len(stratum), -1),
        np.ones(len(stratum)),
        Scored("toy", "sha256:toy", items),
        head=head,
        heads=tuple((0, i) for i in range(heads)) if heads > 1 else ((None, None),),
        **fields,
    )


def fitted_at(kind, up_to=None, **options):
    """A fit of a constant, or of a line in log n, whose file says which sizes were trained."""
    options |= {"trained_up_to": up_to} if up_to else {}
    source = {"options": options}
    if kind == "log-size":
        return Fit(RuleForm.log_size(), (Entry((0.3, 1.0), (0, 5)),), source=source)
    return Fit(RuleForm.constant(), (Entry((2.71,), ()),), source=source)
