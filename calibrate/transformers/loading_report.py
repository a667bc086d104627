"""The loading report of a checkpoint: which of its tensors run in the class of its model.

Transformers prints one, and goes on: a weight that is missing is random, a tensor that the class
does not know is dropped, and a weight in a type of few bits is taken as it is, without its scale.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from calibrate.errors import CalibrateError
from calibrate.storage.safetensors_file import FLOATS
from calibrate.transformers.folder_files import Headers

_N_SHOWN = 3
_N_LETTERS = 100
_ROTARY = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_\w+)\.weight")


class LoadingReport(NamedTuple):
    """The tensors of a checkpoint that are not loaded, by name in order; empty if all is well."""

    model: str  # the class
    missing: tuple[str, ...]  # weights of the class that no file has, or in another shape
    unexpected: tuple[str, ...]  # tensors that the class does not have: they are dropped
    unscaled: tuple[str, ...]  # weights that run without the scale that their type needs
    dtypes: tuple[str, ...] = ()  # those of `unscaled`: "F8_E4M3"


def loading_report(
    model: PreTrainedModel, info: dict[str, Any], headers: Headers, quantised: bool
) -> LoadingReport:
    """The report of a model, by what Transformers says of it and the files' own headers."""
    missing = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    unscaled = {} if quantised else _unscaled(model, headers)
    return LoadingReport(
        type(model).__name__,
        tuple(sorted(missing)),
        tuple(sorted(info["unexpected_keys"])),
        tuple(sorted(unscaled)),
        tuple(sorted(set(unscaled.values()))),
    )


def _unscaled(model: PreTrainedModel, headers: Headers) -> dict[str, str]:
    """The types of weights that are not plain floats, by name; masks and counts are no weights."""
    ignored = [re.compile(x) for x in model._keys_to_ignore_on_load_unexpected or ()]
    prefix, weights = f"{model.base_model_prefix}.", {name for name, _ in model.named_parameters()}
    weights |= {name.removeprefix(prefix) for name in weights}
    return {
        name: tensor.dtype
        for header in headers.values()
        for name, tensor in header.items()
        if tensor.dtype not in FLOATS
        and (name.endswith("weight") or tensor.dtype.startswith("F") or name in weights)
        and not any(pattern.search(name) for pattern in ignored)
    }


def dropped_of_gguf(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Tensors of a .gguf file that Transformers drops without saying so.

    They are factors of rotary positions, such as Llama 3's, and biases of a class without any.
    """
    has_biases = any(name.endswith("bias") for name in model.state_dict())
    return {
        name
        for name in names
        if _ROTARY.fullmatch(name) or (name.endswith(".bias") and not has_biases)
    }


def text_part(config: Any) -> Any:
    """The configuration of the text model of a container of several models; else the whole."""
    try:
        return config.get_text_config()
    except ValueError:  # it has several: of an encoder and a decoder
        return config.get_text_config(decoder=True)


def is_quantised(config: Any) -> bool:
    """True if Transformers knows how the weights are quantised, and applies their scales."""
    for part in (config, text_part(config)):
        if quantisation := getattr(part, "quantization_config", None):
            with suppress(ValueError):  # it names no method
                keys = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
                return bool(AutoHfQuantizer.supports_quant_method(keys))
    return False


def require_whole(path: Path, report: LoadingReport, allow_unexpected: bool) -> None:
    """Raises CalibrateError unless a folder has all weights of its model's class, and no others.

    Args:
      allow_unexpected: whether tensors may be dropped, and weights be taken without their scales.
    """
    if report.missing:
        raise CalibrateError(
            f"{path} lacks weights of {report.model}: {shown(report.missing)}; give the folder of "
            "a whole causal model"
        )
    faults = []
    if report.unscaled:
        types = " and ".join(report.dtypes)
        faults.append(f"takes weights of {types} without their scales ({shown(report.unscaled)})")
    if report.unexpected:
        n = len(report.unexpected)
        count = "a tensor" if n == 1 else f"{n:,} tensors"
        names = shown(report.unexpected)
        faults.append(f"drops {count} that {report.model} does not have ({names})")
    if faults and not allow_unexpected:
        raise CalibrateError(
            f"{path}: Transformers {' and '.join(faults)}; give the model with plain weights and "
            "the config.json that they were trained with, or allow_unexpected=True",
            parameter="allow_unexpected",
        )


def shown(names: Sequence[str]) -> str:
    """The first of some names, cut, and without what a terminal would act on."""
    first = [
        "".join(c if c.isprintable() else "?" for c in name[:_N_LETTERS])
        for name in names[:_N_SHOWN]
    ]
    return ", ".join([*first, *(["..."] if len(names) > _N_SHOWN else [])])
