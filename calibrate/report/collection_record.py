"""A collection as a result to show: what was seen and kept of each set size."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from calibrate.files.rows import RowCollection, count_bad, share_misranked
from calibrate.report.blocks import Block, Table


@dataclass(frozen=True)
class CollectionRecord:
    """The result of `calibrate collect`."""

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
        yield Table(
            columns=("n", "sets", "misranked", "share", "ties", "bad", "kept"),
            rows=rows,
            title=f"Collection {self.collection.folder}",
            note=f"{len(manifest['shards'])} shards, {total / 1e6:,.1f} MB",
        )
