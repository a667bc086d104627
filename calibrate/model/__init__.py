"""A whole model: its answers to prompts, and the rules of its heads fitted through it.

A prompt is one record at each step of its way:

1. `PromptLine`, a line of a file (`prompts/prompts_file.py`); built-in tasks and text begin at 2.
2. `Example`, its tokens and where the answer starts (`prompts/encoding.py`).
3. `ExampleSet`, all examples (`prompts/make_examples.py`), and on disk the `ExampleCollection` of
   them and the baseline's scores (`collect_examples.py`, `datasets/examples.py`).
4. `TokenBatch`, examples of equal length (`batches.py`), which a `Runner` passes through the model.
5. `Scores` of examples under a rule (`answers.py` of a batch, `scoring.py` of all).
6. `Evidence`, the scores of all rules by question, template and length (`objective.compare`).
"""
