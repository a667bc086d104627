"""Fits of many heads: each gets the rule that it needs, or none, and the runtime applies it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
from conftest import ToyHead
from fake_progress import Told
from planted import planted_rows
from test_cli import call, refusal

import calibrate
from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import KINDS
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.logits_recorder import Recorder
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.selection_criterion import Gain
from calibrate.fitting.fit_collection import fit_collection
from calibrate.fitting.fit_rule import fit_kind
from calibrate.fitting.options import Options
from calibrate.fitting.per_head import (
    HeadFit,
    combine_heads,
    fit_each_head,
    select_family,
)
from calibrate.fitting.quality_of_heads import mean_candidates, quality_of_heads
from calibrate.fitting.select import fit_and_select
from calibrate.fitting.verdict_clauses import NOT_JUDGED
from calibrate.parallel import Jobs
from calibrate.report.blocks import Facts
from calibrate.report.fit_record import FitRecord
from calibrate.rows.collect import collect_arrays
from calibrate.solver.optimal_beta import STATUS_NAMES
from calibrate.solver.solved_rows import concatenate_rows, solve_collection
from calibrate.store.entry import Entry
from calibrate.store.publishing import same_fit

# What beta each (layer, head) is planted to want, of entropy and size.
WANTS = {
    (0, 0): lambda H, n: 1 + 0 * H,
    (0, 1): lambda H, n: 2.5 + 0 * H,
    (2, 0): lambda H, n: 0.5 * np.log(n) + 0 * H,
    (2, 1): lambda H, n: 0.2 + 0 * H,  # less than any rule of ours gives
}


def rows_of(wants=WANTS, **options):
    parts = []
    for seed, ((layer, head), beta_of) in enumerate(wants.items()):
        rows = planted_rows(beta_of, seed=seed, **options)
        ones = np.ones(len(rows.size), np.int16)
        parts.append(rows._replace(layer=layer * ones, head=head * ones))
    return concatenate_rows(parts)


def fit_heads(rows, options):
    return combine_heads(fit_each_head(rows, options), options)


@pytest.fixture(scope="module")
def rows():
    return rows_of()


@pytest.fixture(scope="module")
def found(rows):
    return fit_heads(rows, Options(rows="all"))


def test_heads_that_gain_have_a_rule_and_no_others(found):
    fit, heads = found
    assert [(h.layer, h.head) for h in heads] == list(WANTS)
    assert [h.entry is not None for h in heads] == [False, True, True, False]
    assert [(e.layer, e.head) for e in fit.entries] == [(0, 1), (2, 0)]
    assert fit.rule.kind == "log-size"  # the family in which the line has its gain
    kappa, b = fit.entries[0].coefficients
    assert kappa == 0
    assert b == pytest.approx(2.5, abs=0.15)
    n = np.log([16, 64, 256])
    np.testing.assert_allclose(
        np.polyval(fit.entries[1].coefficients, n), np.maximum(0.5 * n, 1), atol=0.25
    )
    assert heads[3].verdict.startswith("not for this head")


@pytest.mark.slow
def test_each_head_is_fitted_as_by_itself(rows, found):
    alone, _ = fit_heads(rows_of({(2, 0): WANTS[2, 0]}), Options(rows="all"))
    mine = rows.take((rows.layer == 2) & (rows.head == 0))
    one, _ = fit_heads(mine, Options(rows="all"))
    assert one.entries[0] == found[0].entries[1]
    assert alone.entries[0].layer == 2


def test_a_family_of_polynomials_is_taken_where_it_gains_more():
    """A wish that grows and falls with entropy, at one size."""
    wants = {(1, 3): lambda H, n: 1 + 2 * np.sin(np.clip(H, 0, np.pi)) ** 2}
    families = fit_each_head(rows_of(wants, sizes=(64,), count=6_000), Options(rows="all"))
    fit, (head,) = combine_heads(families, Options())
    assert fit.rule.kind == "entropy-polynomial"
    assert head.kind == "polynomial"
    assert fit.rule.min_entropy == 0
    assert combine_heads(families, Options(min_entropy=0.25))[0].rule.min_entropy == 0.25
    forced, _ = fit_heads(rows_of({(0, 1): WANTS[0, 1]}), Options(rows="all", kind="polynomial"))
    assert forced.rule.kind == "entropy-polynomial"


def test_a_constant_keeps_the_threshold_under_which_it_was_judged():
    fit, _ = fit_heads(rows_of({(0, 1): WANTS[0, 1]}), Options(rows="all", min_entropy=1.0))
    assert fit.rule == Rule(min_entropy=1.0)
    assert fit.entries[0].coefficients[:4] == (0, 0, 0, 0)


def test_no_head_that_gains_is_an_answer():
    wants = {(0, 0): WANTS[0, 0], (0, 1): WANTS[2, 1]}
    with pytest.raises(QualityError, match="2 gains .* layer 0, head 0: "):
        fit_heads(rows_of(wants), Options(rows="all"))


def test_the_only_head_that_gains_is_named(found, make_fit):
    fit, heads = found
    one = replace(make_fit(), rule=fit.rule, entries=fit.entries[:1])
    facts = [
        row
        for block in FitRecord(one, heads).evidence()
        if isinstance(block, Facts)
        for row in block.rows
    ]
    assert dict(facts)["heads"] == "1 of 4 have a rule: layer 0, head 1"


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_kind_is_published_of_heads_that_do_not_gain(kind):
    wants = {(0, 0): WANTS[0, 0], (0, 1): WANTS[0, 1]}
    options = Options(rows="all", kind=kind)
    fit, heads = fit_heads(rows_of(wants), options)
    assert [(entry.layer, entry.head) for entry in fit.entries] == list(wants)
    assert {head.kind for head in heads} == {kind}
    assert [head.gain.significant for head in heads] == [False, True]
    verdict = quality_of_heads(heads, options)["verdict"]
    assert "2 of 2 heads have a rule" in verdict
    assert "of which 1 gain significantly" in verdict


def test_heads_that_a_named_kind_cannot_be_fitted_to_are_refused():
    few = rows_of({(0, 0): WANTS[0, 0], (0, 1): WANTS[0, 1]}, count=20)
    with pytest.raises(QualityError, match=r"\b2 .* constant; layer 0, head 0: 60 .* 100 "):
        fit_heads(few, Options(rows="all", kind="constant"))


def test_evidence_is_of_the_calibrated_heads_together(found):
    heads = found[1]
    quality = quality_of_heads(heads, Options(trained_up_to=64))
    assert "2 of 4 heads gain, by" in quality["verdict"]
    assert "; in distribution (n <= 64): +0." in quality["verdict"]
    assert quality["verdict"].endswith(f". {NOT_JUDGED}")
    alone = [h.held_out_evidence.gain_records() for h in heads if h.held_out_evidence]
    for size, *of_heads in zip(quality["held_out"], *alone, strict=True):
        assert size["rows"] == sum(of["rows"] for of in of_heads) == 2_000
        assert size["before"] == pytest.approx(np.mean([of["before"] for of in of_heads]))
        assert size["after"] > size["before"]
        assert size["error"] < max(of["error"] for of in of_heads)


def test_kinds_are_compared_by_their_means_over_heads(rows, found):
    """A head that a kind could not be fitted to has the baseline by it."""
    heads = found[1]
    records = {c["kind"]: c for c in quality_of_heads(heads, Options())["candidates"]}
    assert list(records) == list(KINDS)
    alone = [
        {c.kind: c for c in fit_and_select(rows.take(rows.is_of(*name)), Options(kind="constant"))
         .candidates} for name in WANTS
    ]  # fmt: skip
    for kind, record in records.items():
        assert record["gain"] == pytest.approx(np.mean([of[kind].gain.mean for of in alone]))
        assert record["log_p"] == pytest.approx(np.mean([of[kind].mean_log_p for of in alone]))
        assert "coefficients" not in record
    line = {"kind": "log-size", "loss": "likelihood", "q": 0.0, "log_p": -1.5, "gain": 0.5}
    constant = line | {"kind": "constant", "log_p": -1.0, "gain": 0.25}
    of_one_size = replace(NONE, candidates={"constant": constant})
    both = replace(NONE, candidates={"constant": constant, "log-size": line | {"log_p": -0.75}})
    means = {c["kind"]: c for c in mean_candidates([of_one_size, both, NONE])}
    assert [means[kind]["gain"] for kind in means] == [0.25, 0.25]
    assert [means[kind]["log_p"] for kind in means] == [-1.0, -1.0]


@pytest.fixture
def logged(here):
    """Two layers of two heads on disk: only the second head of each is worth calibrating."""
    rng = np.random.default_rng(0)
    z = rng.uniform(0.3, 2, (6_000, 1)) * rng.standard_normal((6_000, 48))
    p = reference.softmax(z, beta=np.repeat([1.0, 3.0, 1.0, 2.0], 1_500)[:, None])
    target = (p.cumsum(1) > rng.random((6_000, 1))).argmax(1)
    layer, head = np.repeat([0, 0, 4, 4], 1_500), np.repeat([0, 1, 0, 1], 1_500)
    np.savez("model.npz", logits=z, target=target, layer=layer, head=head)
    return here / "model.npz"


def test_from_arrays_to_the_runtime(logged, here):
    call("collect", "--logits", logged)
    assert "2 of 4" in call("fit", "runs/model", "--name", "model").stdout
    fit = calibrate.load("model")
    assert [(e.layer, e.head) for e in fit.entries] == [(0, 1), (4, 1)]
    logits = np.random.default_rng(1).standard_normal((2, 2, 3, 48)).astype(np.float32)
    probs = np.asarray(calibrate.adaptive_softmax(logits, fit.layer(4)))
    np.testing.assert_allclose(probs[:, 0], reference.softmax(logits[:, 0]), rtol=1e-5)
    beta = fit.entries[1].coefficients[-1]
    assert beta == pytest.approx(2, abs=0.15)
    np.testing.assert_allclose(
        probs[:, 1], reference.softmax(logits[:, 1], beta=beta), rtol=1e-4, atol=1e-7
    )
    assert (np.asarray(calibrate.adaptive_softmax(logits, fit.layer(3))) ==
            np.asarray(calibrate.adaptive_softmax(logits, calibrate.identity()))).all()  # fmt: skip
    again = call("fit", "runs/model", "--name", "model", "--json")
    assert "model@1 " in again.stderr
    record = json.loads(again.stdout)
    assert [h["kind"] for h in record["heads"]] == [None, "constant", None, "constant"]
    for command in (["show", "model"], ["verify"], ["list"]):
        call("fits", *command)


def test_a_head_is_refused_where_rows_name_theirs(logged, here):
    collect_arrays(Arrays.read(logged), here / "run")
    with pytest.raises(CalibrateError, match="head by head"):
        fit_collection(here / "run", "model", head=ToyHead())
    message = refusal("fit", "run", "--name", "model", "--head", "max-retrieval")
    assert "--q; " in message


@pytest.fixture
def unequal(here):
    """Three heads: many misranked rows, as many of another spread, and few."""
    rng = np.random.default_rng(0)
    z = rng.uniform(0.3, 2, (3_000, 1)) * rng.standard_normal((3_000, 48))
    p = reference.softmax(z, beta=np.repeat([1.5, 3.0, 1.0], 1_000)[:, None])
    target = (p.cumsum(1) > rng.random((3_000, 1))).argmax(1)
    target[2_050:] = z[2_050:].argmax(1)
    layer, head = np.repeat([0, 0, 4], 1_000), np.repeat([0, 1, 0], 1_000)
    columns = {"logits": z, "target": target, "layer": layer, "head": head}
    np.savez("unequal.npz", **columns)
    call("collect", "--logits", "unequal.npz")
    return columns


def test_least_squares_give_each_head_with_enough_misranked_rows_its_polynomial(unequal):
    """The same by three commands and in Python; never one polynomial of all heads."""
    words = ["fit", "runs/unequal", "--name"]
    done = call(*words, "paper-mine", "--paper")
    call(*words, "spelled", "--kind", "polynomial", "--loss", "log-least-squares",
         "--rows", "misranked", "--min-entropy", "0.5")  # fmt: skip
    solved = calibrate.solve("runs/unequal")
    fit = calibrate.load("paper-mine")
    assert calibrate.load("spelled") == fit
    assert calibrate.fit_polynomial(solved) == fit
    assert [(e.layer, e.head) for e in fit.entries] == [(0, 0), (0, 1)]
    assert fit.rule.kind == "entropy-polynomial"
    assert "2 of 3" in done.stdout
    assert "layer 4, head 0" in fit.quality["verdict"]
    for layer, head in ((0, 0), (0, 1)):
        rows = solved.rows.take(solved.rows.is_of(layer, head))
        alone = fit_kind(rows, "polynomial", Options.of_the_paper())
        assert fit.entry_of(layer, head).coefficients == alone.only.coefficients
    assert fit.entries[0].coefficients != fit.entries[1].coefficients


@pytest.mark.parametrize("loss", ["log-least-squares", "least-squares"])
def test_arrays_of_heads_are_fitted_by_least_squares(unequal, loss):
    fit = calibrate.fit(**unequal, kind="polynomial", loss=loss, rows="misranked")
    assert {kind: c["loss"] for kind, c in fit.candidates.items()} == {
        "constant": "likelihood", "polynomial": loss,
    }  # fmt: skip
    assert [(e.layer, e.head) for e in fit.entries] == [(0, 0), (0, 1)]


def test_heads_without_enough_misranked_rows_are_refused(unequal):
    some = {name: column[2_000:] for name, column in unequal.items()}
    with pytest.raises(QualityError, match=r"\b1 .* polynomial; layer 4, head 0: \d+ .* 100"):
        calibrate.fit(**some, kind="polynomial", loss="least-squares", rows="misranked")


@pytest.fixture
def diffuse(here):
    """Two heads whose best beta is 0.3, and one whose best is 3, as logits on disk."""
    rng = np.random.default_rng(0)
    z = rng.uniform(0.3, 2, (3_000, 1)) * rng.standard_normal((3_000, 48))
    p = reference.softmax(z, beta=np.repeat([0.3, 0.3, 3.0], 1_000)[:, None])
    target = (p.cumsum(1) > rng.random((3_000, 1))).argmax(1)
    columns = {"logits": z, "target": target, "layer": np.zeros(3_000, int)}
    columns["head"] = np.repeat([0, 1, 2], 1_000)
    np.savez("three.npz", **columns)
    np.savez("two.npz", **{name: column[:2_000] for name, column in columns.items()})
    return columns


def test_a_head_is_refused_with_the_argument_or_the_option_to_change(diffuse):
    """The reason is found where the head is fitted, which may be another process."""
    for name in ("two", "three"):
        call("collect", "--logits", f"{name}.npz")
    with pytest.raises(QualityError, match=r"\b2 .* min_beta=$"):
        fit_collection(Path("runs/two"), "mine", Options(min_beta=1.0))
    line = refusal("fit", "runs/two", "--name", "mine", "--min-beta", 1, "--jobs", 2, code=3)
    assert line.endswith(" --min-beta")
    fitted = fit_collection(Path("runs/three"), "mine", Options(min_beta=1.0))
    assert [head.entry is not None for head in fitted.heads] == [False, False, True]
    assert fitted.heads[0].verdict.endswith(" min_beta=")


def test_least_squares_fit_no_other_kind(rows):
    with pytest.raises(ValueError, match="'log-size'"):
        fit_kind(rows, "log-size", Options(loss="least-squares"))


def test_a_refit_that_differs_in_a_head_is_new(found):
    fit = found[0]
    assert same_fit(fit, fit)
    assert not same_fit(fit, replace(fit, entries=fit.entries[:1]))
    moved = replace(fit.entries[1], coefficients=(0.0, 9.0), check=())
    assert not same_fit(fit, replace(fit, entries=(fit.entries[0], moved)))


def test_a_constant_with_another_bound_is_new(make_fit):
    """Beta is the same on all rows that there were."""
    fit, higher = (make_fit((0.0, 0.0, 0.0, 0.0, 2.0), max_beta=bound) for bound in (8.0, 16.0))
    assert same_fit(fit, make_fit((0.0, 0.0, 0.0, 0.0, 2.0), max_beta=8.0))
    assert not same_fit(fit, higher)
    assert not same_fit(fit, make_fit((0.0, 0.0, 0.0, 0.0, 2.0), max_beta=8.0, min_beta=0.5))


@pytest.mark.slow
def test_neither_jobs_nor_groups_change_a_fit(logged, here):
    collect_arrays(Arrays.read(logged), here / "run")
    fit = fit_collection(here / "run", "model")
    told = Told()
    other = fit_collection(here / "run", "model", jobs=Jobs(2), progress=told, rows_per_group=1)
    assert other.heads == fit.heads
    assert other.coefficients.quality == fit.coefficients.quality
    assert other.coefficients.entries == fit.coefficients.entries
    assert told.stages == [("fitting heads", 4, 4)]
    assert told.steps == [(1, False)] * 4
    counts = fit.coefficients.quality["rows"]
    assert set(counts) >= set(STATUS_NAMES.values())  # those that no row has, too
    assert sum(counts[status] for status in STATUS_NAMES.values()) == counts["kept"] == 6_000


def test_a_collection_without_a_row_is_exit_3(here):
    z = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    head = np.arange(200) % 2
    np.savez("right.npz", logits=z, target=z.argmax(axis=1), layer=head, head=head)
    call("collect", "--logits", "right.npz", "--keep", "misranked")
    message = refusal("fit", "runs/right", "--name", "right", code=3)
    assert "runs/right " in message


def test_solved_rows_of_heads_without_a_row_are_refused(here):
    z = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    right = {"logits": z, "target": z.argmax(axis=1), "head": np.arange(200) % 2}
    rows = collect_arrays(Arrays.in_memory("right", right), here / "run", keep="misranked")
    with pytest.raises(QualityError, match="no rows"):
        calibrate.fit_polynomial(calibrate.solve(rows))


def test_heads_that_cover_each_others_errors_are_sharpened(here):
    """Each misranks more than half of the rows, others than the rest: together they are right."""
    rng, recorder = np.random.default_rng(0), Recorder(here / "captured", 10**9)
    for _ in range(400):
        z = rng.normal(0, 0.5, (1, 4, 256)).astype(np.float32)
        z[:, :, 0] = 4  # the target
        z[0, rng.random(4) < 0.55, 1] = 7
        recorder.next(query=-1, target=0)
        recorder.add(3, z, 256)
    recorder.finish()
    rows = solve_collection(collect_arrays(Arrays.read(here / "captured"), here / "run"))
    for head in range(4):
        weighed = rows.take(rows.is_of(3, head))
        alike = weighed._replace(weight=np.ones_like(weighed.weight))
        cautious, found = (
            fit_kind(of_head, "constant").only.coefficients[-1] for of_head in (alike, weighed)
        )
        assert cautious < 1.2 < 1.3 < found


def test_a_head_without_any_weight_keeps_plain_softmax():
    """And alone it is refused."""
    rows = rows_of({(5, 5): WANTS[0, 1], (5, 6): WANTS[0, 1]}, sizes=(16, 64), count=200)
    rows = rows._replace(weight=(rows.head == 5).astype(np.float32))
    _, heads = fit_heads(rows, Options(rows="all"))
    assert [head.entry is not None for head in heads] == [True, False]
    assert "no row has any weight" in heads[1].verdict
    for fit in (fit_heads, fit_and_select):
        with pytest.raises(QualityError, match="weight"):
            fit(rows.take(rows.head == 6), Options(rows="all"))


def named(gain, p, kind):
    entry = Entry((0.0, 2.0), (0.0, 1.0))
    return HeadFit(0, 0, 300, 0.1, "gains", entry, kind, Gain(gain, gain / 2, 2 * gain, p))


NONE = HeadFit(0, 0, 300, 0.1, "not for this head")


def test_the_family_is_chosen_by_heads_that_pass_among_all():
    """Not by rules that chance gives some of so many heads, and by however many have none."""
    line, polynomial = "log-size", "entropy-polynomial"
    sure = {line: named(0.1, 1e-9, "log-size"), polynomial: named(0.05, 0.02, "polynomial")}
    chance = {line: NONE, polynomial: named(0.06, 0.02, "polynomial")}
    nothing = dict.fromkeys((line, polynomial), NONE)
    family, heads = select_family([sure, *[chance] * 3, *[nothing] * 36])
    assert family == line
    assert [head.entry is not None for head in heads] == [True] + [False] * 39
    better = sure | {polynomial: named(0.3, 1e-9, "polynomial")}
    assert select_family([better] * 3 + [nothing] * 997)[0] == polynomial
