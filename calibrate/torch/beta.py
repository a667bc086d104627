"""beta of a fit in PyTorch, from entropies and numbers of items."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients, check_fit, check_given
from calibrate.maths.rule import N_COEFFICIENTS, beta_of, slope_of


def inverse_temperature(
    H: Tensor | float | None, coefficients: Coefficients, *, n: Tensor | int | None = None
) -> Tensor:
    """beta of a fit: beta(H), beta(n) or beta(H, n), as its kind has it.

    beta(H) = clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off;
    beta(n) = clip(kappa log n + b, min_beta, max_beta); where kappa < 0, log n is first clipped to
    the sizes that it was fitted on, [lo, hi]. A fit of kind "entropy-and-size" adds terms of log n
    to p(H).

    Args:
      H: entropy in nats, any shape; computed in float32 or wider. For a fit per head, as `entropy`
        gives it for logits (..., heads, queries, items): (..., heads, queries). A log-size fit
        takes its shape alone, or None.
      coefficients: a fit, from `calibrate.load`.
      n: number of unmasked items, broadcastable to H; 0 counts as 1. Fits by set size need it, and
        others do not look at it.
    Returns:
      beta, of H's shape (n's if H is None), dimensionless; 1 for heads that the fit does not name.
    Raises:
      CoefficientsError: no fit was given, it does not fit the heads of H, or H or n is missing.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    check_given(fit, H, n)
    dtype = wide(torch.get_default_dtype()) if type(H) is float else None
    like = H if H is None or isinstance(H, Tensor) else torch.as_tensor(H, dtype=dtype)
    entropy = like.to(wide(like.dtype)) if fit.rule.by_entropy and like is not None else None
    log_n = None
    if fit.rule.by_size:
        items = torch.as_tensor(n, device=None if like is None else like.device)
        log_n = items.to(wide(items.dtype if entropy is None else entropy.dtype)).clamp(min=1).log()
        log_n = log_n if like is None else log_n.expand(like.shape)
    return beta_of_rows(Inputs(entropy, log_n), fit, -2)


class Inputs(NamedTuple):
    """What beta is a function of; None what it is not."""

    entropy: Tensor | None
    log_n: Tensor | float | None  # a number for all rows: beside an entropy, without heads


def beta_of_rows(x: Inputs, fit: Coefficients, head_axis: int) -> Tensor:
    """beta of x, with the heads of a fit per head along that axis."""
    either = x.log_n if x.entropy is None else x.entropy
    assert isinstance(either, Tensor)
    beta: Tensor = beta_by_table(x, head_table(fit, either, head_axis), fit)
    return beta


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for narrower ones and for integers."""
    return dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32


def head_table(fit: Coefficients, x: Tensor, head_axis: int) -> Tensor | None:
    """The numbers of each head, (numbers, heads, 1, ...); None if all heads are alike."""
    if not fit.has_heads:
        fit.only  # noqa: B018 (refuses a fit per layer)
        return None
    if x.ndim < -head_axis:
        raise CoefficientsError(
            f"{fit.reference} has an entry per head, and a tensor of shape {tuple(x.shape)} has "
            "no axis of heads; give (..., heads, queries, items)"
        )
    table = torch.tensor(fit.by_head(x.shape[head_axis]), dtype=x.dtype, device=x.device)
    return table.reshape(*table.shape, *[1] * (-head_axis - 1))


def beta_by_table(x: Inputs, table: Any, fit: Coefficients, xp: Any = torch) -> Any:
    """beta of x, as the fit's kind has it; all of them NumPy's where xp is."""
    coefficients, domain, named = _numbers(table, fit)
    beta = beta_of(*x, coefficients, domain, fit.rule, xp)
    return beta if named is None else xp.where(named, beta, 1.0)


def slope_by_table(x: Inputs, beta: Any, table: Any, fit: Coefficients, xp: Any) -> Any:
    """d beta / dH at x, of a fit by entropy, and perhaps size."""
    coefficients, domain, named = _numbers(table, fit)
    slope = slope_of(*x, beta, coefficients, domain, fit.rule, xp)
    return slope if named is None else xp.where(named, slope, 0.0)


def _numbers(table: Any, fit: Coefficients) -> tuple[Any, Any, Any]:
    """Coefficients, domain, and which heads have any; None if all heads are alike."""
    if table is None:
        entry = fit.entries[0]  # `head_table` has refused others
        return entry.coefficients, entry.domain, None
    n, rows = N_COEFFICIENTS[fit.rule.kind], list(table)
    return rows[:n], rows[n:-1], rows[-1] == 1
