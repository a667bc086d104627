"""`calibrate evaluate`: score a head, or logits on disk, under fits and baselines."""

from typer import Context

from calibrate.cli.options import (
    SCORED_SETS,
    AsJson,
    Dask,
    Draws,
    FitsToScore,
    HeadName,
    LogitsPath,
    Processes,
    ReadStore,
    ScoredSets,
    Seed,
    Sizes,
    check_source,
    parse_sizes,
)
from calibrate.defaults import SIZES
from calibrate.parallel import Jobs
from calibrate.report.terminal import show


def evaluate_command(
    ctx: Context,
    fits: FitsToScore = None,
    *,
    head: HeadName = None,
    logits: LogitsPath = None,
    sizes: Sizes = SIZES,
    sets: ScoredSets = SCORED_SETS,
    seed: Seed = 0,
    jobs: Processes = 1,
    dask: Dask = None,
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
    """Score a head or logits under fits and baselines.

    Fits are ranked by their NLL beside softmax, the paper's published polynomial, log-n scaling and
    argmax. Give --logits that no fit was fitted to; each head in them is scored under its own rule.

    Example: calibrate evaluate mine paper --logits held-out.npz
    """
    check_source(ctx)
    draws = Draws(parse_sizes(sizes), sets, seed)
    from calibrate.cli import loading, row_scoring
    from calibrate.evidence.baselines import fixed_rules, without_equals

    loaded = loading.load_fits(fits or [], store)
    if logits is not None:
        show(row_scoring.score_fits_on_logits(loading.open_logits(logits), loaded), as_json)
        return
    rules = {**without_equals(fixed_rules(), loaded), **loaded}
    workers = Jobs(jobs, dask)
    scores = row_scoring.score_rules_on_head(
        loading.open_head(head), draws, rules, list(loaded), workers
    )
    show(scores, as_json)
