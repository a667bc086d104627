"""Harm to text in the measures of others: perplexity, percentile of the KL, same top token."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import even_examples

from calibrate.errors import DamagedError
from calibrate.evidence.evidence import BASELINE, OWN
from calibrate.evidence.harm_limits import text_harm, text_harm_by_domain, upper_quantile
from calibrate.model.objective import compare_rules
from calibrate.prompts.examples import N_HIGHEST, ExampleSet, Scores, parse_scores
from calibrate.report.page import write_fit_page
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.text_harm import text_harm_sentence

WINDOW = 51  # tokens, of which 50 are predicted


@pytest.fixture
def scored():
    """Two answers and 40 windows, whose tokens have known divergences; (tokens, scores)."""
    rng = np.random.default_rng(0)
    examples = even_examples([20], [WINDOW], count=40)
    n = len(examples.examples)
    is_text = np.array([example.start == 1 for example in examples.examples])
    each = np.where(is_text[:, None], rng.exponential(0.01, (n, WINDOW - 1)), 0)
    log_p = np.where(is_text, -100.0, -3.0)
    changed = np.where(is_text, np.arange(n) % 3, 0).astype(np.int32)
    highest = -np.sort(-each)[:, :N_HIGHEST]
    right = np.zeros(n, np.int32)
    own = Scores(log_p - is_text, right, each.sum(1), changed, highest)
    return examples, each[is_text], {BASELINE: Scores.baseline(log_p, right), OWN: own}


@pytest.fixture
def evidence(scored):
    examples, _, scores = scored
    return compare_rules(examples, range(len(examples.examples)), scores)


@pytest.fixture
def of_two_domains(scored):
    """The same windows twice: as news, and as fiction that has five times the KL."""
    examples, _, scores = scored
    answers, text = examples.cells
    cells = (answers, text._replace(template="news"), text._replace(template="fiction"))
    windows = [i for i, example in enumerate(examples.examples) if example.start == 1]
    fiction = [examples.examples[i]._replace(cell=2) for i in windows]
    both = ExampleSet(cells, (*examples.examples, *fiction))

    def of_both(of_rule):
        own = of_rule.at(windows)
        worse = {"kl": 5 * own.kl, "highest_kl": 5 * own.highest_kl, "changed": 2 * own.changed}
        return Scores.joined([of_rule, own._replace(**worse)])

    by_rule = {rule: of_both(of_rule) for rule, of_rule in scores.items()}
    return compare_rules(both, range(len(both.examples)), by_rule)


def test_the_verdict_has_the_range_over_domains(of_two_domains):
    harms = text_harm_by_domain(of_two_domains, OWN)
    news, fiction = harms["news"], harms["fiction"]
    assert fiction.kl_999 == pytest.approx(5 * news.kl_999)
    found = text_harm_sentence(of_two_domains, OWN)
    assert f"KL from {news.kl.mean:.4f} (news) to {fiction.kl.mean:.4f} (fiction)" in found
    assert f"({news.kl_999:.3f} to {fiction.kl_999:.3f})" in found
    assert f"({100 * fiction.same_top.mean:.2f} to {100 * news.same_top.mean:.2f} %)" in found
    increase = 100 * (np.exp(1 / 50) - 1)
    assert f"({increase:+.1f} to {increase:+.1f} %)" in found


@pytest.mark.parametrize(
    ("second", "is_said"), [("story", True), ("fiction", False)], ids=["built in", "the user's"]
)
def test_the_verdict_on_built_in_text_speaks_of_memorised_text(of_two_domains, second, is_said):
    renamed = [
        stratum._replace(template=second) if stratum.template == "fiction" else stratum
        for stratum in of_two_domains.strata
    ]
    found = text_harm_sentence(replace(of_two_domains, strata=tuple(renamed)), OWN)
    assert ("has memorised" in found) == is_said


def test_the_verdict_on_one_domain_has_no_range(evidence):
    found = text_harm_sentence(evidence, OWN)
    assert f"{text_harm(evidence, OWN).kl_999:.3f} nats" in found
    assert "(" not in found


def test_the_page_on_a_fit_has_each_domain(here, of_two_domains, make_fit):
    scores = ScoresRecord(of_two_domains, own="mine@1")
    write_fit_page(here / "r.html", replace(make_fit(), path=Path("f.json")), scores)
    page = (here / "r.html").read_text(encoding="utf-8")
    assert "Retention text under this fit" in page
    for domain, harm in text_harm_by_domain(of_two_domains, OWN).items():
        (row,) = re.findall(rf"<tr[^>]*>\s*<t[dh][^>]*>{domain}<.*?</tr>", page, re.DOTALL)
        for number in (f"{harm.perplexity:.4g}", f"{harm.kl_999:.3f}"):
            assert number in row


def test_the_measures_are_those_of_all_tokens(scored, evidence):
    _, each, scores = scored
    harm = text_harm(evidence, OWN)
    assert harm.n_tokens == each.size
    assert harm.baseline_perplexity == pytest.approx(np.exp(100 / 50))
    assert harm.perplexity == pytest.approx(np.exp(101 / 50))
    assert harm.kl.mean == pytest.approx(each.mean())
    assert harm.kl_999 == np.sort(each, axis=None)[-1 - int(0.001 * each.size)]
    assert harm.same_top.mean == pytest.approx(1 - scores[OWN].changed.sum() / each.size)


def test_the_baseline_does_no_harm(evidence):
    harm = text_harm(evidence, BASELINE)
    assert (harm.kl.mean, harm.kl_999) == (0, 0)
    assert harm.same_top.mean == pytest.approx(1)


def test_nothing_is_known_without_text_or_without_single_tokens(scored):
    examples, _, scores = scored
    index = range(len(examples.examples))
    assert text_harm(compare_rules(examples, index, scores).answers, OWN) is None
    assert text_harm(compare_rules(examples, index, scores, exact_match=False), OWN) is None


def test_the_quantile_is_exact_while_a_window_has_room():
    each = np.random.default_rng(1).lognormal(0, 1, (300, 200))
    each[7] += 10_000  # all of the highest are of one window
    n = each.size
    exact = np.sort(each, axis=None)[-1 - int(0.001 * n)]
    assert upper_quantile(-np.sort(-each)[:, :61], n) == exact
    assert upper_quantile(-np.sort(-each)[:, :40], n) < exact  # a lower bound
    assert np.isnan(upper_quantile(each[:1, :60], n))


def test_scores_are_read_as_they_were_written(here, scored):
    examples, _, scores = scored
    n_answer = examples.n_answer(range(len(examples.examples)))
    for of_rule in scores.values():
        again = parse_scores(n_answer, of_rule.pack(), here)
        for name, column in of_rule._asdict().items():
            np.testing.assert_array_equal(getattr(again, name), column)


@pytest.mark.parametrize("name", ["highest_kl", "changed"])
def test_scores_out_of_range_are_damaged(here, scored, name):
    examples, _, scores = scored
    n_answer = examples.n_answer(range(len(examples.examples)))
    wrong = scores[OWN]._replace(**{name: getattr(scores[OWN], name) - 1})
    with pytest.raises(DamagedError, match=name):
        parse_scores(n_answer, wrong.pack(), here)


def test_pages_and_json_have_them(evidence):
    harm = text_harm(evidence, OWN)
    found = ScoresRecord(evidence).as_json()["text_harm"][OWN]
    assert found["kl_999"] == harm.kl_999
    assert [domain["text"] for domain in found["domains"]] == ["text"]
    assert found["domains"][0]["perplexity"] == harm.perplexity
    (table,) = [x for x in ScoresRecord(evidence).tables() if x.columns[0] == "text"]
    (row,) = table.rows
    perplexities = f"{harm.baseline_perplexity:.4g} → {harm.perplexity:.4g}"
    assert row[:3] == ["text", "2,000", perplexities]
    assert f"{harm.kl_999:.3f}" in row
