"""Fits through a language model: examples with its scores, and the rules of its heads.

`collect_examples` makes examples (`prompts/make_examples.py`) and scores them under the baseline.
`fit_examples` (`fit.py`) fits the rules of all heads to a collection:

1. `splits.py`: calibration, validation and test split.
2. `runner.py`, `scoring.py`, `transformers_scorer.py`: scores and gradients from passes of batches
   through the model, in this process or in workers.
3. `objective.py`: scores of rules as `Evidence`, and the constraints on rules.
4. `parameters.py`, `options.py`: families of rules, and which of them are solved.
5. `scored_splits.py`, `optimizer.py`, `natural_gradient.py`: the best rules of each family.
6. `acceptance.py`: when a fit is refused.
"""
