"""Collections as results to show: rows by set size, examples by template and length."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from calibrate.evidence.evidence import LOG_P, PLAIN, RIGHT, Evidence
from calibrate.files.examples import ExampleCollection
from calibrate.files.rows import RowCollection, count_bad, share_misranked
from calibrate.report.blocks import Block, Table, Text

LEAST_RIGHT = 0.02  # of the answers of some length: with fewer, the model does not do the task


@dataclass(frozen=True)
class CollectionRecord:
    """The result of `calibrate collect` on a head or logits."""

    collection: RowCollection

    def as_json(self) -> dict[str, Any]:
        """The manifest."""
        return self.collection.manifest

    def blocks(self) -> Iterable[Block]:
        """A row per set size, and the size of the whole."""
        manifest = self.collection.manifest
        rows = [
            (
                f"{size['size']:,}", f"{size['rows']:,}", f"{size['misranked']:,}",
                f"{share_misranked(size):.1%}", f"{size['ties']:,}",
                f"{count_bad(size):,}", f"{size['kept']:,}",
            )
            for size in manifest["sizes"]
        ]  # fmt: skip
        total = sum(shard["bytes"] for shard in manifest["shards"])
        columns = ("n", "sets", "misranked", "share", "ties", "bad", "kept")
        note = (
            f"{len(manifest['shards'])} shards, {total / 1e6:,.1f} MB. Misranked: the target has "
            "not the highest logit."
        )
        yield Table(columns, rows, f"Collection {self.collection.folder}", note)


@dataclass(frozen=True)
class ExamplesRecord:
    """The result of `calibrate collect` on a model."""

    collection: ExampleCollection

    def as_json(self) -> dict[str, Any]:
        """The manifest, and the scores of each template and length."""
        scores = []
        for stratum, part in _plain(self.collection).by("stratum").items():
            log_p, right = (part.mean(PLAIN, measure) for measure in (LOG_P, RIGHT))
            numbers = {"log_p": log_p.mean, "error": log_p.error, "right": right.mean}
            cell = dict(zip(("length", "template", "text"), stratum, strict=True))
            scores.append(cell | {"examples": part.n} | numbers)
        return self.collection.manifest | {
            "folder": self.collection.folder,
            "digest": self.collection.digest,
            "plain": scores,
        }

    def blocks(self) -> Iterable[Block]:
        """A row per template and length."""
        configuration, scores = self.collection.manifest["configuration"], _plain(self.collection)
        rows = [
            (stratum.template, f"{stratum.size:,}", f"{part.n:,}",
             part.mean(PLAIN, LOG_P).shown(".3f"), f"{part.mean(PLAIN, RIGHT).mean:.1%}")
            for stratum, part in scores.by("stratum").items()
        ]  # fmt: skip
        columns = ("template", "length", "examples", "log p", "right")
        title = f"Examples {self.collection.folder}: {configuration['model']}, plain softmax"
        note = "log p in nats of the whole answer; right: greedy decoding gives the whole answer."
        note += " Text: per token." if scores.text.n else ""
        if "prompts" in configuration["sources"]:
            note += " Lengths of --prompts are rounded up to powers of two."
        yield Table(columns, rows, title, note, left=["template"])
        if warning := nearly_none_right(self.collection):
            yield Text(f"\nNote: {warning}.")


def nearly_none_right(collection: ExampleCollection) -> str | None:
    """What it means that the model answers nearly nothing at any length; None if it does."""
    by_length = _plain(collection).answers.by("size")
    right = {n: float(part.mean(PLAIN, RIGHT).mean) for n, part in by_length.items()}
    if not right or max(right.values()) >= LEAST_RIGHT:
        return None
    shown = ", ".join(
        f"{right[n]:.1%} at {n:,} tokens (log p {part.mean(PLAIN, LOG_P).mean:.1f})"
        for n, part in by_length.items()
    )
    return (
        f"the model answers nearly nothing right: {shown}; a temperature can make it surer of what "
        "it finds, and hardly teaches it a task: give prompts that it answers when they are short"
    )


def _plain(collection: ExampleCollection) -> Evidence:
    from calibrate.model.answers import plain_alone

    return plain_alone(collection.set, collection.scores)
