"""Prompt templates that the package does not have, to test a model's fit on.

They were written down before any fit or any choice among rules was made with them, and differ from
the package's in kind: prose with dishes, shell variables, a board with times in front, bare arrows.
"""

from collections.abc import Sequence

from calibrate.prompts.encoding import Encoder
from calibrate.prompts.examples import ExampleSet
from calibrate.prompts.retrieval_task import (
    ADJECTIVES,
    FIRST_NAMES,
    LAST_NAMES,
    NOUNS,
    TOWNS,
    PromptTemplate,
    make_retrieval_examples,
)


def _lines(names: str) -> list[str]:
    return names.replace("\n", "").split(",")


DISHES = _lines("""
bean stew,beef pie,cheese toast,cherry cake,chicken soup,crab salad,fish curry,fried rice,
garlic bread,goat cheese,grilled corn,lamb chops,lemon tart,mushroom omelette,noodle soup,
onion rings,peach ice cream,pepper steak,potato salad,pumpkin risotto,roast duck,spinach lasagne,
tomato soup,vegetable tacos
""")
ANIMALS = _lines("""
badger,beaver,buffalo,camel,cheetah,crane,crow,deer,dolphin,donkey,eagle,falcon,ferret,fox,frog,
giraffe,goose,hamster,hawk,hedgehog,heron,horse,jackal,koala,leopard,lion,lizard,lobster,monkey,
moose,mouse,otter,owl,panda,parrot,penguin,pigeon,rabbit,raven,salmon,seal,shark,sparrow,spider,
squirrel,swan,tiger,turtle,walrus,wolf,zebra
""")
DIRECTIONS = _lines("Central,East,Harbour,Lower,New,North,Old,South,Upper,West")
TIMES = [f"{hour:02}:{minute:02}" for hour in range(5, 24) for minute in range(3, 60, 7)]

HELD_OUT_TEMPLATES = {
    "dinner": PromptTemplate(
        (FIRST_NAMES, LAST_NAMES),
        DISHES,
        "When the waiter came, {a} {b} asked for the {value}.",
        " ",
        "{facts}\n\nHalf an hour later the food arrived. The waiter handed {a} {b} the",
    ),
    "shell": PromptTemplate(
        (ADJECTIVES, NOUNS),
        None,
        "$ export {a}_{b}={value}",
        "\n",
        "{facts}\n$ echo ${a}_{b}\n",
        "{value}",
    ),
    "departures": PromptTemplate(
        (DIRECTIONS, TOWNS),
        TIMES,
        "{value}  {b} {a}",
        "\n",
        "DEPARTURES\n{facts}\n\nAttention please. The train to {b} {a} leaves at",
    ),
    "arrows": PromptTemplate(
        (ADJECTIVES, NOUNS),
        ANIMALS,
        "{a} {b} -> {value}",
        "\n",
        "{facts}\n\n{a} {b} ->",
    ),
}


def held_out_examples(encoder: Encoder, length: int, count: int, seed: int) -> ExampleSet:
    """So many examples of each held-out template, of a length in tokens."""
    names: Sequence[str] = list(HELD_OUT_TEMPLATES)
    return make_retrieval_examples(encoder, names, [length], count, seed, HELD_OUT_TEMPLATES)
