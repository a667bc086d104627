"""A forecast of the passes through the model that an optimizer makes, for its progress bar.

It counts what `HeadRuleOptimizer` does at most: an early stop or a cached result makes it less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from calibrate.model.batches import NO_PASSES, Passes
from calibrate.model.calibration_and_validation import Calibration, Validation
from calibrate.model.interpolation_search import MAX_TRIALS
from calibrate.model.natural_gradient import NaturalGradient
from calibrate.model.parameters import RuleFamily
from calibrate.model.proximal_adam import n_checks


@dataclass(frozen=True, eq=False)
class PassForecast:
    """Passes that families of rules take at most."""

    calibration: Calibration
    validation: Validation
    natural_gradient: NaturalGradient
    is_searched: bool  # an interpolation weight is searched for
    is_refitted: bool  # with few heads of each layer, after all of them
    n_prunings: int  # tries to prune heads

    def of_families(self, families: Sequence[RuleFamily]) -> Passes:
        """The passes of some families, but for derivatives that they share."""
        passes = Passes()
        for family in families:
            if self.natural_gradient.suits(family):
                passes += Passes(self._units(self.validation.answers) + self._trials())
            else:
                passes += self.of_search(family) + self.of_second_search(family)
        return passes

    def of_search(self, family: RuleFamily) -> Passes:
        """The passes of one search by proximal Adam."""
        n_ascents = 2 if self.is_refitted and not family.is_global else 1
        n_scored = 2 + n_ascents * n_checks(self.calibration.max_steps)
        n_scored += 0 if family.is_global else self.n_prunings + n_ascents - 1
        answers = self._units(self.validation.answers) * n_scored
        gradients = list(self.calibration.batches()) * n_ascents
        return Passes([*answers, *self._trials()], gradients)

    def of_second_search(self, family: RuleFamily) -> Passes:
        """The passes of a second search by proximal Adam, if there may be one."""
        may_be = not self.natural_gradient.suits(family) and family.may_begin_again
        return self.of_search(family) if may_be else NO_PASSES

    def _trials(self) -> list[list[int]]:
        """The examples of the passes of one search of an interpolation weight."""
        if not self.is_searched:
            return []
        return self._units(self.validation.constrained) * MAX_TRIALS

    def _units(self, indices: list[int]) -> list[list[int]]:
        return self.validation.objective.examples.units(indices)
