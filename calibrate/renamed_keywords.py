"""Keywords of before 0.2, which public functions refuse by naming the present ones."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

RENAMED = {
    "allowed_loss": ("max_kl=", "tolerance="),
    "force_polynomial": ('kind="polynomial"',),
    "fresh": ("overwrite=",),
    "gate": ("min_entropy=",),
    "stall": ("timeout=",),
    "strength": ("interpolation=",),
}

P = ParamSpec("P")
R = TypeVar("R")


def refuse_renamed(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose TypeError for a keyword of before names the present one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        for old in RENAMED.keys() & given.keys():
            if now := [name for name in RENAMED[old] if name.partition("=")[0] in known]:
                raise TypeError(f"{function.__qualname__}() has no {old}=; it is {now[0]} now")
        return function(*args, **given)

    return call
