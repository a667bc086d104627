"""A check of an engine that serves a stock model, as a result to show."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.errors import CalibrateError, QualityError, command
from calibrate.report.blocks import Block, Result, Table, Text

if TYPE_CHECKING:
    from calibrate.export.stock_engine import StockCheck

_NATS = "nats, root mean square"


def stock_result(model: Path, stock: "StockCheck") -> Result:
    """Reports the scale that an engine applies; a failure unless it agrees: exit 3, or 1."""
    from calibrate.export.engine_check import UNKNOWN
    from calibrate.export.stock_engine import AS_STATED

    check = stock.check
    blocks: list[Block] = [_table(stock)]
    failure: CalibrateError | None = None
    if check.applies == AS_STATED:
        blocks.append(Text(f"{_agrees(model, stock)}."))
    elif check.applies == UNKNOWN:
        message = f"{_cannot_tell(model, stock)}; {_remedy(stock)}"
        failure = CalibrateError(message, parameter="prompts")
    else:
        failure = QualityError(_differs(model, stock))
    record = {
        "path": model,
        **check._asdict(),
        "named": stock.alternatives,
        "alike": stock.alike,
        "estimates": stock.estimates,
    }
    return Result(blocks, record, failure)


def _table(stock: "StockCheck") -> Table:
    """The engine's difference from each scale, by the length of prompts."""
    prompts = stock.check.prompts
    rows = [
        (name, *(f"{off[name]:.4f}" for _, off in prompts), f"{total:.4f}")
        for name, total in stock.check.off.items()
    ]
    columns = ("attention scale", *(f"{n:,} tokens" for n, _ in prompts), "all")
    title = f"The engine's log p is off from the model's under each scale by ({_NATS})"
    return Table(columns, rows, title=title, left=columns[:1])


def _agrees(model: Path, stock: "StockCheck") -> str:
    check = stock.check
    told = [name for name in stock.alternatives if name not in check.untold]
    off = check.off[next(iter(check.off))]
    parts = [
        f"{check.engine} agrees with {model} up to {stock.longest:,} tokens: its log p is off by "
        f"{off:.2g} nats (at one token, where no scale acts, by up to {check.noise:.2g})"
    ]
    if told:
        parts.append(f"ruled out: {_listed(told)}")
    untold = [name for name in stock.alternatives if name in check.untold]
    if untold:
        parts.append(f"not told apart by these prompts: {_listed(untold)}")
    return "; ".join(parts)


def _cannot_tell(model: Path, stock: "StockCheck") -> str:
    check = stock.check
    alternatives = [name for name in stock.alternatives if name in check.untold]
    from_what = f"from {_listed(alternatives)}" if alternatives else "from another attention scale"
    return (
        f"cannot tell the attention scale of {check.engine}: up to {stock.longest:,} tokens what "
        f"the configuration of {model} states is not told {from_what}, by a noise of "
        f"{check.noise:.2g} nats"
    )


def _remedy(stock: "StockCheck") -> str:
    return "give more or longer prompts=, or serve weights that are not quantised"


def _differs(model: Path, stock: "StockCheck") -> str:
    from calibrate.export.engine_check import OTHER

    check = stock.check
    names = list(check.off)
    stated = check.off[names[0]]
    since = f" from {check.off_from:,} tokens on" if check.off_from else ""
    said = f"{check.engine} differs from {model}{since}, by {stated:.2g} nats"
    if check.applies == OTHER:
        best = min(names, key=check.off.__getitem__)
        return (
            f"{said}, and another attention scale does not explain it: the best, {best}, leaves "
            f"{check.off[best]:.2g}; {_exported(check.engine)}; else compare weights, tokenizer "
            "and rotary positions"
        )
    values = stock.estimates.get(check.applies, {})
    estimated = ", ".join(f"{name} {x:.3g} ± {error:.1g}" for name, (x, error) in values.items())
    scale = f'"{check.applies}"' + (f" ({estimated})" if estimated else "")
    scale += f" (or {_listed(stock.alike)}, too near to tell)" if stock.alike else ""
    return (
        f"{said}; what explains it is {scale}, which leaves "
        f"{check.off[check.applies]:.2g}; use a version of the engine that applies what "
        f"config.json states{_rest(stock)}"
    )


def _rest(stock: "StockCheck") -> str:
    """A clause on an estimated scale that leaves more than noise."""
    from calibrate.export.engine_check import NOISES

    check = stock.check
    if check.off[check.applies] <= NOISES * check.noise:
        return ""
    return f"; what it leaves is more than noise: {_exported(check.engine)}"


def _exported(engine: str) -> str:
    """A clause on the factors of an exported fit, which no scale of this check has."""
    check = command("export", check="EXPORTED", engine=engine)
    return (
        "factors may differ by head or layer and not be one scale, as those of an exported fit do: "
        f"{check} tells whether the server applies it"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
