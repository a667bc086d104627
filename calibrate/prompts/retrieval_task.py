"""The built-in retrieval task: a list of facts, and a question that asks for one of them.

Each fact has a key of two words and a value. The other facts are distractors; two of them share one
word of the key that is asked for. The order of the facts is random. An example has as many facts as
fit into its length in tokens.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.examples import Cell, Example, ExampleSet


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


class PromptTemplate(NamedTuple):
    """The format of a prompt and its answer."""

    words: tuple[list[str], list[str]]  # for both halves of a key
    values: list[str] | None  # None: numbers of five digits
    fact: str  # with {a} and {b}, the halves of the key, and {value}
    separator: str  # between facts
    frame: str  # with {facts}, and the question for {a} and {b}
    answer: str = " {value}"


class Fact(NamedTuple):
    """A key of two words, and its value."""

    a: str
    b: str
    value: str


_THINGS = (ADJECTIVES, NOUNS)
_PEOPLE = (FIRST_NAMES, LAST_NAMES)
# In this order, the first templates are for calibration, the next for validation and the last four
# for test; see `calibrate/model/splits.py`. The last four were written before any fit was made.
PROMPT_TEMPLATES = {
    "numbers": PromptTemplate(
        _THINGS,
        None,
        "The special magic number for {a}-{b} is {value}.",
        "\n",
        "{facts}\nWhat is the special magic number for {a}-{b}?\n"
        "The special magic number for {a}-{b} is",
    ),
    "towns": PromptTemplate(
        _PEOPLE,
        TOWNS,
        "{a} {b} lives in the town of {value}.",
        "\n",
        "{facts}\nWhere does {a} {b} live?\n{a} {b} lives in the town of",
    ),
    "table": PromptTemplate(
        _THINGS,
        None,
        "| {a} {b} | {value} |",
        "\n",
        "| item | code |\n| --- | --- |\n{facts}\n\nThe code of the {a} {b} in the table is",
    ),
    "csv": PromptTemplate(
        _PEOPLE,
        TOWNS,
        "{a},{b},{value}",
        "\n",
        "first,last,town\n{facts}\n\nSearch for the row of {a} {b}:\n{a},{b},",
        "{value}",
    ),
    "yaml": PromptTemplate(
        _THINGS,
        FIRST_NAMES,
        "{a}_{b}:\n  owner: {value}",
        "\n",
        "{facts}\n\n# The owner of {a}_{b} is",
    ),
    "xml": PromptTemplate(
        _THINGS,
        LAST_NAMES,
        '<item name="{a} {b}"><keeper>{value}</keeper></item>',
        "\n",
        "<items>\n{facts}\n</items>\n<!-- The keeper of the {a} {b} is",
    ),
    "code": PromptTemplate(
        _THINGS,
        None,
        'codes["{a} {b}"] = {value}',
        "\n",
        'codes = {{}}\n{facts}\nassert codes["{a} {b}"] ==',
    ),
    "story": PromptTemplate(
        _PEOPLE,
        TOWNS,
        "Then {a} {b} packed a bag and took the night train to {value}.",
        " ",
        "{facts}\n\nBy the end of the story, {a} {b} had gone by train to",
    ),
    "chat": PromptTemplate(
        _THINGS,
        None,
        "<{a}_{b}> hello everyone, my ticket is {value}",
        "\n",
        "{facts}\n<host> {a}_{b}, please repeat your ticket\n<{a}_{b}> sure, my ticket is",
    ),
    "inventory": PromptTemplate(
        _THINGS,
        None,
        "{value} pieces in stock: {a} {b}",
        "\n",
        "{facts}\n\nPieces of {a} {b} in stock:",
    ),
    "log": PromptTemplate(
        _PEOPLE,
        None,
        "[INFO] session {value} was opened by {a}.{b}",
        "\n",
        "{facts}\n\nWhich session did {a}.{b} open?\nThe user opened session",
    ),
    "settings": PromptTemplate(
        _THINGS,
        None,
        "[{a}-{b}]\nport = {value}",
        "\n\n",
        "{facts}\n\n; the port in section {a}-{b} is",
    ),
    "sql": PromptTemplate(
        _PEOPLE,
        TOWNS,
        "INSERT INTO homes VALUES ('{a} {b}', '{value}');",
        "\n",
        "{facts}\nSELECT town FROM homes WHERE name = '{a} {b}';\n-- result:",
    ),
    "minutes": PromptTemplate(
        _PEOPLE,
        TOWNS,
        "* {a} {b} will report from {value} next month",
        "\n",
        "Minutes of the meeting\n{facts}\n\nNext month we will hear from {a} {b}, who will be in",
    ),
    "json": PromptTemplate(
        _THINGS,
        None,
        '  "{a}-{b}": "{value}"',
        ",\n",
        '{{\n{facts}\n}}\nThe value of "{a}-{b}" in this dictionary is',
        ' "{value}"',
    ),
    "list": PromptTemplate(
        _THINGS,
        FIRST_NAMES,
        "- the {a} {b}: belongs to {value}",
        "\n",
        "Lost and found:\n{facts}\n\nThe {a} {b} belongs to",
    ),
    "questions": PromptTemplate(
        _THINGS,
        LAST_NAMES,
        "Q: Who looks after the {a} {b}?\nA: {value}",
        "\n\n",
        "{facts}\n\nQ: Who looks after the {a} {b}?\nA:",
    ),
    "phones": PromptTemplate(
        _PEOPLE,
        None,
        "{b}, {a} ..... 555-{value}",
        "\n",
        "Telephone directory\n{facts}\n\nTo call {a} {b}, dial",
        " 555-{value}",
    ),
}


def make_retrieval_examples(
    encoder: Encoder,
    names: Sequence[str],
    lengths: Sequence[int],
    count: int,
    seed: int,
    templates: Mapping[str, PromptTemplate] = PROMPT_TEMPLATES,
) -> ExampleSet:
    """Makes examples of the task.

    Args:
      names: of the templates.
      lengths: tokens of prompt and answer together, at most.
      count: of each template and length.
      seed: of the facts.
    Raises:
      CalibrateError: a length is too short for one fact.
    """
    cells, examples = list[Cell](), list[Example]()
    for name in names:
        n_facts = 1
        for length in lengths:
            for number in range(count):
                text = f"examples|{seed}|{name}|{length}|{number}"
                own_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
                example, n_facts = longest_example(
                    encoder, name, own_seed, length, n_facts, templates
                )
                examples.append(example._replace(cell=len(cells)))
            cells.append(Cell(name, length, False))
    return ExampleSet(tuple(cells), tuple(examples))


def longest_example(
    encoder: Encoder,
    name: str,
    seed: int,
    length: int,
    guess: int,
    templates: Mapping[str, PromptTemplate] = PROMPT_TEMPLATES,
) -> tuple[Example, int]:
    """The example with the most facts that fit into a length in tokens, and their number.

    Args:
      guess: a number of facts that is tried first.
    """

    def encode(n_facts: int) -> tuple[list[int], list[int]]:
        return encoder.pair(*write_prompt(templates[name], seed, n_facts))

    def fits(n_facts: int) -> bool:
        return sum(map(len, encode(n_facts))) <= length

    n = largest_fitting(fits, guess, len(ADJECTIVES) * len(NOUNS))
    if not n:
        raise CalibrateError(
            f"template {name} with one fact alone is longer than {length:,} tokens; give longer "
            "lengths"
        )
    return encoder.join(f"template {name}", *encode(n)), n


def largest_fitting(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest number from 1 to `most` that fits; 0 if none does.

    The search is exponential from the guess, and then binary.
    """
    low, high, step = 0, most + 1, 1
    n = min(max(guess, 1), most)
    while high - low > 1:
        low, high = (n, high) if fits(n) else (low, n)
        ahead = low + step if high == most + 1 else high - step
        step *= 2
        n = ahead if low < ahead < high else (low + high) // 2
    return low


def write_prompt(template: PromptTemplate, seed: int, n_facts: int) -> tuple[str, str]:
    """Writes a prompt with so many facts, and its answer."""
    facts = draw_facts(template, np.random.default_rng(seed), n_facts)
    asked = facts[0]._asdict()
    lines = [template.fact.format(**fact._asdict()) for fact in facts]
    order = np.random.default_rng([seed, n_facts]).permutation(n_facts)
    text = template.separator.join(lines[i] for i in order)
    return template.frame.format(facts=text, **asked), template.answer.format(**asked)


def draw_facts(template: PromptTemplate, rng: np.random.Generator, n_facts: int) -> list[Fact]:
    """Draws facts with different keys.

    The first is asked for; the next two share a half of its key.
    """
    first, second = template.words
    rows, columns = (rng.choice(len(words), 2, replace=False) for words in (first, second))
    near = [(rows[0], columns[0]), (rows[0], columns[1]), (rows[1], columns[0])]
    n_keys = len(first) * len(second)
    drawn = rng.choice(n_keys, min(n_facts + 3, n_keys), replace=False)
    others = [divmod(int(i), len(second)) for i in drawn]
    keys = (near + [key for key in others if key not in near])[:n_facts]
    values = (
        list(map(str, 10_000 + rng.choice(90_000, n_facts, replace=False)))
        if template.values is None
        else [template.values[i] for i in rng.integers(0, len(template.values), n_facts)]
    )
    return [Fact(first[i], second[j], value) for (i, j), value in zip(keys, values, strict=True)]
