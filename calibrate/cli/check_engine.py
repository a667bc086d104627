"""`calibrate check-engine`: which attention scale a server applies to a stock model."""

from pathlib import Path
from typing import Annotated

from typer import Option

from calibrate.cli.options import AsJson
from calibrate.report.streams import stderr
from calibrate.report.terminal import show

ServedModelName = Annotated[str | None, Option(help="Name under which --engine serves the model.")]
EnginePrompts = Annotated[
    Path | None, Option(help="Prompts to ask --engine, as in `model collect`.")
]


def check_engine(
    *,
    model: Annotated[Path, Option(help="Folder of the model that the server should serve.")],
    engine: Annotated[str, Option(help="Address of the server, such as http://localhost:8000.")],
    served_model_name: ServedModelName = None,
    prompts: EnginePrompts = None,
    as_json: AsJson = False,
) -> None:
    """Name the attention scale that a server applies.

    It should be what the model's config.json states. No fit is needed: the server is asked for
    log-likelihoods of a few short prompts, which are compared with those of the folder in
    Transformers, in float32. If they differ, the command names the scale that explains the server:
    a key of config.json that it ignores or applies twice, or an estimated factor, of all layers, by
    position or by type of layers. The exit code is 0 if the two agree, 3 if they differ, 1 if that
    cannot be told.

    Example: calibrate check-engine --model model --engine http://localhost:8000
    """
    from calibrate.cli.loading import require_transformers

    require_transformers()
    from calibrate.export.engine_check import Question
    from calibrate.export.stock_engine import (
        LENGTHS,
        N_POSITIONS,
        N_SINGLE,
        TEMPLATES,
        check_stock_engine,
    )
    from calibrate.report.engine_record import stock_result

    stderr.print("asking the engine, and the model")
    question = Question(
        engine, served_model_name, prompts, TEMPLATES, LENGTHS, N_SINGLE, N_POSITIONS
    )
    show(stock_result(model, check_stock_engine(model, question)), as_json)
