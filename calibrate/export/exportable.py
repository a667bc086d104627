"""What engines run of a model's rules, before any is fitted."""

from typing import NamedTuple

from calibrate.errors import CalibrateError
from calibrate.export.configuration import exported_configuration, unlike_ministral
from calibrate.export.plan import ALIKE, HEAD, LAYER, Plan
from calibrate.export.proof import prove, queries_without_weights
from calibrate.export.queries import Queries, require_supported
from calibrate.transformers.folders import ModelFolder

_STEPS = {ALIKE: (0.0, 0.0), LAYER: (0.1, 0.0), HEAD: (0.1, 0.01)}  # of a factor, by layer and head


class Exportable(NamedTuple):
    """What engines run of a model.

    Attributes:
      factors: HEAD if each head may have a factor of its own; or LAYER, or ALIKE.
      no_size: why beta may not go by log n; None if it may.
    """

    factors: str
    no_size: str | None = None


def exportable(folder: ModelFolder) -> Exportable:
    """What an export of a model can hold, proved on a small copy.

    Raises:
      CalibrateError: no rule can be exported.
    """
    config = folder.config
    require_supported(config.model_type)
    queries = queries_without_weights(config)

    def apply(of: str) -> str:
        plan = _plan(queries, of)
        queries.changes(plan)
        exported_configuration(config.to_dict(), config, plan)
        return of

    factors, no_size = apply(ALIKE), unlike_ministral(config)
    for of in (LAYER, HEAD):
        try:
            factors = apply(of)
        except CalibrateError:
            break
    prove(config, by_size=no_size is None)
    return Exportable(factors, no_size)


def _plan(queries: Queries, of: str) -> Plan:
    """Factors that differ where they may."""
    by_layer, by_head = _STEPS[of]
    factors = {
        (layer, head): 2 + by_layer * layer + by_head * head
        for layer in queries.layers
        for head in range(queries.n_heads)
    }
    return Plan(factors, 0.0)
