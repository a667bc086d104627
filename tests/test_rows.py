"""Collections of rows on disk: forged shards and manifests, and the fit of an unfinished one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ToyHead

from calibrate.errors import CalibrateError
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
def test_a_forged_shard_is_refused(here, forgery):
    forge(**FORGERIES[forgery]())
    with pytest.raises(CalibrateError, match=r"n00016-unit00001.npz"):
        list(open_collection(Path("run"), RowCollection).shards())


def test_a_manifest_with_other_heads_is_another_collection(run):
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["configuration"]["heads"] = [[0, head] for head in range(1_000)]
    (run / "manifest.json").write_text(json.dumps(manifest))
    message = r"heads .*\[\[0, 0\], .* None "
    with pytest.raises(CalibrateError, match=message) as no:
        collect_from_head(ToyHead(), [16, 64], 300, 0, run)
    assert len(str(no.value)) < 500
