#!/usr/bin/env python
"""Computes the expected values in calibrate/conformance/vectors.json anew, with 50 digits.

    python scripts/tools/write_vectors.py

Rows and rules are those of the file; to test another one, add it there, a rule with "expected": {}.
The equations are written anew here, in mpmath, and share no code with the package.
"""

import argparse
import json
from pathlib import Path

import mpmath as mp

mp.mp.dps = 50
PATH = Path(__file__).parents[2] / "calibrate/conformance/vectors.json"
MASK_LIMIT = 9_000  # an item so far below the highest one is masked
SHOWN = 8  # probabilities of a long row


def main():
    document = json.loads(PATH.read_text(encoding="utf-8"))
    for rule in document["rules"]:
        rule["expected"] = {row["name"]: expected(rule, row) for row in document["rows"]}
    PATH.write_text(in_lines(document), encoding="utf-8")


def expected(rule, row):
    logits = logits_of_row(row)
    n = sum(z is not None for z in logits)
    if n == 0:
        return {"n": 0, "probabilities": [0.0] * len(logits)}
    entropy = -mp.fsum(p * mp.log(p) for p in softmax(logits, 1) if p > 0)
    beta = beta_of_row(rule, entropy, n)
    probabilities = [float(p) for p in softmax(logits, beta)]
    result = {"n": n, "entropy": float(entropy), "beta": float(beta)}
    if "formula" in row:  # a long row: the first probabilities, and the highest
        order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
        result["at"] = sorted({*order[: SHOWN // 2], *range(SHOWN // 2)})
        probabilities = [probabilities[i] for i in result["at"]]
    return {**result, "probabilities": probabilities}


def logits_of_row(row):
    """Numbers at 50 digits; None where an item is masked.

    A formula gives z_i = ((multiplier i) mod modulus) / divisor, exact in float32.
    """
    if "formula" in row:
        f = row["formula"]
        integers = ((f["multiplier"] * i) % f["modulus"] for i in range(f["n"]))
        return [mp.mpf(k) / f["divisor"] for k in integers]
    mask = row.get("mask", [True] * len(row["logits"]))
    numbers = [
        None if z is None or not real else mp.mpf(z)
        for z, real in zip(row["logits"], mask, strict=True)
    ]
    highest = max((z for z in numbers if z is not None), default=None)
    return [None if z is None or highest - z > MASK_LIMIT else z for z in numbers]


def softmax(logits, beta):
    highest = max(z for z in logits if z is not None)
    weights = [mp.mpf(0) if z is None else mp.e ** (beta * (z - highest)) for z in logits]
    total = mp.fsum(weights)
    return [w / total for w in weights]


def clip(value, low, high):
    return min(max(value, low), high)


def polynomial(x, coefficients):
    return mp.fsum(mp.mpf(c) * x**k for k, c in enumerate(reversed(coefficients)))


def beta_of_row(rule, entropy, n):
    """The inverse temperature, as in fits/README.md."""
    kind, c = rule["kind"], rule["coefficients"]
    log_n = mp.log(n)
    if kind == "constant":
        value = mp.mpf(c[0])
    elif kind == "log-size":  # rises beyond its domain, but never falls there
        inside = clip(log_n, *rule["domain"])
        value = polynomial(inside, c) + max(mp.mpf(c[0]), 0) * (log_n - inside)
    else:
        lo, hi = rule["domain"][:2]
        threshold = rule["min_entropy"]
        if threshold > 0 and entropy <= threshold:
            return mp.mpf(1)
        if rule["outside"] == "identity" and not lo <= entropy <= hi:
            return mp.mpf(1)
        h = clip(entropy, lo, hi)
        value = polynomial(h, c[:5])
        if kind == "entropy-and-size":
            both, square, line = map(mp.mpf, c[5:])
            inside = clip(log_n, *rule["domain"][2:])
            value += both * h * inside + square * inside**2 + line * inside
            value += max(both * h + 2 * square * inside + line, 0) * (log_n - inside)
    return clip(value, rule["min_beta"], rule["max_beta"])


def in_lines(document):
    """JSON with a line for each row, and for each expected value."""
    fields = {key: json.dumps(value) for key, value in document.items()}
    fields["rows"] = lines("[]", map(json.dumps, document["rows"]), " ")
    fields["rules"] = lines("[]", map(rule_in_lines, document["rules"]), " ")
    return lines("{}", (f'"{key}": {value}' for key, value in fields.items()), "") + "\n"


def rule_in_lines(rule):
    facts = {key: value for key, value in rule.items() if key != "expected"}
    values = (f"{json.dumps(row)}: {json.dumps(value)}" for row, value in rule["expected"].items())
    return f'{json.dumps(facts)[:-1]}, "expected": {lines("{}", values, "  ", inner="    ")}}}'


def lines(brackets, items, indent, inner=None):
    """Items between brackets, each on a line of its own."""
    inner = indent + " " if inner is None else inner
    body = ",\n".join(inner + item for item in items)
    return f"{brackets[0]}\n{body}\n{indent}{brackets[1]}"


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
