"""Collections of rows on disk: forged shards and manifests, and the fit of an unfinished one."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import call, refusal
from conftest import ToyHead, reopen

import calibrate
from calibrate.errors import CalibrateError
from calibrate.fitting.fit import fit_collection, open_for_fit
from calibrate.fitting.options import FitOptions
from calibrate.rows.collect import collect_from_head
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.units import UnitSizes
from calibrate.storage.npz import pack_arrays, read_arrays

SHARD = Path("run/n00016-unit00001.npz")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "run"
    collect_from_head(ToyHead(), [16, 64], 300, 0, folder, unit_sizes=UnitSizes(max_sets=128))
    return folder


@pytest.fixture(autouse=True)
def run(here, original):
    return Path(shutil.copytree(original, here / "run"))


def forge(**changes) -> None:
    """Writes a shard with some arrays changed, or left out if None."""
    arrays = read_arrays(SHARD) | changes
    SHARD.write_bytes(pack_arrays({name: x for name, x in arrays.items() if x is not None}))


FORGERIES = {
    "dtype": lambda: {"logits": read_arrays(SHARD)["logits"].astype(np.float64)},
    "shape": lambda: {"logits": read_arrays(SHARD)["logits"][:-1]},
    "group": lambda: {"group": np.zeros(128, np.int32)},
    "more arrays": lambda: {"more": np.zeros(1)},
    "less": lambda: {"entropy": None},
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("status", ["complete", "partial"])
def test_a_forged_shard_is_refused(here, forgery, status):
    forge(**FORGERIES[forgery]())
    if status == "partial":
        reopen(Path("run"))
    with pytest.raises(CalibrateError, match=r"n00016-unit00001.npz"):
        list(open_collection(Path("run"), RowCollection, allow_partial=True).shards())


def test_an_unfinished_collection_is_fitted_if_asked_and_the_fit_says_so(here):
    whole = open_for_fit(Path("run"), allow_partial=True)
    assert whole == open_collection(Path("run"))
    reopen(Path("run"), "n00016-unit00002.npz", "n00064-unit00000.npz")
    message = refusal("fit", "run", "--name", "part")
    assert "--allow-partial" in message
    done = call("fit", "run", "--name", "part", "--allow-partial", "--kind", "constant")
    assert re.search(r"warning: run .*\b4 ", done.stderr)
    found = calibrate.load("part")
    assert found.source["options"]["partial"] is True
    assert "unfinished" in found.verdict
    assert found.evidence["inputs"]["seen"] == 128 + 128 + 128 + 44
    SHARD.unlink()
    with pytest.warns(UserWarning, match=r"^run .*\b3 "):
        fewer = open_for_fit(Path("run"), allow_partial=True)
    assert len({whole.digest, found.source["collection"], fewer.digest}) == 3
    squares = fit_collection(fewer, "paper", FitOptions(loss="least-squares")).fit
    assert squares.source["options"]["partial"] is True
    reopen(Path("run"), *(path.name for path in Path("run").glob("n*.npz")))
    with pytest.raises(CalibrateError, match=r"^run (?!.*allow-partial)"):
        open_for_fit(Path("run"), allow_partial=True)


def test_a_manifest_with_other_heads_is_another_collection(run):
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["configuration"]["heads"] = [[0, head] for head in range(1_000)]
    (run / "manifest.json").write_text(json.dumps(manifest))
    message = r"heads .*\[\[0, 0\], .* None "
    with pytest.raises(CalibrateError, match=message) as no:
        collect_from_head(ToyHead(), [16, 64], 300, 0, run)
    assert len(str(no.value)) < 500
