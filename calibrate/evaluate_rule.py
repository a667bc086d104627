"""beta of a fit, whose heads may differ, in the arrays of NumPy, JAX or PyTorch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from calibrate.core.rule import CONSTANT, N_COEFFICIENTS, N_DOMAIN, Rule, beta_of, slope_of
from calibrate.errors import CoefficientsError
from calibrate.store.fit import Fit


class Features(NamedTuple):
    """Arguments of beta, arrays of one shape; None for one on which it does not depend."""

    entropy: Any
    log_n: Any  # one number for all rows beside an entropy, where heads do not differ

    @property
    def either(self) -> Any:
        """One of the arrays."""
        return self.log_n if self.entropy is None else self.entropy


def check_fit(fit: Fit) -> Fit:
    """Raises CoefficientsError for a name or None, before JAX or PyTorch fail on it."""
    if not isinstance(fit, Fit):
        raise CoefficientsError(
            f"coefficients is {fit!r}; give a fit, such as calibrate.load('max-retrieval')"
        )
    return fit


def check_given(fit: Fit, H: Any, n: Any) -> None:
    """Raises CoefficientsError if an argument on which beta depends is None."""
    rule = fit.rule
    for name, uses, value in (
        ("H, the entropy of the items", rule.by_entropy, H),
        ("n=, the number of unmasked items", rule.by_size, n),
    ):
        if uses and value is None:
            raise CoefficientsError(f"{fit.reference} is of kind {rule.kind}; give {name}")


def features_of(fit: Fit, entropy: Any, log_n: Any, zeros: Callable[[], Any]) -> Features:
    """The arguments of beta of a fit; zeros, a number for each row, if beta depends on neither."""
    if not fit.ignores_inputs:
        return Features(entropy, log_n)
    none = zeros()
    return Features(none, none)


def head_numbers(
    fit: Fit, shape: tuple[int, ...], head_axis: int
) -> tuple[tuple[float, ...], ...] | None:
    """The numbers of each head along an axis of an array, (numbers, heads); None if heads agree.

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


def require_last_axis(fit: Fit, name: str, axis: Any, ndim: int) -> None:
    """Raises CoefficientsError if a fit per head is applied along an axis other than the last."""
    if fit.has_heads and axis not in (-1, (-1,), ndim - 1):
        raise CoefficientsError(
            f"{fit.reference} has an entry per head, and {name} is {axis!r}; "
            f"give logits (..., heads, queries, items) and {name}=-1"
        )


def beta_at(x: Features, table: Any, fit: Fit, xp: Any) -> Any:
    """beta of a fit, as its kind has it, of the shape of x; 1 for heads that it does not name.

    Args:
      x: of a fit that ignores its inputs, zeros: beta takes its shape and dtype from them.
      table: `head_numbers` as an array that broadcasts, (numbers, heads, 1, ...); None: all alike.
      xp: the arrays' namespace: numpy, jax.numpy or torch.
    """
    coefficients, domain, rule, named = _by_head(table, fit)
    if rule.kind == CONSTANT:
        coefficients = [x.either + coefficients[0]]
    beta = beta_of(*x, coefficients, domain, rule, xp)
    return beta if named is None else xp.where(named, beta, 1.0)


def slope_at(x: Features, beta: Any, table: Any, fit: Fit, xp: Any) -> Any:
    """d beta / dH of a fit whose beta depends on the entropy, where `beta_at` gives beta."""
    coefficients, domain, rule, named = _by_head(table, fit)
    slope = slope_of(*x, beta, coefficients, domain, rule, xp)
    return slope if named is None else xp.where(named, slope, 0.0)


def _by_head(table: Any, fit: Fit) -> tuple[Any, Any, Rule, Any]:
    """Coefficients, domain, rule, and which heads have an entry; None if all heads are alike."""
    if table is None:
        entry = fit.entries[0]  # `head_numbers` refuses fits with several
        return entry.coefficients, entry.domain, fit.rule, None
    rule, rows = fit.rule, list(table)
    n = N_COEFFICIENTS[rule.kind]
    last = n + N_DOMAIN[rule.kind]
    if len(rows) > last + 1:
        min_entropy, min_beta, max_beta = rows[last + 1 :]
        rule = Rule(min_entropy, min_beta, max_beta, rule.outside, rule.kind)
    return rows[:n], rows[n:last], rule, rows[last] == 1
