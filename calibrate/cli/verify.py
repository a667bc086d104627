"""`calibrate verify`: check the shards of a collection."""

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import JsonOption
from calibrate.errors import CalibrateError
from calibrate.report.terminal import show


def verify(
    run: Annotated[Path, typer.Argument(help="Folder of a collection, finished or not.")],
    as_json: JsonOption = False,
) -> None:
    """Check every shard of a collection.

    The exit code is 1 if a shard is bad or missing, or a file is foreign. Shards of a complete
    collection are checked against the manifest's digests and the format, those of an unfinished one
    against the format. No file is changed: to repair bad and missing shards, run the same
    `calibrate collect` command again. Of examples of a model, every file is checked against the
    manifest's digests.

    Example: calibrate verify runs/try
    """
    from calibrate.files.collection_audit import audit_collection
    from calibrate.files.example_collection import is_example_collection, open_examples
    from calibrate.report.audit_records import CollectionAuditRecord
    from calibrate.report.collection_record import ExamplesRecord

    if is_example_collection(run):
        show(ExamplesRecord(open_examples(run)), as_json)
        return
    record = CollectionAuditRecord(audit_collection(run))
    show(record, as_json)
    if failure := record.failure():
        raise CalibrateError(failure)
