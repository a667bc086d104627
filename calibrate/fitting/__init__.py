"""Fits to solved rows, as one algorithm. The way of the rows of a head through `calibrate fit`,
each step on the results of those before it (6 calls 5, 5 calls 2 and 4, and 4 calls 3):

 1. `fit_collection.fit_collection` has the shards of a collection (`LogitRows`) solved:
    `solver.solved_rows.Rows`, with the optimal beta and the likelihood profile of every row.
 2. `groups.deal_into_blocks` leaves out rows without weight or optimum, and gives the others a
    block.
 3. `pooled_rows.pool_rows` adds rows up by block and cell (`Pool`), for a likelihood with some q.
 4. `fit_rule.fit_rule(rows, kind, loss)` fits one `core.rule_kinds.RuleKind`: by
    maximum likelihood (`maximum_likelihood`, `multistart`, `constrained_newton`), or by least
    squares (`least_squares`, `fit_polynomial`).
 5. `cross_validate.cross_validate` fits every kind to the `RowsInFolds`, and scores each on rows
    that folds leave out: a `Candidate`, whose scores are `evidence.evidence.Evidence`.
 6. `select.select_simplest` takes the simplest kind that no other is significantly better than
    (`evidence/selection_criterion.py`); `select.select_rule` adds the selection of q, the verdict
    (`verdict_of_fit`), or the reason why no rule is published (`refusal`): a `Selection`.
 7. `quality_of_fit.quality_of_fit` is the evidence of a file: also standard errors, of fits to
    resamples of the blocks (`bootstrap`).
 8. `fit_result.with_metadata` adds it, options and origin, and the command writes the file:
    `store.publishing.publish`.

A cell is a range of entropies of one set size. Least squares fit one kind, and select nothing:
`select.polynomial_beside_constant` goes from 4 and 5 to 7. `per_head` goes from 2 to 6 for every
head. Rows that are solved begin at 2, by `fit_collection.fit_solved`.
"""
