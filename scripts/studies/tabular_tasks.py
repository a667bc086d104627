"""Tables for a classifier that learns in its context: random ones, and scikit-learn's data sets;
and what scikit-learn's own classifiers make of them.

A random table is one of two kinds, half of each: Voronoi cells, each with a class, of random points
in two to four dimensions; or the class with the highest output of a small random network. A share
of all labels, of queries too, is drawn anew.
"""

from typing import NamedTuple

import numpy as np
from sklearn import datasets
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

FEATURES, CLASSES = 4, 4  # at most
CELLS = (16, 128)  # least and most
HIDDEN = 16  # units of a network
STEEPNESS = (2.0, 8.0)  # of its units, least and most
NOISE = 0.05  # of labels, drawn anew
NEIGHBOURS = (1, 3, 5, 9, 15, 25)
UNIFORM = 0.01  # of logistic regression's probabilities: it knows no class that no row has
DATA_SETS = ("iris", "wine", "breast_cancer", "digits")


class Tables(NamedTuple):
    """Tables of one size."""

    features: np.ndarray  # (tables, rows, FEATURES) float32, the labelled rows first
    labels: np.ndarray  # (tables, rows) int64, of the queries too
    n_labelled: int


def draw(rng: np.random.Generator, count: int, n_labelled: int, n_queries: int) -> Tables:
    """Random tables."""
    n = n_labelled + n_queries
    used = np.arange(FEATURES) < rng.integers(2, FEATURES + 1, (count, 1))
    features = rng.standard_normal((count, n, FEATURES)) * used[:, None]
    n_classes = rng.integers(2, CLASSES + 1, (count, 1))
    is_cells = rng.random((count, 1)) < 0.5
    of_cells, of_network = (
        _of_cells(rng, features, used, n_classes),
        _of_network(rng, features, n_classes),
    )
    labels = np.where(is_cells, of_cells, of_network)
    is_noise = rng.random((count, n)) < NOISE
    labels = np.where(is_noise, rng.integers(0, n_classes, (count, n)), labels)
    return Tables(features.astype(np.float32), labels, n_labelled)


def _of_cells(
    rng: np.random.Generator, features: np.ndarray, used: np.ndarray, n_classes: np.ndarray
) -> np.ndarray:
    count, (least, most) = len(features), CELLS
    points = rng.standard_normal((count, most, FEATURES)) * used[:, None]
    # |x - p|^2, but for what all cells of a row have in common
    distance = (points**2).sum(-1)[:, None] - 2 * features @ points.swapaxes(1, 2)
    n_cells = rng.integers(least, most + 1, (count, 1, 1))
    cell = np.where(np.arange(most) < n_cells, distance, np.inf).argmin(-1)
    return np.take_along_axis(rng.integers(0, n_classes, (count, most)), cell, 1)


def _of_network(
    rng: np.random.Generator, features: np.ndarray, n_classes: np.ndarray
) -> np.ndarray:
    count = len(features)
    steep = np.exp(rng.uniform(*np.log(STEEPNESS), (count, 1, 1)))
    weights = rng.standard_normal((count, FEATURES, HIDDEN))
    hidden = np.tanh(steep * (features @ weights + rng.standard_normal((count, 1, HIDDEN))))
    out = hidden @ rng.standard_normal((count, HIDDEN, CLASSES))
    out = out - out.mean(axis=1, keepdims=True)
    return np.where(np.arange(CLASSES) < n_classes[..., None], out, -np.inf).argmax(-1)


def rows_of(name: str) -> int:
    """The rows of a data set."""
    return len(getattr(datasets, f"load_{name}")().target)


def split_of(rng: np.random.Generator, name: str, n_labelled: int, most_queries: int) -> Tables:
    """A data set with some random rows labelled, and others as queries.

    Features are standardised, and if there are too many, those of the labelled rows tell their
    principal components. Classes are at random in as many groups as the model knows, if too many.
    """
    features, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = rng.permutation(len(labels))[: n_labelled + most_queries]
    features, labels = features[order], labels[order]
    n_classes = int(labels.max()) + 1
    groups = rng.permutation(np.arange(max(n_classes, CLASSES)) % CLASSES)
    features = StandardScaler().fit(features[:n_labelled]).transform(features)
    if features.shape[1] > FEATURES:
        features = PCA(FEATURES).fit(features[:n_labelled]).transform(features)
    return Tables(features[None].astype(np.float32), groups[labels][None], n_labelled)


def neighbours(tables: Tables) -> np.ndarray:
    """Votes of k nearest neighbours, and one vote for each class; k predicts labelled rows best."""
    rows, labels, queries = standardised(tables)
    tree = KNeighborsClassifier(min(max(NEIGHBOURS), len(rows) - 1)).fit(rows, labels)
    hot = np.eye(CLASSES)[labels]
    votes = hot[tree.kneighbors(return_distance=False)].cumsum(axis=1)  # of other rows
    k = max((k for k in NEIGHBOURS if k < len(rows)),
            key=lambda k: (votes[:, k - 1].argmax(-1) == labels).mean())  # fmt: skip
    votes = 1 + hot[tree.kneighbors(queries, k, return_distance=False)].sum(axis=1)
    return np.log(votes / votes.sum(-1, keepdims=True))


def regression(tables: Tables) -> np.ndarray:
    rows, labels, queries = standardised(tables)
    found = np.full((len(queries), CLASSES), UNIFORM / CLASSES)
    if (labels == labels[0]).all():
        found[:, labels[0]] += 1 - UNIFORM
    else:
        fitted = LogisticRegression(max_iter=1000).fit(rows, labels)
        found[:, fitted.classes_] += (1 - UNIFORM) * fitted.predict_proba(queries)
    return np.log(found)


def standardised(tables: Tables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labelled rows, their labels, and query rows of a table, as the model has them."""
    rows, n = tables.features[0], tables.n_labelled
    rows = (rows - rows[:n].mean(axis=0)) / (rows[:n].std(axis=0, ddof=1) + 1e-6)
    return rows[:n], tables.labels[0, :n], rows[n:]
