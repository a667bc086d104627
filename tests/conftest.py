"""Shared by several tests: a head made of numbers, and fits with known behaviour."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest

# Before any library is loaded, which reads these. One thread a process: two processes share two
# cores. What one process has compiled, the others load.
for name in ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HF_HUB_OFFLINE"):
    os.environ.setdefault(name, "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = TemporaryDirectory(prefix="compiled-")  # removed when this process ends
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import calibrate  # noqa: E402
from calibrate.core.rule import ENTROPY_AND_SIZE, RuleForm  # noqa: E402
from calibrate.report import plot_style  # noqa: E402
from calibrate.rows.collection import RowCollection  # noqa: E402
from calibrate.rows.manifest import manifest_text, read_manifest  # noqa: E402
from calibrate.store.entries import Entry  # noqa: E402
from calibrate.store.fit import Fit  # noqa: E402

plot_style.DPI = 40


# Modules that tests import, and the package of an extra that each needs.
NEEDS = {
    "calibrate.transformers": "transformers",
    "clrs_text_task": "transformers",
    "deployed_matching": "transformers",
    "deployed_reactions_head": "transformers",
    "gguf": "gguf",
    "huggingface_hub": "huggingface_hub",
    "llama_cpp": "xllamacpp",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "peft": "peft",
    "rule_families": "torch",
    "tabular_model": "transformers",
    "test_encoding": "transformers",
    "tiny_causal": "transformers",
    "torch": "torch",
    "transformers": "transformers",
    "two_queries_task": "transformers",
}
LACKING = {module: package for module, package in NEEDS.items() if find_spec(package) is None}


def pytest_report_header():
    lacking = ", ".join(sorted(set(LACKING.values())))
    return f"left out: tests that need {lacking}" if lacking else None


def pytest_ignore_collect(collection_path):
    """Tests that import what is not installed are left out."""
    if LACKING and collection_path.suffix == ".py":
        imports = rf"^(import|from) ({'|'.join(LACKING)})\b"
        return re.search(imports, collection_path.read_text("utf-8"), re.MULTILINE) is not None
    return None


class ToyBatch(NamedTuple):
    logits: np.ndarray
    target: np.ndarray


class ToyHead:
    """Logits of a noisy scorer: the target has the highest value before noise is added.

    `spoil` may put anything into the logits of a batch, to play a broken head.
    """

    name = "toy"

    def __init__(self, noise: float = 0.5, spoil=None):
        self.noise = noise
        self.spoil = spoil
        self.fingerprint = f"sha256:toy-{noise}"
        self.attended = 0

    def sample(self, seed, size, count):
        rng = np.random.default_rng(seed)
        value = rng.uniform(0, 6, (count, size))
        logits = value + self.noise * rng.standard_normal((count, size))
        logits = logits.astype(np.float32)
        if self.spoil:
            self.spoil(logits)
        return ToyBatch(logits, value.argmax(axis=1).astype(np.int32))

    def attend(self, batch):
        self.attended += len(batch.target)
        return batch

    def correct(self, attended, weights):
        return np.asarray(weights).argmax(axis=1) == attended.target


def bytes_of(folder) -> dict[str, bytes]:
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def reopen(folder: Path, *lost: str) -> None:
    """Makes a collection of rows an unfinished one, without the shards that are lost."""
    configuration = read_manifest(folder, RowCollection).configuration
    text = manifest_text(RowCollection, configuration, None)
    (folder / "manifest.json").write_text(text)
    for name in lost:
        (folder / name).unlink()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test starts in an empty folder: no ./fits, ./runs or $CALIBRATE_FITS of the user's."""
    monkeypatch.delenv("CALIBRATE_FITS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def toy_head():
    return ToyHead()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a random Llama and its tokenizer; no test changes it."""
    from tiny_causal import causal_model, save

    return save(tmp_path_factory.mktemp("models") / "tiny", causal_model())


@pytest.fixture
def paper():
    return calibrate.load("paper")


@pytest.fixture
def make_fit():
    """A function that makes a fit of a polynomial; its keywords are guards of the rule."""

    def make(powers=(0.0, 0.0, 0.0, 1.0, 1.0), domain=(0.2, 4.0), name="made", **guards):
        return Fit(RuleForm(**guards), (Entry(powers, domain),), name=name)

    return make


@pytest.fixture
def constant():
    """beta = 1.75."""
    return Fit(RuleForm.constant(), (Entry((1.75,)),), name="constant")


@pytest.fixture
def by_size():
    """beta = 0.5 log n + 0.6, made of sets of 16 to 1,024 items."""
    entry = Entry((0.5, 0.6), (float(np.log(16)), float(np.log(1024))))
    return Fit(RuleForm.log_size(), (entry,), name="by-size")


@pytest.fixture
def by_both():
    """A rule of entropy and size, made of sets of 16 to 1,024 items; it rises with both."""
    powers = (-0.002, 0.02, -0.1, 0.4, 0.2, -0.05, -0.01, 0.4)
    entry = Entry(powers, (0.2, 5.0, float(np.log(16)), float(np.log(1024))))
    return Fit(RuleForm(min_entropy=0.0, kind=ENTROPY_AND_SIZE), (entry,), name="by-both")
