"""Names of rules and of kinds of rule for people."""

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import HARD, PAPER, TRAINED_SIZE
from calibrate.evidence.evidence import BASELINE, OWN
from calibrate.fitting.verdict import PROCEDURES, beta_text
from calibrate.store.fit import Fit

LABELS = {  # of those whose name says too little; kinds of rule have their own
    BASELINE: "baseline (softmax)",
    PAPER: "the paper's published polynomial",
    "rounded": "published polynomial, rounded",
    OWN: "fitted rule",
    **PROCEDURES,
    "log-n": f"log n / log {TRAINED_SIZE}",
    HARD: "argmax",
}


def described(fit: Fit) -> str:
    """The rule of a fit in words: "constant, beta = 2, theta = 0.5"; "" of one with many rules."""
    if fit.has_heads:
        return ""
    beta = fit.entries[0].constant_beta(fit.rule)
    if beta is None:
        return fit.rule.kind
    return f"{CONSTANT}, {beta_text(beta)}"


def label(rule: str, own: str = "") -> str:
    """The name of a rule in tables, figures and sentences; `own` is that of OWN, if it has one."""
    return own if rule == OWN and own else LABELS.get(rule, rule)
