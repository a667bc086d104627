"""Diagnosis: heads whose truth is planted, numbers against plain float64, and what is refused."""

import json
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from calibrate.cli.main import app
from calibrate.collecting.collect import collect_arrays
from calibrate.errors import CalibrateError
from calibrate.evaluation import diagnosis as pipeline
from calibrate.evaluation.diagnosis import (
    FEW,
    NOT_WORTH,
    ROBUST,
    WORTH,
    Headroom,
    Slope,
    commitment_slope,
    diagnose,
    judge,
)
from calibrate.files.collection import Collection, open_collection
from calibrate.heads.logits_files import Arrays
from calibrate.maths import reference
from calibrate.report import diagnosis_plots
from calibrate.report.blocks import as_json
from calibrate.report.diagnosis_record import DiagnosisRecord
from calibrate.report.plot_style import png

SIZES, PER_SIZE = (16, 64, 256), 150
BOUNDED, GROWING, RANDOM, SHARP, SHORT = KINDS = (0, 0), (0, 1), (0, 2), (3, 0), (3, 2)


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
    return z.astype(np.float32), target


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Files of five planted heads, one for each set size."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("planted") / "model"
    folder.mkdir()
    for n in SIZES:
        parts = [
            (*planted(kind, n, rng), kind) for kind in (SHARP, SHORT, RANDOM, GROWING, BOUNDED)
        ]
        np.savez(
            folder / f"{n}.npz",
            logits=np.concatenate([z for z, _, _ in parts]),
            target=np.concatenate([t for _, t, _ in parts]),
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
        BOUNDED: WORTH, GROWING: ROBUST, RANDOM: NOT_WORTH, SHARP: ROBUST, SHORT: FEW,
    }  # fmt: skip
    assert "disperses (commitment" in heads[BOUNDED].verdict.reason
    assert "seldom have the top logit" in heads[RANDOM].verdict.reason
    assert heads[SHORT].verdict.reason.startswith("too few rows (30)")


def test_commitment_grows_as_planted(heads):
    assert heads[BOUNDED].slope.value == pytest.approx(0, abs=0.15)
    assert heads[RANDOM].slope.value == pytest.approx(0, abs=0.05)
    assert heads[GROWING].slope.value == pytest.approx(1, abs=0.05)
    assert heads[SHARP].slope.value == pytest.approx(1, abs=1e-3)
    assert 0 < heads[GROWING].slope.error < 0.01


def test_heads_are_ranked_by_headroom_and_those_of_few_rows_are_last(found):
    assert found.heads[0].verdict.word == WORTH
    assert found.heads[-1].verdict.word == FEW
    assert found.heads[-1].headroom.constant > found.heads[1].headroom.constant
    ranked = [head.headroom.constant for head in found.heads[:-1]]
    assert ranked == sorted(ranked, reverse=True)


def rows_of(collection, key):
    """(size, logits, target) of every row of a head, in float64."""
    for size, shard in collection.shards():
        mine = slice(None) if key is None else (shard.layer == key[0]) & (shard.head == key[1])
        for z, t in zip(shard.logits[mine].astype(float), shard.target[mine], strict=True):
            yield size, z, t if np.ndim(t) else np.arange(len(z)) == t


def log_p_of(z, target, beta):
    return np.log(reference.softmax(z, beta=beta)[target].sum())


def check_against_plain_formulas(head, rows, eps):
    """Every number of a head, row by row, in float64."""
    n = np.array([np.isfinite(z).sum() for _, z, _ in rows])
    H = np.array([reference.entropy(z) for _, z, _ in rows])
    size = np.array([size for size, _, _ in rows])
    on_top = np.array([z.argmax() in np.flatnonzero(t) for _, z, t in rows])
    assert head.rows == len(rows)
    assert head.slope.value == pytest.approx(np.polyfit(np.log(n), np.log(n) - H, 1)[0], abs=1e-5)
    assert head.on_top == pytest.approx(on_top.mean())
    last = size == head.largest
    assert head.on_top_at_largest == pytest.approx(on_top[last].mean())
    variance, n_star = [], []
    for _, z, t in rows:
        z, p, t = z[np.isfinite(z)], reference.softmax(z)[np.isfinite(z)], t[np.isfinite(z)]
        variance.append(p @ (z - p @ z) ** 2)
        n_star.append(t.sum() + (1 / eps - 1) * np.exp(z[t]).sum() / np.exp(z[~t]).mean())
    assert head.dispersal == pytest.approx(np.median(np.array(n_star)[last]), rel=1e-5)
    assert [at.size for at in head.sizes] == sorted(set(size))
    for at in head.sizes:
        mine = size == at.size
        assert at.entropy == pytest.approx(H[mine].mean(), abs=1e-5)
        assert at.entropy_spread == pytest.approx(H[mine].std(), abs=1e-5)
        assert at.commitment == pytest.approx((np.log(n) - H)[mine].mean(), abs=1e-5)
        assert at.susceptibility == pytest.approx(np.array(variance)[mine].mean(), rel=1e-4)
        assert at.on_top == pytest.approx(on_top[mine].mean())
    betas = np.geomspace(1, 64, 97)
    log_p = np.array([[log_p_of(z, t, beta) for beta in betas] for _, z, t in rows])
    by_size = {s: log_p[size == s] for s in np.unique(size)}  # each of 100 rows or more
    curve = np.mean([part.mean(axis=0) for part in by_size.values()], axis=0)
    room = head.headroom
    assert room.plain == pytest.approx(curve[0], abs=1e-3)
    assert room.constant == pytest.approx(curve.max() - curve[0], abs=1e-3)
    assert room.ceiling == pytest.approx(
        np.mean([part.max(axis=1).mean() for part in by_size.values()]) - curve[0], abs=2e-3
    )
    added = log_p[:, curve.argmax()] - log_p[:, 0]
    assert room.error == pytest.approx(added.std() / np.sqrt(len(rows)), rel=0.1, abs=1e-6)
    assert 0 <= room.constant <= room.ceiling


def test_numbers_are_those_of_plain_formulas(collection, heads):
    for key in (BOUNDED, RANDOM):
        check_against_plain_formulas(heads[key], list(rows_of(collection, key)), eps=0.25)
    beta = [reference.optimal_beta(z, int(t.argmax())) for _, z, t in rows_of(collection, BOUNDED)]
    interior = [b for b in beta if 0 < b < np.inf]
    assert heads[BOUNDED].beta == pytest.approx(np.percentile(interior, [10, 50, 90]), rel=1e-3)
    assert heads[BOUNDED].shares["sharp"] == pytest.approx(np.mean(np.isinf(beta)))
    assert heads[BOUNDED].shares["interior"] == pytest.approx(len(interior) / len(beta))


def test_sets_of_targets_masks_and_no_name():
    """Any of three may win; rows of 20 to 32 and of 40 to 64 real items."""
    rng = np.random.default_rng(1)
    n = np.repeat([rng.integers(20, 33, 120), rng.integers(40, 65, 120)], 1).reshape(-1)
    mask = np.arange(64) < n[:, None]
    z = rng.uniform(-1, 1, (240, 64))
    z[:, 5:8] += rng.uniform(0, 2, (240, 1))
    target = np.zeros((240, 64), bool)
    target[:, 5:8] = True
    found = diagnose(collected("run", logits=z, target=target, mask=mask), eps=0.25)
    (head,) = found.heads
    assert (head.name, head.layer, head.head) == ("logged", None, None)
    check_against_plain_formulas(head, list(rows_of(found.collection, None)), eps=0.25)


def test_one_set_size_has_no_slope():
    z, target = planted(BOUNDED, 16, np.random.default_rng(0))
    (head,) = diagnose(collected("run", logits=z, target=target)).heads
    assert head.slope is None
    assert head.verdict.word == WORTH
    assert "per unit of log n" not in head.verdict.reason


def test_a_target_that_never_disperses_has_no_size(here):
    z, target = planted(SHARP, 16, np.random.default_rng(0))
    done = diagnose(collected("run", logits=np.where(z == 40, 1e4, z), target=target))
    assert done.heads[0].dispersal is None
    json.dumps(as_json(DiagnosisRecord(done, here, [])), allow_nan=False)


def test_the_largest_size_has_twenty_rows():
    rng = np.random.default_rng(0)
    n = np.array([60] * 100 + [100] * 19)
    z = rng.uniform(-1, 1, (119, 100))
    few = collected("a", logits=z, target=np.zeros(119, int), mask=np.arange(100) < n[:, None])
    assert diagnose(few).heads[0].largest == 60
    z, n = np.vstack([z, z[-1:]]), np.append(n, 100)
    more = collected("b", logits=z, target=np.zeros(120, int), mask=np.arange(100) < n[:, None])
    assert diagnose(more).heads[0].largest == 100


def test_the_error_of_a_slope_is_how_far_slopes_scatter():
    """Also where rows vary more at some sizes."""
    rng, items = np.random.default_rng(0), np.repeat([16, 64, 1024], 40)
    noise = np.where(items == 1024, 1.0, 0.2)
    slopes = [
        commitment_slope(items, 0.3 * np.log(items) + noise * rng.standard_normal(120))
        for _ in range(1_000)
    ]
    values, errors = np.array(slopes).T
    assert values.mean() == pytest.approx(0.3, abs=0.01)
    assert errors.mean() == pytest.approx(values.std(), rel=0.07)
    assert commitment_slope(np.array([16, 64]), np.array([1.0, 2.0])) is None


@pytest.mark.parametrize(
    ("slope", "on_top", "constant", "error", "word", "said"),
    [
        (0.2, 0.91, 0.12, 0.01, WORTH, "worth calibrating: disperses (commitment grows 0.20"),
        (-0.2, 0.91, 0.12, 0.01, WORTH, "(commitment falls 0.20 per unit of log n)"),
        (0.95, 0.91, 0.12, 0.01, WORTH, "worth calibrating: hardly disperses"),
        (0.2, 0.3, 0.12, 0.01, WORTH, "top logit in only 30% of rows"),
        (0.2, 0.3, 0.0, 0.0, NOT_WORTH, "sharpening would help the wrong items"),
        (0.95, 0.3, 0.0, 0.0, NOT_WORTH, "seldom have the top logit (30%)"),
        (0.95, 0.9, 0.0, 0.0, ROBUST, "robust: its entropy hardly grows"),
        (0.2, 0.9, 0.004, 0.001, NOT_WORTH, "one constant would add 0.004 nats, less than 0.01"),
        (0.2, 0.9, 0.03, 0.02, NOT_WORTH, "0.030 nats, within chance (± 0.020)"),
        (None, 0.9, 0.12, 0.01, WORTH, "worth calibrating: its target has the top logit in 90%"),
    ],
)
def test_verdicts(slope, on_top, constant, error, word, said):
    slope = None if slope is None else Slope(slope, 0.01)
    verdict = judge(100, slope, on_top, Headroom(-1, constant, error, 2, 0.2))
    assert verdict.word == word
    assert said in verdict.reason
    assert judge(99, slope, on_top, Headroom(-1, constant, error, 2, 0.2)).word == FEW


def test_one_shard_is_in_memory_at_a_time(collection, monkeypatch):
    shards, alive = Collection.shards, []

    def watched(self, heads):
        for size, shard in shards(self, heads):
            assert all(seen() is None for seen in alive)
            alive.append(weakref.ref(shard))
            yield size, shard
            del shard

    monkeypatch.setattr(Collection, "shards", watched)
    diagnose(collection)
    assert len(alive) == len(SIZES)


def call(*arguments, code=0):
    done = CliRunner().invoke(app, ["diagnose", *map(str, arguments)])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def test_table_record_and_figures_say_the_same(collection, here):
    shutil.copytree(collection.folder, "runs/model")
    done = call("runs/model", "--eps", "0.25")
    record = json.loads(call("runs/model", "--eps", "0.25", "--json").stdout)
    assert record == json.loads(Path("runs/model-diagnosis/diagnosis.json").read_text())
    assert "1 of 5 worth calibrating" in done.stdout
    lines = done.stdout.splitlines()
    for head in record["heads"]:
        assert f"  {head['name']}: {head['verdict']['reason']}" in lines
        cells = lines[[line.startswith(f"  {head['name']}   ") for line in lines].index(True)]
        room, slope, last = head["headroom"], head["slope"], head["sizes"][-1]
        for cell in (
            f"{head['rows']:,}", f"{slope['value']:.2f} ± {slope['error']:.2f}",
            f"{last['entropy']:.2f} ± {last['entropy_spread']:.2f}", f"{head['on_top']:.1%}",
            f"{head['on_top_at_largest']:.1%}", f"{room['constant']:.4f} ± {room['error']:.4f}",
            f"{room['ceiling']:.4f}",
        ):  # fmt: skip
            assert f" {cell} " in cells + " "
    assert "calibrate fit runs/model --name NAME" in done.stdout
    assert sorted(path.name for path in Path("runs").iterdir()) == ["model", "model-diagnosis"]
    names = {Path(path).name for path in record["figures"]}
    assert names == {"entropy.png", "plane.png", "beta.png", "slope.png"}
    for path in record["figures"]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_a_head_without_rows_is_counted(collection, here):
    shutil.copytree(collection.folder, "run")
    manifest = json.loads(Path("run/manifest.json").read_text())
    manifest["configuration"]["heads"].append([7, 7])
    Path("run/manifest.json").write_text(json.dumps(manifest))
    assert diagnose(open_collection(Path("run"))).without_rows == [(7, 7)]
    assert "heads without any kept row: 1" in call("run").stdout


def test_the_folder_goes_beside_the_collection(collection, here, monkeypatch):
    shutil.copytree(collection.folder, "runs/model")
    monkeypatch.chdir("runs/model")
    call(".")
    assert (here / "runs/model-diagnosis/diagnosis.json").exists()
    call(".", "--out", here / "else")
    assert (here / "else/entropy.png").exists()
    for inside in (".", "figures", here / "runs/model/figures"):
        line = call(".", "--out", inside, code=1).stderr
        assert "is a collection's folder; choose another one with --out" in line
    assert not (here / "runs/model/figures").exists()


@pytest.mark.parametrize("eps", ["0", "1", "-1", "nan", "inf"])
def test_eps_is_a_coefficient(here, eps):
    done = call("nowhere", "--eps", eps, code=2)
    assert "give a coefficient between 0 and 1" in done.stderr


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
    assert "run has no rows; collect more sets" in refusal("run", code=3)


def test_figures_show_what_was_found(found, heads):
    axes = Figure(figsize=(9, 16)).subplots(4)
    entropy = diagnosis_plots.plot_entropy(axes[0], found.heads)
    shown = {line.get_label(): line for line in entropy.lines}
    for head in found.heads:
        H = [at.entropy for at in head.sizes]
        np.testing.assert_allclose(shown[head.name].get_ydata(), H)
    reference_line = shown["log n: uniform attention"]
    np.testing.assert_allclose(reference_line.get_ydata(), np.log(reference_line.get_xdata()))
    plane = diagnosis_plots.plot_plane(axes[1], heads[BOUNDED])
    (points,) = plane.collections
    assert len(points.get_offsets()) == heads[BOUNDED].rows
    assert points.get_rasterized()
    beta = diagnosis_plots.plot_beta_quantiles(axes[2], found.heads)
    names = [text.get_text() for text in beta.get_yticklabels()]
    assert [name.splitlines()[0] for name in names] == [head.name for head in found.heads]
    bars = [tuple(line.get_xdata()) for line in beta.lines if len(line.get_xdata()) == 2]
    assert (heads[RANDOM].beta[0], heads[RANDOM].beta[2]) in bars
    slope = diagnosis_plots.plot_slope_map(axes[3], found.heads)
    image = np.asarray(slope.images[0].get_array())
    assert image[0, 1] == pytest.approx(heads[GROWING].slope.value)
    assert np.isnan(np.ma.filled(slope.images[0].get_array(), np.nan)[1, 1])  # there is none
    for ax in axes:
        assert ax.get_xlabel()


def test_of_many_heads_five_are_coloured(found):
    many = [found.heads[0]._replace(head=i, name=f"head ${i}_^x$") for i in range(40)]
    ax = diagnosis_plots.plot_entropy(Figure().add_subplot(), many)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert len(labels) == 7
    assert "35 other heads" in labels
    assert len(ax.lines) == 40 + 2
    assert png(ax.figure).startswith(b"\x89PNG")  # dollar signs are no mathematics


def test_heads_without_slope_or_interior_rows_are_drawn(found, tmp_path):
    bare = [head._replace(slope=None, beta=None, sizes=head.sizes[:1]) for head in found.heads[:2]]
    paths = diagnosis_plots.save_figures(tmp_path, found._replace(heads=bare))
    assert [path.name for path in paths] == ["entropy.png", "plane.png", "beta.png"]
    ax = diagnosis_plots.plot_slope_map(Figure().add_subplot(), bare)
    assert [line.get_marker() for line in ax.lines] == ["x", "x"]


def test_thresholds_are_in_the_record(found):
    thresholds = DiagnosisRecord(found, Path("x.json"), []).as_json()["thresholds"]
    assert thresholds["robust_slope"] == pipeline.ROBUST_SLOPE
    assert thresholds["min_rows"] == pipeline.MIN_ROWS
