"""The study of RULER's tasks: each way to load a fit, in the harness, and the tables."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import transformers
from test_export import constants
from tiny_causal import VOCABULARY, causal_model, save

from calibrate.store.saving import save_to_store

SCRIPT = Path(__file__).parents[1] / "scripts" / "studies" / "ruler.py"
NO_HARNESS = any(importlib.util.find_spec(name) is None for name in ("lm_eval", "wonderwords"))


@pytest.fixture
def study(here):
    """The script as a module that works in the test's folder."""
    spec = importlib.util.spec_from_file_location("ruler", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RUN, module.MODEL = here, here / "model"
    module.PLACES, module.SAMPLES, module.SAMPLES_OF_ROUTES = (("niah_multikey_2", 512),), 3, 2
    module.JOBS = 1
    return module


def test_paired_differences(study):
    right = {"baseline": [0, 0, 1, 1], "constants": [1, 0, 1, 1]}
    cell = {"task": "niah_multikey_2", "length": 512, "tokens": 300.0, "right": right}
    record = {"cells": [cell], "routes": {"samples": 0, "same as the runtime": {}}}
    first, *_ = (x for x in study.markdown(record) if x.startswith("| niah"))
    cells = [x.strip() for x in first.strip("|").split("|")]
    assert cells[:-1] == ["niah_multikey_2", "512", "300", "4", "50.0", "75.0"]
    differences = 100 * (np.array(right["constants"]) - right["baseline"])
    assert cells[-1] == f"+25.0 ± {differences.std(ddof=1) / 2:.1f}"


@pytest.mark.slow
@pytest.mark.skipif(NO_HARNESS, reason="needs lm-eval with RULER")
@pytest.mark.filterwarnings("ignore")
def test_every_step_on_a_tiny_model(study, here, monkeypatch):
    model = causal_model("llama", vocab_size=len(VOCABULARY), max_position_embeddings=1024)
    save(here / "model", model)
    tokenizer = transformers.AutoTokenizer.from_pretrained("model", eos_token="on")
    tokenizer.save_pretrained("model")
    fit, _ = save_to_store(constants(model.config, range(2)), here / "fits")
    study.FIT = fit.reference
    study.export()
    found = study.evaluate()
    (cell,) = found["cells"]
    counts = {rule: len(right) for rule, right in cell["right"].items()}
    assert counts == {"baseline": 3, "constants": 3}
    assert 256 < cell["tokens"] < 512
    answers = [path.stat().st_mtime_ns for path in (here / "ruler").glob("*.db")]
    assert len(answers) == 2

    with monkeypatch.context() as interrupted:
        interrupted.setattr("transformers.GenerationMixin.generate", None)  # answers are known
        assert study.evaluate()["cells"] == found["cells"]

    routes = study.compare_routes()["routes"]
    same = routes["same as the runtime"]
    assert (same["exported folder"], same["runtime"]) == (2, 2)
    assert same["baseline"] < 2
