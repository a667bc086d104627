"""calibrate.fit: the same numbers as the command line, on arrays in memory, and its errors."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import call

import calibrate
from calibrate.errors import CalibrateError, CoefficientsError, QualityError
from calibrate.rows.collect import collect_arrays
from calibrate.rows.logits_files import Arrays

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
    return calibrate.fit(*by_size(), kind="polynomial", seed=3)


def test_rows_that_are_left_out_are_counted(fitted):
    logits, target = by_size()
    weight = [np.where(np.arange(300) % 3, 1.0, 0.0)] * 2
    bad = [np.array(z) for z in logits]
    bad[1][4:14:3] = np.nan  # 1 %, the most that is allowed
    with pytest.warns(UserWarning, match=r"^4\b.* 400 "):
        found = calibrate.fit(bad, target, weight=weight, group=[np.arange(300) % 15] * 2)
    inputs = found.evidence["inputs"]
    assert (inputs["seen"], inputs["bad"], inputs["fitted"]) == (400, 4, 396)
    assert fitted.evidence["inputs"]["fitted"] == fitted.evidence["inputs"]["seen"] == 600


def test_the_numbers_are_those_of_the_command_line(fitted, here):
    logits, target = by_size()
    Path("rows").mkdir()
    for i, (z, t) in enumerate(zip(logits, target, strict=True)):
        np.savez(f"rows/{i}.npz", logits=z, target=t)
    call("collect", "--logits", "rows")
    call("fit", "runs/rows", "--name", "mine", "--kind", "polynomial", "--seed", "3")
    saved = calibrate.load("mine")
    assert saved == fitted
    assert saved.evidence == fitted.evidence


def test_a_collection_in_memory_is_the_one_on_disk(here):
    logits, target = scored(2_900, 8)
    part = {"logits": logits, "target": target, "group": np.arange(2_900) // 2}
    np.savez("mine.npz", **part)
    on_disk, in_memory = Arrays.read(Path("mine.npz")), Arrays.in_memory("mine", part)
    assert on_disk.fingerprint == in_memory.fingerprint
    written, kept = collect_arrays(on_disk, here / "run"), collect_arrays(in_memory)
    assert kept.digest == written.digest
    assert kept.manifest["sizes"][0]["kept"] == 2_900
    for (_, one), (_, other) in zip(kept.shards(), written.shards(), strict=True):
        np.testing.assert_array_equal(one.index, other.index)


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


def test_verdict_and_table_have_the_gain(fitted):
    (head,) = fitted.evidence["heads"]
    assert f"gain {head['gain']:.3f} ± {head['se']:.3f})" in fitted.verdict
    table = fitted.table
    for record in fitted.evidence["held_out"]:
        assert f"{record['nll_after']:.4f}" in table
    assert len(str(fitted).splitlines()) <= 10


def test_each_head_has_its_own_rule():
    logits, target = scored(1_000, 16)
    head = np.arange(1_000) % 2
    logits[head == 1] *= 0.3
    fit = calibrate.fit(logits, target, layer=np.zeros(1_000, int), head=head)
    assert {(entry.layer, entry.head) for entry in fit.entries} >= {(0, 1)}
    z = np.broadcast_to(logits[1], (2, 1, 16))  # (heads, queries, items)
    probs = calibrate.adaptive_softmax(z, fit.layer(0))
    assert probs[1].max() > probs[0].max()
    alone = calibrate.fit(logits[head == 1], target[head == 1])
    assert fit.entry_of(0, 1).coefficients == alone.coefficients


def test_masked_items_do_not_count_in_any_type_of_array():
    logits, target = scored(600, 16)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    wide = jnp.concatenate([jnp.full((600, 4), 50, jnp.bfloat16), rounded], axis=1)
    fit = partial(calibrate.fit, group=np.arange(600) % 15, kind="constant")
    masked = fit(wide, (target + 4).tolist(), mask=np.arange(20) >= 4)
    assert masked == fit(np.asarray(rounded, np.float64), target)
    coarse = jnp.asarray(logits, jnp.float8_e4m3fn)
    assert fit(coarse, target) == fit(np.asarray(coarse, float), target)


class OnDevice:
    """A tensor of an accelerator, with the members that are used."""

    ndim = 2

    def __init__(self, tensor):
        self.detach, self.cpu = (lambda: self), (lambda: tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_tensors_of_any_kind_are_read(dtype):
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    logits, target = scored(400, 16)
    logits += 1e7 if dtype == "float64" else 0  # float32 would keep none of the differences
    z = torch.tensor(logits, dtype=getattr(torch, dtype), requires_grad=True)
    wide, t = np.asarray(z.detach().double()), torch.tensor(target)
    given = {"group": np.arange(400) % 15, "weight": np.ones(400, np.float32),
             "mask": np.ones((400, 16), bool)}  # fmt: skip
    tensors = {name: torch.tensor(x) for name, x in given.items()}
    expected = calibrate.fit(wide, target, kind="constant", **given)
    parts = {name: [OnDevice(x)] for name, x in tensors.items()}
    if dtype == "bfloat16":
        fit = calibrate.fit([OnDevice(z.detach())], [OnDevice(t)], kind="constant", **parts)
    else:
        fit = calibrate.fit(z, t, kind="constant", **tensors)
    assert fit == expected
    solved, other = calibrate.optimal_beta(z, t), calibrate.optimal_beta(wide, target)
    np.testing.assert_allclose(solved.beta, other.beta, rtol=1e-3)
    calibrator = calibrate.SoftmaxCalibrator(kind="constant")
    if dtype == "float64":
        calibrator.fit(z, t, tensors["group"])
        assert calibrator.coefficients_ == expected
        assert calibrator.score(z, t) == pytest.approx(calibrator.score(wide, target))
    with pytest.raises(TypeError, match="calibrate.torch.entropy"):
        calibrate.entropy(z)
    with pytest.raises(CalibrateError, match="^logits .*Tensor"):
        calibrate.fit(z.to("meta"), t)


def test_logits_of_heads_by_rows():
    """The same as rows that name their heads."""
    logits, target = scored(200, 16)
    z = np.stack([logits, 0.3 * logits])
    fit = calibrate.fit(z, target, head=range(2), layer=[3, 3])
    of_rows = {"group": np.tile(np.arange(200), 2), "head": np.repeat([0, 1], 200)}
    rows = calibrate.fit(z.reshape(400, 16), np.tile(target, 2), layer=np.full(400, 3), **of_rows)
    assert fit == rows
    sets = np.stack([np.arange(16) == target[:, None]] * 2)
    masks = {"mask": [np.ones(sets.shape[1:], bool)]}
    again = calibrate.fit([z], [sets], head=[range(2)], layer=[[3, 3]], **masks)
    assert again.entries == fit.entries
    with pytest.raises(CalibrateError, match=r"\(2, 200, 16\)"):
        calibrate.fit(z, target)


def test_an_offset_of_float64_logits_changes_nothing():
    rng = np.random.default_rng(0)
    logits, target = rng.standard_normal((400, 16)), rng.integers(0, 16, 400)
    logits[np.arange(400), target] += 2.5
    mask = rng.random((400, 16)) < 0.9
    mask[np.arange(400), target] = True
    options = {"mask": mask, "group": np.arange(400) % 15, "kind": "constant"}
    one, other = (calibrate.fit(logits + offset, target, **options) for offset in (0, 1e7))
    assert one.coefficients == pytest.approx(other.coefficients, rel=1e-5)


Z, T = scored(40, 16)


def test_too_few_or_bad_rows_are_refused(here):
    with pytest.raises(QualityError, match=r"^40 .*100") as caught:
        calibrate.fit(Z, T)
    assert "--" not in str(caught.value)
    logits, target = scored(200, 16)
    logits[:10, 3] = np.nan
    with pytest.raises(QualityError, match=r"^10\b.* 200 .*\(10 nan\)"):
        calibrate.fit(logits, target)


def test_heads_that_are_too_sharp_are_made_more_diffuse():
    logits, target = scored(300, 16)
    fit = calibrate.fit(8 * logits, target)
    again = calibrate.load(fit.save("diffuse.json"))
    assert float(calibrate.inverse_temperature(1.0, again, n=16)) < 0.7
    bounded = calibrate.fit(8 * logits, target, kind="polynomial", min_beta=1)
    assert "--min-beta" in bounded.verdict
    assert float(calibrate.inverse_temperature(1.0, bounded, n=16)) == 1
    assert bounded.rule.min_beta == bounded.source["options"]["min_beta"] == 1
    for wrong in (0, 1.5):
        with pytest.raises(CalibrateError, match=rf"min_beta .*{wrong}"):
            calibrate.fit(logits, target, min_beta=wrong)


MASKED = np.ma.array(Z, mask=np.broadcast_to(np.arange(16) > 12, Z.shape))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: calibrate.fit(x, T), "logits"),
        (lambda x: calibrate.fit(list(x), list(T)), "logits"),
        (lambda x: calibrate.fit([x], [T]), "logits"),
        (lambda x: calibrate.fit(Z, T, weight=x[:, 15]), "weight"),
        (lambda x: calibrate.fit(Z, T, group=list(x[:, 15])), "group"),
        (lambda x: calibrate.SoftmaxCalibrator().fit(x, T), "X"),
        (lambda x: calibrate.SoftmaxCalibrator().fit(list(x), T), "X"),
        (lambda x: calibrate.SoftmaxCalibrator().fit(Z, x[:, 15]), "y"),
        (lambda x: calibrate.optimal_beta(x, T), "logits"),
        (lambda x: calibrate.optimal_beta(list(x), T), "logits"),
        (lambda x: calibrate.commitment([list(x)]), "logits"),
        (lambda x: calibrate.susceptibility(Z, x), "where"),
        (lambda x: calibrate.entropy(list(x)), "logits"),
        (lambda x: calibrate.adaptive_softmax(x, calibrate.identity()), "logits"),
        (lambda x: calibrate.inverse_temperature(x, calibrate.load("paper")), "H"),
    ],
)
def test_an_array_of_numpy_ma_is_refused_by_name(call, name):
    """Its mask would be dropped."""
    with pytest.raises((ValueError, CalibrateError), match=rf"^{name} .*mask"):
        call(MASKED)


def test_an_array_of_numpy_ma_without_masked_items_is_an_array():
    logits, target = scored(200, 16)
    options = {"group": np.arange(200) % 15, "kind": "constant"}
    fit = calibrate.fit(np.ma.array(logits), target, **options)
    assert fit == calibrate.fit(logits, target, **options)


def test_groups_are_numbers_or_strings():
    logits, target = scored(300, 16)
    number = np.arange(300) // 20
    expected = calibrate.fit(logits, target, group=number, kind="polynomial")
    for name in (lambda i: f"prompt {i:02}", lambda i: i / 2, lambda i: i - 50):
        group = [name(i) for i in number.tolist()]
        assert calibrate.fit(logits, target, group=group, kind="polynomial") == expected
    halves = [[x[:150], x[150:]] for x in (logits, target)]
    parts = calibrate.fit(*halves, group=[group[:150], group[150:]], kind="polynomial")
    assert parts.evidence["kinds"] == expected.evidence["kinds"]


def test_options_may_be_scalars_of_numpy(here):
    logits, target = scored(300, 16)
    options = {"seed": np.int64(3), "trained_up_to": np.int32(16), "tolerance": np.float64(0.5),
               "min_beta": np.float32(0.5)}  # fmt: skip
    group = np.arange(300) % 15
    fit = calibrate.fit(logits, target, group=group, kind="constant", **options)
    saved = calibrate.load(fit.save("mine.json"))
    assert {name: saved.source["options"][name] for name in options} == options


@pytest.mark.slow
def test_the_users_settings_of_numpy_and_jax_change_nothing(fitted):
    logits, target = by_size()
    wide, right = 30 * logits[0], target[0]
    calls = {
        "fit": lambda: calibrate.fit(logits, target, kind="polynomial", seed=3),
        "optimal_beta": lambda: calibrate.optimal_beta(wide, right).beta.tolist(),
        "of sets": lambda: calibrate.optimal_beta(wide, wide > 90).status.tolist(),
        "commitment": lambda: calibrate.commitment(wide).tolist(),
        "estimator": lambda: (
            calibrate.SoftmaxCalibrator(kind="constant").fit(wide, right).predict_proba(wide)
        ).tolist(),
        "head": lambda: calibrate.solve(calibrate.collect("max-retrieval", [16], 64)).beta.tolist(),
    }
    expected = {name: call() for name, call in calls.items()}
    with (
        np.errstate(all="raise"), jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):  # fmt: skip
        assert {name: call() for name, call in calls.items()} == expected
    assert expected["fit"] == fitted


def test_weights_count_as_rows_that_are_repeated_in_their_group():
    """In the coefficients, and in the held-out scores of every kind."""
    kind = "entropy-and-size"
    parts = [scored(200, n) for n in SIZES]
    weight = [np.arange(200) % 3 + 1.0] * 2
    group = [np.arange(200) + 200 * i for i in range(2)]
    logits, target = map(list, zip(*parts, strict=True))
    one = calibrate.fit(logits, target, weight=weight, group=group, kind=kind)
    columns = [[np.repeat(x, weight[0].astype(int), axis=0) for x in of] for of in
               (logits, target, group)]  # fmt: skip
    other = calibrate.fit(columns[0], columns[1], group=columns[2], kind=kind)
    assert one.coefficients == pytest.approx(other.coefficients, rel=1e-3, abs=1e-5)
    assert one.only.domain == pytest.approx(other.only.domain, rel=1e-6)
    for ours, repeated in zip(one.evidence["kinds"], other.evidence["kinds"], strict=True):
        assert ours["nll"] == pytest.approx(repeated["nll"], rel=1e-3)


def test_tables_of_numbers_are_arrays_and_those_of_objects_are_refused():
    pandas = pytest.importorskip("pandas")
    logits, target = scored(200, 16)
    table = pandas.DataFrame(logits)
    fit = partial(calibrate.fit, group=np.arange(200) % 15, kind="constant")
    assert fit(table, pandas.Series(target)) == fit(logits, target)
    for given in (table.astype("Float64"), pandas.Series(list(map(list, logits)))):
        with pytest.raises(CalibrateError, match="^logits are object"):
            fit(given, target)
