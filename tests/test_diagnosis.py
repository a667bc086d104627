"""Diagnosis: heads whose truth is planted, numbers against plain float64, and what is refused."""

import json
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import reference
from matplotlib.figure import Figure
from planted import NO_GAIN, grouped_nulls
from test_cli import call, refusal

from calibrate.cli.diagnose import diagnosis_folder
from calibrate.datasets.collection import open_collection
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_collection import RowCollection
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.selection_criterion import Gain
from calibrate.fitting.diagnosis import (
    FEW,
    NOT_WORTH,
    SINK,
    WORTH,
    Sink,
    attended,
    diagnose,
    find_sink,
    gains_of_rules,
    judge_head,
    too_few,
)
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select
from calibrate.report import plots
from calibrate.report.diagnosis_record import RECORD
from calibrate.report.plot_style import png
from calibrate.rows.collect import collect_arrays
from calibrate.solver.solved_rows import solve_rows

SIZES, PER_SIZE = (16, 64, 256), 150
BOUNDED, RANDOM, SHARP, RESTING, SHORT = KINDS = ((0, 0), (0, 2), (3, 0), (0, 3), (3, 2))


def planted(kind, n, rng):
    """(rows, n) logits and (rows,) targets of a head with that truth, of some size."""
    count = 10 if kind == SHORT else PER_SIZE
    target, at = rng.integers(0, n, count), np.arange(count)
    z = rng.uniform(-1, 1, (count, n))
    if kind in (BOUNDED, SHORT):
        z[at, target] = rng.uniform(0.8, 3, count)  # now and then it is misranked
    elif kind == SHARP:
        z[at, target] = 40
    elif kind == RESTING:
        z[:, 0] = 4 + np.log(n)
    return z.astype(np.float32), target


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
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
    return collect_arrays(Arrays.read(logged), tmp_path_factory.mktemp("runs") / "planted")


@pytest.fixture(scope="module")
def found(collection):
    return diagnose(collection)


def test_planted_heads_get_their_verdicts(found):
    heads = {(head.layer, head.head): head for head in found.heads}
    assert {key: head.word for key, head in heads.items()} == {
        BOUNDED: WORTH, RANDOM: NOT_WORTH, SHARP: NOT_WORTH, RESTING: SINK, SHORT: FEW,
    }  # fmt: skip
    assert heads[RESTING].reason.startswith(
        "sink: 98% of its attention is on item 1 from the first; "
    )
    assert {key for key, head in heads.items() if head.sink} == {RESTING}
    assert heads[SHORT].reason.startswith("too few rows: 30 usable rows, fewer than")
    assert found.heads[0].word == WORTH
    assert found.heads[-1].word == FEW
    ranked = [head.gain for head in found.heads[:-1]]
    assert ranked == sorted(ranked, reverse=True)


def check_against_plain_formulas(head, shards):
    """Every number of a head, row by row."""
    on_top = []
    for at, (size, z, target) in zip(head.sizes, shards, strict=True):
        assert (at.size, at.rows) == (size, len(z))
        assert at.entropy == pytest.approx(reference.entropy(z).mean(), abs=1e-5)
        masks = target if target.ndim == 2 else np.arange(size) == target[:, None]
        on_top += [t[row.argmax()] for row, t in zip(z, masks, strict=True)]
    assert (head.rows, head.on_top) == (len(on_top), pytest.approx(np.mean(on_top)))


def test_numbers_are_those_of_plain_formulas(collection, found):
    for head in found.heads[:2]:
        check_against_plain_formulas(head, [
            (n, shard.logits[mine], shard.target[mine])
            for n, shard in collection.shards()
            if any(mine := (shard.layer == head.layer) & (shard.head == head.head))
        ])  # fmt: skip


def test_sets_of_targets_masks_and_no_name():
    rng = np.random.default_rng(1)
    mask = np.arange(64) < rng.integers(40, 65, 240)[:, None]
    z = rng.uniform(-1, 1, (240, 64))
    z[:, 5:8] += rng.uniform(0, 4, (240, 1))
    target = np.zeros((240, 64), bool)
    target[:, 5:8] = True
    np.savez("logged.npz", logits=z, target=target, mask=mask)
    collection = collect_arrays(Arrays.read(Path("logged.npz")), Path("run"))
    (head,) = diagnose(collection).heads
    assert (head.name, head.layer, head.head) == ("logged", None, None)
    assert set(head.gains) == {"constant", "log-size", "polynomial", "entropy-and-size"}
    check_against_plain_formulas(head, [(n, x.logits, x.target) for n, x in collection.shards()])


def test_one_shard_is_in_memory_at_a_time(collection):
    alive = []

    class Watched(RowCollection):
        def shards(self, heads=None):
            for size, shard in super().shards(heads):
                assert all(seen() is None for seen in alive)
                alive.append(weakref.ref(shard))
                yield size, shard
                del shard

    diagnose(Watched(collection.folder, collection.manifest, collection.digest))
    assert len(alive) == len(SIZES)


N = 24


def drawn(parts, seed=0):
    """Rows of one size whose targets are drawn from softmax(beta z): (spread of z, beta, rows)."""
    rng = np.random.default_rng(seed)
    z = np.concatenate([s * rng.standard_normal((count, N)) for s, _, count in parts])
    beta = np.concatenate([np.full(count, beta) for _, beta, count in parts])
    p = reference.softmax(z, beta=beta[:, None])
    target = np.minimum((p.cumsum(axis=1) <= rng.random((len(z), 1))).sum(axis=1), N - 1)
    H = np.array([reference.entropy(row) for row in z])
    return solve_rows(z.astype(np.float32), target, H, N)


HEADS = {  # name: rows, the word, and the kind of rule that a fit gives it
    # A constant gains nothing: half of the rows are overconfident, and half are blurred.
    "only by entropy": ([(6, 0.3, 300), (1, 2.0, 300)], WORTH, "polynomial"),
    "blurred": ([(2, 2.0, 600)], WORTH, "constant"),
    "seldom on top": ([(0.6, 2.0, 600)], WORTH, "constant"),
    "calibrated": ([(2, 1.0, 600)], NOT_WORTH, None),
    "overconfident": ([(6, 0.1, 600)], NOT_WORTH, None),
}


@pytest.mark.parametrize("name", HEADS)
def test_verdicts_agree_with_the_fit(name):
    parts, word, kind = HEADS[name]
    rows = drawn(parts)
    gains = gains_of_rules(rows)
    found, reason = judge_head(1 - rows.misranked.mean(), gains, None)
    assert found == word
    assert f"top logit in {1 - rows.misranked.mean():.0%} of rows" in reason
    if kind is None:
        with pytest.raises(QualityError, match=NO_GAIN):
            fit_and_select(rows, Options(rows="all"))
    else:
        chosen = fit_and_select(rows, Options(rows="all")).published
        assert (chosen.kind, chosen.gain) == (kind, next(iter(gains.values())))


def test_fewer_than_five_prompts_get_no_verdict():
    rows = grouped_nulls(11)
    assert too_few(rows) is None
    word, reason = too_few(rows._replace(group=rows.group % 4))
    assert word == FEW
    assert reason.startswith("the rows come from 4 groups (prompts), fewer than")


@pytest.mark.parametrize(
    ("gain", "sink", "word", "said"),
    [
        ((0.12, 0.1), None, WORTH, "constant gains most (0.120, 95 % interval 0.100 to 0.140)"),
        ((0.12, 0.1), Sink(2, 0.93), WORTH, "93% of its attention is on item 3 from the first; "),
        ((0.004, 0.002), None, NOT_WORTH, "gains most (0.004"),
        ((0.03, -0.01), Sink(-1, 0.8), SINK, "80% of its attention is on item 1 from the last"),
        (None, None, NOT_WORTH, "the rows determine no rule; "),
    ],
)  # fmt: skip
def test_words(gain, sink, word, said):
    gains = {"constant": Gain(*gain, 0.14, 0.5)} if gain else {}
    found, reason = judge_head(0.91, gains, sink)
    assert found == word
    assert said in reason
    assert reason.endswith("its target has the top logit in 91% of rows")


def looks_at(place, share, target, items):
    """Logits (rows, 40) with that share of the attention on one place of each row."""
    rng, count = np.random.default_rng(0), len(items)
    z = np.where(np.arange(40) < items[:, None], 0.1 * rng.standard_normal((count, 40)), -np.inf)
    at, place = np.arange(count), np.broadcast_to(place, count)
    z[at, place] = -np.inf
    z[at, place] = np.log(share / (1 - share) * np.exp(z).sum(axis=1))
    return find_sink(*attended(z.astype(np.float32), target), items)


def test_sinks_are_found_whatever_the_target():
    rng = np.random.default_rng(1)
    items = rng.integers(20, 41, 300)
    target = rng.integers(0, items)
    for place, position in ((0, 0), (2, 2), (items - 1, -1), (items - 3, -3)):
        sink = looks_at(place, 0.8, target, items)
        assert sink.position == position
        assert sink.attention == pytest.approx(0.8, abs=0.01)
    assert looks_at(0, 0.4, target, items) is None  # less than half
    assert looks_at(target, 0.9, target, items) is None  # it finds its targets
    assert looks_at(0, 0.9, np.where(np.arange(300) < 200, 0, target), items)


def test_targets_in_one_place_are_not_a_sink():
    items = np.full(300, 40)
    mostly = np.where(np.arange(300) < 200, 0, 7)
    assert looks_at(mostly, 0.9, mostly, items) is None  # it finds the others, too
    assert looks_at(0, 0.9, np.zeros(300, int), items) is None
    z = np.zeros((50, 6), np.float32)
    z[:, 1] = 9
    targets = np.zeros((50, 6), bool)
    targets[:, :3] = True  # any of several
    assert find_sink(*attended(z, targets), np.full(50, 6)) is None
    assert find_sink(*attended(z, targets[:, ::-1]), np.full(50, 6))


@pytest.mark.slow
def test_table_record_and_figure_say_the_same(collection, here):
    shutil.copytree(collection.folder, "runs/model")
    done = call("diagnose", "runs/model")
    record = json.loads(Path("runs/model-diagnosis/diagnosis.json").read_text())
    assert "1 of 5 worth calibrating" in done.stdout
    for head in record["heads"]:
        assert f"\n  {head['name']}: {head['reason']}\n" in done.stdout
    assert "calibrate fit runs/model --name NAME" in done.stdout
    assert sorted(path.name for path in Path("runs").iterdir()) == ["model", "model-diagnosis"]
    (figure,) = map(Path, record["figures"])
    assert figure.name == "entropy.png"
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_folder_goes_beside_the_collection(here, monkeypatch):
    Path("runs/model").mkdir(parents=True)
    monkeypatch.chdir("runs/model")
    assert diagnosis_folder(Path("."), None, RECORD) == here / "runs/model-diagnosis"
    assert diagnosis_folder(Path("."), here / "else", RECORD) == here / "else"


def test_misranked_rows_alone_are_refused(logged, here):
    folder = here / "run"
    collect_arrays(Arrays.read(logged), folder, keep="misranked")
    with pytest.raises(CalibrateError, match=str(folder)):
        diagnose(open_collection(folder))
    assert refusal("diagnose", folder).startswith(f"calibrate: {folder} ")
    assert not (here / "run-diagnosis").exists()


def test_no_rows_at_all_is_exit_3(collection, here):
    shutil.copytree(collection.folder, "run")
    manifest = json.loads(Path("run/manifest.json").read_text())
    manifest["shards"] = []
    manifest["sizes"] = [size | {"kept": 0} for size in manifest["sizes"]]
    Path("run/manifest.json").write_text(json.dumps(manifest))
    assert "run " in refusal("diagnose", "run", code=3)


def test_rows_without_weight_are_left_out(here):
    """And so are heads that have no others."""
    rng, rows = np.random.default_rng(1), 400
    logits = rng.standard_normal((rows, 16)).astype(np.float32)
    weight = np.where(np.arange(rows) < 200, 1.0, 0.0)
    columns = {"logits": logits, "target": rng.integers(0, 16, rows), "weight": weight}
    columns |= {"layer": np.zeros(rows, int), "head": (np.arange(rows) >= 300).astype(int)}
    np.savez("some.npz", **columns)
    found = diagnose(collect_arrays(Arrays.read(Path("some.npz")), here / "run"))
    assert [(head.head, head.rows) for head in found.heads] == [(0, 200)]


def test_of_many_heads_five_are_coloured(found):
    many = [found.heads[0]._replace(head=i, name=f"head ${i}_^x$") for i in range(40)]
    ax = plots.plot_entropy(Figure().add_subplot(), many)
    np.testing.assert_allclose(ax.lines[-3].get_ydata(), [at.entropy for at in many[0].sizes])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert len(labels) == 7
    assert "35 other heads" in labels
    assert len(ax.lines) == 40 + 2
    assert png(ax.figure).startswith(b"\x89PNG")  # dollar signs are no mathematics
