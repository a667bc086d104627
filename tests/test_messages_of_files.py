"""Wording of messages about files: of arrays, of logits, of coefficients; and of their values."""

import copy
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from messages import says

import calibrate
from calibrate.core.rule import Rule
from calibrate.datasets.logits_files import Arrays
from calibrate.errors import CalibrateError, DamagedError
from calibrate.storage.npz import read_arrays, write_arrays
from calibrate.store.coefficient_file import read
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "{here}/fit.json does not exist; check the path"),
        (Path.mkdir, "cannot read {here}/fit.json: Is a directory; check the path"),
        (
            os.mkfifo,
            "cannot read {here}/fit.json: it is not a regular file; check the path",
        ),  # and is never waited for
        (
            lambda path: path.symlink_to("/dev/zero"),
            "cannot read {here}/fit.json: it is not a regular file; check the path",
        ),
        (
            lambda path: (path.touch(), os.truncate(path, 1 << 40)),
            (
                "cannot read {here}/fit.json: it has 1,099,511,627,776 bytes, more than the "
                "limit of 1,048,576; check the path"
            ),
        ),
        (
            lambda path: path.write_text("{}"),
            (
                "{here}/fit.json: the file is not a fit file; give a coefficient file, which "
                "`calibrate fit` writes"
            ),
        ),
    ],
)
def test_a_coefficient_file_that_cannot_be_read(tmp_path, make, message):
    make(tmp_path / "fit.json")
    with says(calibrate.CoefficientsError, message):
        read(tmp_path / "fit.json")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Coefficients(Rule(), (Entry((1.0,) * 3, (0.0, 1.0)),)),
            (
                "entries[0].coefficients are (1.0, 1.0, 1.0); give the 5 of a rule of kind "
                "'entropy-polynomial'"
            ),
        ),
        (
            lambda: Entry((1.0, float("inf")), (0.0, 1.0)),
            "coefficients are (1.0, inf); give finite numbers",
        ),
        (
            lambda: Coefficients(Rule(kind="entropy-and-size"), (Entry((1.0,) * 8, (0.0, 1.0)),)),
            (
                "entries[0].domain is [0.0, 1.0]; give the 4 numbers of a rule of kind "
                "'entropy-and-size'"
            ),
        ),
        (
            lambda: Coefficients(Rule(), (Entry((1.0,) * 5, (0.0, 1.0, 2.0)),)),
            (
                "entries[0].domain is [0.0, 1.0, 2.0]; give the 2 numbers of a rule of kind "
                "'entropy-polynomial'"
            ),
        ),
        (
            lambda: Entry((1.0,) * 8, (0.0, 1.0, 3.0, 3.0)),
            (
                "domain is [0.0, 1.0, 3.0, 3.0]; give lo and hi, 0 <= lo < hi <= 64, in nats of "
                "entropy, in log n, or of both"
            ),
        ),
        (
            lambda: Coefficients(
                Rule(kind="entropy-and-size"), (Entry((1.0,) * 8, (0.0, 1.0, 1.0, 1.0 + 3e-16)),)
            ),
            (
                "entries[0].coefficients are (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0); their "
                "rule is beyond float64, or the domain [0.0, 1.0, 1.0, 1.0000000000000002] is "
                "too narrow for a fit"
            ),
        ),
        (
            lambda: Coefficients(
                Rule(outside="identity", kind="entropy-and-size"),
                (Entry((1.0,) * 8, (0.0, 1.0, 1.0, 2.0)),),
            ),
            "rule.outside is 'identity'; use 'clamp'",
        ),
        (
            lambda: Coefficients(Rule(), (Entry((1.0, 2.0), (0.0, 1.0)),)),
            (
                "entries[0].coefficients are (1.0, 2.0); give the 5 of a rule of kind "
                "'entropy-polynomial'"
            ),
        ),
        (
            lambda: Coefficients(Rule(kind="spline"), (Entry((1.0,) * 5, (0.0, 1.0)),)),
            ("rule.kind is 'spline'; use 'entropy-polynomial' or 'log-size' or 'entropy-and-size'"),
        ),
        (
            lambda: Coefficients(Rule(0.5, kind="log-size"), (Entry((1.0, 2.0), (0.0, 1.0)),)),
            "a log-size rule has no min_entropy; use Rule.log_size()",
        ),
        (
            lambda: Entry((10**400, 0, 0, 0, 1), (0.0, 1.0)),
            (
                "coefficients or domain are not float64 numbers (int too large to convert to "
                "float); give finite numbers"
            ),
        ),
        (
            lambda: Coefficients(Rule(), (Entry((1e308,) * 5, (1.0, 9.0)),)),
            (
                "entries[0].coefficients are (1e+308, 1e+308, 1e+308, 1e+308, 1e+308); their "
                "rule is beyond float64, or the domain [1.0, 9.0] is too narrow for a fit"
            ),
        ),
        (
            lambda: Coefficients(Rule(outside="both"), (Entry((1.0,) * 5, (0.0, 1.0)),)),
            "rule.outside is 'both'; use 'clamp' or 'identity'",
        ),
        (lambda: Coefficients(Rule(), ()), "entries are empty; give one at least"),
    ],
)
def test_impossible_coefficients(build, message):
    with says(calibrate.CoefficientsError, message):
        build()


def saved(save, array) -> bytes:
    buffer = io.BytesIO()
    save(buffer, x=array)
    return buffer.getvalue()


def forged(shape: str, descr: str = "'<f8'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return member(data=b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(80))


def member(name: str = "x.npy", data: bytes = b"", **changes) -> bytes:
    """An npz of one entry, whose place in the directory says something else."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", data or npy(np.arange(4.0)))
        entry = archive.infolist()[0]
        entry.filename = name
        for key, value in changes.items():
            setattr(entry, key, value)
    return buffer.getvalue()


def npy(array) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def twice(data: bytes = npy(np.arange(1000.0)), times: int = 50) -> bytes:
    """Many entries that are all the same bytes: more together than the file has."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", data)
        first = archive.filelist[0]
        for i in range(times):
            entry = copy.copy(first)
            entry.filename = f"x{i}.npy"
            archive.filelist.append(entry)
        archive._didModify = True
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda data: data[:-30],
            (
                "{here}/a.npz is not a readable npz file (File is not a zip file); restore it "
                "from a copy, or write it again"
            ),
        ),
        (
            lambda data: bytes(len(data)),
            (
                "{here}/a.npz is not a readable npz file (File is not a zip file); restore it "
                "from a copy, or write it again"
            ),
        ),
        (
            lambda data: data[:300] + b"\xff" + data[301:],
            (
                "{here}/a.npz is not a readable npz file (<*>); restore "
                "it from a copy, or write it again"
            ),
        ),
        (
            lambda data: forged("(13421772800,)"),
            (
                "{here}/a.npz is not a readable npz file (x.npy declares 107374182400 bytes and "
                "has 80); restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: forged("(10,)", "'|O'"),
            (
                "{here}/a.npz: x is an array of Python objects, which is not read; write an "
                "array of numbers, and rows of different lengths into a file for each length, in "
                "a folder"
            ),
        ),
        (
            lambda data: saved(np.savez, np.array([{"a": 1}], dtype=object)),
            (
                "{here}/a.npz: x is an array of Python objects, which is not read; write an "
                "array of numbers, and rows of different lengths into a file for each length, in "
                "a folder"
            ),
        ),
        (
            lambda data: saved(np.savez_compressed, np.zeros(10**7)),
            (
                "{here}/a.npz: x is compressed; write the file with numpy.savez, not "
                "numpy.savez_compressed"
            ),
        ),
        (
            lambda data: member(data=b"hello"),
            (
                "{here}/a.npz is not a readable npz file (<*>)"
                "; restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: forged("(2,)"),
            (
                "{here}/a.npz is not a readable npz file (x.npy declares 16 bytes and has 80); "
                "restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: forged("(-2, -5)"),
            (
                "{here}/a.npz is not a readable npz file (<*>)"
                "; restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: forged("(" * 3000),
            (
                "{here}/a.npz is not a readable npz file (<*>)"
                "; restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: member(file_size=100 << 30, compress_size=100 << 30),
            (
                "{here}/a.npz is not a readable npz file (its entries declare 107374182400 "
                "bytes, and the file has 288); restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: member(file_size=100 << 30),
            (
                "{here}/a.npz is not a readable npz file (x has another size than it declares); "
                "restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: twice(),
            (
                "{here}/a.npz is not a readable npz file (<*>)"
                "; restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: member("../x.npy"),
            (
                "{here}/a.npz is not a readable npz file ('../x.npy' is not a valid array name); "
                "restore it from a copy, or write it again"
            ),
        ),
        (
            lambda data: twice(times=1).replace(b"x0.npy", b"x.npy\0"),
            (
                "{here}/a.npz is not a readable npz file (<*>)"
                "; restore it from a copy, or write it again"
            ),
        ),
    ],
)
def test_damaged_arrays(damage, message, here):
    npz = here / "a.npz"
    write_arrays(npz, {"x": np.arange(100.0), "layer/y": np.int64(7)})
    npz.write_bytes(damage(npz.read_bytes()))
    with says(DamagedError, message):
        read_arrays(npz)


LOGITS = np.random.default_rng(0).normal(size=(6, 8))
TARGET = LOGITS.argmax(axis=1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"target": None},
            (
                "{here}/mine.npz has the arrays logits; give logits and target, and if need be "
                "mask, layer, head, weight, group"
            ),
        ),
        (
            {"targets": TARGET},
            (
                "{here}/mine.npz has the arrays logits, target, targets; give logits and target, "
                "and if need be mask, layer, head, weight, group"
            ),
        ),
        ({"logits": LOGITS[:0], "target": TARGET[:0]}, "{here}/mine.npz has no rows; give some"),
        (
            {"logits": LOGITS[0]},
            (
                "{here}/mine.npz: logits are float64(8,); give floats (rows, n), n at least 2, "
                "or (heads, rows, n) with the number of each head as head (heads,)"
            ),
        ),
        (
            {"logits": LOGITS > 0},
            (
                "{here}/mine.npz: logits are bool(6, 8); give floats (rows, n), n at least 2, or "
                "(heads, rows, n) with the number of each head as head (heads,)"
            ),
        ),
        (
            {"target": TARGET[:3]},
            "{here}/mine.npz: target is int64(3,); give integers (6,), or bool (6, 8)",
        ),
        (
            {"target": TARGET + 8},
            (
                "{here}/mine.npz: target is <*>, which is not a position in [0, 8); give the "
                "index of the item that should win"
            ),
        ),
        (
            {"mask": np.ones((6, 8))},
            (
                "{here}/mine.npz: mask is float64(6, 8); give bool (6, 8) or (8,), True for real "
                "items"
            ),
        ),
        (
            {"layer": TARGET.astype("<m8[s]")},
            (
                "{here}/mine.npz: layer is timedelta64[s](6,); give integers (rows,) within [0, "
                "32767]"
            ),
        ),
        (
            {"head": np.full(6, -2)},
            "{here}/mine.npz: head has -2 to -2; give integers (rows,) within [0, 32767]",
        ),
        (
            {"group": np.full(6, 2**63, np.uint64)},
            (
                "{here}/mine.npz: group has 9.22337e+18 to 9.22337e+18; give integers (rows,) "
                "within [0, 9.22337e+18]"
            ),
        ),
        (
            {"group": np.ones(6)},
            (
                "{here}/mine.npz: group is float64(6,); give integers (rows,) within [0, "
                "9.22337e+18]"
            ),
        ),
        (
            {"weight": np.ones(5)},
            ("{here}/mine.npz: weight is float64(5,); give floats (rows,) within [0, 3.40282e+38]"),
        ),
        (
            {"weight": np.arange(6) - 1.0},
            "{here}/mine.npz: weight has -1 to 4; give floats (rows,) within [0, 3.40282e+38]",
        ),
        (
            {"weight": np.full(6, 1e39)},
            (
                "{here}/mine.npz: weight has 1e+39 to 1e+39; give floats (rows,) within [0, "
                "3.40282e+38]"
            ),
        ),
        (
            {"logits": np.full((6, 8), 1 / 8)},
            (
                "{here}/mine.npz: logits have rows that are >= 0 and sum to 1, as probabilities "
                "do; give the scores before softmax, or the logarithms of the probabilities"
            ),
        ),
    ],
)
def test_arrays_of_logits(arrays, message, here):
    given = {"logits": LOGITS, "target": TARGET} | arrays
    np.savez("mine.npz", **{k: v for k, v in given.items() if v is not None})
    with says(CalibrateError, message):
        Arrays.read(here / "mine.npz")
