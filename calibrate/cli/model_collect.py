"""`calibrate model collect`: examples of a model, with their right answers."""

from pathlib import Path
from typing import Annotated, Literal

from typer import BadParameter, Option

from calibrate.cli.options import (
    EXECUTION_PANEL,
    AsJson,
    Dask,
    Device,
    Overwrite,
    Processes,
    RequiredModelFolder,
    Seed,
    parse_sizes,
)
from calibrate.defaults import LENGTHS, N_EXAMPLES
from calibrate.parallel import Jobs
from calibrate.report.terminal import Steps, show, stderr

MAX_EXAMPLES = 100_000


def model_collect_command(
    *,
    model: RequiredModelFolder,
    out: Annotated[
        Path | None, Option(help="Folder of the collection [default: runs/NAME of the model]")
    ] = None,
    overwrite: Overwrite = False,
    prompts: Annotated[
        Path | None,
        Option(
            exists=True,
            dir_okay=False,
            help='JSON lines {"prompt": ..., "answer": ...}.',
        ),
    ] = None,
    task: Annotated[
        str | None,
        Option(help="Built-in task: retrieval, or retrieval:numbers,json for some templates."),
    ] = None,
    retention_text: Annotated[
        Path | None,
        Option(
            exists=True,
            help="Text whose predictions must stay, or a folder of .txt files [default: nine "
            "built-in text domains]",
        ),
    ] = None,
    no_retention_text: Annotated[
        bool, Option("--no-retention-text", help="Use no retention text.")
    ] = False,
    lengths: Annotated[
        str, Option(help="Lengths of --task and --retention-text in tokens.")
    ] = f"{LENGTHS[0]}..{LENGTHS[-1]}",
    examples: Annotated[
        int,
        Option(
            min=1,
            max=MAX_EXAMPLES,
            help="Examples of each prompt template and length, 8 at least for a fit.",
        ),
    ] = N_EXAMPLES,
    seed: Seed = 0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(
            rich_help_panel=EXECUTION_PANEL,
            help="Type of the weights; auto is bfloat16 if stored so, else float32.",
        ),
    ] = "auto",
    device: Device = "cpu",
    jobs: Processes = 1,
    dask: Dask = None,
    as_json: AsJson = False,
) -> None:
    """Collect examples of a model: prompts with their right answers.

    They are stored with the model's scores under the baseline. Give one or more of --prompts,
    --task and --retention-text. The same command continues an interrupted collection; a
    complete one is left as it is.

    Example: calibrate model collect --model Qwen3 --task retrieval
    """
    from calibrate.cli.loading import require_transformers
    from calibrate.prompts.make_examples import ExampleSpec

    if not (prompts or task or retention_text):
        raise BadParameter("give --prompts FILE.jsonl, --task retrieval or --retention-text FILE")
    if retention_text and no_retention_text:
        raise BadParameter("--no-retention-text cannot be used with --retention-text")
    sizes, built_in = tuple(parse_sizes(lengths)), not (no_retention_text or retention_text)
    spec = ExampleSpec(
        prompts, _templates_of(task), retention_text, sizes, examples, seed, built_in_text=built_in
    )
    _ = spec.lines  # read now, so that an error in the file is found before a model is loaded
    require_transformers(device)
    from calibrate.model.acceptance import too_few_answers
    from calibrate.model.collect_examples import collect_examples, plan
    from calibrate.prompts.examples import ExampleCollection
    from calibrate.report.collection_record import examples_result
    from calibrate.rows.resume import discard_collection

    stderr.print(f"making examples for {model}")
    job = plan(model, spec, dtype, device)
    if warning := too_few_answers(job.examples):
        stderr.print(f"this collection is too small for calibrate model fit: {warning}")
    folder = out or Path("runs") / job.folder.name
    if overwrite:
        discard_collection(folder, ExampleCollection)
    with Steps() as steps:
        collection = collect_examples(job, folder, steps, Jobs(jobs, dask))
    if not steps.done:
        stderr.print(f"{folder} is already complete")
    show(examples_result(collection), as_json)


def _templates_of(task: str | None) -> tuple[str, ...]:
    """The prompt templates that --task names."""
    from calibrate.prompts.make_examples import parse_task

    try:
        return () if task is None else parse_task(task)
    except ValueError as failure:
        raise BadParameter(str(failure)) from None
