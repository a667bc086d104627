"""calibrate.fit: the numbers of the command line, on arrays in memory; and what it refuses."""

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from test_cli import call

import calibrate
from calibrate.datasets.logits_files import Arrays
from calibrate.errors import CalibrateError, CoefficientsError, QualityError
from calibrate.evidence.metrics import P
from calibrate.fitting.groups import hold_out
from calibrate.fitting.verdict_clauses import NOT_JUDGED
from calibrate.rows.collect import collect_arrays, collect_in_memory
from calibrate.rows.score_logits import score_logits

SIZES = (16, 64)


def scored(rows, n, seed=0, noise=0.7):
    rng = np.random.default_rng([seed, n])
    value = rng.uniform(0, 6, (rows, n))
    return value + noise * rng.standard_normal(value.shape), value.argmax(axis=1)


def by_size(rows=300, **options):
    """Logits and targets, a list of arrays each."""
    logits, target = zip(*(scored(rows, n, **options) for n in SIZES), strict=True)
    return list(logits), list(target)


@pytest.fixture(scope="module")
def fitted():
    return calibrate.fit(*by_size(), seed=3)


def test_rows_that_do_not_count_are_named_and_not_said_to_be_used(fitted):
    logits, target = by_size()
    weight = [np.where(np.arange(300) % 3, 1.0, 0.0)] * 2
    bad = [np.array(z) for z in logits]
    bad[1][4:14:3] = np.nan  # just as many as may be
    with pytest.warns(UserWarning, match=r"^4\b.* 400 "):
        found = calibrate.fit(bad, target, weight=weight, seed=3)
    counts = found.quality["rows"]
    fitted_weight = np.concatenate(weight)[~found.held_out].sum()
    assert counts["used"] == fitted_weight - counts["nan"]
    assert fitted.quality["rows"]["used"] == fitted.quality["rows"]["rows"]
    bad = [np.array(z) for z in logits]
    bad[0][np.flatnonzero(fitted.held_out)[:2]] = np.nan  # 2 of 600, though both of 120 that judge
    with pytest.warns(UserWarning, match=r"^2\b.* 600 "):
        assert calibrate.fit(bad, target, seed=3) == fitted


def test_the_numbers_are_those_of_the_command_line(fitted, here):
    """Fitted to the same rows, and judged by the same rows."""
    logits, target = by_size()
    for i, held in enumerate(np.split(fitted.held_out, [300])):
        for folder, chosen in (("rows", ~held), ("others", held)):
            Path(folder).mkdir(exist_ok=True)
            np.savez(f"{folder}/{i}.npz", logits=logits[i][chosen], target=target[i][chosen])
    call("collect", "--logits", "rows")
    call("fit", "runs/rows", "--name", "mine", "--min-beta", 1 / 64)
    published = calibrate.load("mine")
    assert published == fitted
    assert published.quality == fitted.quality
    scores = score_logits(Arrays.read(Path("others")), {"mine": published})
    ours, theirs = fitted.evidence.by("size"), scores.by("size")
    assert list(ours) == list(theirs) == list(SIZES)
    for size in SIZES:
        for rule in ("plain", "paper", "mine"):
            mine = ours[size].mean(rule.replace("mine", "this fit"), P)
            assert theirs[size].mean(rule, P) == mine


def test_a_collection_in_memory_is_the_one_on_disk(here):
    logits, target = scored(2_900, 8)
    part = {"logits": logits, "target": target, "group": np.arange(2_900) // 2}
    np.savez("mine.npz", **part)
    on_disk, in_memory = Arrays.read(Path("mine.npz")), Arrays.in_memory("mine", part)
    assert on_disk.fingerprint == in_memory.fingerprint
    disk, memory = (hold_out(arrays, seed=1).fitted for arrays in (on_disk, in_memory))
    written, kept = collect_arrays(disk, here / "run"), collect_in_memory(memory)
    assert kept.digest == written.digest
    assert kept.manifest["sizes"][0]["kept"] == 2_320
    for (_, one), (_, other) in zip(kept.shards(), written.shards(), strict=True):
        np.testing.assert_array_equal(one.index, other.index)


def test_a_collection_of_logits_from_before_it_said_so_stays_as_it_is(here):
    part = dict(zip(("logits", "target"), scored(200, 8), strict=True))
    arrays = Arrays.in_memory("mine", part)
    assert collect_arrays(arrays, here / "run").configuration["of"] == "logits"
    manifest = here / "run" / "manifest.json"
    manifest.write_text(re.sub(r'"of": ?"logits",\s*', "", manifest.read_text()))
    before = manifest.read_bytes()
    assert "of" not in collect_arrays(arrays, here / "run").configuration
    assert manifest.read_bytes() == before


def test_whole_groups_are_held_out_of_every_size_alike():
    rng = np.random.default_rng(0)
    logits, target = by_size(600)
    groups = [rng.integers(0, 200, 600), 200 + rng.integers(0, 200, 600)]
    parts = [
        {"logits": z, "target": t, "group": g}
        for z, t, g in zip(logits, target, groups, strict=True)
    ]
    arrays = Arrays.in_memory("mine", parts)
    split, again, other = (hold_out(arrays, 0.25, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(split.is_held_out, again.is_held_out)
    assert (split.is_held_out != other.is_held_out).any()
    for held, group in zip(np.split(split.is_held_out, 2), groups, strict=True):
        assert not set(group[held]) & set(group[~held])
        assert len(set(group[held])) == pytest.approx(len(set(group)) / 4, abs=1)
    counts = [part.count(16) for part in (split.fitted, split.held_out)]
    assert sum(counts) == 600
    assert split.held_out.fingerprint != split.fitted.fingerprint == arrays.fingerprint


def test_a_fit_is_used_saved_and_loaded_like_any_other(fitted, here):
    logits, _ = by_size()
    path = fitted.save("mine.json")
    loaded = calibrate.load("mine.json")
    assert loaded == fitted == loaded != calibrate.identity()
    assert (hash(loaded), loaded.path.absolute()) == (hash(fitted), path)
    of_loaded, of_fit = (calibrate.adaptive_softmax(logits[0], fit) for fit in (loaded, fitted))
    np.testing.assert_array_equal(of_loaded, of_fit)
    assert not np.allclose(of_fit, calibrate.adaptive_softmax(logits[0], calibrate.identity()))
    with pytest.raises(CoefficientsError, match="nowhere/x.json"):
        fitted.save("nowhere/x.json")
    assert not (here / "nowhere").exists()
    before = path.read_bytes()
    assert fitted.save(path) == path  # the same fit
    other = replace(fitted, source={**fitted.source, "seed": 9})
    with pytest.raises(CoefficientsError, match=r"mine\.json"):
        other.save(path)
    assert path.read_bytes() == before


def test_verdict_and_table_tell_what_it_gains(fitted):
    verdict, table = fitted.verdict, fitted.table
    assert fitted.outcome == "gain"
    assert verdict.startswith("Use this fit (")
    assert "120 rows" in verdict
    assert {row.size for row in table} == {*SIZES, None}
    rows = {row.rule: row for row in reversed(table)}
    plain, own = rows["baseline"], rows["this fit"]
    assert own.log_p - plain.log_p == pytest.approx(own.gain)
    assert plain.gain == 0 < own.error
    assert f"({-own.gain:+.3f} ± {own.error:.3f})" in str(table)


def test_the_loss_where_a_model_was_trained_stands_in_verdict_table_and_file():
    logits, target = by_size()
    fit = calibrate.fit(logits, target, trained_up_to=min(SIZES))
    words = f"in distribution (n <= {min(SIZES)}): "
    assert f"I{words[1:]}" in fit.verdict
    assert f"I{words[1:]}" in repr(fit)
    assert words in str(fit.table)
    assert f"; {words}" in fit.quality["verdict"]
    assert "this fit: " in str(fit.table)


def test_heads_get_rules_of_their_own():
    logits, target = scored(1_000, 16)
    head = np.arange(1_000) % 2
    logits[head == 1] *= 0.3
    fit = calibrate.fit(logits, target, layer=np.zeros(1_000, int), head=head)
    assert {(entry.layer, entry.head) for entry in fit.entries} >= {(0, 1)}
    z = np.broadcast_to(logits[1], (2, 1, 16))  # (heads, queries, items)
    probs = calibrate.adaptive_softmax(z, fit.layer(0))
    assert probs[1].max() > probs[0].max()
    assert NOT_JUDGED in fit.verdict
    assert NOT_JUDGED in fit.quality["verdict"]
    one = calibrate.fit(logits[head == 0], target[head == 0], layer=np.zeros(500, int))
    assert NOT_JUDGED in one.verdict
    assert NOT_JUDGED in one.quality["verdict"]


def test_masked_items_are_no_items_and_any_array_will_do():
    logits, target = scored(600, 16)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    wide = jnp.concatenate([jnp.full((600, 4), 50, jnp.bfloat16), rounded], axis=1)
    masked = calibrate.fit(wide, (target + 4).tolist(), mask=np.arange(20) >= 4, q=0.0)
    assert masked == calibrate.fit(np.asarray(rounded, np.float64), target, q=0.0)
    coarse = jnp.asarray(logits, jnp.float8_e4m3fn)
    assert calibrate.fit(coarse, target) == calibrate.fit(np.asarray(coarse, float), target)


class OnDevice:
    """A tensor of an accelerator, as far as it is looked at."""

    ndim = 2

    def __init__(self, tensor):
        self.detach, self.cpu = (lambda: self), (lambda: tensor)


def test_targets_of_which_the_logits_carry_no_information_are_refused():
    """Else beta would be at its least, and every distribution all but uniform."""
    rng = np.random.default_rng(0)
    logits, target = 3 * rng.standard_normal((800, 32)), rng.integers(0, 32, 800)
    with pytest.raises(QualityError, match=r"argmax .*2\.5%"):
        calibrate.fit(logits, target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_tensors_of_any_kind_are_read(dtype):
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    logits, target = scored(400, 16)
    z = torch.tensor(logits, dtype=getattr(torch, dtype), requires_grad=True)
    wide, t = np.asarray(z.detach().double()), torch.tensor(target)
    given = {"group": np.arange(400) // 2, "weight": np.ones(400, np.float32),
             "mask": np.ones((400, 16), bool)}  # fmt: skip
    tensors = {name: torch.tensor(x) for name, x in given.items()}
    expected = calibrate.fit(wide, target, **given)
    assert calibrate.fit(z, t, **tensors) == expected
    parts = {name: [OnDevice(x)] for name, x in tensors.items()}
    assert calibrate.fit([OnDevice(z.detach())], [OnDevice(t)], **parts) == expected
    solved, other = calibrate.optimal_beta(z, t), calibrate.optimal_beta(wide, target)
    np.testing.assert_allclose(solved.beta, other.beta, rtol=1e-3)
    fitted = calibrate.SoftmaxCalibrator(refit=False).fit(z, t, tensors["group"])
    assert fitted.coefficients_ == expected
    assert fitted.score(z, t) == pytest.approx(fitted.score(wide, target))
    with pytest.raises(TypeError, match="calibrate.torch.entropy"):
        calibrate.entropy(z)
    with pytest.raises(CalibrateError, match="^logits .*Tensor"):
        calibrate.fit(z.to("meta"), t)


def test_logits_of_heads_by_rows():
    """The same as rows that name their heads; a row's heads judge or fit together."""
    logits, target = scored(200, 16)
    z = np.stack([logits, 0.3 * logits])
    fit = calibrate.fit(z, target, head=range(2), layer=[3, 3])
    of_rows = {"group": np.tile(np.arange(200), 2), "head": np.repeat([0, 1], 200)}
    rows = calibrate.fit(z.reshape(400, 16), np.tile(target, 2), layer=np.full(400, 3), **of_rows)
    assert fit == rows
    np.testing.assert_array_equal(*np.split(fit.held_out, 2))
    assert calibrate.fit([z], [target], head=[range(2)], layer=[[3, 3]]) == fit
    sets = np.arange(16) == target[:, None]
    again = calibrate.fit(z, np.stack([sets] * 2), mask=np.ones(sets.shape, bool), head=[0, 1])
    assert [e.head for e in again.entries] == [e.head for e in fit.entries]
    with pytest.raises(CalibrateError, match=r"\(2, 200, 16\)"):
        calibrate.fit(z, target)


def test_an_offset_of_float64_logits_is_no_matter():
    rng = np.random.default_rng(0)
    logits, target = rng.standard_normal((2_000, 16)), rng.integers(0, 16, 2_000)
    logits[np.arange(2_000), target] += 2.5
    mask = rng.random((2_000, 16)) < 0.9
    mask[np.arange(2_000), target] = True
    one, other = (calibrate.fit(logits + offset, target, mask=mask) for offset in (0, 1e7))
    assert one.only.coefficients[-1] == pytest.approx(other.only.coefficients[-1], rel=1e-5)


Z, T = scored(40, 16)


@pytest.mark.parametrize("of", [list, np.asarray])
@pytest.mark.parametrize("targets", ["positions", "sets"])
def test_rows_of_different_lengths_are_read_as_they_are(of, targets):
    """As the same rows with a mask; log-probabilities in them are no log of 0."""
    logits, _ = scored(400, 24)
    lengths = np.random.default_rng(3).integers(4, 25, 400)
    real = np.arange(24) < lengths[:, None]
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, where=real))
    best = np.where(real, logits + np.random.default_rng(4).normal(0, 1, logits.shape), -np.inf)
    target = best.argmax(axis=1)
    ragged = [of(row[:n]) for row, n in zip(logits, lengths, strict=True)]
    sets = np.arange(24) == target[:, None]
    marked = [row[:n] for row, n in zip(sets, lengths, strict=True)]
    given, padded = (target.tolist(), target) if targets == "positions" else (marked, sets)
    one, other = (
        calibrate.fit(*rows, kind="constant")
        for rows in ((ragged, given), (np.where(real, logits, 0), padded, real))
    )
    assert one.only.coefficients == other.only.coefficients
    np.testing.assert_array_equal(one.held_out, other.held_out)


def test_too_little_is_refused_with_what_would_do(here):
    with pytest.raises(QualityError, match=r"arrays .*\b40\b.* 125 ") as caught:
        calibrate.fit(Z, T)
    assert "--" not in str(caught.value)
    with pytest.raises(QualityError, match="held_out = 0.28$"):
        calibrate.fit(*scored(140, 16), held_out=0.5)
    logits, target = scored(200, 16)
    with pytest.raises(QualityError, match=r"\b4 groups.* 10 groups"):
        calibrate.fit(logits, target, group=np.arange(200) % 4)
    logits[:10, 3] = np.nan
    np.savez("bad.npz", logits=logits, target=target)
    for refused in (
        lambda: calibrate.fit(logits, target),
        lambda: hold_out(Arrays.read("bad.npz")),
    ):
        with pytest.raises(QualityError, match=r"^10\b.* 200 .*\(10 nan\)"):
            refused()
    with pytest.raises(QualityError, match="baseline"):
        calibrate.fit(scored(200, 16, seed=1)[0], np.arange(200) % 16, min_beta=1)


def test_heads_that_are_too_sharp_may_be_made_more_diffuse():
    logits, target = scored(300, 16)
    with pytest.raises(QualityError, match="min_beta="):
        calibrate.fit(8 * logits, target, min_beta=1)
    fit = calibrate.fit(8 * logits, target)
    assert fit.outcome == "gain"
    assert fit.rule.min_beta == fit.source["options"]["min_beta"] == 1 / 64
    again = calibrate.load(fit.save("diffuse.json"))
    assert float(calibrate.inverse_temperature(1.0, again, n=16)) < 0.7
    for wrong in (0, 1.5):
        with pytest.raises(CalibrateError, match=rf"min_beta .*{wrong}; .*0\.015625 "):
            calibrate.fit(logits, target, min_beta=wrong)
