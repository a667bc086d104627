"""Fits through a model: gradients, what stays as it is, what is held, resuming, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import calibrate
from calibrate.errors import CalibrateError, QualityError

torch = pytest.importorskip("torch", reason="needs the extra torch")
pytest.importorskip("transformers", reason="needs the extra transformers")

from test_cli import call, refusal  # noqa: E402
from test_first_look import planted_examples, planted_model, some_examples  # noqa: E402
from test_model_examples import collected, write_lines  # noqa: E402
from tiny_causal import causal_model, save  # noqa: E402

from calibrate.export.plan import ALIKE, HEAD, LAYER  # noqa: E402
from calibrate.files.examples import Cell, Example, ExampleSet, Scores  # noqa: E402
from calibrate.maths.rule import LOG_SIZE  # noqa: E402
from calibrate.model import (  # noqa: E402
    answering,
    candidates,
    steps,
)
from calibrate.model.candidates import ModelOptions  # noqa: E402
from calibrate.model.comparison import PLAIN, Estimate, compare  # noqa: E402
from calibrate.model.descent import Point  # noqa: E402
from calibrate.model.judging import Judged  # noqa: E402
from calibrate.model.memo import Memo, processor  # noqa: E402
from calibrate.model.model_fit import fit_through  # noqa: E402
from calibrate.model.objective import Multipliers, Objective  # noqa: E402
from calibrate.model.parts import CHOOSING, FITTING, JUDGING, parts_of  # noqa: E402
from calibrate.model.passes import Passes  # noqa: E402
from calibrate.model.rule_parameters import CONSTANT, N_NUMBERS, ONE_RATIO, Form  # noqa: E402
from calibrate.model.score_fits import score_fits  # noqa: E402
from calibrate.report.model_fit_record import rules_table  # noqa: E402
from calibrate.transformers.betas import head_betas  # noqa: E402

FORMS = [Form(kind, of, 2.0, 4.0) for kind in N_NUMBERS for of in (ALIKE, HEAD)]
FORMS += [Form(kind, LAYER, 2.0, 4.0) for kind in (CONSTANT, ONE_RATIO)]
HEADS = [(layer, head) for layer in range(2) for head in range(4)]


def numbers_of(form):
    rng = np.random.default_rng(5)
    numbers = 0.1 * rng.standard_normal(form.zeros(HEADS).shape)
    numbers[-1, -1] = abs(numbers[-1, -1])  # it may be the slope, which may not fall
    return form.within(numbers)


@pytest.fixture(params=["llama", "gemma2", "gpt_oss"])
def passes(request):
    model = causal_model(request.param)
    with head_betas(model) as heads:
        yield Passes(model, heads, some_examples(), Memo(None))


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_gradients_are_those_of_finite_differences(passes, form):
    numbers, which = numbers_of(form), [0, 1, 3]
    weights = np.array([1.0, -0.5, 2.0])
    gradient = passes.gradient(form, numbers, which, weights)
    direction = np.random.default_rng(6).standard_normal(numbers.shape)
    h = 0.003
    up, down = (
        weights @ passes.scores(form, numbers + sign * h * direction, which).log_p
        for sign in (1, -1)
    )
    assert (gradient * direction).sum() == pytest.approx((up - down) / 2 / h, rel=0.02, abs=4e-3)


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_a_fit_scores_as_its_numbers_do(passes, form):
    """The runtime, by the coefficients in a file, and the rules that the descent goes by."""
    numbers, which = numbers_of(form), list(range(4))
    n_entries = 1
    if form.of != ALIKE:  # of two layers, or eight heads
        left = [1, 6] if form.of == HEAD else [1]
        numbers[:, left] = 0  # stay as they are, and have no entry unless all heads have
        n_entries = 8 if form.kind == ONE_RATIO else 8 - len(left) * (1 if form.of == HEAD else 4)
    expected = passes.scores(form, numbers, which).log_p
    fit = form.fit(numbers, passes.heads.heads)
    assert len(fit.entries) == n_entries
    found = score_fits(lambda: passes.model, passes.examples, which, {"fit": fit})["fit"].log_p
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert form.fit(np.zeros_like(numbers), passes.heads.heads) is None


# --- the objective -------------------------------------------------------------------------------


def made_up(lengths, texts=(), count=8):
    """Examples of each length whose answers are two tokens."""
    cells = [Cell("a", n, False) for n in lengths] + [Cell("text", n, True) for n in texts]
    made = [
        Example(np.zeros(cell.length, np.int32), 1 if cell.text else cell.length - 2, i)
        for i, cell in enumerate(cells) for _ in range(count)
    ]  # fmt: skip
    return ExampleSet(tuple(cells), tuple(made))


def test_parts_share_every_cell():
    examples = made_up([10, 20], count=8).examples
    parts = parts_of(examples).reshape(2, 8)
    for part, count in ((FITTING, 4), (CHOOSING, 2), (JUDGING, 2)):
        assert ((parts == part).sum(axis=1) == count).all()


@pytest.mark.parametrize(
    ("lengths", "texts"), [([10, 20], []), ([10, 900], [30, 40]), ([3000, 2000, 1000, 10], [500])]
)
def test_steps_see_every_cell_equally_often(lengths, texts):
    examples = made_up(lengths, texts)
    plan = steps.Plan(examples, np.arange(len(examples.examples)), 0)
    taken, n_answers, largest = np.zeros(len(examples.cells)), 0, 0
    n_steps = 120
    for _, step in zip(range(n_steps), plan, strict=False):
        cells = np.array([examples.examples[i].cell for i in step])
        np.add.at(taken, cells, 1)
        n_answers += sum(not examples.cells[i].text for i in cells)
        tokens = sum(len(examples.examples[i].tokens) for i in step)
        largest = max(largest, tokens)
        assert len(set(step)) == len(step)
        assert any(examples.cells[i].text for i in cells) == bool(texts)
    assert len(set(taken[: len(lengths)])) == 1
    assert len(set(taken[len(lengths) :])) <= 1
    assert n_answers / n_steps == plan.n_answers
    assert largest <= steps.TOKENS_A_STEP


def test_a_multiplier_rises_when_what_is_held_gets_worse_and_falls_again():
    examples = made_up([10, 20], [30])
    n = len(examples.examples)
    objective = Objective(examples, Scores(np.full(n, -1.0), np.zeros(n, np.int32)), 10)
    assert objective.constraints == [[2], [0]]
    multipliers, which = Multipliers(objective), list(range(n))
    first = multipliers.weights(which, 16.0)
    np.testing.assert_allclose(first[8:16], 1 / 16)
    held = first - np.array([1 / 16] * 16 + [0.0] * 8)
    np.testing.assert_allclose(held[:8] * 2, held[16] * 29)  # a token of either weighs the same
    multipliers.adapt(objective.value(which, np.array([-1.0] * 16 + [-1.0 - 29 * 0.02] * 8)))
    raised = multipliers.weights(which, 16.0)
    np.testing.assert_allclose(raised[16:], 4 * first[16:])
    assert (raised[:8] < first[:8]).all()
    for _ in range(2):
        multipliers.adapt(objective.value(which, np.full(n, -1.0)))
    np.testing.assert_allclose(multipliers.weights(which, 16.0)[16:], first[16:])


def test_values_are_means_over_cells_and_losses_are_a_token():
    examples = made_up([10, 20], [30])
    n = len(examples.examples)
    objective = Objective(examples, Scores(np.full(n, -1.0), np.zeros(n, np.int32)), 10)
    log_p = np.array([-0.5] * 8 + [-1.5] * 8 + [-1.29] * 8)
    value = objective.value(range(n), log_p)
    assert value.gain == 0
    np.testing.assert_allclose(value.losses, [(0.01, 0), (-0.25, 0)], atol=1e-9)
    assert not value.is_allowed
    better = objective.value(range(n), log_p + np.arange(n) % 2)
    assert better.lead(value) == pytest.approx((0.5, np.sqrt(2 * (2 / 7) / 8) / 2))


def test_a_loss_of_text_at_several_lengths_is_as_uncertain_as_of_one():
    losses = []
    for lengths in ([30], [30, 40, 50]):
        examples = made_up([10], lengths)
        n = len(examples.examples)
        objective = Objective(examples, Scores(np.full(n, -9.0), np.zeros(n, np.int32)))
        gain = np.tile(np.arange(8.0), 1 + len(lengths)) * objective.n_answer
        losses += objective.value(range(n), gain - 9.0).losses
    assert losses[1] == pytest.approx(losses[0])


def candidates_of(monkeypatch, log_p_of, **options):
    """What is begun, and the candidates, where descents come by log p = log_p_of(form, start)."""
    examples, begun = made_up([10, 20], []), []
    n = len(examples.examples)
    plain = Scores(np.full(n, -1.0), np.zeros(n, np.int32))
    objective, which = Objective(examples, plain), list(range(n))

    class Known:
        def __init__(self, *_):
            pass

        def at(self, form, start):
            return Point(start, None, None)

        def run(self, form, start):
            log_p = log_p_of(form, start) + 0.01 * (np.arange(n) % 2)
            return Point(start.numbers, None, objective.value(which, log_p))

    monkeypatch.setattr(candidates, "Descent", Known)
    found = candidates.fit_candidates(
        SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(heads=HEADS),
        SimpleNamespace(set=examples, scores=plain, folder=None, digest=""),
        ModelOptions(**options), None, lambda what, passes: begun.append(what), lambda found: None,
    )  # fmt: skip
    return begun, found


def test_heads_start_again_from_a_better_rule_of_all_alike(monkeypatch):
    def log_p_of(form, start):
        again = start.value is not None
        return -0.5 if again else -0.8 if (form.kind, form.of) == (LOG_SIZE, ALIKE) else -0.9

    begun, found = candidates_of(monkeypatch, log_p_of)
    assert begun == [
        "kind 1 of 5 (constant, all heads alike)", "kind 2 of 5 (log-size, all heads alike)",
        "kind 3 of 5 (constant, each head)", "kind 4 of 5 (log-size, each head)",
        "kind 4 of 5 (log-size, each head), again", "kind 5 of 5 (entropy-and-size, each head)",
    ]  # fmt: skip
    assert found[3].point.value.gain == pytest.approx(0.505)


def test_a_search_without_hope_ends_early(monkeypatch):
    with pytest.raises(QualityError, match=r"neither .* nor a constant for each gains .*0.005"):
        candidates_of(monkeypatch, lambda form, start: -1.0)
    others = {"trained_up_to": 10}, {"kind": LOG_SIZE}
    assert [len(candidates_of(monkeypatch, lambda *_: -1.0, **o)[1]) for o in others] == [5, 4]


@pytest.mark.parametrize(
    ("losses", "message"),
    [([Estimate(0.05, 0.03), Estimate(0.004, 0.001)], None),
     ([Estimate(0.05, 0.03), Estimate(0.02, 0.005)], "loses 0.0200 ± 0.0050 on 16 answers"),
     ([Estimate(0.01, np.nan)], "loses 0.0100 ± nan on 16 answers"),
     ([Estimate(0.001, np.nan)], None), ([], None)],
)  # fmt: skip
def test_what_is_held_may_not_lose_evidently_more(losses, message):
    examples = made_up([10, 20], [])
    n = len(examples.examples)
    plain, own = (Scores(np.full(n, x), np.zeros(n, np.int32)) for x in (-1.0, -0.5))
    found = compare(examples, range(n), {PLAIN: plain, "own": own})
    judged = Judged(found, {"own": losses}, 0.005)
    if message is None:
        judged.require_worth()
        return
    with pytest.raises(QualityError, match=message):
        judged.require_worth()


def test_a_verdict_tells_log_p_and_right_answers_apart():
    examples, right = made_up([10, 20], [], count=50), np.arange(100) % 2
    other = right.copy()
    other[:4] = 0, 0, 1, 0
    plain, own = (Scores(np.full(100, x), 2 * y) for x, y in ((-1.0, right), (-0.5, other)))
    judged = Judged(compare(examples, range(100), {PLAIN: plain, "own": own}), {"own": []}, 0.005)
    assert judged.summary() == (
        "log p +0.500 ± 0.000 nats, answers right 50.0 -> 49.0 % (-1.0 ± 1.8 points, no difference "
        "beyond chance), on 100 answers that no fit has seen"
    )


@pytest.mark.parametrize(
    ("right", "advice"), [(1, "collect more examples"), (0, "the model gets no answer right: give")]
)
def test_a_fit_without_gain_says_what_may_help(right, advice):
    examples = made_up([10, 20], [])
    n = len(examples.examples)
    scores = Scores(np.full(n, -1.0), right * examples.n_answer(range(n)).astype(np.int32))
    judged = Judged(compare(examples, range(n), {PLAIN: scores, "own": scores}), {"own": []}, 0.005)
    with pytest.raises(QualityError, match=f"changes by .0.000 .*; {advice}"):
        judged.require_worth()


@pytest.mark.parametrize("held", [[], [Estimate(0.01, 0.002)]])
def test_what_held_tokens_lose_is_a_column_only_if_some_are_held(held):
    examples = made_up([10, 20], [])
    n = len(examples.examples)
    plain, own = (Scores(np.full(n, x), np.zeros(n, np.int32)) for x in (-1.0, -0.5))
    found = compare(examples, range(n), {PLAIN: plain, "own": own})
    table = rules_table(Judged(found, {"own": held}, 0.005))
    assert [row[:1] for row in table.rows] == [(PLAIN,), ("own",)]
    last = {"log p gained": "+0.500 ± 0.000"}
    if held:
        last["lost by held tokens"] = "+0.0100 ± 0.0020"
    assert dict(zip(table.columns[2:], table.rows[1][2:], strict=True)) == last
    assert ("nats a token" in table.note) == bool(held)


# --- a model of which it is known what its heads want --------------------------------------------


def planted(folder, text=False):
    """Examples on disk; text, if wanted, that loses by what the answers gain by."""
    save(Path(folder), planted_model(), tokenizer=False)
    examples = planted_examples(count=32)
    lines = [
        {"prompt_ids": e.tokens[: e.start].tolist(), "answer_ids": e.tokens[e.start :].tolist(),
         "template": f"n{e.cell}"}
        for e in examples.examples
    ]  # fmt: skip
    collection = collected(
        folder, f"{folder}-run", prompts=write_lines("p.jsonl", lines), templates=()
    )
    if not text:
        return collection
    wrong = [
        Example(np.array([*e.tokens[:-1], 10 + (e.tokens[-1] - 10 + 3) % 8], np.int32), e.start, 2)
        for e in examples.examples
    ]
    cells = (*collection.set.cells, Cell("text", 16, True))
    both = ExampleSet(cells, collection.set.examples + tuple(wrong))
    plain = answering.score(planted_model(), both, range(len(both.examples)))
    return replace(collection, in_memory=(both, plain))


def through(collection, **options):
    return fit_through(planted_model, collection, "x", ModelOptions(**options))


def test_the_command_finds_the_heads_and_leaves_the_others_alone(here):
    planted("tiny")
    out = call("fit", "tiny-run", "--name", "tiny", "--steps", "40", "--kind", "constant")
    assert "2 of 8 heads have a rule (constant)" in out.stdout
    assert 'transformers.register("tiny", fit)' in out.stdout
    fit = calibrate.load("tiny@1")
    found = {(e.layer, e.head): e.coefficients[-1] for e in fit.entries}
    assert found.keys() == {(0, 0), (0, 2)}
    assert found[0, 0] > 2
    assert found[0, 2] < 0.8
    assert fit.rule.min_beta < 1
    assert fit.source["head"] == "tiny"
    before, after = ([size[k] for size in fit.quality["held_out"]] for k in ("before", "after"))
    assert np.mean(after) > np.mean(before) + 1
    assert Path("fits/tiny/1.png").read_bytes().startswith(b"\x89PNG")
    again = call("fit", "tiny-run", "--name", "tiny", "--steps", "40", "--kind", "constant",
                 "--json")  # fmt: skip
    assert "tiny@1 is unchanged; no new version is written" in again.stderr
    record = json.loads(again.stdout)
    assert record["rules"]["own"]["right"] > record["rules"]["plain"]["right"] + 0.5
    assert {(c["kind"], c["each_head"]) for c in record["candidates"]} == {
        ("constant", False), ("log-size", False), ("constant", True),
    }  # fmt: skip
    assert sum(head["beta"] != 1 for head in record["heads"]) == 2


def test_an_interrupted_fit_carries_on_with_the_same_numbers(here, monkeypatch):
    collection, calls = planted("tiny"), []
    real = Passes._gradient

    def counted(*arguments):
        calls.append(1)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Passes, "_gradient", counted)
    with pytest.raises(KeyboardInterrupt):
        through(collection, most_steps=10, kind="constant")
    resumed = through(collection, most_steps=10, kind="constant")
    n_calls = len(calls)
    kept = next(Path("tiny-run/.passes").iterdir())
    kept.write_bytes(kept.read_bytes()[:-9])  # is made again
    whole = through(
        replace(collection, folder=Path(planted("other").folder)), most_steps=10, kind="constant"
    )
    assert len(calls) - n_calls == n_calls - 1  # what was interrupted is done twice
    assert (
        resumed.coefficients
        == whole.coefficients
        == through(collection, most_steps=10, kind="constant").coefficients
    )


def test_results_of_another_processor_are_not_read(tmp_path, monkeypatch):
    def passed():
        memo = Memo(tmp_path, processor(torch.device("cpu")))
        return memo.get(b"x", lambda: {"a": np.zeros(1)})[1]

    assert [passed(), passed()] == [False, True]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert not passed()


@pytest.mark.slow
def test_what_is_held_does_not_get_worse(here):
    """Text that asks the same questions and wants wrong answers: hardly any sharpening is left."""
    collection = planted("tiny", text=True)
    free = through(collection, most_steps=20, allowed=10.0)
    assert free.judged.lost("own").mean > 0.5
    try:
        held = through(collection, most_steps=20, allowed=0.05)
    except QualityError:
        return  # nothing is allowed that is worth it
    chosen = held.chosen.published.point.value
    assert chosen.losses[0].mean <= 0.05
    assert chosen.gain < free.chosen.published.point.value.gain


def test_what_a_fit_through_a_model_refuses(here, monkeypatch):
    save(Path("random"), causal_model())
    Path("text.txt").write_text("The apple is on the table. " * 60)
    collected("random", "few", templates=("numbers",), lengths=(64,), count=4)
    line = refusal("fit", "few", "--name", "x", code=3)
    assert "template numbers at 64 tokens has 4 examples; collect 8 at least" in line
    collected("random", "text", templates=(), text=Path("text.txt"), lengths=(64,), count=4)
    assert "text has plain text alone; collect answers too" in refusal(
        "fit", "text", "--name", "x", code=3
    )
    text = {"text": Path("text.txt"), "lengths": (120,), "count": 8}  # 420 tokens
    collected("random", "short", templates=("numbers",), **text)
    line = refusal("fit", "short", "--name", "x", code=3)
    assert "the 3 windows of plain text leave none to choose or to judge by" in line
    assert "of four times 120 tokens at least, or shorter --lengths" in line
    assert "--rows cannot be used with a collection of examples" in refusal(
        "fit", "few", "--name", "x", "--rows", "all", code=2
    )
    Path("random").rename("moved")
    assert "few does not know where its model is" in refusal("fit", "few", "--name", "x")
    assert not Path("fits").exists()


@pytest.mark.slow
def test_a_random_model_gets_no_fit(here):
    save(Path("random"), causal_model())
    collected("random", "run", templates=("numbers",), lengths=(40, 64), count=16)
    arguments = ("fit", "run", "--name", "x", "--steps", "10", "--kind", "constant")
    lines = call(*arguments, code=3).stderr.splitlines()
    assert "not for this model" in lines[-1]
    assert [line.split(" tokens ")[0] for line in lines[-3:-1]] == ["  at 40", "  at 64"]
    assert all("answers" in line and "log p" in line for line in lines[-3:-1])
    assert not Path("fits").exists()


def test_numbers_that_run_out(here, monkeypatch):
    collection = planted("tiny")
    broken = planted_model()
    broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(CalibrateError, match="the model's logits are not finite"):
        fit_through(lambda: broken, collection, "x", ModelOptions(most_steps=1))

    def exhausted(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("calibrate.model.passes.answer", exhausted)
    with pytest.raises(CalibrateError, match="out of memory at"):
        fit_through(planted_model, collection, "x", ModelOptions(most_steps=2))


@pytest.mark.slow
def test_the_fit_names_what_it_was_made_of(here):
    fit = through(planted("tiny"), most_steps=10).coefficients
    assert fit.source["options"] == {"through": "model", "allowed_loss": 0.005, "steps": 10}
    assert {"torch", "transformers"} <= fit.provenance["versions"].keys()
    assert replace(fit, name="x") == fit
