"""The rows of deployed matching and retrieval heads: targets, splits, match metrics."""

from collections import Counter
from types import SimpleNamespace

import deployed_matches
import deployed_matching
import deployed_retrieval
import deployed_rows
import image_pairs
import numpy as np
import pytest
from deployed_matches import MatchedPair
from scipy.ndimage import center_of_mass
from scipy.special import expit, softmax


def ones(logits):
    return np.ones(len(logits))


def blob(x, y, height=96, width=128):
    rows, columns = np.indices((height, width))
    spot = np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / 18)
    return np.repeat(spot[..., None], 3, axis=2).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
def test_a_warped_point_is_where_the_homography_projects_it(seed):
    rng = np.random.default_rng(seed)
    homography = image_pairs.draw_homography(rng, 128, 96)
    warped = image_pairs.warp(blob(70, 40), homography)
    y, x = center_of_mass(warped[..., 0])
    assert image_pairs.project(homography, np.array([[70, 40]])) == pytest.approx(
        np.array([[x, y]]), abs=0.3
    )


def test_the_target_is_the_nearest_keypoint_within_the_tolerance():
    projected = np.array([[10.0, 10.0], [50.0, 50.0], [-300.0, 4.0]])
    keypoints = np.array([[51.9, 50.0], [10.5, 10.0], [9.7, 10.0]])
    truth = deployed_matching.Truth(projected, keypoints)
    assert deployed_matching.nearest_keypoints(truth).tolist() == [2, 0, -1]
    keypoints[0] += [0.8, 0]
    assert deployed_matching.nearest_keypoints(truth).tolist() == [2, -1, -1]


def test_rows_of_pruned_keypoints_are_left_out_and_counted():
    places = np.arange(5)[:, None] * np.array([[20.0, 0.0]])
    truth = deployed_matching.Truth(places, np.vstack([places[[3, 1, 0, 2]], [[500.0, 500.0]]]))
    matched = deployed_matching.Assignment(
        similarity=np.arange(12, dtype=np.float32).reshape(4, 3),
        matchability0=np.zeros(4),
        matchability1=np.zeros(3),
        kept0=np.array([0, 1, 3, 4]),
        kept1=np.array([0, 2, 4]),
    )
    counts = Counter()
    rows = deployed_matching._pair_rows(matched, truth, (64, 7, 2), counts)
    found = [(row.logits.tolist(), row.right.argmax(), row.right.sum()) for row in rows]
    assert found == [([0, 1, 2], 1, 1), ([6, 7, 8], 0, 1)]
    assert [row[2:] for row in rows] == [(64, 7, 2)] * 2
    assert counts["keypoints without a partner"] == 1
    assert counts["keypoints pruned, or their partner"] == 2


def random_pair(seed, shape=(30, 40)):
    """Keypoint i of the first image is keypoint i of the second."""
    rng = np.random.default_rng(seed)
    similarity = rng.normal(size=shape)
    similarity[np.arange(30), np.arange(30)] += rng.uniform(0, 9, 30)
    places = 10.0 * np.arange(40)[:, None] * [1, 0]
    matchability = rng.normal(1, 2, shape[0]), rng.normal(1, 2, shape[1])
    return MatchedPair(similarity, *matchability, places[:30], places[: shape[1]], 3, 1, 25)


def test_scores_are_those_of_the_dual_softmax():
    pair = random_pair(0)

    def beta(logits):
        return 1 + np.abs(logits[:, 0])

    scores = deployed_matches.log_match_scores(pair, beta)
    expected = softmax(beta(pair.similarity)[:, None] * pair.similarity, axis=1)
    expected *= softmax(beta(pair.similarity.T) * pair.similarity, axis=0)
    expected *= expit(pair.matchability0)[:, None] * expit(pair.matchability1)
    np.testing.assert_allclose(np.exp(scores), expected, rtol=1e-9)


def test_matches_are_those_of_kornia():
    torch = pytest.importorskip("torch")
    lightglue = pytest.importorskip("kornia.feature.lightglue")
    for seed in range(5):
        pair = random_pair(seed)
        sim, z0, z1 = (torch.tensor(x)[None] for x in pair[:3])
        scores = lightglue.sigmoid_log_double_softmax(sim, z0[..., None], z1[..., None])
        partner, _, score, _ = lightglue.filter_matches(scores, 0.1)
        row = np.flatnonzero(partner[0] >= 0)
        found, right = deployed_matches.mutual_matches(pair, ones)
        np.testing.assert_allclose(found[found > 0.1], score[0][row], rtol=1e-9)
        n_right = int((partner[0][row] == torch.tensor(row)).sum())
        assert right[found > 0.1].sum() == n_right
        assert 0 < n_right < 30


def test_a_match_is_mutual():
    similarity = np.array([[9.0, 0.0, 0.0], [8.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    sure, places = np.full(3, 30.0), 10.0 * np.eye(3)[:, :2]
    pair = MatchedPair(similarity, sure, sure, places[[0, 1, 1]], places, 0, 0, 3)
    score, right = deployed_matches.mutual_matches(pair, ones)
    assert right.tolist() == [True, False]
    assert (score > 0.1).all()
    unsure = pair._replace(matchability0=np.full(3, -9.0))
    assert (deployed_matches.mutual_matches(unsure, ones)[0] < 0.1).all()


def test_saved_pairs_are_read_as_they_were(tmp_path):
    empty = MatchedPair(
        np.zeros((0, 2)), np.zeros(0), np.zeros(2), np.zeros((0, 2)), np.zeros((2, 2)), 1, 2, 0
    )
    pairs = [random_pair(1), empty, random_pair(2, (30, 31))]
    deployed_matches.write_pairs(tmp_path / "pairs.npz", pairs)
    read = deployed_matches.read_pairs(tmp_path / "pairs.npz")
    for pair, saved in zip(read, pairs, strict=True):
        for array, expected in zip(pair[:5], saved[:5], strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-3, atol=1e-3)
        assert pair[5:] == saved[5:]
    assert len(deployed_matches.mutual_matches(read[1], ones)[0]) == 0


def test_whole_clusters_are_split():
    assert np.bincount(deployed_rows.split_clusters(24)).tolist() == [10, 9, 5]


SOURCE = '''
class Line:
    async def add(self, point):
        """Adds a point at the
        end of the line.

        Not of the query.
        """
        # A comment on the body.
        self.points = [*self.points, point, *self.points_that_are_elsewhere]
        return self.points_in_the_order_in_which_they_were_added_to_this_line

    def short(self):
        """Has a body that is too short to be a passage."""
        return 1

    def undocumented(self):
        self.points = [*self.points, point, *self.points_that_are_elsewhere]
        return self.points_in_the_order_in_which_they_were_added_to_this_line_
'''


def test_queries_are_first_paragraphs_and_passages_are_bodies():
    (function,) = deployed_retrieval.parse_functions(SOURCE)
    assert function.query == "Adds a point at the end of the line."
    assert function.passage.startswith("self.points = [*")
    assert function.passage.endswith(
        "\nreturn self.points_in_the_order_in_which_they_were_added_to_this_line"
    )
    assert not list(deployed_retrieval.parse_functions("def broken("))


def test_distractors_are_of_the_same_split_or_have_no_query():
    """Each passage's only coordinate is its number, so the logits tell the passages of a row."""
    queries = np.ones((8, 1), np.float32)
    passages = np.arange(80, dtype=np.float32)[:, None]
    file_of = np.repeat(np.arange(4), 2)
    split = np.array([0, 1, 0, 1], np.int8)
    rows = deployed_retrieval.make_retrieval_rows(queries, passages, file_of, split)
    assert [row.n for row in rows] == [16, 64] * 8
    for number in range(8):
        small, large = rows[2 * number : 2 * number + 2]
        small, large = (
            SimpleNamespace(passages=np.rint(row.logits / deployed_retrieval.SCALE), row=row)
            for row in (small, large)
        )
        assert small.passages[small.row.right] == large.passages[large.row.right] == number
        assert set(small.passages) < set(large.passages)
        assert len(set(large.passages)) == 64
        with_query = large.passages[large.passages < 8].astype(int)
        assert set(split[file_of[with_query]]) == {split[file_of[number]]}
        assert {small.row.group, small.row.cluster} == {file_of[number]}
