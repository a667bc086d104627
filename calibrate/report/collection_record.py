"""Collections as results to show: inputs by size, examples by template and length."""

from calibrate.datasets.examples import ExampleCollection, allows_unexpected
from calibrate.datasets.row_collection import RowCollection
from calibrate.datasets.row_quality import count_bad, share_misranked
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import LOG_P, RIGHT
from calibrate.report.blocks import Block, Result, Table, Text

MIN_RIGHT = 0.02  # of the answers of some length: with fewer, the model does not do the task


def rows_result(collection: RowCollection) -> Result:
    """Inputs by size, how many are misranked, and the bytes of all; JSON is the manifest."""
    manifest = collection.manifest
    rows = [
        (
            f"{size['size']:,}",
            f"{size['rows']:,}",
            f"{size['misranked']:,}",
            f"{share_misranked(size):.1%}",
            f"{size['ties']:,}",
            f"{count_bad(size):,}",
            f"{size['kept']:,}",
        )
        for size in manifest["sizes"]
    ]
    total = sum(shard["bytes"] for shard in manifest["shards"])
    is_of_logits = manifest["configuration"].get("of") == "logits"
    n = "n, up to" if is_of_logits else "n"
    columns = (n, "inputs", "misranked", "share", "ties", "bad", "kept")
    note = (
        f"{len(manifest['shards'])} shards, {total / 1e6:,.1f} MB. Misranked: another item has a "
        "higher logit than the target. Ties: another item has the same."
    )
    return Result([Table(columns, rows, f"Collection {collection.folder}", note)], manifest)


def examples_result(collection: ExampleCollection) -> Result:
    """Examples by template and length; JSON has the manifest as well."""
    configuration, scores = collection.manifest["configuration"], _plain(collection)
    rows, cells = [], []
    for stratum, part in scores.by("stratum").items():
        log_p, right = (part.mean(BASELINE, metric) for metric in (LOG_P, RIGHT))
        shown = (f"{part.n:,}", log_p.shown(".3f", -1), f"{right.mean:.1%}")
        rows.append((stratum.template, f"{stratum.size:,}", *shown))
        cell = dict(zip(("length", "template", "text"), stratum[:3], strict=True))
        numbers = {"log_p": log_p.mean, "error": log_p.error, "right": right.mean}
        cells.append(cell | {"examples": part.n} | numbers)
    columns = ("template", "length", "examples", "NLL", "exact match")
    title = f"Examples {collection.folder}: {configuration['model']}, baseline"
    note = (
        "NLL of the whole answer in nats, of text per token; exact match: each token of the answer "
        "has the highest probability."
    )
    if "prompts" in configuration["sources"]:
        note += " Lengths of prompts are rounded up to powers of two."
    if allows_unexpected(configuration):
        note += " Tensors of the model's files that Transformers drops were allowed."
    shown_blocks: list[Block] = [Table(columns, rows, title, note, left=["template"])]
    if warning := nearly_none_right(collection):
        shown_blocks.append(Text(f"\nNote: {warning}."))
    more = {"folder": collection.folder, "digest": collection.digest, "baseline": cells}
    return Result(shown_blocks, collection.manifest | more)


def nearly_none_right(collection: ExampleCollection) -> str | None:
    """A warning where the model answers nearly nothing at any length; None where it does."""
    by_length = _plain(collection).answers.by("size").values()
    right = max((float(part.mean(BASELINE, RIGHT).mean) for part in by_length), default=1.0)
    if right >= MIN_RIGHT:
        return None
    return (
        f"the model answers nearly nothing right ({right:.1%} at best); a temperature hardly "
        "teaches it a task: give prompts that it answers when they are short"
    )


def _plain(collection: ExampleCollection) -> Evidence:
    from calibrate.model.objective import plain_alone

    return plain_alone(collection.set, collection.scores)
