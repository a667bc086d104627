#!/usr/bin/env python
"""Reliability of the verdicts of `calibrate fit`; writes scripts/results/verdicts.json and .png.

scripts/studies/verdicts.py             # six minutes on two cores; an interrupted run is resumed
scripts/studies/verdicts.py --markdown  # prints the tables of its page from the record

Samples of rows are drawn many times, from heads with a known optimal beta and from trained heads;
each sample is fitted as by `calibrate fit`, with m pseudo-observations, and what it publishes is
scored on fresh rows. m was chosen on the first group of trained heads, and is reported on the
second.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from command_line import parse, study_parser
from joblib import Parallel, delayed
from scipy.special import softmax

from calibrate.core.row_batches import row_entropy
from calibrate.core.rule import ENTROPY_AND_SIZE
from calibrate.core.rule_kinds import KINDS
from calibrate.errors import QualityError
from calibrate.evidence.prior import PRIOR_ROWS
from calibrate.evidence.publish_threshold import MIN_GAIN
from calibrate.evidence.significance import ALPHA, significant_fdr
from calibrate.fitting.cross_validate import cross_validate
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.options import Options
from calibrate.fitting.select import select_rule
from calibrate.report.plot_style import OURS, PAPER, draw, save_figure
from calibrate.rows.heads import load_head
from calibrate.solver.solved_rows import Rows, concatenate_rows, solve_rows
from calibrate.storage.atomic_io import write_atomically

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "scripts" / "results" / "verdicts.json"
FOLDER = ROOT / "runs" / "verdicts"
SIZES = (16, 64, 256)
HEAD_SIZES = (2, 4, 8)
COUNTS = (40, 150, 600)  # rows of a size
REPETITIONS = {PRIOR_ROWS: 100, 0.0: 40}  # m -> samples
HEAD_REPETITIONS = 12  # of each trained head and m
HEAD_PRIORS = (0.0, 3.0, PRIOR_ROWS, 30.0)
CHUNK = 20  # samples of a task
GROUPS = {"heads 1, 2, 4, 6, 7, 9": (1, 2, 4, 6, 7, 9), "heads 0, 3, 5, 8": (0, 3, 5, 8)}
N_PROMPTS = 8
FRESH = 1_000  # rows of a size
HEAD_FRESH = 8_192
THREE_KINDS = "the same, three kinds of rule"
# Name -> (how its logits are drawn, the beta that its targets are drawn at).
CELLS = {
    "calibrated, sharp (p .99 to .9999)": ("sharp", 1.0),
    "calibrated, blurred": ("blurred", 1.0),
    "too sharp (beta 0.8)": ("blurred", 0.8),
    "weak (beta 1.15)": ("blurred", 1.15),
    "strong (beta 2)": ("blurred", 2.0),
    "calibrated, 8 prompts": ("prompts", 1.0),
    "calibrated, 8 prompts not told apart": ("untold", 1.0),
    THREE_KINDS: ("untold", 1.0),
}
# For people, where the name in the record is another; names seed the draws, so they stay.
LABELS = {
    "calibrated, sharp (p .99 to .9999)": "calibrated, probability .99 to .9999",
    "calibrated, blurred": "calibrated, diffuse",
    "too sharp (beta 0.8)": "over-confident (optimal beta 0.8)",
    "weak (beta 1.15)": "optimal beta 1.15",
    "strong (beta 2)": "optimal beta 2",
    "calibrated, 8 prompts": "calibrated, 8 prompts, with groups",
    "calibrated, 8 prompts not told apart": "calibrated, 8 prompts, without groups",
}
N_HEADS, N_GAINING, N_MODELS = 270, 27, 2_000

GainOf = Callable[[np.ndarray], float]


def main() -> None:
    parse(study_parser(__doc__), markdown, RESULT)
    tasks = [
        *(partial(_head_samples, *task) for task in product(GROUPS, COUNTS, range(10))),
        *(
            partial(_samples, *task)
            for task in product(CELLS, COUNTS, range(0, max(REPETITIONS.values()), CHUNK))
        ),
    ]
    parts = Parallel(n_jobs=2, verbose=10)(delayed(task)() for task in tasks)
    samples = [sample for part in parts for sample in part]
    cells: dict[tuple, list[dict]] = {}
    for sample in samples:
        cells.setdefault((sample["cell"], sample["rows"], sample["m"]), []).append(sample)
    record = {
        "least_gain": MIN_GAIN,
        "prior_rows": PRIOR_ROWS,
        "cells": [_summary(*cell, of_cell) for cell, of_cell in cells.items()],
        "many_heads": [_many_heads(cells, count) for count in COUNTS],
    }
    write_atomically(RESULT, (json.dumps(record, indent=1) + "\n").encode())
    save_figure(RESULT.with_suffix(".png"), draw(_plot, record["cells"]))


def _kept(path: Path, compute: Callable[[], list[dict]]) -> list[dict]:
    """The samples of a task, from an earlier run if there are any."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(compute()).encode())
    return json.loads(path.read_text())


def _samples(name: str, count: int, first: int) -> list[dict]:
    """Fits to samples of a synthetic head, scored by the expectation on fresh logits."""
    how, beta = CELLS[name]
    kinds = [k for k in KINDS if k != ENTROPY_AND_SIZE or name != THREE_KINDS]

    def compute() -> list[dict]:
        alike = "sharp" if how == "sharp" else "blurred"
        fresh = _draw(np.random.default_rng(1), alike, beta, FRESH)
        samples = []
        for repetition in range(first, first + CHUNK):
            rng = np.random.default_rng([repetition, count, zlib.crc32(how.encode())])
            rows, _ = _draw(rng, how, beta, count)
            for m in (m for m, number in REPETITIONS.items() if repetition < number):
                gain_of = partial(_expected_gain, fresh, beta)
                sample = _sample(rows, m, gain_of, fresh[0], kinds)
                samples.append({"cell": name, "rows": count, "m": m, **sample})
        return samples

    return _kept(FOLDER / f"{zlib.crc32(name.encode()):08x}-{count}-{first}.json", compute)


def _head_samples(group: str, count: int, number: int) -> list[dict]:
    """Fits to samples of a trained head of the group, scored on fresh sets."""

    def compute() -> list[dict]:
        fresh = _rows_of_head(number, HEAD_FRESH, 99)
        plain = fresh.log_p(np.ones_like(fresh.beta))
        samples = []
        for repetition in range(HEAD_REPETITIONS):
            rows = _rows_of_head(number, count, 12 + repetition)
            for m in HEAD_PRIORS:
                sample = _sample(rows, m, lambda b: (fresh.log_p(b) - plain).mean(), fresh)
                samples.append({"cell": group, "rows": count, "m": m, **sample})
        return samples

    of_group = number in GROUPS[group]
    return _kept(FOLDER / f"head-{number}-{count}.json", compute) if of_group else []


def _sample(
    rows: Rows, m: float, gain_of: GainOf, fresh: Rows, kinds: Sequence[str] = KINDS
) -> dict:
    """What `calibrate fit` says of some rows, and what it gains on fresh ones."""
    try:
        options = Options(prior_rows=m)
        validation = cross_validate(rows, [KINDS[kind] for kind in kinds], options)
        selection = select_rule(validation, tuple(kinds))
    except QualityError:
        return {"published": False}
    chosen = selection.published
    true = float(gain_of(applied_beta(chosen.coefficients, fresh)))
    return {"published": True, "kind": chosen.kind, **chosen.gain._asdict(), "true": true}


def _draw(rng: np.random.Generator, how: str, beta: float, count: int) -> tuple[Rows, list]:
    """Solved rows whose targets are drawn at beta, and their logits."""
    parts, logits = [], []
    for n in SIZES:
        z = _logits(rng, how, n, count).astype(np.float32)
        noise = rng.gumbel(size=z.shape)
        if how in ("prompts", "untold"):  # one draw for all rows of a prompt
            noise = noise[np.arange(count) % N_PROMPTS]
        rows = solve_rows(z, (beta * z + noise).argmax(axis=1), row_entropy(z), n)
        if how == "prompts":
            rows = rows._replace(group=np.arange(count) % N_PROMPTS)
        parts.append(rows)
        logits.append(z)
    return concatenate_rows(parts), logits


def _logits(rng: np.random.Generator, how: str, n: int, count: int) -> np.ndarray:
    """(count, n) logits of a size."""
    if how in ("prompts", "untold"):  # the rows of a prompt are alike
        prompts = np.sqrt(4 - 0.3**2) * rng.standard_normal((N_PROMPTS, n))
        own = 0.3 * rng.standard_normal((count, n))
        return prompts[np.arange(count) % N_PROMPTS] + own
    z = rng.standard_normal((count, n)) * (1 if how == "sharp" else 2)
    if how == "sharp":
        p = 1 - 10 ** rng.uniform(-4, -2, count)  # of the first item
        z[:, 0] = np.log(p / (1 - p)) + np.log(np.exp(z[:, 1:]).sum(axis=1))
    return z


def _expected_gain(fresh: tuple[Rows, list], true_beta: float, beta: np.ndarray) -> float:
    """Mean gain in log p over the baseline of targets drawn at `true_beta`, sizes alike."""
    gains, start = [], 0
    for z in fresh[1]:
        own = beta[start : start + len(z), None]
        start += len(z)
        z = z.astype(float)
        added = own * z - _log_sum(own * z) - (z - _log_sum(z))
        gains.append((softmax(true_beta * z, axis=1) * added).sum(axis=1).mean())
    return float(np.mean(gains))


def _log_sum(z: np.ndarray) -> np.ndarray:
    highest = z.max(axis=1, keepdims=True)
    return np.log(np.exp(z - highest).sum(axis=1, keepdims=True)) + highest


def _rows_of_head(number: int, count: int, seed: int) -> Rows:
    head, parts = load_head(f"max-retrieval-{number}"), []
    for n in HEAD_SIZES:
        batch = head.sample(1_000 * seed + n, n, count)
        z = np.asarray(head.attend(batch).logits, np.float32)
        parts.append(solve_rows(z, np.asarray(batch.target), row_entropy(z), n))
    return concatenate_rows(parts)


def _summary(name: str, count: int, m: float, samples: list[dict]) -> dict:
    """What is published in a cell, and how it compares with fresh rows."""
    published = [s for s in samples if s["published"]]
    true = np.array([s["true"] for s in published])
    low, high, mean = (np.array([s[key] for s in published]) for key in ("low", "high", "mean"))
    return {
        "cell": name, "rows": count, "m": m, "samples": len(samples), "published": len(published),
        "below": int((true < low).sum()), "above": int((true > high).sum()),
        "reported": float(mean.mean()) if published else None,
        "fresh": float(true.mean()) if published else None,
        "fresh_of_all": float(true.sum() / len(samples)),
        "worst": float(true.min()) if published else None,
    }  # fmt: skip


def _many_heads(results: dict, count: int) -> dict:
    """Models of 270 heads of which 27 have an optimal beta of 1.15, drawn from the samples."""

    def p_values(name: str) -> np.ndarray:
        samples = results[name, count, PRIOR_ROWS]
        return np.array([s["p"] if s["published"] else 1.0 for s in samples])

    rng = np.random.default_rng(0)
    null, weak = p_values("calibrated, blurred"), p_values("weak (beta 1.15)")
    found = []
    for _ in range(N_MODELS):
        p = np.concatenate([rng.choice(weak, N_GAINING), rng.choice(null, N_HEADS - N_GAINING)])
        found.append(np.mean(significant_fdr(p.tolist())[:N_GAINING]))
    return {
        "rows": count, "heads": N_HEADS, "gaining": N_GAINING, "rate": ALPHA,
        "alone": float((weak < 1).mean()), "found": float(np.mean(found)),
    }  # fmt: skip


def markdown(record: dict) -> list[str]:
    """The tables of the study's page: samples, nothing published, many heads."""
    lines = [
        "| head | rows per size | m | published | reported gain | fresh gain | worst | below the "
        "interval | above it | fresh gain, all fits |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for c in sorted(record["cells"], key=lambda c: (_order(c["cell"]), c["rows"], c["m"])):
        if c["published"]:
            reported, fresh, worst = (f"{c[key]:+.4f}" for key in ("reported", "fresh", "worst"))
            lines.append(
                f"| {label_of(c['cell'])} | {c['rows']} | {c['m']:g} | "
                f"{c['published']} of {c['samples']} | "
                f"{reported} | {fresh} | {worst} | {c['below']} | {c['above']} | "
                f"{c['fresh_of_all']:+.4f} |"
            )
    silent = [c for c in record["cells"] if not c["published"]]
    lines += ["", "Nothing was published of:", ""]
    for name in sorted({c["cell"] for c in silent}, key=_order):
        of_name = sorted((c["rows"], c["m"], c["samples"]) for c in silent if c["cell"] == name)
        samples = ", ".join(f"{rows} rows, m = {m:g} ({of})" for rows, m, of in of_name)
        lines.append(f"* {label_of(name)}: {samples}")
    lines += [
        "",
        "| rows per size | heads of optimal beta 1.15, published alone | as 27 of 270 |",
        "| ---: | ---: | ---: |",
    ]
    for c in record["many_heads"]:
        lines.append(f"| {c['rows']} | {c['alone']:.0%} | {c['found']:.0%} |")
    return lines


def label_of(name: str) -> str:
    return LABELS.get(name, name)


def _order(name: str) -> int:
    return [*GROUPS, *CELLS].index(name)


def _plot(ax, cells: list[dict]):
    """The share of samples published, and of these the share below their interval."""
    names = [*GROUPS, *CELLS]
    for m, colour, offset in ((0.0, PAPER, -0.17), (PRIOR_ROWS, OURS, 0.17)):
        for k, count in enumerate(COUNTS):
            of = {c["cell"]: c for c in cells if c["m"] == m and c["rows"] == count}
            y = np.arange(len(names)) + offset + (k - 1) * 0.1
            share = [100 * of[name]["published"] / of[name]["samples"] for name in names]
            worse = [100 * of[name]["below"] / of[name]["samples"] for name in names]
            label = f"m = {m:g}" if k == 0 else None
            ax.barh(y, share, 0.08, color=colour, alpha=0.35, label=label)
            ax.barh(y, worse, 0.08, color=colour)
    ax.set_yticks(range(len(names)), [label_of(name) for name in names])
    ax.invert_yaxis()
    ax.set_xlabel("% of samples published (dark: and below their interval)")
    ax.set_title("40, 150, 600 rows per size, top to bottom")
    ax.legend(loc="upper right")
    return ax


if __name__ == "__main__":
    main()
