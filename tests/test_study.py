"""Study: many heads, each with fits of its own, and nothing done twice."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ToyHead

from calibrate.errors import CalibrateError
from calibrate.evaluation.baselines import LABELS, LogSize
from calibrate.evaluation.study import Calibration, study
from calibrate.files.npz import read_arrays, write_arrays
from calibrate.files.score_files import Outcome, add_scores, read_scores

SIZES = [16, 64, 256]
CALIBRATION = Calibration([64, 256, 1024], 600)


def run(heads, folder, **changes):
    options = {"sizes": SIZES, "sets": 200, "seed": 0, "calibration": CALIBRATION} | changes
    return study(heads, folder=folder, **options)


class SharpHead(ToyHead):
    """Is right where the target gets more than a third: beta matters."""

    def correct(self, attended, weights):
        got = np.take_along_axis(np.asarray(weights), attended.target[:, None], axis=1)
        return got[:, 0] > 1 / 3


@pytest.fixture
def heads():
    return [SharpHead(noise) for noise in (0.2, 0.25, 0.3)]


def test_a_study_of_three_heads(heads, here):
    told = []
    found = run(heads, here / "s", scored=lambda head, score: told.append((head, score.size)))
    assert found.rules == list(LABELS)
    assert found.per_head.shape == (len(LABELS), 3, 3)
    assert told == [("toy", size) for _ in heads for size in SIZES]
    plain, own, hard = (found.rules.index(rule) for rule in ("plain", "own", "hard"))
    assert (found.accuracy[own] > found.accuracy[plain] + 0.04).all(), found.accuracy
    assert (found.p_plain[[own, hard]] < 0.08).all()
    assert (found.headroom[own, :2] > 0.3).all()


def test_again_nothing_is_attended(heads, here):
    first = run(heads, here / "s")
    before = [head.attended for head in heads]
    again = run(heads, here / "s")
    assert [head.attended for head in heads] == before
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_rule_is_scored_alone(heads, here, monkeypatch):
    from calibrate.evaluation import score_head

    run(heads[:1], here / "s")
    seen = []
    kernel = score_head.attention_weights
    monkeypatch.setattr(
        score_head, "attention_weights",
        lambda *a, **k: seen.append(kernel(*a, **k)) or seen[-1],
    )  # fmt: skip
    found = run(heads[:1], here / "s", more={"twice": LogSize(0.0, 2.0)})
    assert found.rules[-2:] == ["twice", "hindsight"]
    assert {weights.shape[1] for weights in seen} == {1}


def test_an_interrupted_study_carries_on(heads, here):
    whole = run(heads, here / "whole")
    scored = []

    def stop(head, score):
        scored.append(score)
        if len(scored) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(heads, here / "s", scored=stop)
    after = sum(head.attended for head in heads)
    resumed = run(heads, here / "s")
    # Of 9 scores, 4 were there; of 3 collections, 2.
    assert sum(head.attended for head in heads) - after == 5 * 200 + 3 * 600
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_damaged_scores_are_refused(heads, here):
    run(heads[:1], here / "s")
    path = next((here / "s" / "scores").rglob("n64-*.npz"))
    arrays = read_arrays(path)
    key = next(k for k in arrays if not k.endswith("/beta") and k != "about")
    write_arrays(path, arrays | {key: arrays[key][:-1]})
    with pytest.raises(CalibrateError, match="is no score of 200 sets; delete the file"):
        run(heads[:1], here / "s")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CalibrateError, match="not a readable npz file"):
        run(heads[:1], here / "s")


def test_another_calibration_lies_beside_the_first(heads, here):
    first = run(heads[:1], here / "s")
    other = run(heads[:1], here / "s", calibration=Calibration([64, 256, 1024], 601))
    assert len(list((here / "s" / "collections").iterdir())) == 2
    i = first.rules.index("hard")
    np.testing.assert_array_equal(first.per_head[i], other.per_head[i])


def test_scores_of_another_head_are_refused(heads, here):
    """Two heads whose folders would have one name: the full fingerprint decides."""
    run(heads[:1], here / "s")
    for path in (here / "s" / "scores").rglob("*.npz"):
        arrays = read_arrays(path)
        about = arrays["about"].copy()
        about[-1] ^= 1
        write_arrays(path, arrays | {"about": about})
    with pytest.raises(CalibrateError, match="scores of another head or version; delete"):
        run(heads[:1], here / "s")


def test_two_writers_lose_nothing(here):
    path = here / "n8-sets9-seed0.npz"
    outcomes = {f"rule {i}": Outcome(np.arange(9) > i, float(i)) for i in range(12)}
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(add_scores, path, "f", 9, {k: v}) for k, v in outcomes.items()]
        assert all(task.result() is None for task in tasks)
    found = read_scores(path, "f", 9)
    assert found.keys() == outcomes.keys()
    for key, outcome in outcomes.items():
        np.testing.assert_array_equal(found[key].correct, outcome.correct)
        assert found[key].beta == outcome.beta


class ShuffledHead(SharpHead):
    """Its targets have nothing to do with its logits."""

    def sample(self, seed, size, count):
        batch = super().sample(seed, size, count)
        return batch._replace(target=np.random.default_rng(seed).integers(0, size, count))


def test_a_head_that_no_rule_helps_is_named(here):
    with pytest.warns(UserWarning, match="toy has no fit of its own: not for this head"):
        found = run([ShuffledHead(0.2)], here / "s")
    own, plain = (found.accuracy[found.rules.index(rule)] for rule in ("own", "plain"))
    np.testing.assert_array_equal(own, plain)
