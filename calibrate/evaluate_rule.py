"""beta of a fit, whose heads may differ, in the arrays of NumPy, JAX or PyTorch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from calibrate.core.rule import N_COEFFICIENTS, N_DOMAIN, Rule, beta_of, slope_of
from calibrate.errors import CoefficientsError
from calibrate.store.coefficients import Coefficients


class Features(NamedTuple):
    """Arguments of beta, arrays of one shape; None for one on which it does not depend."""

    entropy: Any
    log_n: Any  # one number for all rows beside an entropy, where heads do not differ

    @property
    def either(self) -> Any:
        """One of the arrays."""
        return self.log_n if self.entropy is None else self.entropy


def features_of(fit: Coefficients, entropy: Any, log_n: Any, zeros: Callable[[], Any]) -> Features:
    """What beta of a fit depends on; zeros, of a number for each row, where it ignores both."""
    if not fit.ignores_inputs:
        return Features(entropy, log_n)
    none = zeros()
    return Features(none, none)


def head_numbers(
    fit: Coefficients, shape: tuple[int, ...], head_axis: int
) -> tuple[tuple[float, ...], ...] | None:
    """The numbers of each head along an axis of an array, (numbers, heads); None if all are alike.

    Raises:
      CoefficientsError: there is no such axis, it has too few heads, or the fit has layers.
    """
    if not fit.has_heads:
        fit.refuse_layers()
        return None
    if len(shape) < -head_axis:
        raise CoefficientsError(
            f"{fit.reference} has an entry per head, and an array of shape {tuple(shape)} has no "
            "axis of heads; give (..., heads, queries, items)"
        )
    return fit.by_head(shape[head_axis])


def require_last_axis(fit: Coefficients, name: str, axis: Any, ndim: int) -> None:
    """Raises CoefficientsError if a fit per head is applied along an axis other than the last."""
    if fit.has_heads and axis not in (-1, (-1,), ndim - 1):
        raise CoefficientsError(
            f"{fit.reference} has an entry per head, and {name} is {axis!r}; "
            f"give logits (..., heads, queries, items) and {name}=-1"
        )


def beta_at(x: Features, table: Any, fit: Coefficients, xp: Any) -> Any:
    """beta of a fit, as its kind has it; 1 for heads that it does not name.

    Args:
      table: `head_numbers` as an array that broadcasts, (numbers, heads, 1, ...); None: all alike.
      xp: the arrays' namespace: numpy, jax.numpy or torch.
    """
    coefficients, domain, rule, named = _by_head(table, fit)
    beta = beta_of(*x, coefficients, domain, rule, xp)
    return beta if named is None else xp.where(named, beta, 1.0)


def slope_at(x: Features, beta: Any, table: Any, fit: Coefficients, xp: Any) -> Any:
    """d beta / dH where beta is what `beta_at` gives, of a fit by entropy, and perhaps size."""
    coefficients, domain, rule, named = _by_head(table, fit)
    slope = slope_of(*x, beta, coefficients, domain, rule, xp)
    return slope if named is None else xp.where(named, slope, 0.0)


def _by_head(table: Any, fit: Coefficients) -> tuple[Any, Any, Rule, Any]:
    """Coefficients, domain, rule, and which heads have any; None if all heads are alike."""
    if table is None:
        entry = fit.entries[0]  # `head_numbers` has refused others
        return entry.coefficients, entry.domain, fit.rule, None
    rule, rows = fit.rule, list(table)
    n = N_COEFFICIENTS[rule.kind]
    last = n + N_DOMAIN[rule.kind]
    if len(rows) > last + 1:
        min_entropy, min_beta, max_beta = rows[last + 1 :]
        rule = Rule(min_entropy, min_beta, max_beta, rule.outside, rule.kind)
    return rows[:n], rows[n:last], rule, rows[last] == 1
