"""Keywords of before 0.2: a TypeError names the present one."""

import inspect
import re

import pytest

import calibrate
from calibrate.parallel.jobs import Jobs


@pytest.mark.parametrize(
    ("function", "keywords", "now"),
    [
        ("fit_model", {"allowed_loss": 0.01}, "max_kl="),
        ("fit_model", {"strength": 0.5}, "interpolation="),
        ("fit", {"gate": 0.5}, "min_entropy="),
        ("fit", {"force_polynomial": True}, 'kind="polynomial"'),
        ("SoftmaxCalibrator", {"allowed_loss": 0.01}, "tolerance="),
        ("collect", {"fresh": True}, "overwrite="),
        ("fit_polynomial", {"gate": 0.5}, "min_entropy="),
    ],
)
def test_a_keyword_of_before_is_refused_with_the_present_one(function, keywords, now):
    (old,) = keywords
    with pytest.raises(TypeError) as refusal:
        getattr(calibrate, function)(**keywords)
    assert re.search(f"{old}=.* {re.escape(now)}", str(refusal.value))


def test_jobs_of_before_are_refused_too():
    with pytest.raises(TypeError, match=r"stall=.* timeout="):
        Jobs(2, stall=5)
    assert Jobs(2, timeout=5).timeout == 5


def test_other_keywords_and_signatures_are_as_python_has_them():
    for other in ("max_lk", "strength"):  # no keyword of `fit` was a strength
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{other}'"):
            calibrate.fit([[1.0, 2.0]], [1], **{other: 1})
    assert list(inspect.signature(calibrate.fit).parameters)[:3] == ["logits", "target", "mask"]
    assert "tolerance" in calibrate.SoftmaxCalibrator().get_params()
