"""Options of before 0.2: a command refuses one in a line that names the present option."""

from collections.abc import Mapping, Sequence
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand

RENAMED: Mapping[str, Sequence[str]] = {
    "--allowed-loss": ("--max-kl", "--tolerance"),
    "--force-polynomial": ("--kind polynomial",),
    "--fresh": ("--overwrite",),
    "--gate": ("--min-entropy",),
    "--no-text": ("--no-retention-text",),
    "--served": ("--served-model-name",),
    "--stall": ("--timeout",),
    "--strength": ("--interpolation",),
    "--text": ("--retention-text",),
}
_USES = {"--max-kl": "for KL divergence", "--tolerance": "for NLL"}


class Command(TyperCommand):
    """A command that knows which of its options had another name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in option.opts}
        for word in args[: args.index("--") if "--" in args else None]:
            old = word.partition("=")[0]
            now = [name for name in RENAMED.get(old, ()) if name.split()[0] in known]
            if now and old not in known:
                raise BadParameter(f"it is {_told(now)} now", ctx, param_hint=f"'{old}'")
        return super().parse_args(ctx, args)


def _told(now: Sequence[str]) -> str:
    """The present names, each with its use if there are several."""
    if len(now) == 1:
        return now[0]
    return " and ".join(f"{name} ({_USES[name]})" for name in now)
