"""The fits of the rules in the conformance vectors."""

from calibrate.conformance.vectors import read_vectors
from calibrate.core.rule import RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit


def fit_of_vectors(name):
    """The fit of a rule of the file, such as "published-polynomial"."""
    (rule,) = (rule for rule in read_vectors()["rules"] if rule["name"] == name)
    guards = (rule["min_entropy"], rule["min_beta"], rule["max_beta"], rule["outside"])
    entry = Entry(tuple(rule["coefficients"]), tuple(rule["domain"]))
    return Fit(RuleForm(*guards, rule["kind"]), (entry,), name)
