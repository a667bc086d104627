"""Options that a command does not have: of before 0.2, or of the same command for a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand

from calibrate.cli.option_names import spell_options
from calibrate.errors import CalibrateError

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
_FOR_A_MODEL = ("--model", "--prompts", "--task", "--retention-text")
_WITH_COUNTERPART = ("run", "collect", "diagnose", "fit", "evaluate")
_USES = {"--max-kl": "for KL divergence", "--tolerance": "for NLL"}


class Command(TyperCommand):
    """A command whose messages name its options, also where one is that it does not have."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CalibrateError as error:
            spell_options(error, self._options())
            raise

    def _options(self) -> set[str]:
        """The options, such as "--max-kl"."""
        return {name for option in self.params for name in option.opts}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = self._options()
        for word in args[: args.index("--") if "--" in args else None]:
            old = word.partition("=")[0]
            now = [name for name in RENAMED.get(old, ()) if name.split()[0] in known]
            if now and old not in known:
                raise BadParameter(f"it is {_told(now)} now", ctx, param_hint=f"'{old}'")
            if old in _FOR_A_MODEL and old not in known and self.name in _WITH_COUNTERPART:
                there = f"for a model: `calibrate model {self.name}`"
                raise BadParameter(there, ctx, param_hint=f"'{old}'")
        return super().parse_args(ctx, args)


def _told(now: Sequence[str]) -> str:
    """The present names, each with its use if there are several."""
    if len(now) == 1:
        return now[0]
    return " and ".join(f"{name} ({_USES[name]})" for name in now)
