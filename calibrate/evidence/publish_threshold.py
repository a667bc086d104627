"""Nats of log-likelihood below which no rule is published, and no richer one is preferred."""

MIN_GAIN = 0.01  # nats: a user would not notice less
MIN_IMPROVEMENT = 0.001  # nats, of one kind of rule over a simpler one
# A rule of entropy and size extrapolates to pairs of them that no row had: it needs a larger gain.
MIN_IMPROVEMENT_OF_BOTH = MIN_GAIN


def min_improvement(depends_on_both: bool) -> float:
    """Nats by which a kind of rule, of entropy and size or not, has to lead a simpler one."""
    return MIN_IMPROVEMENT_OF_BOTH if depends_on_both else MIN_IMPROVEMENT
