"""The rows of deployed matching and retrieval heads: targets, splits, match metrics."""

import json
from collections import Counter
from types import SimpleNamespace

import deployed_matching
import deployed_retrieval
import deployed_rows
import image_pairs
import match_metrics
import numpy as np
import pytest
from scipy.ndimage import center_of_mass
from scipy.special import expit, softmax

from calibrate.storage.npz import read_arrays


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


def test_homographies_change_scale_and_rotation_within_the_limits():
    rng = np.random.default_rng(0)
    scales, angles = [], []
    for _ in range(200):
        homography = image_pairs.draw_homography(rng, 320, 256)
        ends = np.array([[159.5, 127.5], [160.5, 127.5]])
        start, end = image_pairs.project(homography, ends)
        scales.append(np.linalg.norm(end - start))
        angles.append(np.arctan2(*(end - start)[::-1]))
    low, high = image_pairs.SCALES
    assert low * 0.98 < min(scales) < 0.65 < 1.15 < max(scales) < high * 1.02
    assert 0.4 < np.abs(angles).max() < image_pairs.MAX_ROTATION + 0.02


@pytest.mark.parametrize(
    ("sides", "expected"),
    [((451, 300), (800, 544)), ((512, 512), (800, 800)), ((9, 800), (32, 800))],
)
def test_sides_are_multiples_of_32(sides, expected):
    assert image_pairs.fit_sides(sides, 800) == expected


def test_the_target_is_the_nearest_keypoint_within_the_tolerance():
    projected = np.array([[10.0, 10.0], [50.0, 50.0], [-300.0, 4.0]])
    keypoints = np.array([[51.9, 50.0], [10.5, 10.0], [9.7, 10.0]])
    target = image_pairs.nearest_target(projected, keypoints, tolerance=2.0)
    assert target.tolist() == [2, 0, -1]
    assert image_pairs.nearest_target(projected, keypoints, 1.0).tolist() == [2, -1, -1]


def test_rows_of_pruned_keypoints_are_left_out_and_counted():
    places = np.arange(5)[:, None] * np.array([[20.0, 0.0]])
    truth = deployed_matching.Truth(places, np.vstack([places[[3, 1, 0, 2]], [[500.0, 500.0]]]))
    matched = deployed_matching.Assignment(
        similarity=np.arange(12, dtype=np.float32).reshape(4, 3),
        matchability0=np.zeros(4),
        matchability1=np.zeros(3),
        kept0=np.array([0, 1, 3, 4]),
        kept1=np.array([0, 2, 4]),
        n_matches=0,
    )
    counts = Counter()
    rows = deployed_matching._pair_rows(matched, truth, (64, 7, 2), counts)
    assert [(row.logits.tolist(), row.target) for row in rows] == [([0, 1, 2], 1), ([6, 7, 8], 0)]
    assert [row[2:] for row in rows] == [(64, 7, 2)] * 2
    assert counts["keypoints without a partner"] == 1
    assert counts["keypoints pruned, or their partner"] == 2


def random_pair(seed, shape=(30, 40)):
    rng = np.random.default_rng(seed)
    similarity = rng.normal(size=shape)
    similarity[np.arange(30), np.arange(30)] += rng.uniform(0, 9, 30)
    matchability = rng.normal(1, 2, shape[0]), rng.normal(1, 2, shape[1])
    return similarity, *matchability, np.eye(*shape, dtype=bool)


def test_scores_are_those_of_the_dual_softmax():
    similarity, matchability0, matchability1, _ = random_pair(0)

    def beta(logits):
        return 1 + np.abs(logits[:, 0])

    scores = match_metrics.log_match_scores(similarity, matchability0, matchability1, beta)
    expected = softmax(beta(similarity)[:, None] * similarity, axis=1)
    expected *= softmax(beta(similarity.T) * similarity, axis=0)
    expected *= expit(matchability0)[:, None] * expit(matchability1)
    np.testing.assert_allclose(np.exp(scores), expected, rtol=1e-9)


def test_matches_are_those_of_kornia():
    torch = pytest.importorskip("torch")
    lightglue = pytest.importorskip("kornia.feature.lightglue")
    for seed in range(5):
        similarity, matchability0, matchability1, truth = random_pair(seed)
        inputs = (torch.tensor(x)[None] for x in (similarity, matchability0, matchability1))
        sim, z0, z1 = inputs
        scores = lightglue.sigmoid_log_double_softmax(sim, z0[..., None], z1[..., None])
        partner, _, score, _ = lightglue.filter_matches(scores, 0.1)
        row = np.flatnonzero(partner[0] >= 0)
        found, right = match_metrics.mutual_matches(
            similarity, matchability0, matchability1, truth, ones
        )
        np.testing.assert_allclose(found[found > 0.1], score[0][row], rtol=1e-9)
        n_right = int((partner[0][row] == torch.tensor(row)).sum())
        assert right[found > 0.1].sum() == n_right
        assert 0 < n_right < 30


def test_a_match_is_mutual():
    similarity = np.array([[9.0, 0.0, 0.0], [8.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    sure = np.full(3, 30.0)
    truth = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 0]], bool)
    score, right = match_metrics.mutual_matches(similarity, sure, sure, truth, ones)
    assert right.tolist() == [True, False]
    assert (score > 0.1).all()
    score, _ = match_metrics.mutual_matches(similarity, np.full(3, -9.0), sure, truth, ones)
    assert (score < 0.1).all()
    empty = np.zeros((0, 3))
    score, _ = match_metrics.mutual_matches(empty, sure[:0], sure, empty.astype(bool), ones)
    assert len(score) == 0


def test_saved_pairs_are_read_as_they_were(tmp_path):
    pairs = []
    for seed, shape in ((1, (30, 40)), (2, (30, 31))):
        similarity, matchability0, matchability1, _ = random_pair(seed, shape)
        places = np.random.default_rng(seed).uniform(0, 20, (71, 2))
        ends = places[: shape[0]], places[-shape[1] :]
        facts = 256, seed, 3, 1, 9, 25
        pairs.append(
            match_metrics.MatchedPair(similarity, matchability0, matchability1, *ends, *facts)
        )
    empty = match_metrics.MatchedPair(
        np.zeros((0, 2)), np.zeros(0), np.zeros(2), np.zeros((0, 2)), np.zeros((2, 2)), *range(6)
    )
    pairs.insert(1, empty)
    match_metrics.write_pairs(tmp_path / "pairs.npz", pairs)
    for pair, saved in zip(match_metrics.read_pairs(tmp_path / "pairs.npz"), pairs, strict=True):
        for array, expected in zip(pair[:5], saved[:5], strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-3, atol=1e-3)
        assert pair[5:] == saved[5:]
        assert pair.truth.shape == pair.similarity.shape


def test_whole_clusters_are_split():
    split = deployed_rows.split_clusters(24)
    assert np.bincount(split).tolist() == [10, 9, 5]
    assert split.tolist() == deployed_rows.split_clusters(24).tolist()
    assert split.tolist() != deployed_rows.split_clusters(24, seed=1).tolist()


def test_rows_are_written_flat_with_the_split_of_their_cluster(tmp_path):
    rows = [
        deployed_rows.Row(np.array([0.5, 1.0]), 1, 16, 4, 2),
        deployed_rows.Row(np.array([3.0, 2.0, 1.0]), 0, 64, 5, 0),
    ]
    split = np.array([0, 1, 2], np.int8)
    deployed_rows.write_rows(tmp_path / "head", rows, split, {"clusters": ["a", "b", "c"]})
    saved = read_arrays(tmp_path / "head" / "rows.npz")
    assert saved["logits"].tolist() == [0.5, 1.0, 3.0, 2.0, 1.0]
    assert saved["lengths"].tolist() == [2, 3]
    assert saved["target"].tolist() == [1, 0]
    assert saved["n"].tolist() == [16, 64]
    assert saved["group"].tolist() == [4, 5]
    assert saved["cluster"].tolist() == [2, 0]
    assert saved["split"].tolist() == [2, 0]
    assert saved["split"].dtype == np.int8
    assert json.loads(str(saved["names"])) == {"clusters": ["a", "b", "c"]}


def test_weights_other_than_the_pinned_ones_are_refused(tmp_path):
    path = tmp_path / "xfeat.pt"
    path.write_bytes(b"weights")
    with pytest.raises(ImportError, match="xfeat.pt"):
        deployed_rows.check_digest(path, deployed_matching.XFEAT_SHA256)


def test_an_absent_package_raises_import_error(monkeypatch):
    monkeypatch.setattr(image_pairs, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="skimage"):
        image_pairs.source_paths()


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
        assert small.passages[small.row.target] == large.passages[large.row.target] == number
        assert set(small.passages) < set(large.passages)
        assert len(set(large.passages)) == 64
        with_query = large.passages[large.passages < 8].astype(int)
        assert set(split[file_of[with_query]]) == {split[file_of[number]]}
        assert {small.row.group, small.row.cluster} == {file_of[number]}
