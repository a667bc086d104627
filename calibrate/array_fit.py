"""`calibrate.fit`: a fit of logits in memory, with its verdict on held-out rows."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from calibrate.datasets.given_arrays import numpy_columns
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_quality import count_bad
from calibrate.defaults import MIN_BETA_LIMIT, NLL_TOLERANCE
from calibrate.errors import CalibrateError
from calibrate.evidence.baselines import chosen_kind
from calibrate.evidence.evidence import Evidence
from calibrate.evidence.verdict import judge
from calibrate.fitting.fit_collection import fit_collection
from calibrate.fitting.fitted_baselines import baselines_on_logits
from calibrate.fitting.groups import HELD_OUT, Split, hold_out
from calibrate.fitting.options import LIKELIHOOD, Options
from calibrate.report.gains_table import GainsTable, gains_table
from calibrate.report.labels import described
from calibrate.report.sentences import require_gain, sentences
from calibrate.rows.collect import collect_in_memory
from calibrate.rows.score_logits import score_logits
from calibrate.store.coefficients import Coefficients, register_with_jax
from calibrate.store.publishing import check_name

THIS_FIT = "this fit"  # what a verdict and a table call it


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Fit(Coefficients):
    """Coefficients, as `calibrate.load` gives them, with their scores on rows held out.

    It equals what was loaded from its file, and works wherever that does.
    """

    evidence: Evidence  # on held-out rows, THIS_FIT beside other rules
    held_out: np.ndarray  # (rows,) bool: the test split
    refitted_to: int | None = None  # number of rows, if all were fitted after the verdict

    @classmethod
    def of(
        cls,
        coefficients: Coefficients,
        evidence: Evidence,
        held_out: np.ndarray,
        refitted_to: int | None = None,
    ) -> "Fit":
        """Coefficients with their evidence."""
        given = {x.name: getattr(coefficients, x.name) for x in fields(Coefficients) if x.init}
        return cls(**given, evidence=evidence, held_out=held_out, refitted_to=refitted_to)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Coefficients):
            return NotImplemented
        return (self.rule, self.entries) == (other.rule, other.entries)

    __hash__ = Coefficients.__hash__

    @property
    def verdict(self) -> str:
        """A sentence: whether the target becomes more probable on the rows held out, and how."""
        text = " ".join(sentences(self.evidence, THIS_FIT))
        if self.refitted_to is None:
            return text
        words = described(self)
        return f"{text} Coefficients were then refitted to all {self.refitted_to:,} rows: {words}."

    @property
    def outcome(self) -> str:
        """The verdict in a word: "gain", "loss" or "no difference" in log-likelihood (significant).

        Or "unknown", of too few rows held out, or groups of them, for an error.
        """
        return judge(self.evidence, THIS_FIT).outcome

    @property
    def candidates(self) -> dict[str, dict[str, Any]]:
        """Records of the kinds of rules that were compared, by kind.

        Each has `coefficients` and `domain` as in a file of that kind. The others are of held-out
        folds: the means `log_p` (nats) and `p`, and the `gain` over the baseline with its interval
        from `low` to `high` (nats). All are fitted with the q that was given; a polynomial by least
        squares stands beside a constant by maximum likelihood. Of rows that name heads, there are
        the means of `log_p` and `gain` alone, over the heads that some kind could be fitted to; a
        head that another kind could not be fitted to has a gain of 0 by it.
        """
        found: dict[str, dict[str, Any]] = {}
        for record in self.quality.get("candidates", []):
            found.setdefault(record["kind"], dict(record))
        return found

    @property
    def table(self) -> GainsTable:
        """Gains over the baseline by set size on the rows held out, beside other rules.

        The largest constant is beta = 64. Each record is (size, rows, rule, log_p, p, gain, error).
        """
        return gains_table(self.evidence, THIS_FIT)

    def __repr__(self) -> str:
        return f"<Fit {self.reference}: {self.verdict}>"


register_with_jax(Fit)


Array = Any  # what numpy.asarray takes, or a tensor of PyTorch


def fit(
    logits: Array | Sequence[Array],
    target: Array | Sequence[Array],
    mask: Array | Sequence[Array] | None = None,
    *,
    group: Array | Sequence[Array] | None = None,
    weight: Array | Sequence[Array] | None = None,
    layer: Array | Sequence[Array] | None = None,
    head: Array | Sequence[Array] | None = None,
    kind: str = "auto",
    loss: str = LIKELIHOOD,
    rows: str = "all",
    q: float = 0.0,
    trained_up_to: int | None = None,
    tolerance: float = NLL_TOLERANCE,
    min_entropy: float = 0.0,
    min_beta: float = MIN_BETA_LIMIT,
    held_out: float = HELD_OUT,
    refit: bool = False,
    seed: int = 0,
    name: str = "arrays",
) -> Fit:
    """A rule beta fitted to 80 % of the rows of logits, and evaluated on the others.

        import calibrate
        import numpy as np

        rng = np.random.default_rng(0)  # replace by your logits and targets
        score = rng.uniform(0, 6, (2000, 64))
        logits = score + 0.5 * rng.standard_normal(score.shape)
        target = score.argmax(axis=1)

        fit = calibrate.fit(logits, target)
        print(fit.verdict)
        print(fit.table)
        probs = calibrate.adaptive_softmax(logits, fit)
        fit.save("mine.json")  # calibrate.load("./mine.json") reads it

    As `calibrate run --logits` on a file of the same arrays, and in memory. The kind of rule is
    chosen by scores on five folds; see `calibrate fit --help`.

    Args:
      logits: (rows, n) float, the scores before softmax, -inf where masked; or, if n differs, a
        list of such arrays, and lists as long of the others, or a list of rows, (n,) each. Tensors
        of PyTorch will do, too.
      target: (rows,) int, the position that should win; or (rows, n) bool, where several may.
      mask: (rows, n) or (n,) bool, True for real items.
      group: (rows,) int, the prompt, or whatever makes rows dependent; each its own if None.
      weight: (rows,) float, of a row among those of its size; 1 if None.
      layer, head: (rows,) int, the head of each row: each head then gets a rule of its own. Or
        (heads,) int, of logits (heads, rows, n); arrays that lack this axis are of all heads.
      kind: of rule: "constant", "log-size", "polynomial" or "entropy-and-size"; "auto" is the
        simplest that no other is significantly better than. One that is named is returned whatever
        its verdict.
      loss: "likelihood"; or, of a polynomial, "log-least-squares" or "least-squares": squares of
        log p(H) - log beta or of p(H) - beta, beta being the optimum of each row.
      rows: "all", or "misranked": those that are fitted.
      q: exponent of the generalised cross-entropy, from 0 (maximum likelihood) to 1 (mean p).
      trained_up_to: set size up to which log p may fall by no more than the tolerance, in the mean
        of the rows held out at each size; else there is no fit.
      tolerance: NLL that may be lost there, nats.
      min_entropy: nats, up to which beta is 1; 0 is no threshold.
      min_beta: the least beta of a rule, from 1/64 to 1; 1 makes none more diffuse than softmax.
      held_out: share of the groups that are held out for the verdict.
      refit: after the verdict, fit the coefficients of the same kind of rule to all rows, held-out
        ones included; of one rule, without `layer` and `head`.
      seed: which groups those are.
      name: of the fit.
    Returns:
      Fit: Coefficients with .verdict, .outcome, .table, .save(path) and .held_out.
    Raises:
      CalibrateError: arrays of another shape, dtype or range.
      QualityError: too few rows, more than 1 % of bad ones (NaN, +inf or a masked target), logits
        without information about the targets (beta at 1/64, argmax no better than a guess), no
        rule that beats the baseline by 0.01 nats and significantly, or one that does not do so on
        the rows held out; the last two not of a kind that is named.
    Warns:
      UserWarning: rows that were left out, more than 262,144 rows, a beta at its bound, or numbers
        that look like probabilities.
    """
    check_name(name)
    options = Options(
        rows,
        min_entropy,
        q=q,
        trained_up_to=trained_up_to,
        tolerance=tolerance,
        kind=None if kind == "auto" else kind,
        min_beta=min_beta,
        loss=loss,
    ).checked()
    columns = {
        "logits": logits,
        "target": target,
        "mask": mask,
        "layer": layer,
        "head": head,
        "weight": weight,
        "group": group,
    }
    arrays = Arrays.in_memory(name, numpy_columns(columns))
    if refit and (layer is not None or head is not None):
        raise CalibrateError("refit=True fits one rule; leave it out with layer and head")
    fitted = _fit(hold_out(arrays, held_out, seed), options, name)
    return _refit(fitted, arrays, options) if refit else fitted


def _fit(split: Split, options: Options, name: str) -> Fit:
    collection = collect_in_memory(split.fitted)
    result = fit_collection(collection, name, options)
    coefficients = result.coefficients
    fits = {THIS_FIT: coefficients, **baselines_on_logits(result.rows, result.selection)}
    evidence = score_logits(split.held_out, fits)
    if options.kind is None:
        require_gain(evidence, THIS_FIT)
    bad = sum(map(count_bad, collection.manifest["sizes"])) + count_bad(evidence.of.left_out)
    if bad:
        warnings.warn(
            f"{bad:,} of {split.fitted.bad['rows']:,} rows are left out: they have NaN, +inf or a "
            "masked target",
            stacklevel=4,  # of the caller of `fit`, which is decorated
        )
    return Fit.of(coefficients, evidence, split.is_held_out)


def _refit(fitted: Fit, arrays: Arrays, options: Options) -> Fit:
    """The same kind of rule fitted to all rows, with the verdict on those that were held out."""
    collection = collect_in_memory(arrays)
    options = options._replace(kind=chosen_kind(fitted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first fit has warned of the same rows
        result = fit_collection(collection, fitted.name, options)
    n_rows = len(fitted.held_out)
    return Fit.of(result.coefficients, fitted.evidence, fitted.held_out, n_rows)
