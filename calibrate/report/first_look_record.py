"""The first look at a model as a result to show: a map of its heads, and what they want."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.evidence.estimate import CHANCE, Estimate
from calibrate.evidence.evidence import Head
from calibrate.model.first_look import DIFFUSE, SHARPER, STEP, UNCLEAR, HeadLook, Look, Slopes
from calibrate.report.blocks import (
    SHOWN_HEADS,
    Block,
    Facts,
    Heading,
    Result,
    Table,
    Text,
    and_more,
)
from calibrate.report.diagnosis_record import save_json
from calibrate.report.plot_style import new_figure, save_figure
from calibrate.report.plots import plot_slopes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD, MAP = "first-look.json", "heads.png"
NAMED_HEADS = 12  # in a sentence
MOST_LENGTHS = 4  # columns of the table; --json has all


def _found(look: Look, places: Mapping[Head, int]) -> dict[str, Any]:
    """Every head, with its mean at each length and of each template."""
    kinds = (("answers", look.answers), ("text", look.text))
    parts = (("by_length", look.by_length), ("by_template", look.by_template))
    means = {kind: x and {"examples": x.examples, "log_p": x.log_p} for kind, x in kinds}
    heads = [
        head._asdict()
        | {
            name: {str(key): _at(mean, places[head.layer, head.head]) for key, mean in by.items()}
            for name, by in parts
        }
        for head in look.heads
    ]
    return {"step": STEP, "level": CHANCE, **means, "heads": heads}


def _table(look: Look, places: Mapping[Head, int]) -> Table:
    """The steepest heads."""
    lengths = list(look.by_length)[:MOST_LENGTHS] if len(look.by_length) > 1 else []
    kinds = {"answers": look.answers, **{f"{n:,} tokens": look.by_length[n] for n in lengths}}
    slopes = {name: mean for name, mean in (kinds | {"text": look.text}).items() if mean}
    rows = []
    for head in look.heads[:SHOWN_HEADS]:
        i = places[head.layer, head.head]
        cells = [Estimate(*_at(mean, i)).shown("+.3f") for mean in slopes.values()]
        rows.append([name_of(head), *cells, head.wants, f"{head.gain:.4f}"])
    note = (
        "Nats of log p per unit of log beta ± standard error; templates and lengths have equal "
        "weight. Gain: to first order, of a beta 10 % higher or lower. Wants: beyond chance "
        "among all heads." + and_more(len(look.heads))
    )
    return Table(["head", *slopes, "wants", "gain"], rows, note=note, left=["head", "wants"])


def _at(slopes: Slopes, i: int) -> tuple[float, float]:
    """The slope of a head, and its error."""
    return float(slopes.slope.mean[i]), float(slopes.slope.error[i])


def sentences(look: Look) -> Iterable[str]:
    """Which heads want what, what a step would gain, and what plain text says to it."""
    main = look.answers or look.text
    assert main is not None
    what = "an answer" if look.answers else "a token of the text"
    yield f"{main.examples:,} examples; mean log p of {what} {main.log_p:.3f} nats"
    for word in (SHARPER, DIFFUSE):
        heads = look.wanting(word)
        names = [*map(name_of, heads[:NAMED_HEADS]), *(["..."] if heads[NAMED_HEADS:] else [])]
        listed = f": {', '.join(names)}" if heads else ""
        verb = "wants" if len(heads) == 1 else "want"
        yield f"{len(heads)} of {len(look.heads)} heads {verb} to be {word}{listed}"
    clear = [head for head in look.heads if head.wants != UNCLEAR]
    if not clear:
        yield "no head's direction is beyond chance; more examples may tell"
        return
    gain = sum(head.gain for head in clear)
    yield f"a step of 10 % in each of these gains {gain:.3f} nats to first order"
    if look.answers and look.text:
        against = sum(head.text_wants not in (UNCLEAR, head.wants) for head in clear)
        signs = {SHARPER: 1, DIFFUSE: -1}
        cost = np.log(STEP) * sum(h.text[0] * signs[h.wants] for h in clear if h.text)
        yield (
            f"protected text wants the opposite in {against} of them; the step changes its log p "
            f"by {cost:+.4f} nats a token"
        )


def name_of(head: HeadLook) -> str:
    """Short: L10H3."""
    return f"L{head.layer}H{head.head}"


def save_first_look(
    folder: Path, look: Look, model: str, fingerprint: str, collection: str | None
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
    save_figure(figure, draw_first_look(look))
    places: dict[Head, int] = {
        head: i for i, head in enumerate(sorted((h.layer, h.head) for h in look.heads))
    }
    shown: list[Block] = [
        Heading(f"First look at {model}: d log p / d log beta of every head"),
        *(Text(f"  {sentence}") for sentence in sentences(look)),
        _table(look, places),
        Facts([("record", str(path)), ("figure", str(figure))]),
    ]
    of = {"model": model, "fingerprint": fingerprint, "collection": collection}
    result = Result(shown, of | _found(look, places) | {"path": path, "figures": [figure]})
    save_json(path, result)
    return result


def draw_first_look(look: Look) -> "Figure":
    """The map of the answers, and that of plain text beside it."""
    shown = [kind for kind in ("answers", "text") if getattr(look, kind) is not None]
    n_layers = len({head.layer for head in look.heads})
    figure = new_figure(6.0 * len(shown), min(max(3.6, 0.28 * n_layers), 12))
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for ax, kind in zip(axes, shown, strict=True):
        wants = "wants" if kind == "answers" or len(shown) == 1 else "text_wants"
        plot_slopes(ax, look.heads, kind, wants)
    return figure
