"""beta of a fit in PyTorch, from entropies and numbers of items."""

import torch
from torch import Tensor

from calibrate.files.coefficients import Coefficients, check_fit, check_given
from calibrate.fit_beta import Features, beta_at, head_numbers


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
    return beta_of_rows(Features(entropy, log_n), fit, -2)


def beta_of_rows(x: Features, fit: Coefficients, head_axis: int) -> Tensor:
    """beta of x, with the heads of a fit per head along that axis."""
    beta: Tensor = beta_at(x, head_table(fit, x.either, head_axis), fit, torch)
    return beta


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for narrower ones and for integers."""
    return dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32


def head_table(fit: Coefficients, x: Tensor, head_axis: int) -> Tensor | None:
    """The numbers of each head along an axis of x, (numbers, heads, 1, ...); None if alike."""
    numbers = head_numbers(fit, x.shape, head_axis)
    if numbers is None:
        return None
    table = torch.tensor(numbers, dtype=x.dtype, device=x.device)
    return table.reshape(*table.shape, *[1] * (-head_axis - 1))
