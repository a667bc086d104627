"""`calibrate check-engine`: which attention scale a server applies to a stock model."""

from pathlib import Path
from typing import Annotated

from typer import Option

from calibrate.cli.options import AsJson
from calibrate.report.terminal import show, stderr

SERVER_PANEL = "Options of the server"
EngineAddress = Annotated[
    str | None,
    Option(rich_help_panel=SERVER_PANEL, help="Address of a server that should apply --check."),
]
ServedModelName = Annotated[
    str | None,
    Option(rich_help_panel=SERVER_PANEL, help="Name under which --engine serves the model."),
]
EnginePrompts = Annotated[
    Path | None,
    Option(
        rich_help_panel=SERVER_PANEL,
        help='Prompts to ask --engine: JSON lines {"prompt": ..., "answer": ...}.',
    ),
]


def check_engine_command(
    *,
    model: Annotated[Path, Option(help="Folder of the model that the server should serve.")],
    engine: Annotated[str, Option(help="Address of the server, such as http://localhost:8000.")],
    served_model_name: ServedModelName = None,
    prompts: EnginePrompts = None,
    as_json: AsJson = False,
) -> None:
    """Check the attention scale that a server applies.

    It should be that of the model's config.json. The server is asked for log-likelihoods of a few
    short prompts, which are compared with those of the folder in Transformers, in float32. If they
    differ (exit code 3), the command names the scale that explains the server: a key of config.json
    that it ignores or applies twice.

    Example: calibrate check-engine --model Qwen3 --engine http://localhost:8000
    """
    from calibrate.cli.loading import require_transformers

    require_transformers()
    from calibrate.export.engine_check import check_stock_engine
    from calibrate.export.engine_predictions import Question
    from calibrate.report.export_record import stock_result

    stderr.print("asking the engine, and the model")
    question = Question(engine, served_model_name, prompts)
    show(stock_result(model, check_stock_engine(model, question)), as_json)
