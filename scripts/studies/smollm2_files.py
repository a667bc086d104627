"""The folders that the studies of SmolLM2 share; the step `get` of smollm2.py makes the model."""

from pathlib import Path

RUNS = Path(__file__).parents[2] / "runs" / "smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL = RUNS / MODEL_NAME
