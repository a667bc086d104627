"""Diagnosis: heads whose truth is planted, numbers against plain float64, and what is refused."""

import json
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import reference_solver
from matplotlib.figure import Figure
from typer.testing import CliRunner

from calibrate.cli.main import app
from calibrate.errors import CalibrateError
from calibrate.files.collection import open_collection
from calibrate.files.rows import RowCollection
from calibrate.maths import reference
from calibrate.report import diagnosis_record, plots
from calibrate.report.blocks import as_json
from calibrate.report.diagnosis_record import diagnosis_result
from calibrate.report.plot_style import png
from calibrate.rows import diagnosis as pipeline
from calibrate.rows import head_verdict
from calibrate.rows.collect import collect_arrays
from calibrate.rows.diagnosis import diagnose
from calibrate.rows.head_verdict import FEW, NOT_WORTH, ROBUST, SINK, WORTH
from calibrate.rows.logits_files import Arrays
from calibrate.rows.solved_rows import concatenate_rows

SIZES, PER_SIZE = (16, 64, 256), 150
BOUNDED, GROWING, RANDOM, SHARP, RESTING, SHORT = KINDS = (
    (0, 0), (0, 1), (0, 2), (3, 0), (0, 3), (3, 2),
)  # fmt: skip


def planted(kind, n, rng):
    """(rows, n) logits and (rows,) targets of a head with that truth, of some size."""
    count = 10 if kind == SHORT else PER_SIZE
    target, at = rng.integers(0, n, count), np.arange(count)
    z = rng.uniform(-1, 1, (count, n))
    if kind in (BOUNDED, SHORT):
        z[at, target] = rng.uniform(0.8, 3, count)  # now and then it is misranked
    elif kind == GROWING:
        z[at, target] = 6 + np.log(n)
    elif kind == SHARP:
        z[at, target] = 40
    elif kind == RESTING:
        z[:, 0] = 4 + np.log(n)
    return z.astype(np.float32), target


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Files of six planted heads, one for each set size."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("planted") / "model"
    folder.mkdir()
    for n in SIZES:
        parts = [(*planted(kind, n, rng), kind) for kind in reversed(KINDS)]
        z, target = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        # Three masked items, before every other row and after the rest.
        after = np.pad(z, [(0, 0), (0, 3)], constant_values=-np.inf)
        before = np.arange(len(z)) % 2 == 0
        np.savez(
            folder / f"{n}.npz",
            logits=np.where(before[:, None], np.roll(after, 3, axis=1), after),
            target=target + 3 * before,
            layer=np.concatenate([np.full(len(t), kind[0]) for _, t, kind in parts]),
            head=np.concatenate([np.full(len(t), kind[1]) for _, t, kind in parts]),
        )
    return folder


@pytest.fixture(scope="module")
def collection(logged, tmp_path_factory):
    return collect_arrays(Arrays(logged), tmp_path_factory.mktemp("runs") / "planted")


@pytest.fixture(scope="module")
def found(collection):
    return diagnose(collection, eps=0.25)


@pytest.fixture(scope="module")
def heads(found):
    return {(head.layer, head.head): head for head in found.heads}


def collected(folder, **arrays):
    """A collection of arrays; nobody says whose they are."""
    np.savez("logged.npz", **arrays)
    return collect_arrays(Arrays(Path("logged.npz")), Path(folder))


def test_planted_heads_get_their_verdicts(heads):
    words = {key: head.verdict.word for key, head in heads.items()}
    assert words == {
        BOUNDED: WORTH, GROWING: ROBUST, RANDOM: NOT_WORTH, SHARP: ROBUST, RESTING: SINK,
        SHORT: FEW,
    }  # fmt: skip
    assert heads[RESTING].verdict.reason.startswith(
        "sink: 98% of its attention is on the first item"
    )
    assert {key for key, head in heads.items() if head.sink} == {RESTING}
    assert heads[SHORT].verdict.reason.startswith("too few rows (30)")


def test_commitment_grows_as_planted(heads):
    assert heads[BOUNDED].slope == pytest.approx(0, abs=0.15)
    assert heads[RANDOM].slope == pytest.approx(0, abs=0.05)
    assert heads[GROWING].slope == pytest.approx(1, abs=0.05)
    assert heads[SHARP].slope == pytest.approx(1, abs=1e-3)


def test_heads_are_ranked_by_gain_and_those_of_few_rows_are_last(found):
    assert found.heads[0].verdict.word == WORTH
    assert found.heads[-1].verdict.word == FEW
    ranked = [head.headroom.gain for head in found.heads[:-1]]
    assert ranked == sorted(ranked, reverse=True)


def rows_of(collection, key):
    """(size, logits, target) of every row of a head, in float64."""
    for size, shard in collection.shards():
        mine = slice(None) if key is None else (shard.layer == key[0]) & (shard.head == key[1])
        for z, t in zip(shard.logits[mine].astype(float), shard.target[mine], strict=True):
            yield size, z, t if np.ndim(t) else np.arange(len(z)) == t


def log_p_of(z, target, betas):
    """log of the targets' mass, (betas,)."""
    p = reference.softmax(np.broadcast_to(z, (len(betas), len(z))), beta=betas[:, None])
    return np.log(p[:, target].sum(axis=1))


def check_against_plain_formulas(head, rows, eps):
    """Every number of a head, row by row, in float64."""
    n = np.array([np.isfinite(z).sum() for _, z, _ in rows])
    H = np.array([reference.entropy(z) for _, z, _ in rows])
    size = np.array([size for size, _, _ in rows])
    on_top = np.array([z.argmax() in np.flatnonzero(t) for _, z, t in rows])
    assert head.rows == len(rows)
    assert head.slope == pytest.approx(np.polyfit(np.log(n), np.log(n) - H, 1)[0], abs=1e-5)
    assert head.on_top == pytest.approx(on_top.mean())
    last = size == head.largest
    n_star = []
    for _, z, t in rows:
        z, t = z[np.isfinite(z)], t[np.isfinite(z)]
        n_star.append(t.sum() + (1 / eps - 1) * np.exp(z[t]).sum() / np.exp(z[~t]).mean())
    assert head.dispersal == pytest.approx(np.median(np.array(n_star)[last]), rel=1e-5)
    assert [at.size for at in head.sizes] == sorted(set(size))
    for at in head.sizes:
        mine = size == at.size
        assert at.entropy == pytest.approx(H[mine].mean(), abs=1e-5)
        assert at.entropy_spread == pytest.approx(H[mine].std(), abs=1e-5)
        assert at.on_top == pytest.approx(on_top[mine].mean())
    betas = np.geomspace(1, 64, 97)
    log_p = np.array([log_p_of(z, t, betas) for _, z, t in rows])
    by_size = {s: log_p[size == s] for s in np.unique(size)}  # each of 100 rows or more
    curve = np.mean([part.mean(axis=0) for part in by_size.values()], axis=0)
    room = head.headroom
    assert room.plain == pytest.approx(curve[0], abs=1e-3)
    assert np.interp(np.log(room.beta), np.log(betas), curve) == pytest.approx(
        curve.max(), abs=1e-3
    )
    assert room.ceiling == pytest.approx(
        np.mean([part.max(axis=1).mean() for part in by_size.values()]) - curve[0], abs=2e-3
    )
    constant = dict(room.gains)["constant"]
    # Half of the rows choose another constant than all of them: it gains a little less.
    assert constant.mean == pytest.approx(curve.max() - curve[0], rel=0.05, abs=0.01)
    assert constant.mean < curve.max() - curve[0] + 1e-3


def test_numbers_are_those_of_plain_formulas(collection, heads):
    for key in (BOUNDED, RANDOM):
        check_against_plain_formulas(heads[key], list(rows_of(collection, key)), eps=0.25)
    beta = [
        reference_solver.optimal_beta(z, int(t.argmax()))
        for _, z, t in rows_of(collection, BOUNDED)
    ]
    interior = [b for b in beta if 0 < b < np.inf]
    assert heads[BOUNDED].shares["sharp"] == pytest.approx(np.mean(np.isinf(beta)))
    assert heads[BOUNDED].shares["interior"] == pytest.approx(len(interior) / len(beta))


def test_sets_of_targets_masks_and_no_name():
    """Any of three may win; rows of 40 to 64 real items."""
    rng = np.random.default_rng(1)
    n = rng.integers(40, 65, 240)
    mask = np.arange(64) < n[:, None]
    z = rng.uniform(-1, 1, (240, 64))
    z[:, 5:8] += rng.uniform(0, 2, (240, 1))
    target = np.zeros((240, 64), bool)
    target[:, 5:8] = True
    found = diagnose(collected("run", logits=z, target=target, mask=mask), eps=0.25)
    (head,) = found.heads
    assert (head.name, head.layer, head.head) == ("logged", None, None)
    check_against_plain_formulas(head, list(rows_of(found.collection, None)), eps=0.25)


@pytest.fixture(scope="module")
def measured(collection):
    """The rows of one head, one part for each size."""
    parts = [pipeline._measure(0.5, size, shard) for size, shard in collection.shards()]
    return [part.take(part.rows.is_of(*BOUNDED)) for part in parts]


def test_one_set_size_has_no_slope(measured):
    head = pipeline._diagnose_head(measured[0], "it")
    assert head.slope is None
    assert head.verdict.word == WORTH
    assert "per unit of log n" not in head.verdict.reason
    assert {gain.kind for gain in head.headroom.gains} == {"constant", "polynomial"}


def test_a_target_that_never_disperses_has_no_size(measured, found, here):
    never = measured[0]._replace(dispersal=np.full(PER_SIZE, np.inf))
    head = pipeline._diagnose_head(never, "it")
    assert head.dispersal is None
    json.dumps(as_json(diagnosis_result(found._replace(heads=[head]), here, [])), allow_nan=False)


def test_the_largest_size_has_twenty_rows(measured):
    for count, largest in ((19, 64), (20, 256)):
        last = measured[2].take(np.arange(PER_SIZE) < count)
        rows, *columns = zip(*measured[:2], last, strict=True)
        all_rows = pipeline.Measured(concatenate_rows(rows), *map(np.concatenate, columns))
        assert pipeline._diagnose_head(all_rows, "it").largest == largest


def test_one_shard_is_in_memory_at_a_time(collection, monkeypatch):
    shards, alive = RowCollection.shards, []

    def watched(self, heads):
        for size, shard in shards(self, heads):
            assert all(seen() is None for seen in alive)
            alive.append(weakref.ref(shard))
            yield size, shard
            del shard

    monkeypatch.setattr(RowCollection, "shards", watched)
    diagnose(collection)
    assert len(alive) == len(SIZES)


def call(*arguments, code=0):
    done = CliRunner().invoke(app, ["diagnose", *map(str, arguments)])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


@pytest.mark.slow
def test_table_record_and_figures_say_the_same(collection, here):
    shutil.copytree(collection.folder, "runs/model")
    done = call("runs/model")
    record = json.loads(Path("runs/model-diagnosis/diagnosis.json").read_text())
    assert "1 of 6 worth calibrating" in done.stdout
    lines = done.stdout.splitlines()
    for head in record["heads"]:
        assert f"  {head['name']}: {head['verdict']['reason']}" in lines
    assert "calibrate fit runs/model --name NAME" in done.stdout
    assert sorted(path.name for path in Path("runs").iterdir()) == ["model", "model-diagnosis"]
    names = {Path(path).name for path in record["figures"]}
    assert names == {"entropy.png"}
    for path in record["figures"]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def undrawn(monkeypatch):
    """No figures: they take most of the time."""
    monkeypatch.setattr(diagnosis_record, "save_figure", lambda path, figure: None)


def test_a_head_without_rows_is_counted(collection, here, undrawn):
    shutil.copytree(collection.folder, "run")
    manifest = json.loads(Path("run/manifest.json").read_text())
    manifest["configuration"]["heads"].append([7, 7])
    Path("run/manifest.json").write_text(json.dumps(manifest))
    record = json.loads(call("run", "--json").stdout)
    assert record["without_rows"] == [[7, 7]]
    assert record == json.loads(Path("run-diagnosis/diagnosis.json").read_text())


def test_the_folder_goes_beside_the_collection(collection, found, here, monkeypatch, undrawn):
    monkeypatch.setattr(pipeline, "diagnose", lambda *arguments, **options: found)
    shutil.copytree(collection.folder, "runs/model")
    monkeypatch.chdir("runs/model")
    call(".")
    assert (here / "runs/model-diagnosis/diagnosis.json").exists()
    call(".", "--out", here / "else")
    assert (here / "else/diagnosis.json").exists()


def refusal(folder, code=1):
    done = call(folder, code=code)
    assert done.stdout == ""
    return done.stderr.strip().splitlines()[-1]


def test_misranked_rows_alone_are_refused(logged, here):
    folder = here / "run"
    collect_arrays(Arrays(logged), folder, keep="misranked")
    with pytest.raises(CalibrateError, match="needs a sample of all rows"):
        diagnose(open_collection(folder))
    assert refusal(folder).endswith("collect with --keep all into another folder")
    assert not (here / "run-diagnosis").exists()


def test_odd_folders_get_one_clear_line(collection, here):
    Path("empty").mkdir()
    assert "empty is not a collection" in refusal("empty")
    assert "nowhere is not a collection" in refusal("nowhere")
    Path("file").write_text("")
    assert "file is not a collection" in refusal("file")
    assert os_names(here) == ["empty", "file"]
    shutil.copytree(collection.folder, "bad")
    shard = sorted(Path("bad").glob("*.npz"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-100] + bytes(100))
    assert "was damaged or replaced" in refusal("bad")
    shard.unlink()
    assert "is missing; the same `calibrate collect` command" in refusal("bad")
    manifest = Path("bad/manifest.json")
    manifest.write_text(manifest.read_text().replace('"complete"', '"partial"'))
    assert "is unfinished" in refusal("bad")
    manifest.write_text("{")
    assert "is not a manifest" in refusal("bad")


def os_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_no_rows_at_all_is_exit_3(collection, here):
    shutil.copytree(collection.folder, "run")
    manifest = json.loads(Path("run/manifest.json").read_text())
    manifest["shards"] = []
    manifest["sizes"] = [size | {"kept": 0} for size in manifest["sizes"]]
    Path("run/manifest.json").write_text(json.dumps(manifest))
    assert "run has no rows of any weight; collect more sets" in refusal("run", code=3)


def test_rows_without_weight_are_left_out(here):
    """And so are heads that have no others."""
    rng, rows = np.random.default_rng(1), 400
    logits = rng.standard_normal((rows, 16)).astype(np.float32)
    weight = np.where(np.arange(rows) < 200, 1.0, 0.0)
    columns = {"logits": logits, "target": rng.integers(0, 16, rows), "weight": weight}
    columns |= {"layer": np.zeros(rows, int), "head": (np.arange(rows) >= 300).astype(int)}
    np.savez("some.npz", **columns)
    found = diagnose(collect_arrays(Arrays(Path("some.npz")), here / "run"))
    assert [(head.head, head.rows) for head in found.heads] == [(0, 200)]
    assert found.without_rows == [(0, 1)]


def test_the_figure_shows_what_was_found(found):
    ax = plots.plot_entropy(Figure().add_subplot(), found.heads[:5])
    shown = {line.get_label(): line for line in ax.lines}
    for head in found.heads[:5]:
        H = [at.entropy for at in head.sizes]
        np.testing.assert_allclose(shown[head.name].get_ydata(), H)
    reference_line = shown["log n: uniform attention"]
    np.testing.assert_allclose(reference_line.get_ydata(), np.log(reference_line.get_xdata()))
    assert ax.get_xlabel()


def test_of_many_heads_five_are_coloured(found):
    many = [found.heads[0]._replace(head=i, name=f"head ${i}_^x$") for i in range(40)]
    ax = plots.plot_entropy(Figure().add_subplot(), many)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert len(labels) == 7
    assert "35 other heads" in labels
    assert len(ax.lines) == 40 + 2
    assert png(ax.figure).startswith(b"\x89PNG")  # dollar signs are no mathematics


def test_heads_without_rows_are_counted_in_the_text(found, here):
    for heads, said in (([], False), ([(7, 7)], True)):
        record = diagnosis_result(found._replace(without_rows=heads), here, [])
        assert ("heads without any kept row: 1" in str(list(record.blocks()))) == said


def test_thresholds_are_in_the_record(found):
    thresholds = diagnosis_result(found, Path("x.json"), []).as_json()["thresholds"]
    assert thresholds["robust_slope"] == head_verdict.ROBUST_SLOPE
    assert thresholds["min_rows"] == head_verdict.MIN_ROWS
