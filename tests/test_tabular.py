"""The study of a classifier of tables: its tables, its model and shipped weights, its record."""

import numpy as np
import pytest
import reference
import tabular
import tabular_model
import tabular_tasks
import torch
from study import mean_and_error
from study_pages import page_of, record_of

import calibrate


@pytest.fixture
def model():
    return tabular_model.new_model(3).eval()


def drawn(seed=0, count=2, n=20, queries=6):
    return tabular_tasks.draw(np.random.default_rng(seed), count, n, queries)


@torch.no_grad()
def log_p(model, tables):
    return tabular_model.log_p_of(model, tables).numpy()


def test_random_tables_depend_on_their_seed_alone_and_have_all_kinds():
    tables, same = drawn(count=60), drawn(count=60)
    assert tables.features.shape == (60, 26, 4)
    np.testing.assert_array_equal(tables.features, same.features)
    np.testing.assert_array_equal(tables.labels, same.labels)
    assert (drawn(1, 60).labels != tables.labels).any()
    assert {int(x.any(axis=0).sum()) for x in tables.features} == {2, 3, 4}
    assert {int(x.max()) for x in tables.labels} == {1, 2, 3}


@pytest.mark.parametrize("name", tabular_tasks.DATA_SETS)
def test_data_sets_are_cut_to_what_the_model_knows(name):
    tables = tabular_tasks.split_of(np.random.default_rng(0), name, 30, 10)
    assert tables.features.shape == (1, 40, 4)
    assert tables.labels.max() < 4
    assert tabular_tasks.rows_of(name) >= 150


def test_a_query_sees_labelled_rows_alone(model):
    tables = drawn()
    found = log_p(model, tables)
    others = tables.features.copy()
    others[:, 21:] += 1
    np.testing.assert_allclose(log_p(model, tables._replace(features=others))[:, 0], found[:, 0],
                               atol=1e-6)  # fmt: skip
    relabelled = tables.labels.copy()
    relabelled[:, 3] = (relabelled[:, 3] + 1) % 4
    moved = log_p(model, tables._replace(labels=relabelled))
    assert (np.abs(moved - found).max(axis=-1) > 1e-5).all()


def test_a_rule_of_entropy_is_query_by_query(model):
    paper, attention = calibrate.load("paper@1"), model.layers[0].attention
    tabular.apply(model, paper, **tabular.SMALL)
    rows = 3 * torch.randn(2, 30, 64, generator=torch.manual_seed(0))
    with torch.no_grad():
        found = attention(rows, rows[:, :24]).numpy()
        q, k, v = (
            project(x).unflatten(-1, (4, 16)).transpose(1, 2).double().numpy()
            for project, x in (
                (attention.q_proj, rows), (attention.k_proj, rows[:, :24]),
                (attention.v_proj, rows[:, :24]),
            )
        )  # fmt: skip
        rule, entry = paper.rule, paper.only
        weights = reference.adaptive_softmax(
            q @ k.swapaxes(2, 3) / 4, entry.coefficients, entry.domain, rule
        )
        out = torch.from_numpy(weights @ v).float().transpose(1, 2).flatten(2)
        np.testing.assert_allclose(found, attention.o_proj(out).numpy(), atol=1e-5)


def shipped():
    return tabular.load_model(tabular.weights_of(0), tabular.TableModel)


def test_fit_model_finds_heads_by_the_measure_of_a_model_that_takes_no_tokens():
    """Shipped weights, with heads three times as blunt as they were trained to be."""
    model = shipped()
    for layer in model.layers:
        layer.attention.q_proj.weight.data /= 3
    batches = [drawn(seed, count=8, n=40, queries=16) for seed in range(12)]
    fit = calibrate.fit_model(model, batches, tabular.log_p, kind="constant", steps=3, size=40)
    assert {entry.layer for entry in fit.entries} <= {None, 0, 1, 2}
    assert np.mean([entry.coefficients[-1] for entry in fit.entries]) > 1.05


def test_the_answer_and_its_costs_are_the_record():
    def less_baseline(of, measure):
        """(seeds, sizes) scores of the fitted rule less those of the baseline."""
        scores = [found["scores"] for found in record_of("tabular")["found"]]
        pairs = [[arms[arm][of][measure] for arm in (tabular.OWN, "baseline")] for arms in scores]
        return -np.diff(np.array(pairs)[..., 0], axis=1)[:, 0]

    page = " ".join(page_of("tabular").split())
    (loss, loss_error), (points, points_error) = (
        (mean[-1], error[-1]) for mean, error in (
            mean_and_error(scale * less_baseline("random", measure))
            for measure, scale in (("log_loss", -1), ("accuracy", 100))
        )
    )  # fmt: skip
    assert f"lowers it by {loss:.3f} ± {loss_error:.3f} nats" in page
    assert f"({points:.1f} ± {points_error:.1f} points)" in page
    wine = less_baseline("wine", "log_loss")[:, 0].mean()
    assert f"up to {wine:.3f} on data sets (wine)" in page


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["baseline", "entropy-and-size"])
def test_shipped_weights_give_numbers_of_the_record(arm):
    """All tables of two sizes; processors may differ in the last bits, and so in a query or two."""
    record = record_of("tabular")
    path = tabular.fit_of(0, tabular.OWN)
    fit = calibrate.load(path) if arm == tabular.OWN else calibrate.identity()
    predict = tabular.model_with(shipped(), fit)
    recorded = record["found"][0]["scores"][arm]["random"]
    for place, size in ((0, 16), (2, 256)):
        tables = tabular.measured_tables(0, size, record["tables"][place])
        right, loss = np.mean([tabular.score(predict, x) for x in tables], axis=0)
        assert right == pytest.approx(recorded["accuracy"][place][0], abs=2e-4)
        assert loss == pytest.approx(recorded["log_loss"][place][0], abs=2e-4)
