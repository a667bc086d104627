"""The first look at a model as a result to show: a map of its heads, and what they want."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.significance import ALPHA
from calibrate.model.sensitivity import (
    DIFFUSE,
    SHARPER,
    STEP,
    UNCLEAR,
    HeadSensitivity,
    ModelSensitivity,
)
from calibrate.report.blocks import SHOWN_HEADS, Facts, Heading, Result, Table, Text, and_more
from calibrate.report.diagnosis_record import save_json
from calibrate.report.plot_style import new_figure, save_figure
from calibrate.report.plots import plot_slopes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD = "first-look.json"
MAP = "heads.png"
NAMED_HEADS = 12  # in a sentence


def save_sensitivity(
    folder: Path, look: ModelSensitivity, model: str, fingerprint: str, collection: str | None
) -> Result:
    """Writes the map of the heads and then the record, which is returned.

    Shown are what the heads want in words, the steepest of them, and the files.

    Args:
      folder: of the files, which are written whole or not at all.
      look: at the model.
      model: its name.
      fingerprint: of the model.
      collection: the digest of the examples; None if they were not kept.
    """
    figure, path = folder / MAP, folder / RECORD
    save_figure(figure, draw_sensitivity(look))
    of = {"model": model, "fingerprint": fingerprint, "collection": collection}
    result = Result(
        [
            Heading(f"First look at {model}: d log-likelihood / d log beta of every head"),
            *(Text(f"  {sentence}") for sentence in sentences(look)),
            _table(look),
            Facts([("record", str(path)), ("figure", str(figure))]),
        ],
        of | _record(look) | {"path": path, "figures": [figure]},
    )
    save_json(path, result)
    return result


def sentences(look: ModelSensitivity) -> Iterable[str]:
    """Sentences on heads that a sharper or more diffuse rule helps, and on the gain of a step."""
    main = look.answers or look.text
    assert main is not None
    what = "an answer" if look.answers else "a token of the text"
    yield f"{main.examples:,} examples; mean NLL of {what} {0.0 - main.log_p:.3f} nats"
    for word in (SHARPER, DIFFUSE):
        heads = look.with_direction(word)
        listed = f": {', '.join(map(name_of, heads[:NAMED_HEADS]))}" if heads else ""
        more = ", ..." if heads[NAMED_HEADS:] else ""
        verb = "wants" if len(heads) == 1 else "want"
        yield f"{len(heads)} of {len(look.heads)} heads {verb} to be {word}{listed}{more}"
    clear = [head for head in look.heads if head.wants != UNCLEAR]
    gain = sum(head.gain for head in clear)
    yield f"a step of 10 % in each of these gains {gain:.3f} nats to first order"
    if look.answers and look.text:
        against = sum(head.text_wants not in (UNCLEAR, head.wants) for head in clear)
        yield f"retention text wants the opposite in {against} of them"


def name_of(head: HeadSensitivity) -> str:
    """Short: L10H3."""
    return f"L{head.layer}H{head.head}"


def _table(look: ModelSensitivity) -> Table:
    """The steepest heads."""
    kinds = [kind for kind in ("answers", "text") if getattr(look, kind)]
    rows = []
    for head in look.heads[:SHOWN_HEADS]:
        slopes = [Estimate(*getattr(head, kind)).shown("+.3f") for kind in kinds]
        rows.append([name_of(head), *slopes, head.wants, f"{head.gain:.4f}"])
    note = (
        "Nats of log-likelihood per unit of log beta ± standard error; templates and lengths have "
        "equal weight. Gain: to first order, of a beta 10 % higher or lower. Wants: significant "
        "(false discovery rate 5 % over all heads)." + and_more(len(look.heads))
    )
    return Table(["head", *kinds, "wants", "gain"], rows, note=note, left=["head", "wants"])


def _record(look: ModelSensitivity) -> dict[str, Any]:
    """Every head, with its mean at each length and of each template."""
    kinds = (("answers", look.answers), ("text", look.text))
    means = {kind: x and {"examples": x.examples, "log_p": x.log_p} for kind, x in kinds}
    places = {head: i for i, head in enumerate(sorted((h.layer, h.head) for h in look.heads))}
    heads = []
    for head in look.heads:
        record, i = head._asdict(), places[head.layer, head.head]
        for name, parts in (("by_length", look.by_length), ("by_template", look.by_template)):
            slopes = {str(key): part.slope for key, part in parts.items()}
            record[name] = {key: (x.mean[i], x.error[i]) for key, x in slopes.items()}
        heads.append(record)
    return {"step": STEP, "level": ALPHA, **means, "heads": heads}


def draw_sensitivity(look: ModelSensitivity) -> "Figure":
    """The map of the answers, and that of plain text beside it."""
    shown = [kind for kind in ("answers", "text") if getattr(look, kind) is not None]
    n_layers = len({head.layer for head in look.heads})
    figure = new_figure(6.0 * len(shown), min(max(3.6, 0.28 * n_layers), 12))
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for ax, kind in zip(axes, shown, strict=True):
        plot_slopes(ax, look.heads, kind)
    return figure
