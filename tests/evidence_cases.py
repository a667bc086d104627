"""Synthetic evidence: rules that gain so much in each stratum, and fits whose files say so."""

from dataclasses import replace

import numpy as np

import calibrate
from calibrate.evidence.evidence import Evidence, Scored, Stratum
from calibrate.evidence.metrics import KL, LOG_P, RIGHT, ROWS, SETS, P
from calibrate.store.entry import Entry

SIZES = (16, 64, 256, 1024)
BY_SIZE = tuple(map(Stratum, SIZES))
CELLS = (
    Stratum(64, "list"),
    Stratum(128, "list"),
    Stratum(64, "towns"),
    Stratum(128, "book", protected=True),
)


def evidence_of_gains(gains, items=ROWS, count=200, strata=BY_SIZE, heads=1, **fields):
    """Rules that add so much in each stratum: to log p, or to the share that is right.

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

    values = {}
    if items != SETS:
        plain = rng.normal(-2, 1, len(stratum))
        noise = rng.normal(0, 0.1, (len(gains), len(stratum)))
        added = [of_items(gain) + e for gain, e in zip(gains.values(), noise, strict=True)]
        values[LOG_P] = np.array([plain, *(plain + x for x in added)], np.float32)
    if items == ROWS:
        values[P] = np.exp(values[LOG_P])
    else:
        u = rng.random(len(stratum))
        if any(s.protected for s in strata):
            values[KL] = np.array([u * 0, *(0.05 * u for _ in gains)])
        right = [u < 0.5, *(u < 0.5 + of_items(gain) for gain in gains.values())]
        values[RIGHT] = np.array(right, float)
    return Evidence(
        ("plain", *gains),
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
    """A fit of constants, or one of log n, whose file says which sizes were trained."""
    rule = calibrate.load("max-retrieval").rule if kind == "log-size" else calibrate.identity().rule
    entry = Entry((0.3, 1.0), (0, 5)) if kind == "log-size" else Entry((0, 0, 0, 0, 2.71), (0, 5))
    rule = rule._replace(min_entropy=0.0, max_beta=64.0)
    options |= {"trained_up_to": up_to} if up_to else {}
    return replace(calibrate.identity(), rule=rule, entries=(entry,), source={"options": options})
