"""The study of CLRS-Text: its text, its training, its scores, its shipped weights, its tables."""

import json
import sys
from types import ModuleType, SimpleNamespace

import clrs_text
import clrs_text_task
import numpy as np
import pytest
import small_models
import torch
from clrs_text_results import difference
from clrs_text_task import PIECES, SPAN, TASKS
from study import mean_and_error
from study_pages import page_of, record_of

# What dm-clrs 2.0.3 gives, and the answer here.
TEXTS = {
    "minimum": ("minimum:\nkey: [0.63 0.49 0.5]\nmin:\n", "1\n\n", "0.49\n\n"),
    "quickselect": ("quickselect:\nkey: [0.63 0.0 0.58]\nmedian:\n", "2\n\n", "0.58\n\n"),
    "binary_search": ("binary_search:\nkey: [0.02 0.44 0.8], target: 0.41\nreturn:\n", "1\n\n",
                      "0.44\n\n"),
    "find_maximum_subarray_kadane": (
        "find_maximum_subarray_kadane:\nkey: [-0.27 0.16 -0.0]\nstart, end:\n", "1, 2\n\n",
        "0.16, -0.0\n\n"),
    "naive_string_matcher": (
        "naive_string_matcher:\nstring: [0 0 0 1], key: [2 0 1 0]\nmatch:\n", "1\n\n", "1\n\n"),
    "insertion_sort": ("insertion_sort:\nkey: [0.63 0.49]\npred:\n", "[0.49 0.63]\n\n",
                       "[0.49 0.63]\n\n"),
}  # fmt: skip


@pytest.fixture
def record():
    return record_of("clrs-text")


@pytest.fixture
def samplers(monkeypatch):
    """In place of dm-clrs: the texts above, and the seeds that were asked for."""
    seeds = []

    def build_sampler(task, samples, *, seed, **options):
        seeds.append(seed)
        return SimpleNamespace(next=lambda size: None), None

    parts = {
        "samplers": {"build_sampler": build_sampler},
        "clrs_text.clrs_utils": {"format_clrs_example": lambda task, _: TEXTS[task][:2]},
    }
    for name in ("clrs", "clrs._src", "clrs._src.clrs_text", *(f"clrs._src.{p}" for p in parts)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for part, contents in parts.items():
        module = sys.modules[f"clrs._src.{part}"]
        vars(module).update(contents)
        package, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[package], last, module)
    return seeds


@pytest.mark.parametrize("task", TASKS)
def test_tokens_spell_the_prompt_and_the_value_in_place_of_its_index(samplers, task):
    assert TEXTS.keys() == TASKS.keys()
    ((prompt, answer),) = clrs_text_task.draw("measure", 0, task, 4, 1)
    spelled = ["".join(PIECES[token] for token in part) for part in (prompt, answer)]
    assert spelled == [TEXTS[task][0], TEXTS[task][2]]


def test_streams_seeds_and_steps_have_samples_of_their_own_and_none_published(samplers):
    wanted = [(stream, seed, step) for stream in clrs_text_task.STREAMS for seed in (0, 1)
              for step in (0, 1)]  # fmt: skip
    for stream, seed, step in wanted:
        clrs_text_task.draw(stream, seed, "minimum", 4, 1, step)
    assert len(set(samplers)) == len(wanted)
    assert min(samplers) > 1 << 30  # the published ones are small


def test_even_prompts_have_two_decimals_throughout(samplers, monkeypatch):
    uneven, even = TEXTS["minimum"][0], "minimum:\nkey: [0.63 0.49]\nmin:\n"
    texts = iter([(uneven, "1\n\n"), (even, "1\n\n")] * 4)
    utils = sys.modules["clrs._src.clrs_text.clrs_utils"]
    monkeypatch.setattr(utils, "format_clrs_example", lambda *_: next(texts))
    found = clrs_text_task.draw_even("calibrate", 0, "minimum", 2, 2)
    assert found == [(clrs_text_task.tokens_of(even), clrs_text_task.tokens_of("0.49\n\n"))] * 2


def test_gaps_are_before_items_alone_and_reach_far():
    tokens = torch.randint(0, len(PIECES), (64, 40), generator=torch.Generator().manual_seed(0))
    positions = clrs_text_task.gaps(tokens, np.random.default_rng(0))
    steps = positions.diff(dim=1)
    assert (steps[tokens[:, 1:] < 10] == 1).all()
    assert (steps >= 1).all()
    assert 300 < positions.max() < SPAN


def test_an_answer_is_right_if_all_of_its_tokens_are():
    """A model that knows the next token but for those it is made to miss."""
    pairs = [([11, 12], [1, 2, 14]), ([11, 12, 13, 12], [3, 14]), ([11], [4, 5, 6, 14])]
    batch = clrs_text_task.padded(pairs)
    logits = 9.0 * torch.nn.functional.one_hot(batch.tokens.roll(-1, 1), len(PIECES)).float()
    logits[0, 0] = logits[1, -1] = 0  # of a prompt, and behind an answer
    logits[2, 2] = 0  # of an answer
    found = clrs_text_task.scores(lambda **_: SimpleNamespace(logits=logits), pairs)
    assert found["right"] == [1, 1, 0]
    sure = 9 - np.log(np.exp(9) + len(PIECES) - 1)
    unsure = (3 * sure - np.log(len(PIECES))) / 4
    np.testing.assert_allclose(found["log_p"], [sure, sure, unsure], atol=1e-6)


def test_an_interrupted_training_carries_on(tmp_path):
    checkpoint = tmp_path / "checkpoint"

    def trained(at, stop=None):
        model = clrs_text_task.new_model(0, width=8)

        def loss_at(step):
            if step == stop:
                raise KeyboardInterrupt
            tokens = torch.randint(0, 30, (2, 5), generator=torch.Generator().manual_seed(step))
            return -clrs_text_task.log_p(model, tokens)[0].mean()

        rate_at = small_models.warm_up_and_cosine(1e-2, 2, 6)
        small_models.train(model, loss_at, rate_at, 6, "tiny", at, steps_per_checkpoint=2)
        return model.state_dict()

    whole = trained(None)
    with pytest.raises(KeyboardInterrupt):
        trained(checkpoint, stop=6)
    again = trained(checkpoint)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_the_page_has_the_log_likelihoods_of_the_record(record):
    def numbers(pair, length, sign):
        mean, error = mean_and_error(difference(record["arms"], pair, "log_p"))
        place = record["lengths"].index(length)
        return f"{sign * mean[place]:.3f} ± {error[place]:.3f}"

    page = " ".join(page_of("clrs-text").split())
    assert f"at length 64 the fitted rules gain {numbers(('own', 'plain'), 64, 1)} nats" in page
    assert f"polynomial loses {numbers(('paper', 'plain'), 64, -1)} there" in page
    assert f"{numbers(('trained-paper', 'plain'), 16, -1)} at length 16 in training" in page


def test_no_fitted_rule_differs_significantly_as_the_page_says(record):
    mean, error = mean_and_error(100 * difference(record["arms"], ("own", "plain"), "right"))
    most = np.argmax(abs(mean / error))
    assert record["lengths"][most] == 16
    said = f"{mean[most]:.2f} ± {error[most]:.2f} points ({-mean[most] / error[most]:.1f})"
    assert f"{said}, at length 16" in " ".join(page_of("clrs-text").split())


def test_the_fits_of_the_record_are_the_shipped_ones(record):
    shipped = [clrs_text.described(clrs_text.rule_of("own", seed)) for seed in record["seeds"]]
    assert json.loads(json.dumps(shipped)) == record["own"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["plain", "paper", "trained-paper", "tuned-own"])
def test_shipped_weights_reproduce_a_part_of_the_record(record, monkeypatch, arm):
    if not clrs_text_task.WHEELS.exists():
        pytest.skip("needs dm-clrs: scripts/studies/clrs_text.py get")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("clrs", "clrs._src", "clrs._src.clrs_text", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    weights, rule = clrs_text.ARMS[arm]
    model = small_models.load_model(clrs_text.Trial(0, weights).weights)
    clrs_text.apply(model, clrs_text.rule_of(rule, 0))
    for task, length in (("minimum", 16), ("binary_search", 48), ("insertion_sort", 16)):
        found = clrs_text_task.scores(
            model, clrs_text_task.draw("measure", 0, task, length, clrs_text.PROMPTS)
        )
        recorded, place = record["arms"][arm][task], record["lengths"].index(length)
        for measure, within in (("right", 0.011), ("log_p", 2e-3)):
            expected = recorded[measure][0][place]
            assert np.mean(found[measure]) == pytest.approx(expected, abs=within), (task, measure)
