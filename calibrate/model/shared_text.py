"""Prompts that share text with others outside of their group.

Splits keep groups together, and standard errors are by group. If prompts of no common group have a
document in common, say, held-out prompts are not new, and errors are too small.

A sequence of N_TOKENS tokens of a prompt is shared if a prompt of another group has it, too. The
frame of a template, sequences that half of its groups have, does not count. A prompt shares its
text if at least half of its other sequences are shared.
"""

import warnings

import numpy as np

from calibrate.datasets.examples import ExampleSet
from calibrate.evidence.estimate import index_groups

N_TOKENS = 13  # as checks for contaminated benchmarks take
MIN_SHARE = 1 / 2  # of the sequences of a prompt
_FRAME = 1 / 2  # of the groups of a template
_MIN_WARNED = 1 / 20  # of the prompts
MAX_SEQUENCES = 2_000_000  # of all prompts: of more, a fair sample by their hashes
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, of a polynomial hash modulo 2^64


def warn_of_shared_text(examples: ExampleSet) -> None:
    """Warns if some prompts share their text with prompts of no common group."""
    shares = sharing_prompts(examples)
    n_prompts = sum(not examples.cells[x.cell].text for x in examples.examples)
    if shares.sum() > _MIN_WARNED * n_prompts:
        warnings.warn(
            f"{shares.sum():,} of {n_prompts:,} prompts share at least half of their text "
            f"(sequences of {N_TOKENS} tokens) with prompts of no common group: they would be in "
            "several splits, and standard errors too small; give related prompts the same `group`",
            stacklevel=3,
        )


def sharing_prompts(examples: ExampleSet, max_sequences: int = MAX_SEQUENCES) -> np.ndarray:
    """(examples,) bool: the prompts that share their text; False of text windows."""
    owner, hashes = _sequences(examples, max_sequences)
    unit, template = _units_and_templates(examples)
    kept = ~_is_frame(hashes, unit[owner], template[owner])
    owner, hashes = owner[kept], hashes[kept]
    is_shared = _n_distinct(hashes, unit[owner]) > 1
    n_all = np.bincount(owner, minlength=len(examples.examples))
    n_shared = np.bincount(owner, is_shared, minlength=len(examples.examples))
    shares: np.ndarray = (n_all > 0) & (n_shared >= MIN_SHARE * n_all)
    return shares


def _sequences(examples: ExampleSet, max_sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """The example of each sequence of tokens of a prompt, and its hash; a prompt has it once."""
    prompts = {
        i: x.tokens[: x.start].astype(np.uint64)
        for i, x in enumerate(examples.examples)
        if not examples.cells[x.cell].text and x.start >= N_TOKENS
    }
    step = 1 + sum(map(len, prompts.values())) // max_sequences
    owners, hashes = [np.empty(0, int)], [np.empty(0, np.uint64)]
    for i, tokens in prompts.items():
        of_prompt = np.unique(_hashes(tokens))
        of_prompt = of_prompt[(of_prompt >> np.uint64(32)) % np.uint64(step) == 0]
        owners.append(np.full(len(of_prompt), i))
        hashes.append(of_prompt)
    return np.concatenate(owners), np.concatenate(hashes)


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """(length - N_TOKENS + 1,) of each sequence; products wrap around at 2^64."""
    value = np.zeros(len(tokens) - N_TOKENS + 1, np.uint64)
    for i in range(N_TOKENS):
        value = (value + tokens[i : i + len(value)] + np.uint64(1)) * _FACTOR
    return value


def _units_and_templates(examples: ExampleSet) -> tuple[np.ndarray, np.ndarray]:
    """(examples,) the number of each one's group, its own if it is alone, and of its template."""
    names = {name: i for i, name in enumerate(sorted({x.template for x in examples.cells}))}
    group = np.array([x.group for x in examples.examples], int)
    templates = [names[examples.cells[x.cell].template] for x in examples.examples]
    return index_groups(group), np.array(templates, int)


def _is_frame(hashes: np.ndarray, unit: np.ndarray, template: np.ndarray) -> np.ndarray:
    """True of sequences that half of the groups of some template have, of three or more."""
    frames = [np.empty(0, np.uint64)]
    for i in np.unique(template):
        of_template = template == i
        n_units = len(np.unique(unit[of_template]))
        n_with = _n_distinct(hashes[of_template], unit[of_template])
        if n_units >= 3:
            frames.append(hashes[of_template][n_with >= _FRAME * n_units])
    return np.isin(hashes, np.concatenate(frames))


def _n_distinct(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each key, how many distinct values it occurs with."""
    order = np.lexsort((values, keys))
    key, value = keys[order], values[order]
    is_new = np.ones(len(keys), bool)
    is_new[1:] = (key[1:] != key[:-1]) | (value[1:] != value[:-1])
    _, place = np.unique(keys, return_inverse=True)
    counts = np.bincount(place[order], is_new)
    distinct: np.ndarray = counts[place] if len(keys) else np.empty(0)
    return distinct
