"""The inverse temperature beta of a fit, per head, in arrays of NumPy, JAX or PyTorch.

`core/rule.py` has the equation for one rule. Here it meets the entries of a fit: softmax and
attention of every backend call `beta_at`, and gradients `slope_at`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from calibrate.core.rule import CONSTANT, N_COEFFICIENTS, N_DOMAIN, RuleForm, beta_of, slope_of
from calibrate.errors import CoefficientsError
from calibrate.store.fit import Fit


class Features(NamedTuple):
    """The arguments of beta, arrays of one shape; None for one on which it does not depend."""

    entropy: Any
    log_n: Any  # may be one number for all rows beside an entropy, if heads do not differ

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
    for name, is_used, value in (
        ("H, the entropy of the items", rule.by_entropy, H),
        ("n=, the number of unmasked items", rule.by_size, n),
    ):
        if is_used and value is None:
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
    """beta of a fit, of the shape of x; 1 for heads without an entry.

    Args:
      x: see `features_of`. Where the fit ignores its inputs these are zeros, from which beta takes
        its shape and dtype.
      table: `head_numbers` as an array that broadcasts, (numbers, heads, 1, ...); None if heads
        agree.
      xp: the namespace of the arrays; see `beta_of`.
    """
    coefficients, domain, rule, has_entry = _rule_of_heads(table, fit)
    if rule.kind == CONSTANT:
        coefficients = [x.either + coefficients[0]]  # x is zeros: gives beta the rows' shape
    beta = beta_of(*x, coefficients, domain, rule, xp)
    return beta if has_entry is None else xp.where(has_entry, beta, 1.0)


def slope_at(x: Features, beta: Any, table: Any, fit: Fit, xp: Any) -> Any:
    """d beta / dH of a fit whose beta depends on the entropy; beta is that of `beta_at`."""
    coefficients, domain, rule, has_entry = _rule_of_heads(table, fit)
    slope = slope_of(*x, beta, coefficients, domain, rule, xp)
    return slope if has_entry is None else xp.where(has_entry, slope, 0.0)


def _rule_of_heads(table: Any, fit: Fit) -> tuple[Any, Any, RuleForm, Any]:
    """Coefficients, domain and rule, and True for heads with an entry, None if heads agree."""
    if table is None:
        entry = fit.entries[0]  # the only one: else `head_numbers` gives a table, or refuses layers
        return entry.coefficients, entry.domain, fit.rule, None
    rule, rows = fit.rule, list(table)
    n = N_COEFFICIENTS[rule.kind]
    last = n + N_DOMAIN[rule.kind]
    # There are two layouts. `Fit.numbers`, for torch.compile, ends with the guards, so that these
    # are inputs of the program, which then serves many fits. `Fit.by_head` has no guards: those of
    # the fit are constants.
    if len(rows) > last + 1:
        min_entropy, min_beta, max_beta = rows[last + 1 :]
        rule = RuleForm(min_entropy, min_beta, max_beta, rule.outside, rule.kind)
    return rows[:n], rows[n:last], rule, rows[last] == 1
