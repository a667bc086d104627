"""Numbers as text: shares in per cent, p-values, means with their standard errors."""

import math

NOTHING = "·"


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent, without the sign; a dot for NaN."""
    return f"{100 * share:.{digits}f}" if math.isfinite(share) else NOTHING


def p_value(p: float) -> str:
    """0.4, 0.002, 2e-05: one digit, as the paper prints them."""
    return f"{p:.1g}" if math.isfinite(p) else NOTHING


def with_error(mean: float, error: float, shape: str) -> str:
    """A mean in that format and its standard error with as many digits, where they are finite."""
    if not math.isfinite(mean):
        return NOTHING
    return f"{mean:{shape}}" + f" ± {error:{shape.removeprefix('+')}}" * math.isfinite(error)
