"""Writes calibrate/conformance/vectors.json: adaptive softmax of some rows, at 50 digits.

    python scripts/tools/write_vectors.py

The equations are written anew here, in mpmath, and share no code with the package.
"""

import argparse
import json
import sys
from pathlib import Path

import mpmath as mp
import numpy as np

mp.mp.dps = 50
OUT = Path(__file__).parents[2] / "calibrate/conformance/vectors.json"
MASK_LIMIT = 9_000  # an item so far below the highest one is masked
SHOWN = 8  # probabilities of a long row

RULES = {
    "published-polynomial": {
        "kind": "polynomial",
        "coefficients": [-0.037, 0.481, -2.3, 4.917, -1.791],
        "min_entropy": 0.5, "min_beta": 1.0, "max_beta": 64.0, "domain": [0.5, 5.945],
        "outside": "identity",
    },
    "fitted-polynomial": {
        "kind": "polynomial",
        "coefficients": [0.0625, -0.5, 1.25, -0.75, 1.5],
        "min_entropy": 0.25, "min_beta": 0.5, "max_beta": 6.0, "domain": [0.125, 4.0],
        "outside": "clamp",
    },
    "constant": {
        "kind": "constant", "coefficients": [2.25],
        "min_entropy": 0.0, "min_beta": 0.0009765625, "max_beta": 1024.0, "domain": [],
        "outside": "clamp",
    },
    "log-size": {
        "kind": "log-size", "coefficients": [0.375, 0.5],
        "min_entropy": 0.0, "min_beta": 0.5, "max_beta": 64.0, "domain": [0.5, 5.0],
        "outside": "clamp",
    },
    "entropy-and-size": {
        "kind": "entropy-and-size",
        "coefficients": [0.0, 0.03125, -0.25, 0.5, 1.0, 0.125, -0.03125, 0.25],
        "min_entropy": 0.0, "min_beta": 0.5, "max_beta": 64.0, "domain": [0.0, 5.0, 0.5, 6.0],
        "outside": "clamp",
    },
}  # fmt: skip


def ramp(n, step=1.0, start=0.0):
    return [start + step * i for i in range(n)]


def peak(height, n):
    """One item above n - 1 equal ones."""
    return [height] + [0.0] * (n - 1)


def peak_of_entropy(entropy, n):
    """A peak whose entropy is as near to a number as float32 logits allow, in 1/65536 nats."""

    def excess(height):
        weights = [mp.e**height] + [mp.mpf(1)] * (n - 1)
        total = mp.fsum(weights)
        return -mp.fsum(w / total * mp.log(w / total) for w in weights) - entropy

    return peak(float(mp.nint(mp.findroot(excess, 3) * 65536) / 65536), n)


def long_row(n, multiplier, modulus, divisor):
    """z_i = ((multiplier i) mod modulus) / divisor, exact in float32."""
    return {"n": n, "multiplier": multiplier, "modulus": modulus, "divisor": divisor}


ROWS = {
    "one item": {"logits": [1.5]},
    "two equal items": {"logits": [0.0, 0.0]},
    "four items, two highest": {"logits": [2.0, 2.0, 0.5, -1.0]},
    "entropy 0.05": {"logits": peak_of_entropy(0.05, 6)},
    "entropy 0.2": {"logits": peak_of_entropy(0.2, 6)},
    "entropy 0.3": {"logits": peak_of_entropy(0.3, 6)},
    "entropy just below 0.5": {"logits": peak_of_entropy(0.499, 6)},
    "entropy 0.5": {"logits": peak_of_entropy(0.5, 6)},
    "entropy just above 0.5": {"logits": peak_of_entropy(0.501, 6)},
    "entropy 0.75": {"logits": peak_of_entropy(0.75, 6)},
    "entropy 1": {"logits": peak_of_entropy(1, 8)},
    "entropy 1.5": {"logits": peak_of_entropy(1.5, 8)},
    "ramp of 8": {"logits": ramp(8, 0.5)},
    "ramp of 16, shifted by 1000": {"logits": ramp(16, 0.25, 1000.0)},
    "ramp of 24": {"logits": ramp(24, -0.125)},
    "40 items": {"logits": [((7 * i) % 13) / 8 for i in range(40)]},
    "wide range": {"logits": [80.0, 79.0, 78.5, -80.0, 0.0]},
    "logits rounded to bfloat16": {"logits": [1.1015625, -0.296875, 2.203125, 0.703125, 2.09375]},
    "masked by -inf": {"logits": [1.0, None, 0.5, None, 2.0, 0.0, None, 1.5]},
    "masked by -1e9": {"logits": [1.0, -1e9, 0.5, -1e9, 2.0, 0.0, -1e9, 1.5]},
    "masked by the least number of float32": {
        "logits": [1.0, float(np.finfo(np.float32).min), 0.5, 1.75, 2.0, 0.0]
    },
    "masked by an array": {
        "logits": [1.0, 3.0, 0.5, 2.5, 2.0, 0.0, 1.25, 1.5],
        "mask": [True, False, True, False, True, True, False, True],
    },
    "masked throughout by an array": {"logits": [1.0, 2.0, 3.0], "mask": [False] * 3},
    "256 items": {"formula": long_row(256, 101, 253, 64)},
    "1,024 items": {"formula": long_row(1024, 389, 1021, 32)},
    "2,048 items beyond the domain": {"formula": long_row(2048, 787, 2039, 512)},
    "16,384 items, entropy near 5": {"formula": long_row(16384, 7919, 16381, 64)},
    "16,384 items, entropy near 9": {"formula": long_row(16384, 7919, 16381, 4096)},
}  # fmt: skip


def logits_of_row(row):
    """Numbers at 50 digits; None where an item is masked."""
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


def number(value):
    return float(value)


def expected(rule, row):
    logits = logits_of_row(row)
    n = sum(z is not None for z in logits)
    if n == 0:
        return {"n": 0, "probabilities": [0.0] * len(logits)}
    plain = softmax(logits, 1)
    entropy = -mp.fsum(p * mp.log(p) for p in plain if p > 0)
    beta = beta_of_row(rule, entropy, n)
    probabilities = softmax(logits, beta)
    result = {"n": n, "entropy": number(entropy), "beta": number(beta)}
    if "formula" in row:
        order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
        chosen = sorted({*order[: SHOWN // 2], *range(SHOWN // 2)})
        return {
            **result,
            "at": chosen,
            "probabilities": [number(probabilities[i]) for i in chosen],
        }
    return {**result, "probabilities": list(map(number, probabilities))}


def main():
    rules = [
        {"name": name, **rule, "expected": {row: expected(rule, ROWS[row]) for row in ROWS}}
        for name, rule in RULES.items()
    ]
    rows = [{"name": name, **row} for name, row in ROWS.items()]
    document = {
        "format": "calibrate.conformance",
        "schema_version": "1.0",
        "about": "Adaptive-temperature softmax, arXiv 2410.01104, computed with 50 digits. "
        "A null logit is -inf; mask is true for real items. See calibrate/conformance/README.md.",
        "rows": rows,
        "rules": rules,
    }
    OUT.write_text(in_lines(document), encoding="utf-8")
    print(f"{OUT}: {OUT.stat().st_size:,} bytes", file=sys.stderr)


def in_lines(document):
    """JSON with a line for each row, and for each expected value."""

    def lines(items, indent):
        return ",\n".join(f"{indent}{json.dumps(item)}" for item in items)

    head = "".join(
        f' "{key}": {json.dumps(document[key])},\n' for key in ("format", "schema_version", "about")
    )
    rules = []
    for rule in document["rules"]:
        facts = {key: value for key, value in rule.items() if key != "expected"}
        values = ",\n".join(
            f"    {json.dumps(row)}: {json.dumps(value)}" for row, value in rule["expected"].items()
        )
        rules.append(f'  {json.dumps(facts)[:-1]}, "expected": {{\n{values}\n  }}}}')
    rows = lines(document["rows"], "  ")
    return (
        "{\n" + head + f' "rows": [\n{rows}\n ],\n "rules": [\n' + ",\n".join(rules) + "\n ]\n}\n"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
