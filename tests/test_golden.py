"""Golden records: numbers of the commands, compared with those that were written down before.

Each command runs once, in this process, on small inputs. Every number in its JSON is compared, in
which a fit is told by the pairs that its file has to check it. Whoever changes an estimator on
purpose writes the records anew, and says in the commit which numbers moved and why:

    python tests/test_golden.py --write
"""

import json
import math
import os
import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import conftest  # compiles as the tests do, with as few resamples  # noqa: F401
import numpy as np
import pytest
from reference import entropy, softmax
from typer.testing import CliRunner

import calibrate
from calibrate.cli.main import app

RECORD = Path(__file__).with_name("golden") / "numbers.json"

# (relative, absolute), the first whose words are in the name of a number.
TOLERANCES = {
    # BLAS, XLA and PyTorch round otherwise on other processors; solvers and folds carry that on.
    "/check/": (3e-3, 1e-3),
    "/domain/": (1e-3, 1e-3),
    "same_top": (1e-2, 1e-3),  # a near tie of some hundred tokens falls either way
    "error": (6e-3, 1e-5),
    "/low": (2e-2, 1e-3),
    "/high": (2e-2, 1e-3),
    " model/": (1e-4, 1e-5),  # float32 through a model and a descent of some dozen steps
    "/p": (2e-3, 1e-5),
    "": (1e-5, 2e-5),  # nats; gains of polynomials of few rows move as much
}
# Ill-conditioned, or said elsewhere in the record.
LEFT_OUT = {"coefficients", "condition", "standard_errors", "band", "bytes"}

SIZES = (16, 64, 256)
# The beta that each head's targets are drawn at, by set size.
ONE = {(0, 0): lambda n: 0.8 * np.log(n) - 1}
HEADS = {
    (0, 0): lambda n: 1.0,
    (0, 1): lambda n: 2.5,
    (2, 0): lambda n: 0.5 * np.log(n),
    (2, 1): lambda n: 0.3,
}


def drawn(rng, beta, n, count, spread=2):
    """(rows, n) logits, and (rows,) targets drawn from softmax at beta, or beta(entropy, log n)."""
    z = rng.uniform(0.3, spread, (count, 1)) * rng.standard_normal((count, n))
    z = z.astype(np.float32)
    if callable(beta):
        beta = beta(entropy(z)[:, None], np.log(n))
    p = softmax(z, beta=beta)
    return z, (p.cumsum(axis=1) > rng.random((count, 1))).argmax(axis=1)


def drawn_at_sizes(rng, beta, count):
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
    from tiny_causal import causal_model, planted_examples, planted_model, save
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
    lines = [
        {"prompt_ids": e.tokens[: e.start].tolist(), "answer_ids": e.tokens[e.start :].tolist(),
         "template": f"n{e.cell}"}
        for e in planted_examples(count=24).examples
    ]  # fmt: skip
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    k = np.random.default_rng(6).integers(0, 8, (600, 3))
    wrong = np.stack([10 + k[:, 0], 20 + k[:, 1], 10 + k[:, 2], np.full(600, 30),
                      10 + (k[:, 1] + 3) % 8], axis=1)  # fmt: skip
    wrong[np.arange(600) % 4 > 0, 3] = 10  # most have no query
    Path("wrong.txt").write_text(" ".join(f"w{i}" for i in wrong.ravel()))
    write_gguf(Path("packed"), small_model())


ROWS = {
    "collect/head": "collect --head max-retrieval --sizes 256,512 --sets 400 --out runs/head",
    "diagnose/head": "diagnose runs/head",
    "fit/head": "fit runs/head --name head",
    "fit/head by the paper": "fit runs/head --name head-paper --paper",
    "fit/head with a gate": "fit runs/head --name head-gate --min-entropy 0.5",
    "fit/head for log p": "fit runs/head --name head-log-p --q 0",
    "fit/head of misranked rows": "fit runs/head --name head-misranked --rows misranked",
    "fit/head, a polynomial": "fit runs/head --name head-poly --kind polynomial",
    "evaluate/head": "evaluate --head max-retrieval-3 --sizes 32,64 --sets 300"
    " --fits head,head-paper",
    "run/head": "run --sizes 256,512 --sets 300 --name head-run",
    "collect/one": "collect --logits one --out runs/one",
    "diagnose/one": "diagnose runs/one",
    "fit/one": "fit runs/one --name one",
    "evaluate/one": "evaluate --logits one-fresh --fits one",
    "run/one": "run --logits one --name one-run",
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
}
SHORT = (
    "collect/head", "fit/head", "fit/head by the paper", "evaluate/head", "collect/heads",
    "diagnose/heads", "fit/heads", "evaluate/heads", "collect/sets", "fit/sets",
)  # fmt: skip
MODEL = {
    "collect/random model": "model collect --model random --task retrieval:numbers,list"
    " --retention-text book.txt --lengths 64,96 --examples 4 --out runs/random",
    "evaluate/random model": "model evaluate runs/random --fits paper",
    "collect/planted model": "model collect --model planted --prompts prompts.jsonl"
    " --retention-text wrong.txt --lengths 25,50 --examples 32 --out runs/planted",
    "fit/planted model": "model fit runs/planted --name planted --steps 25 --kind constant"
    " --max-kl 0.05",
    "fit/planted model for export": "model fit runs/planted --name planted-export --steps 8"
    " --for-export --trained-up-to 8 --sharing global",
    "evaluate/planted model": "model evaluate runs/planted --fits planted",
    "export/planted model": "export planted --model planted --out exported",
    "export/planted model, checked": "export --check exported",
    "export/packed model": "export planted --any-model --model packed/tiny.gguf --out out.gguf",
}


def of_arrays():
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
    found = []
    for name, fit in fits.items():
        table = [row._asdict() for row in fit.table]
        file = json.loads(fit.save(Path(f"{name[:3]}.json")).read_text())
        found += numbers_in([file, table, int(fit.held_out.sum())], f"python/{name}")
    return dict(found)


def numbers_in(record, name):
    if isinstance(record, dict):
        left_out = LEFT_OUT | ({"sizes"} if "strata" in record else set())
        record = {key: x for key, x in record.items() if key not in left_out}
    if isinstance(record, dict | list):
        parts = record.items() if isinstance(record, dict) else enumerate(record)
        return [found for key, x in parts for found in numbers_in(x, f"{name}/{key}")]
    return [(name, float(record))] if isinstance(record, int | float) else []


def run(cases):
    return dict(found for case, line in cases.items() for found in numbers_in(result(line), case))


def result(command):
    done = CliRunner().invoke(app, [*command.split(), "--json"])
    assert done.exit_code in (0, 3), f"{command}: {done.output}{done.exception!r}"
    if done.exit_code:
        return {"exit": done.exit_code}
    found = json.loads(done.stdout)
    if command == "fits list":  # those of this run alone: the package gets more with time
        return [store for store in found if store["origin"] != "package"]
    return found


def of_rows(cases=tuple(ROWS)):
    write_rows()
    return run({case: ROWS[case] for case in cases})


def of_rows_in_short():
    return of_rows(SHORT)


def of_models():
    for extra in ("torch", "transformers", "gguf"):
        pytest.importorskip(extra)
    write_models()
    return run(MODEL)


def differences(found, stored):
    for name in sorted(found.keys() | stored.keys()):
        x, was = found.get(name), stored.get(name)
        relative, absolute = next(TOLERANCES[words] for words in TOLERANCES if words in name)
        if None in (x, was) or not math.isclose(x, was, rel_tol=relative, abs_tol=absolute):
            yield f"{name} is {x}, was {was}"


@pytest.mark.parametrize(
    "numbers",
    [
        of_rows_in_short,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (of_rows, of_arrays, of_models)),
    ],
)
def test_the_numbers_are_those_written_down(numbers):
    found = numbers()
    cases = {case_of(name) for name in found}
    stored = {k: x for k, x in json.loads(RECORD.read_text()).items() if case_of(k) in cases}
    lines = list(differences(found, stored))
    assert not lines, f"{len(lines)} of {len(stored)} differ:\n" + "\n".join(lines[:40])


def case_of(name):
    return "/".join(name.split("/")[:2])


def test_every_case_is_written_down():
    cases = set(map(case_of, json.loads(RECORD.read_text())))
    assert {case for case in cases if not case.startswith("python/")} == {*ROWS, *MODEL}


def write():
    os.environ.pop("CALIBRATE_FITS", None)
    found = {}
    for numbers in (of_rows, of_arrays, of_models):
        with TemporaryDirectory() as folder, chdir(folder):
            found |= numbers()
    kept = {name: float(f"{x:.8g}") for name, x in found.items()}
    RECORD.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
