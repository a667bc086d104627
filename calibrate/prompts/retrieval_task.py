"""The built-in task: a list of facts, one of which is asked for.

The others are distractors: two of them share half of the key that is asked for. The asked fact
stands anywhere with the same probability. There are as many facts as fit into the length.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.datasets.examples import Cell, Example, ExampleSet
from calibrate.errors import CalibrateError
from calibrate.prompts.encoding import Encoder


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words("""
amber ancient autumn bitter bold brave bright broken calm clever cold copper cosmic crimson
curious damp dark distant dusty early eager faint fancy gentle golden green happy heavy hidden
hollow honest icy idle ivory jolly late lively lonely lucky misty modern muddy narrow noble old
pale patient plain proud purple quick quiet rapid rough royal shy silent silver smooth snowy solar
steep tender wild
""")
NOUNS = _words("""
anchor apple arrow badge basket beacon bell bottle bridge brush bucket button cabin candle canvas
carpet castle chain circle clock cloud coin compass crown curtain desk door drum engine feather
fence flag flute forest fountain garden glove hammer harbor helmet island jacket kettle key ladder
lamp lantern letter mirror mountain needle orchard paddle pencil piano pillow ribbon river saddle
shell table tower window wheel
""")
FIRST_NAMES = _words("""
Ada Agnes Albert Alice Amos Anna Arthur Beth Boris Carla Carlos Clara Daniel David Diana Edgar
Edith Elena Emil Emma Eric Esther Felix Flora Frank Fred George Gloria Grace Greta Hans Harriet
Helen Henry Hugo Ida Irene Isaac Ivan Jack James Jane Jonas Julia Karl Kate Laura Leo Linda Louis
Lucy Marco Maria Martin Maya Nina Nora Oscar Paul Peter Rosa Ruth Simon Vera
""")
LAST_NAMES = _words("""
Abbott Adams Bailey Baker Barnes Bell Bennett Bishop Black Booth Brooks Brown Carter Chapman Clark
Cole Collins Cook Cooper Cox Davis Dixon Ellis Evans Fisher Foster Fox Gibson Grant Gray Green
Hall Harris Hart Hill Holmes Hughes Hunt Jones Kelly King Knight Lane Lee Lewis Marsh Mason Moore
Morgan Murray Palmer Parker Porter Price Reed Ross Shaw Stone Turner Walker Ward Watson White
Young
""")
TOWNS = _words("""
Aberdeen Athens Austin Bergen Berlin Bern Boston Bristol Cairo Calgary Cambridge Cardiff Chester
Cologne Cork Dallas Delhi Denver Dover Dublin Durham Essen Exeter Florence Geneva Genoa Ghent
Glasgow Granada Hamburg Helsinki Kyoto Lagos Leeds Leipzig Lima Lincoln Lisbon London Lyon Madrid
Malaga Milan Munich Naples Nice Odessa Oslo Oxford Paris Perth Porto Prague Riga Rome Seville
Sofia Stockholm Sydney Tokyo Turin Venice Vienna York
""")

Facts = list[tuple[str, str, str]]  # the halves of the key, and the value


class Template(NamedTuple):
    """A prompt template: the forms of facts and of the question."""

    words: tuple[list[str], list[str]]
    values: list[str] | None  # None: numbers of five digits
    fact: str
    separator: str
    frame: str  # around the facts, and then the question
    answer: str = " {value}"


_THINGS = (ADJECTIVES, NOUNS)
_PEOPLE = (FIRST_NAMES, LAST_NAMES)
# In this order the first are for calibration, the next for validation, the last four for test; see
# `splits.py`. These four were written down before any fit was made.
TEMPLATES = {
    "numbers": Template(
        _THINGS,
        None,
        "The special magic number for {a}-{b} is {value}.",
        "\n",
        "{facts}\nWhat is the special magic number for {a}-{b}?\n"
        "The special magic number for {a}-{b} is",
    ),
    "towns": Template(
        _PEOPLE,
        TOWNS,
        "{a} {b} lives in the town of {value}.",
        "\n",
        "{facts}\nWhere does {a} {b} live?\n{a} {b} lives in the town of",
    ),
    "table": Template(
        _THINGS,
        None,
        "| {a} {b} | {value} |",
        "\n",
        "| item | code |\n| --- | --- |\n{facts}\n\nThe code of the {a} {b} in the table is",
    ),
    "csv": Template(
        _PEOPLE,
        TOWNS,
        "{a},{b},{value}",
        "\n",
        "first,last,town\n{facts}\n\nSearch for the row of {a} {b}:\n{a},{b},",
        "{value}",
    ),
    "yaml": Template(
        _THINGS,
        FIRST_NAMES,
        "{a}_{b}:\n  owner: {value}",
        "\n",
        "{facts}\n\n# The owner of {a}_{b} is",
    ),
    "xml": Template(
        _THINGS,
        LAST_NAMES,
        '<item name="{a} {b}"><keeper>{value}</keeper></item>',
        "\n",
        "<items>\n{facts}\n</items>\n<!-- The keeper of the {a} {b} is",
    ),
    "code": Template(
        _THINGS,
        None,
        'codes["{a} {b}"] = {value}',
        "\n",
        'codes = {{}}\n{facts}\nassert codes["{a} {b}"] ==',
    ),
    "story": Template(
        _PEOPLE,
        TOWNS,
        "Then {a} {b} packed a bag and took the night train to {value}.",
        " ",
        "{facts}\n\nBy the end of the story, {a} {b} had gone by train to",
    ),
    "chat": Template(
        _THINGS,
        None,
        "<{a}_{b}> hello everyone, my ticket is {value}",
        "\n",
        "{facts}\n<host> {a}_{b}, please repeat your ticket\n<{a}_{b}> sure, my ticket is",
    ),
    "inventory": Template(
        _THINGS,
        None,
        "{value} pieces in stock: {a} {b}",
        "\n",
        "{facts}\n\nPieces of {a} {b} in stock:",
    ),
    "log": Template(
        _PEOPLE,
        None,
        "[INFO] session {value} was opened by {a}.{b}",
        "\n",
        "{facts}\n\nWhich session did {a}.{b} open?\nThe user opened session",
    ),
    "settings": Template(
        _THINGS,
        None,
        "[{a}-{b}]\nport = {value}",
        "\n\n",
        "{facts}\n\n; the port in section {a}-{b} is",
    ),
    "sql": Template(
        _PEOPLE,
        TOWNS,
        "INSERT INTO homes VALUES ('{a} {b}', '{value}');",
        "\n",
        "{facts}\nSELECT town FROM homes WHERE name = '{a} {b}';\n-- result:",
    ),
    "minutes": Template(
        _PEOPLE,
        TOWNS,
        "* {a} {b} will report from {value} next month",
        "\n",
        "Minutes of the meeting\n{facts}\n\nNext month we will hear from {a} {b}, who will be in",
    ),
    "json": Template(
        _THINGS,
        None,
        '  "{a}-{b}": "{value}"',
        ",\n",
        '{{\n{facts}\n}}\nThe value of "{a}-{b}" in this dictionary is',
        ' "{value}"',
    ),
    "list": Template(
        _THINGS,
        FIRST_NAMES,
        "- the {a} {b}: belongs to {value}",
        "\n",
        "Lost and found:\n{facts}\n\nThe {a} {b} belongs to",
    ),
    "questions": Template(
        _THINGS,
        LAST_NAMES,
        "Q: Who looks after the {a} {b}?\nA: {value}",
        "\n\n",
        "{facts}\n\nQ: Who looks after the {a} {b}?\nA:",
    ),
    "phones": Template(
        _PEOPLE,
        None,
        "{b}, {a} ..... 555-{value}",
        "\n",
        "Telephone directory\n{facts}\n\nTo call {a} {b}, dial",
        " 555-{value}",
    ),
}


def retrieval(
    encoder: Encoder,
    names: Sequence[str],
    lengths: Sequence[int],
    count: int,
    seed: int,
    templates: Mapping[str, Template] = TEMPLATES,
) -> ExampleSet:
    """So many examples of each template and length in tokens, prompt and answer together."""
    cells, examples = list[Cell](), list[Example]()
    for name in names:
        n_facts = 1
        for length in lengths:
            for number in range(count):
                text = f"examples|{seed}|{name}|{length}|{number}"
                drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
                example, n_facts = longest(encoder, name, drawn, length, n_facts, templates)
                examples.append(example._replace(cell=len(cells)))
            cells.append(Cell(name, length, False))
    return ExampleSet(tuple(cells), tuple(examples))


def longest(
    encoder: Encoder,
    name: str,
    seed: int,
    length: int,
    guess: int,
    templates: Mapping[str, Template] = TEMPLATES,
) -> tuple[Example, int]:
    """The example of the most facts that fit into a length in tokens, and their number."""

    def pair(n_facts: int) -> tuple[list[int], list[int]]:
        return encoder.pair(*write(templates[name], seed, n_facts))

    def fits(n_facts: int) -> bool:
        return sum(map(len, pair(n_facts))) <= length

    n = most_that(fits, guess, len(ADJECTIVES) * len(NOUNS))
    if not n:
        raise CalibrateError(
            f"template {name} with one fact alone is longer than {length:,} tokens; give longer "
            "lengths"
        )
    return encoder.join(f"template {name}", *pair(n)), n


def most_that(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest number, up to `most`, that fits; 0 if none does. Near the guess it is quick."""
    low, step = 0, 1
    high = most + 1
    n = min(max(guess, 1), most)
    while high - low > 1:
        low, high = (n, high) if fits(n) else (low, n)
        ahead = low + step if high == most + 1 else high - step
        step *= 2
        n = ahead if low < ahead < high else (low + high) // 2
    return low


def write(template: Template, seed: int, n_facts: int) -> tuple[str, str]:
    """A prompt and its answer."""
    rng = np.random.default_rng(seed)
    facts = draw_facts(template, rng, n_facts)
    a, b, value = facts[0]
    lines = [template.fact.format(a=a, b=b, value=v) for a, b, v in facts]
    order = np.random.default_rng([seed, n_facts]).permutation(n_facts)
    text = template.separator.join(lines[i] for i in order)
    return template.frame.format(facts=text, a=a, b=b), template.answer.format(value=value)


def draw_facts(template: Template, rng: np.random.Generator, n_facts: int) -> Facts:
    """Facts with keys of their own: the one that is asked for, two that share half of its key."""
    first, second = template.words
    here, there = (rng.choice(len(words), 2, replace=False) for words in (first, second))
    near = [(here[0], there[0]), (here[0], there[1]), (here[1], there[0])]
    most = len(first) * len(second)
    drawn = rng.choice(most, min(n_facts + 3, most), replace=False)
    pairs = [divmod(int(i), len(second)) for i in drawn]
    keys = (near + [pair for pair in pairs if pair not in near])[:n_facts]
    values = (
        list(map(str, 10_000 + rng.choice(90_000, n_facts, replace=False)))
        if template.values is None
        else [template.values[i] for i in rng.integers(0, len(template.values), n_facts)]
    )
    return [(first[i], second[j], value) for (i, j), value in zip(keys, values, strict=True)]
