"""Golden records: numbers of the commands, compared with those that were written down before.

Each command runs once, in this process, on small inputs. An extractor takes the numbers that mean
something out of its JSON, or out of the coefficient file that it wrote, and gives them names that
do not depend on how the record spells them. tests/golden/records has them by "command/input/what":
standard errors, intervals and p-values in errors.json, all others in numbers.json. If a command or
a record is renamed, ROWS, MODEL and EXTRACT follow; the stored numbers do not. Whoever changes an
estimator on purpose writes the records anew, and says in the commit which numbers moved and why:

    python tests/test_golden.py --write
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

import conftest  # compiles as the tests do, with as few resamples  # noqa: F401
import numpy as np
import pytest
from typer.testing import CliRunner

import calibrate
from calibrate.cli.main import app

RECORDS = Path(__file__).with_name("golden") / "records"
NUMBERS, ERRORS = RECORDS / "numbers.json", RECORDS / "errors.json"

# (relative, absolute), the first whose words are in the name of a number.
TOLERANCES = {
    # BLAS, XLA and PyTorch round otherwise on other processors; solvers and folds carry that on.
    "beta": (3e-3, 1e-3),
    "domain": (1e-3, 1e-3),
    # float32 through a model and a descent of some dozen steps.
    "model": (1e-4, 1e-5),
    "": (1e-5, 2e-5),  # nats; gains of polynomials of few rows move as much
}
ERROR_TOLERANCES = {
    # Student's t for every number of groups: 0.4 % wider with 300 sets of a size.
    "error": (6e-3, 1e-5),
    "low": (2e-2, 1e-3),
    "high": (2e-2, 1e-3),
    "p-value": (2e-3, 1e-5),
}  # by the last part of a name in errors.json

# What is stored and no longer compared.
GONE = {
    "one estimator: Student's t widens the errors of few examples; text is grouped by stretch":
        r"(collect|diagnose|evaluate|fit|run)/(random|planted) model.*/error",
    "one estimator: rows of a group are alike in all heads, not each head by itself":
        r"(fit/heads|run/heads/fit)/[0-9]+/error",
    "gains are tested on both sides": r"(diagnose|fit)/heads/.*p-value",
    "a rule is chosen beyond chance: four examples that choose are too few, and exit is 3":
        r"run/planted model/.*",
    "fits are compared where either was fitted": r"fits/diff/common/.*",
    "the verdict is on the page": r"report/.*/verdict",
}  # fmt: skip

Numbers = dict[str, float]

# --- inputs --------------------------------------------------------------------------------------

SIZES = (16, 64, 256)
# The beta that each head's targets are drawn at, by set size.
ONE = {(0, 0): lambda n: 0.8 * np.log(n) - 1}
HEADS = {
    (0, 0): lambda n: 1.0,
    (0, 1): lambda n: 2.5,
    (2, 0): lambda n: 0.5 * np.log(n),
    (2, 1): lambda n: 0.3,
}


def softmax(z):
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def drawn(rng, beta, n, count, spread=2):
    """(rows, n) logits, and (rows,) targets drawn from softmax at beta, or beta(entropy, log n)."""
    z = rng.uniform(0.3, spread, (count, 1)) * rng.standard_normal((count, n))
    z = z.astype(np.float32)
    if callable(beta):
        p = softmax(z.astype(float))
        beta = beta(-(p * np.log(p)).sum(axis=1, keepdims=True), np.log(n))
    p = softmax(beta * z.astype(float))
    return z, (p.cumsum(axis=1) > rng.random((count, 1))).argmax(axis=1)


def drawn_at_sizes(rng, beta, count):
    """A list of logits, and one of targets."""
    parts = [drawn(rng, beta, n, count, spread=3) for n in SIZES]
    return [z for z, _ in parts], [target for _, target in parts]


def pairs_with(logits, target):
    """Sets of targets: the target and its neighbour."""
    return [np.arange(x.shape[1]) // 2 == t[:, None] // 2
            for x, t in zip(logits, target, strict=True)]  # fmt: skip


def write_logits(folder, seed, wants, count):
    """A file for each size; rows of 80 groups, and two masked items after the rest."""
    Path(folder).mkdir()
    rng = np.random.default_rng(seed)
    for n in SIZES:
        parts = [drawn(rng, beta(n), n, count) for beta in wants.values()]
        names = np.repeat(list(wants), count, axis=0)
        np.savez(
            f"{folder}/{n}.npz",
            logits=np.concatenate([np.pad(z, [(0, 0), (0, 2)]) for z, _ in parts]),
            mask=np.arange(n + 2) < n,
            target=np.concatenate([target for _, target in parts]),
            group=np.tile(np.arange(count) % 80, len(wants)),
            **({"layer": names[:, 0], "head": names[:, 1]} if len(wants) > 1 else {}),
        )


def write_rows():
    """Logits of one head and of four, each twice: to be fitted, and to be scored; and others."""
    write_logits("one", 0, ONE, 400)
    write_logits("one-fresh", 1, ONE, 160)
    write_logits("heads", 2, HEADS, 240)
    write_logits("heads-fresh", 3, HEADS, 80)
    write_logits("calibrated", 4, {(0, 0): lambda n: 1.0}, 160)
    Path("sets").mkdir()
    z, target = drawn_at_sizes(np.random.default_rng(9), 4.0, 300)
    for n, x, pairs in zip(SIZES, z, pairs_with(z, target), strict=True):
        np.savez(f"sets/{n}.npz", logits=x, target=pairs)


def write_models():
    """A model of random weights; one of which it is known what its heads want; prompts and texts.

    The text of the second loses by what its answers gain by: a fit meets the constraint on text.
    """
    import transformers
    from test_first_look import planted_examples, planted_model
    from tiny_causal import causal_model, save
    from tiny_gguf import small_model, write_gguf
    from tokenizers import Tokenizer, models, pre_tokenizers

    save(Path("random"), causal_model())
    words = ["is", "the", "key", "of", "number", "a", "in", "and", "."]
    Path("book.txt").write_text(" ".join(np.random.default_rng(5).choice(words, 400)))

    save(Path("planted"), planted_model(), tokenizer=False)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.save_pretrained("planted")
    write_prompts("prompts.jsonl", planted_examples(count=24))
    k = np.random.default_rng(6).integers(0, 8, (600, 3))
    wrong = np.stack([10 + k[:, 0], 20 + k[:, 1], 10 + k[:, 2], np.full(600, 30),
                      10 + (k[:, 1] + 3) % 8], axis=1)  # fmt: skip
    wrong[np.arange(600) % 4 > 0, 3] = 10  # most have no query
    Path("wrong.txt").write_text(" ".join(f"w{i}" for i in wrong.ravel()))
    write_gguf(Path("packed"), small_model())


def write_prompts(name, examples):
    lines = [
        {"prompt_ids": e.tokens[: e.start].tolist(), "answer_ids": e.tokens[e.start :].tolist(),
         "template": f"n{e.cell}"}
        for e in examples.examples
    ]  # fmt: skip
    Path(name).write_text("\n".join(map(json.dumps, lines)))


# --- commands, in order --------------------------------------------------------------------------

ROWS = {
    "collect/head": "collect --head max-retrieval --sizes 256,512 --sets 400 --out runs/head",
    "diagnose/head": "diagnose runs/head",
    "fit/head": "fit runs/head --name head",
    "fit/head by the paper": "fit runs/head --name head-paper --paper",
    "fit/head with a gate": "fit runs/head --name head-gate --gate 0.5",
    "fit/head for log p": "fit runs/head --name head-log-p --q 0",
    "fit/head of misranked rows": "fit runs/head --name head-misranked --rows misranked",
    "fit/head, a polynomial": "fit runs/head --name head-poly --force-polynomial",
    "evaluate/head": "evaluate --head max-retrieval-3 --sizes 32,64 --sets 300"
    " --fits head,head-paper",
    "report/head": "report head --out head.html --sizes 32,64 --sets 300",
    "run/head": "run --sizes 32,64 --sets 300 --name head-run",
    "collect/one": "collect --logits one --out runs/one",
    "diagnose/one": "diagnose runs/one",
    "fit/one": "fit runs/one --name one",
    "evaluate/one": "evaluate --logits one-fresh --fits one",
    "report/one": "report one --logits one-fresh --out one.html",
    "run/one": "run --logits one --name one-run --held-out 0.25",
    "collect/heads": "collect --logits heads --out runs/heads",
    "diagnose/heads": "diagnose runs/heads",
    "fit/heads": "fit runs/heads --name heads",
    "evaluate/heads": "evaluate --logits heads-fresh --fits heads",
    "run/heads": "run --logits heads --name heads-run",
    "collect/calibrated": "collect --logits calibrated --out runs/calibrated",
    "fit/calibrated": "fit runs/calibrated --name calibrated",
    "collect/sets": "collect --logits sets --out runs/sets",
    "fit/sets": "fit runs/sets --name sets",
    "fit/sets of misranked rows": "fit runs/sets --name sets-misranked --rows misranked",
    "fits/list": "fits list",
    "fits/show": "fits show head-poly",
    "fits/diff": "fits diff head head-paper",
    "fits/verify": "fits verify",
}
LONG = ("report/head", "run/head", "run/one", "run/heads", "fits/list", "fits/verify")
MODEL = {
    "collect/random model": "model collect --model random --task retrieval:numbers,list"
    " --text book.txt --lengths 64,96 --examples 4 --out runs/random",
    "diagnose/random model": "model diagnose runs/random",
    "evaluate/random model": "model evaluate runs/random --fits paper --constants 1.2"
    " --trained-up-to 64",
    "collect/planted model": "model collect --model planted --prompts prompts.jsonl"
    " --text wrong.txt --lengths 25,50 --out runs/planted",
    "diagnose/planted model": "model diagnose runs/planted",
    "fit/planted model": "model fit runs/planted --name planted --steps 25 --kind constant",
    "fit/planted model for export": "model fit runs/planted --name planted-export --steps 8"
    " --for-export --trained-up-to 8",
    "evaluate/planted model": "model evaluate runs/planted --fits planted --constants 1.2",
    "report/planted model": "report planted --out planted.html",
    "export/planted model": "export planted --model planted --out exported",
    "export/planted model, checked": "export --check exported",
    "export/packed model": "export planted --any-model --model packed/tiny.gguf --out out.gguf",
}


def run(commands) -> dict[str, Numbers]:
    """The numbers of each case."""
    return {case: EXTRACT[case](result(command)) for case, command in commands.items()}


def result(command):
    """The JSON of a command, or its exit code where it has none."""
    done = CliRunner().invoke(app, [*command.split(), "--json"])
    assert done.exit_code in (0, 3), f"{command}: {done.output}{done.exception!r}"
    return json.loads(done.stdout) if done.exit_code == 0 else {"exit": done.exit_code}


def short_rows_numbers():
    """Without the cases that run several commands, or need those that do."""
    write_rows()
    return run({case: line for case, line in ROWS.items() if case not in LONG}) | python_numbers()


def rows_numbers():
    write_rows()
    return run(ROWS)


def python_numbers():
    return {f"python/{name}": fitted(*made) for name, made in made_in_python().items()}


def model_numbers():
    for extra in ("torch", "transformers", "gguf"):
        pytest.importorskip(extra)
    write_models()
    return run(MODEL)


def made_in_python():
    """(the file's path, the fit) of arrays."""
    rng = np.random.default_rng(7)
    z, target = drawn_at_sizes(rng, 4.0, 400)
    both = drawn_at_sizes(rng, lambda H, log_n: np.maximum(1, 1.2 * log_n - H), 400)
    weight = [rng.uniform(0, 2, 400) for _ in z]
    group = [np.arange(400) % 200 for _ in z]
    fits = {
        "one target": calibrate.fit(z, target, seed=3),
        "by entropy and size": calibrate.fit(*both, q=0),
        "several targets, weights and groups": calibrate.fit(
            z, pairs_with(z, target), weight=weight, group=group, q=0.25
        ),
    }
    return {name: (fit.save(Path(f"{name[:3]}.json")), fit) for name, fit in fits.items()}


# --- extractors: the only place that knows how records spell what they hold ----------------------


def named(numbers: dict[str, Numbers]) -> Numbers:
    return {f"{name}/{key}": x for name, some in numbers.items() for key, x in some.items()}


def head_name(of):
    return "all" if of["layer"] is None else f"L{of['layer']}H{of['head']}"


def counts(record):
    keys = ("rows", "misranked", "ties", "kept")
    return named({str(of["size"]): {key: of[key] for key in keys} for of in record["sizes"]})


# Coefficient files.


def grid(entry, rule):
    """Points (H, log n) of the domain, and of sets that are e times as large."""
    lo, hi = entry["domain"][:2]
    H = np.linspace(lo, hi, 5)
    if rule["kind"] == "entropy-polynomial":
        return [(x, 0.0) for x in H]
    sizes = np.linspace(*entry["domain"][-2:], 3)
    sizes = [*sizes, sizes[-1] + 1]
    if rule["kind"] == "log-size":
        return [(0.0, x) for x in sizes]
    return [(x, y) for y in sizes for x in H]


def beta_at(H, log_n, entry, rule):
    """As fits/README.md defines it, without the gate."""
    c, domain = entry["coefficients"], entry["domain"]
    if rule["kind"] == "entropy-polynomial":
        value = np.polyval(c, H)
    else:
        inside = min(max(log_n, domain[-2]), domain[-1])
        if rule["kind"] == "log-size":
            value, rise = np.polyval(c, inside), c[0]
        else:
            value = np.polyval(c[:5], H) + inside * (c[5] * H + c[6] * inside + c[7])
            rise = c[5] * H + 2 * c[6] * inside + c[7]
        value += max(rise, 0) * (log_n - inside)
    return float(np.clip(value, rule["min_beta"], rule["max_beta"]))


def of_document(document):
    """beta of every entry, and the gains that a file claims."""
    rule, quality = document["rule"], document["quality"]
    kinds = ("entropy-polynomial", "log-size", "entropy-and-size")
    found = {"kind": kinds.index(rule["kind"]), "entries": len(document["entries"])}
    found |= {f"rule/{name}": rule[name] for name in ("min_entropy", "min_beta", "max_beta")
              if name in rule}  # fmt: skip
    for entry in document["entries"]:
        head = head_name(entry)
        found |= {f"{head}/domain/{i}": x for i, x in enumerate(entry["domain"])}
        found |= {f"{head}/beta/{i}": beta_at(*at, entry, rule)
                  for i, at in enumerate(grid(entry, rule))}  # fmt: skip
    for of in quality.get("held_out", []):
        found |= {f"{of['size']}/{key}": of[key] for key in ("rows", "before", "after", "error")}
    for of in quality.get("candidates", []):
        name = f"candidates/{of['kind']}" + (f"/q={of['q']:g}" if "q" in of else "")
        keys = {"log_p", "p", "gain", "low", "high"} & of.keys()
        found |= {f"{name}/{key}": of[key] for key in keys}
    if "standard_errors" in quality:
        found |= {f"coefficients/{i}/error": x
                  for i, x in enumerate(np.ravel(quality["standard_errors"]))}  # fmt: skip
    return found | {f"rows/{name}": count for name, count in quality.get("rows", {}).items()}


def written(record):
    """The file of a fit, and what is known beside it; or that there is none."""
    if "exit" in record:
        return {"exit": record["exit"]}
    found = of_document(record["fit"])
    if "candidates" in record:
        return found | through_model(record)
    for head in record.get("heads", []):
        found[f"{head_name(head)}/misranked"] = head["misranked"]
        if gain := head["gain"]:
            found |= gained(gain, f"{head_name(head)}/gain")
    return found


def gained(gain, name):
    found = {name: gain["mean"], f"{name}/p-value": gain["p"]}
    return found | {f"{name}/{end}": gain[end] for end in ("low", "high")}


def through_model(record):
    """A fit through a model, its rivals on what no fit has seen, and the forms that were tried."""
    names = {"constant": "one constant", "kappa-log-n": "one line in log n",
             "paper": "the paper's numbers", "free": "best without --for-export"}  # fmt: skip
    found = {f"{head_name(of)}/typical beta": of["beta"] for of in record["heads"]}
    for rule, of in record["scores"]["all"]["rules"].items():
        name = names.get(rule, rule)
        found[f"{name}/right"] = of["right"]["mean"]
        if rule != "plain":
            found[f"{name}/gain"] = of["log_p"]["gain"]
    for rule, losses in record["losses"].items():
        found |= {f"{names.get(rule, rule)}/loss/{i}": x["mean"] for i, x in enumerate(losses)}
    for of in record["candidates"]:
        name = f"candidates/{of['kind']}/{'each head' if of['each_head'] else 'all heads'}"
        found |= {f"{name}/gain": of["gain"], f"{name}/heads": of["heads"]}
        found |= {f"{name}/loss/{i}": loss["mean"] for i, loss in enumerate(of["losses"])}
    return found | ({"cost of exporting": cost["mean"]} if (cost := record["export_cost"]) else {})


def fitted(path, fit):
    """A fit that was made in Python, and the rows that it was judged by."""
    words = ("loss", "no difference", "gain")
    found = of_document(json.loads(path.read_text()))
    found |= {"outcome": words.index(fit.outcome) - 1, "rows that judge": fit.held_out.sum()}
    for row in fit.table:
        name = f"judged/{row.size or 'all'}/{row.rule}"
        found |= {f"{name}/log_p": row.log_p, f"{name}/p": row.p, f"{name}/gain": row.gain,
                  f"{name}/gain/error": row.error}  # fmt: skip
    return found


# Scores. Gains were spelled otherwise where sets, rows and answers were scored.


def scored(parts, spelled):
    """Means and gains of all rules in parts of the items, by the name of the part."""
    found = {}
    for where, part in parts.items():
        for rule, measures in part["rules"].items():
            for measure, of in measures.items():
                name = f"{where}/{rule.split('@')[0]}/{measure}"
                gain = f"{where}/{rule.split('@')[0]}/{spelled.format(measure)}"
                found |= {name: of["mean"], f"{name}/error": of["error"],
                          gain: of["gain"], f"{gain}/error": of["gain_error"]}  # fmt: skip
    return found


def by_size(record, before=""):
    return {f"{before}{of['size']}": of for of in record["sizes"]}


def scored_head(record):
    found = scored(by_size(record), "gain")
    for size, part in by_size(record).items():
        found |= {f"{size}/{rule.split('@')[0]}/against plain/p-value": of["right"]["p"]
                  for rule, of in part["rules"].items()}  # fmt: skip
    return {name: x for name, x in found.items() if x is not None}


def scored_logits(record):
    parts = {"all": record["all"], **by_size(record)}
    for head in record["heads"]:
        parts |= {head_name(head): head, **by_size(head, f"{head_name(head)}/")}
    rows = {f"{where}/rows": part["items"] for where, part in parts.items()}
    return rows | scored(parts, "{}_gain")


def scored_model(record):
    parts = {"answers": record["all"]} | ({"text": record["text"]} if record["text"] else {})
    parts |= {f"{of['template']} {of['size']}": of for of in record["strata"]}
    examples = {f"{where}/examples": part["items"] for where, part in parts.items()}
    return examples | scored(parts, "{}/gain")


def scores_of_run(record):
    """Accuracies of a head before and after."""
    found = {name: x for name, x in scored_head(record).items() if "/right" in name}
    for size, part in by_size(record).items():
        own = part["rules"]["own"]["right"]
        found |= {f"{size}/gain": own["gain"], f"{size}/gain/error": own["gain_error"]}
    return found


def collected_examples(record):
    found = {}
    for of in record["plain"]:
        name = f"{of['template']} {of['length']}"
        found |= {f"{name}/{key}": of[key] for key in ("examples", "log_p", "right", "error")}
    return found


def ran(scores):
    """A fit and its scores."""

    def of_run(record):
        fit = {key: x for key, x in record.items() if key != "scores"}
        return named({"fit": written(fit), "scores": scores(record["scores"])})

    return of_run


def reported(record):
    """The page is written whole."""
    text = Path(record["report"]).read_text(encoding="utf-8")
    assert record["verdict"].split(". ")[0] in unescape(text)
    return {"page": text.rstrip().endswith("</html>")}


# Diagnoses.


def diagnosed_rows(record):
    found = {}
    for head in record["heads"]:
        name, room = head_name(head), head["headroom"]
        found |= {f"{name}/rows": head["rows"], f"{name}/on top": head["on_top"],
                  f"{name}/worth": head["verdict"]["word"] == "worth calibrating",
                  f"{name}/plain": room["plain"], f"{name}/ceiling": room["ceiling"],
                  f"{name}/best constant beta": room["beta"],
                  f"{name}/sink": (head["sink"] or {"attention": 0})["attention"]}  # fmt: skip
        for of in room["gains"]:
            gain, kind = of["gain"], f"{name}/{of['kind']}"
            found |= {f"{kind}/gain": gain["mean"], f"{kind}/p-value": gain["p"]}
            found |= {f"{kind}/{end}": gain[end] for end in ("low", "high")}
    found |= {f"{i}/{head_name(head)}": i for i, head in enumerate(record["heads"])}  # their order
    return found


def diagnosed_model(record):
    signs = {"sharper": 1, "more diffuse": -1, "unclear": 0}
    found = {}
    for kind in ("answers", "text"):
        found |= {f"{kind}/{key}": record[kind][key] for key in ("examples", "log_p")}
    for head in record["heads"]:
        name = head_name(head)
        slopes = {kind: head[kind] for kind in ("answers", "text")}
        slopes |= head["by_length"] | head["by_template"]
        for what, (slope, error) in slopes.items():
            found |= {f"{name}/{what}": slope, f"{name}/{what}/error": error}
        found |= {f"{name}/gain": head["gain"], f"{name}/wants": signs[head["wants"]],
                  f"{name}/text wants": signs[head["text_wants"]]}  # fmt: skip
    return found


# Exports and stores.


def exported(record):
    found = {"ratio": record["ratio"], "faults": len(record["faults"])}
    for layer, factors in record["factors"].items():
        found |= {f"L{layer}H{head}/beta": x for head, x in enumerate(factors)}
    return found


def listed(record):
    return {f"{of['name']}/{'/'.join(map(str, of['versions']))}": of["default"] for of in record}


def shown(record):
    return of_document(record["fit"])


def differing(record):
    keys = ("largest beta", "beta before", "beta after")
    return dict(zip((f"anywhere/{key}" for key in keys), record["change"].values(), strict=False))


def verified(record):
    versions = [of for of in record if Path(of["path"]).stem.isdigit()]
    return {"versions": len(versions), "sound": sum(of["ok"] for of in versions)}


EXTRACT: dict[str, Callable[..., Numbers]] = {
    "collect/head": counts, "collect/one": counts, "collect/heads": counts,
    "collect/calibrated": counts, "collect/random model": collected_examples,
    "collect/planted model": collected_examples,
    "diagnose/head": diagnosed_rows, "diagnose/one": diagnosed_rows,
    "diagnose/heads": diagnosed_rows, "diagnose/random model": diagnosed_model,
    "diagnose/planted model": diagnosed_model,
    "fit/head": written, "fit/head by the paper": written, "fit/head with a gate": written,
    "fit/head for log p": written, "fit/head of misranked rows": written,
    "fit/head, a polynomial": written, "fit/one": written, "fit/calibrated": written,
    "collect/sets": counts, "fit/sets": written, "fit/sets of misranked rows": written,
    "fit/heads": written,
    "fit/planted model": written, "fit/planted model for export": written,
    "evaluate/head": scored_head, "evaluate/one": scored_logits, "evaluate/heads": scored_logits,
    "evaluate/random model": scored_model, "evaluate/planted model": scored_model,
    "report/head": reported, "report/one": reported, "report/planted model": reported,
    "run/head": ran(scores_of_run), "run/one": ran(scored_logits), "run/heads": ran(scored_logits),
    "export/planted model": exported, "export/planted model, checked": exported,
    "export/packed model": exported,
    "fits/list": listed, "fits/show": shown, "fits/diff": differing, "fits/verify": verified,
}  # fmt: skip

# --- the test ------------------------------------------------------------------------------------


def is_error(name):
    return name.rsplit("/", 1)[1] in ERROR_TOLERANCES


def tolerance(name):
    if is_error(name):
        return ERROR_TOLERANCES[name.rsplit("/", 1)[1]]
    return next(TOLERANCES[words] for words in TOLERANCES if words in name)


def differences(found: Numbers, stored: Numbers) -> Iterator[str]:
    """A line for each number that is not what was written down."""
    for name, x in sorted(stored.items()):
        if any(re.fullmatch(pattern, name) for pattern in GONE.values()):
            continue
        relative, absolute = tolerance(name)
        if name not in found:
            yield f"{name} is gone"
        elif not math.isclose(found[name], x, rel_tol=relative, abs_tol=absolute):
            yield f"{name} is {found[name]:.8g}, was {x:.8g}"


@pytest.mark.parametrize(
    "numbers",
    [
        short_rows_numbers,
        pytest.param(rows_numbers, marks=pytest.mark.slow),
        pytest.param(model_numbers, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_written_down(numbers):
    found = numbers()
    stored = json.loads(NUMBERS.read_text()) | json.loads(ERRORS.read_text())
    stored = {name: x for name, x in stored.items() if "/".join(name.split("/")[:2]) in found}
    lines = list(differences(named(found), stored))
    assert not lines, f"{len(lines)} of {len(stored)} differ:\n" + "\n".join(lines[:40])


def test_every_case_is_compared():
    """A command that is not run any more takes its numbers from the comparison."""
    stored = json.loads(NUMBERS.read_text())
    cases = {"/".join(name.split("/")[:2]) for name in stored}
    ours = {*ROWS, *MODEL} | {case for case in cases if case.startswith("python/")}
    assert cases - ours == {"run/planted model"}
    assert set(LONG) < set(ROWS)


def write():
    """Makes all numbers anew, and writes them down."""
    os.environ.pop("CALIBRATE_FITS", None)
    found: Numbers = {}
    for numbers in (rows_numbers, python_numbers, model_numbers):
        with TemporaryDirectory() as folder, chdir(folder):
            found |= named(numbers())
    for path, errors in ((NUMBERS, False), (ERRORS, True)):
        kept = {name: float(f"{x:.10g}") for name, x in found.items() if is_error(name) == errors}
        path.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
