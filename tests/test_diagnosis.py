"""Diagnosis: planted heads, numbers against independent formulas, and errors."""

import json
import shutil
import weakref
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import reference
from commands import call, refusal

from calibrate.errors import CalibrateError
from calibrate.report import plot_diagnosis
from calibrate.report.blocks import Facts, Table, as_json
from calibrate.report.diagnosis_record import diagnosis_result
from calibrate.report.plot_diagnosis import (
    MAX_PANELS,
    MAX_SHOWN_INPUTS,
    draw_diagnosis,
    shown_heads,
)
from calibrate.report.plot_style import MAX_SIZE_TICKS, png
from calibrate.rows.collect import collect_arrays
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.diagnosis import Diagnosis, diagnose, estimate_slope
from calibrate.rows.logits_files import Arrays

SIZES, PER_SIZE = (16, 64, 256), 150
FIGURE = Path("diagnosis.png")
# Logits that are as high at any n, that rise with log n, without a preferred item, and one-hot.
BOUNDED, RISING, RANDOM, SHARP = KINDS = ((0, 0), (0, 2), (3, 0), (3, 2))


def planted(kind, n, rng):
    """(rows, n) logits and (rows,) targets of a head of that kind."""
    target, at = rng.integers(0, n, PER_SIZE), np.arange(PER_SIZE)
    z = rng.uniform(-1, 1, (PER_SIZE, n))
    z[at, target] += {BOUNDED: 2.5, RISING: 4 + np.log(n), RANDOM: 0, SHARP: 40}[kind]
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
            layer=np.repeat([kind[0] for *_, kind in parts], PER_SIZE),
            head=np.repeat([kind[1] for *_, kind in parts], PER_SIZE),
        )
    return folder


@pytest.fixture(scope="module")
def collection(logged, tmp_path_factory):
    return collect_arrays(Arrays.read(logged), tmp_path_factory.mktemp("runs") / "planted")


@pytest.fixture(scope="module")
def found(collection):
    return diagnose(collection)


def collected(name="given", **columns):
    """The collection of one head or several, from arrays (rows, ...) in memory."""
    return collect_arrays(Arrays.in_memory(name, columns))


def head_of(**columns):
    """The diagnosis of the only head of these arrays."""
    (head,) = diagnose(collected(**columns)).heads
    return head


def test_slopes_tell_heads_that_disperse_from_heads_that_do_not(found):
    heads = {(head.layer, head.head): head for head in found.heads}
    assert heads[SHARP].slope.mean == pytest.approx(1, abs=1e-6)
    assert 0.9 < heads[RISING].slope.mean < 1
    assert abs(heads[RANDOM].slope.mean) < 0.05
    assert heads[BOUNDED].slope.mean < 0
    assert [(head.layer, head.head) for head in found.heads] == [BOUNDED, RANDOM, RISING, SHARP]
    assert heads[SHARP].misranked == 0
    assert heads[RANDOM].misranked > 0.9
    assert heads[SHARP].sizes[0].susceptibility < 1e-6 < heads[RANDOM].sizes[0].susceptibility


def check_against_formulas(head, shards):
    """Means of a head of weight 1 and without groups, input by input."""
    misranked, rho, log_n = [], [], []
    for at, (z, target) in zip(head.sizes, shards, strict=True):
        n = (z > -np.inf).sum(axis=1)
        of_rows = np.log(n) - reference.entropy(z)
        p = reference.softmax(z)
        real = np.where(z > -np.inf, z, 0)
        variance = (p * (real - (p * real).sum(axis=1, keepdims=True)) ** 2).sum(axis=1)
        assert (at.least_n, at.most_n, at.inputs) == (n.min(), n.max(), len(z))
        assert at.commitment.mean == pytest.approx(of_rows.mean(), abs=1e-5)
        error = of_rows.std(ddof=1) / np.sqrt(len(z))
        assert at.commitment.error == pytest.approx(error, abs=1e-6)
        assert at.susceptibility == pytest.approx(variance.mean(), rel=1e-4, abs=1e-6)
        masks = target if target.ndim == 2 else np.arange(z.shape[1]) == target[:, None]
        missed = [not t[row.argmax()] for row, t in zip(z, masks, strict=True)]
        assert at.misranked == pytest.approx(np.mean(missed))
        misranked += missed
        rho, log_n = [*rho, *of_rows], [*log_n, *np.log(n)]
    assert (head.inputs, head.misranked) == (len(rho), pytest.approx(np.mean(misranked)))
    assert head.slope.mean == pytest.approx(np.polyfit(log_n, rho, 1)[0], abs=1e-5)


def test_numbers_are_those_of_the_formulas(collection, found):
    for head in found.heads:
        check_against_formulas(head, [
            (shard.logits[mine], shard.target[mine])
            for _, shard in collection.shards()
            if any(mine := (shard.layer == head.layer) & (shard.head == head.head))
        ])  # fmt: skip


def test_sets_of_targets_masks_and_no_name():
    rng = np.random.default_rng(1)
    mask = np.arange(64) < rng.integers(40, 65, 240)[:, None]
    z = rng.uniform(-1, 1, (240, 64)).astype(np.float32)
    z[:, 5:8] += rng.uniform(0, 4, (240, 1))
    target = np.zeros((240, 64), bool)
    target[:, 5:8] = True
    rows = collected("logged", logits=z, target=target, mask=mask)
    (head,) = diagnose(rows).heads
    assert (head.name, head.layer, head.head) == ("logged", None, None)
    check_against_formulas(head, [(shard.logits, shard.target) for _, shard in rows.shards()])
    assert (head.sizes[0].least_n, head.sizes[0].most_n) == (40, 64)


def test_of_one_n_there_is_no_slope():
    rng = np.random.default_rng(0)
    z = rng.standard_normal((200, 16)).astype(np.float32)
    found = diagnose(collected(logits=z, target=np.zeros(200, int), head=np.arange(200) % 8))
    assert [head.slope for head in found.heads] == [None] * 8
    record = diagnosis_result(found, FIGURE)
    assert as_json(record)["heads"][0]["slope"] is None
    assert shown_heads(found.heads) == list(range(MAX_PANELS))
    assert png(draw_diagnosis(found)).startswith(b"\x89PNG")


def test_weights_count_as_repeated_inputs():
    rng = np.random.default_rng(2)
    n = rng.choice([8, 16], 300)
    z = np.where(np.arange(16) < n[:, None], rng.standard_normal((300, 16)), -np.inf)
    z, weight, group = z.astype(np.float32), rng.choice([1.0, 2.0, 3.0], 300), np.arange(300) % 30
    target = np.zeros(300, int)
    weighed = head_of(logits=z, target=target, weight=weight, group=group)
    again = np.repeat(np.arange(300), weight.astype(int))
    repeated = head_of(logits=z[again], target=target[again], group=group[again])
    assert weighed.inputs == 300
    for ours, expected in [
        (weighed.slope, repeated.slope),
        *((a.commitment, b.commitment) for a, b in zip(weighed.sizes, repeated.sizes, strict=True)),
    ]:
        assert ours == pytest.approx(expected, rel=1e-9)
    assert weighed.misranked == pytest.approx(repeated.misranked)


def test_errors_are_those_of_groups():
    """Copies of inputs within a group add no information."""
    rng = np.random.default_rng(3)
    n = rng.choice([8, 16], 60)
    z = np.where(np.arange(16) < n[:, None], rng.standard_normal((60, 16)), -np.inf)
    z, target = z.astype(np.float32), np.zeros(60, int)
    once = head_of(logits=z, target=target)
    rows = np.repeat(np.arange(60), 5)
    in_groups = head_of(logits=z[rows], target=target[rows], group=rows)
    alone = head_of(logits=z[rows], target=target[rows])
    assert in_groups.slope == pytest.approx(once.slope)
    assert in_groups.slope.groups == 60
    assert alone.slope.error < 0.6 * once.slope.error
    assert in_groups.sizes[0].commitment == pytest.approx(once.sizes[0].commitment)


def test_the_error_of_a_slope_is_its_spread_over_samples():
    rng = np.random.default_rng(4)
    x, group, weight = np.repeat([1.0, 2.0, 4.0], 40), np.arange(120) % 20, np.ones(120)
    slopes, errors = [], []
    for _ in range(400):
        of_group = rng.standard_normal((20, 2))  # groups differ in level and in slope
        y = 0.5 * x + of_group[group, 0] + of_group[group, 1] * x + rng.standard_normal(120)
        slope = estimate_slope(x, y, weight, group)
        slopes.append(slope.mean)
        errors.append(slope.error)
    assert np.mean(slopes) == pytest.approx(0.5, abs=0.05)
    assert np.mean(errors) == pytest.approx(np.std(slopes), rel=0.1)


def test_an_error_is_unknown_where_a_group_alone_has_an_n():
    x, y, weight = np.log([8.0, 8, 16, 16]), np.array([1.0, 2, 3, 4]), np.ones(4)
    slope = estimate_slope(x, y, weight, np.array([0, 0, 1, 1]))
    assert slope.mean == pytest.approx(2 / np.log(2))
    assert np.isnan(slope.error)
    assert np.isnan(estimate_slope(x, y, weight, np.zeros(4, int)).error)
    assert np.isfinite(estimate_slope(x, y, weight, np.full(4, -1)).error)
    assert estimate_slope(np.full(4, np.log(7)), y, weight, np.arange(4)) is None


def test_one_shard_is_in_memory_at_a_time(collection):
    alive = []

    class Watched(RowCollection):
        def readers(self, heads=None):
            def watched(read):
                assert all(seen() is None for seen in alive)
                size, shard = read()
                alive.append(weakref.ref(shard))
                return size, shard

            return [lambda read=read: watched(read) for read in super().readers(heads)]

    diagnose(Watched(collection.folder, collection.manifest, collection.digest))
    assert len(alive) == len(SIZES)


def texts(result):
    """The cells of the table by row, and the facts by label."""
    (table,) = (block for block in result.blocks() if isinstance(block, Table))
    facts = dict(row for block in result.blocks() if isinstance(block, Facts) for row in block.rows)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows], facts


def test_the_table_has_a_row_for_each_head(found):
    rows, facts = texts(diagnosis_result(found, FIGURE))
    assert set(facts) == {"figure"}
    for row, head in zip(rows, found.heads, strict=True):
        assert (row["head"], row["inputs"]) == (head.name, "450")
        assert row["slope"] == head.slope.shown(".3f")
        assert row["rho, n = 16"] == head.sizes[0].commitment.shown(".2f")
        assert row["rho, n = 256"] == head.sizes[2].commitment.shown(".2f")
        assert float(row["susceptibility, n = 256"]) == pytest.approx(
            head.sizes[2].susceptibility, rel=0.01
        )
    many = [found.heads[0]._replace(name=f"head {i}") for i in range(40)]
    record = diagnosis_result(found._replace(heads=many), FIGURE)
    assert len(texts(record)[0]) == 20
    assert len(record.as_json()["heads"]) == 40


def test_a_head_without_inputs_of_a_size_has_dots(found):
    first = found.heads[0]
    heads = [first, first._replace(sizes=first.sizes[:1], slope=None)]
    rows, _ = texts(diagnosis_result(found._replace(heads=heads), FIGURE))
    assert [rows[1][name] for name in ("slope", "rho, n = 256", "susceptibility, n = 256")] == 3 * [
        "·"
    ]


def test_of_one_head_the_table_has_a_row_for_each_n(found):
    one = Diagnosis(found.collection, found.heads[1:2], found.inputs[1:2])
    rows, facts = texts(diagnosis_result(one, FIGURE))
    assert [row["n"] for row in rows] == ["16", "64", "256"]
    assert facts["slope"].startswith(one.heads[0].slope.shown(".3f"))


def test_the_figure_has_a_point_for_each_input(found):
    figure = draw_diagnosis(found)
    panels = [ax for ax in figure.axes if ax.get_title()]
    assert len(panels) == len(KINDS)
    for ax, head, inputs in zip(panels, found.heads, found.inputs, strict=True):
        assert head.name in ax.get_title()
        points, means = ax.collections
        x, y = points.get_offsets().T
        np.testing.assert_allclose(np.sort(x), np.sort(inputs.commitment))
        np.testing.assert_allclose(np.sort(y), np.sort(inputs.susceptibility))
        np.testing.assert_allclose(
            means.get_offsets(), [(at.commitment.mean, at.susceptibility) for at in head.sizes]
        )
        colours = {tuple(c) for c in points.get_facecolors()[:, :3]}
        assert len(colours) == len(SIZES)
    with matplotlib.rc_context({"text.usetex": True, "font.size": 22}):  # the user's
        assert png(figure) == png(draw_diagnosis(found))


def test_of_many_inputs_and_heads_some_are_drawn(found, monkeypatch):
    monkeypatch.setattr(plot_diagnosis, "MAX_SHOWN_INPUTS", 100)
    assert MAX_SHOWN_INPUTS == 2_000
    slopes = np.linspace(-0.2, 1, 30)
    first, inputs = found.heads[0], found.inputs[0]
    heads = [first._replace(name=f"head ${i}_^x$", slope=first.slope._replace(mean=slope))
             for i, slope in enumerate(slopes)]  # fmt: skip
    heads.append(first._replace(name="without a slope", slope=None))
    assert shown_heads(heads) == [0, 1, 2, 27, 28, 29]
    figure = draw_diagnosis(Diagnosis(found.collection, heads, [inputs] * 31))
    panels = [ax for ax in figure.axes if ax.get_title()]
    assert [len(ax.collections[0].get_offsets()) for ax in panels] == [100] * MAX_PANELS
    assert "6 of 31 heads" in figure.get_suptitle()
    assert png(figure).startswith(b"\x89PNG")  # dollar signs are no mathematics


@pytest.mark.parametrize("n", [[8], [16, 33], [33, 35, 40, 45, 50, 55, 60], range(3, 3_000, 17)])
def test_the_colour_bar_has_ticks_at_some_n(n, found):
    inputs = found.inputs[0]
    one = inputs._replace(n=np.resize(n, len(inputs.n)))
    figure = draw_diagnosis(Diagnosis(found.collection, found.heads[:1], [one]))
    ticks = figure.axes[-1].get_yticks()
    assert 1 <= len(ticks) <= MAX_SIZE_TICKS
    assert min(n) <= min(ticks)
    assert max(ticks) <= max(n)


def test_the_command_prints_the_record_and_draws_the_figure(collection, found, here):
    shutil.copytree(collection.folder, "runs/model")
    record = json.loads(call("diagnose", "runs/model", "--json").stdout)
    figure = here / "runs/model-diagnosis.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert (record["collection"], record["figure"]) == ("runs/model", str(figure))
    slopes = [head.slope.mean for head in found.heads]
    assert [head["slope"]["mean"] for head in record["heads"]] == slopes
    shown = call("diagnose", "runs/model", "--out", "other.png").stdout
    assert all(head["name"] in shown for head in record["heads"])
    assert Path("other.png").exists()


def test_misranked_inputs_alone_are_refused(logged, here):
    folder = here / "run"
    collect_arrays(Arrays.read(logged), folder, keep="misranked")
    with pytest.raises(CalibrateError, match=str(folder)):
        diagnose(open_collection(folder))
    assert refusal("diagnose", folder).startswith(f"calibrate: {folder} ")
    assert not (here / "run-diagnosis.png").exists()


def test_no_inputs_at_all_is_exit_3(collection, here):
    shutil.copytree(collection.folder, "run")
    manifest = json.loads(Path("run/manifest.json").read_text())
    manifest["shards"] = []
    manifest["sizes"] = [size | {"kept": 0} for size in manifest["sizes"]]
    Path("run/manifest.json").write_text(json.dumps(manifest))
    assert "run " in refusal("diagnose", "run", code=3)


def test_inputs_without_weight_are_left_out(here):
    """A head without other inputs is left out, too."""
    rng, rows = np.random.default_rng(1), 400
    logits = rng.standard_normal((rows, 16)).astype(np.float32)
    weight = np.where(np.arange(rows) < 200, 1.0, 0.0)
    columns = {"logits": logits, "target": rng.integers(0, 16, rows), "weight": weight}
    columns |= {"layer": np.zeros(rows, int), "head": (np.arange(rows) >= 300).astype(int)}
    found = diagnose(collected(**columns))
    assert [(head.head, head.inputs) for head in found.heads] == [(0, 200)]
