"""Reactions with their true atom maps, made by RDKit from building blocks and reaction templates.

A reaction is SMILES of reactants, reagents and solvents, ">>", and the product, as RXNMapper writes
them: each molecule canonical, the molecules in alphabetical order. The template says which atom of
the product comes from which atom of a reactant. Atoms that symmetry makes equal (the two carbons of
an isopropyl group, say) are all right answers.
"""

import re
from collections.abc import Iterator

import numpy as np
from deployed_reactions_smiles import Reaction, atom_positions, tokenize
from rdkit import Chem, RDLogger
from rdkit.Chem import rdChemReactions

RDLogger.DisableLog("rdApp.*")

MAX_TOKENS = 510  # with [CLS] and [SEP], the 512 positions of the model

# Class of reaction: (SMARTS of the template, handles of its building blocks).
TEMPLATES = {
    "amide coupling": (
        "[C:1](=[O:2])[OX2H1].[NX3;H2,H1;!$(N[C,S]=[O,S]);!$(Nc):3]>>[C:1](=[O:2])[N:3]",
        ("C(=O)O", "N"),
    ),
    "esterification": (
        "[C:1](=[O:2])[OX2H1].[OX2H1;$(O[CX4]):3]>>[C:1](=[O:2])[O:3]",
        ("C(=O)O", "CO"),
    ),
    "Suzuki coupling": ("[c:1]Br.[c:2]B(O)O>>[c:1][c:2]", ("Br", "B(O)O")),
    "Buchwald-Hartwig amination": (
        "[c:1]Br.[NX3;H2,H1;!$(N[C,S]=[O,S]):2]>>[c:1][N:2]",
        ("Br", "N"),
    ),
    "reductive amination": (
        "[CX3H1:1](=O).[NX3;H2,H1;!$(N[C,S]=[O,S]);!$(Nc):2]>>[C:1][N:2]",
        ("C=O", "N"),
    ),
    "Williamson ether synthesis": (
        "[CX4:1]Br.[OX2H1;$(Oc):2]>>[C:1][O:2]",
        ("CBr", "O"),
    ),
    "sulfonamide formation": (
        "[S:1](=[O:2])(=[O:3])Cl.[NX3;H2,H1;!$(N[C,S]=[O,S]):4]>>[S:1](=[O:2])(=[O:3])[N:4]",
        ("S(=O)(=O)Cl", "N"),
    ),
    "urea formation": (
        "[N:1]=[C:2]=[O:3].[NX3;H2,H1;!$(N[C,S]=[O,S]):4]>>[N:1][C:2](=[O:3])[N:4]",
        ("N=C=O", "N"),
    ),
    "aromatic substitution": (
        "[c:1]F.[NX3;H2,H1;!$(N[C,S]=[O,S]);!$(Nc):2]>>[c:1][N:2]",
        ("F", "N"),
    ),
    "N-alkylation": (
        "[CX4:1]Br.[NX3;H2,H1;!$(N[C,S]=[O,S]);!$(Nc):2]>>[C:1][N:2]",
        ("CBr", "N"),
    ),
    "Sonogashira coupling": ("[c:1]I.[CX2H1:2]#[C:3]>>[c:1][C:2]#[C:3]", ("I", "C#C")),
    "azide-alkyne cycloaddition": (
        "[N:1]=[N+:2]=[N-:3].[CX2H1:4]#[C:5]>>[N:1]1[N+0:2]=[N+0:3][C:5]=[C:4]1",
        ("CN=[N+]=[N-]", "C#C"),
    ),
    "Heck reaction": ("[c:1]Br.[CX3H2:2]=[CX3H1:3]>>[c:1]/[C:2]=[C:3]", ("Br", "C=C")),
    "Grignard addition": (
        "[C:1](=[O:2])([#6:3])[#6:4].[c:5][Mg]Br>>[C:1]([O:2])([#6:3])([#6:4])[c:5]",
        ("C(C)=O", "[Mg]Br"),
    ),
    "nitro reduction": ("[c:1][N+:2](=O)[O-]>>[c:1][N+0:2]", ("[N+](=O)[O-]",)),
    "ester hydrolysis": ("[C:1](=[O:2])OC>>[C:1](=[O:2])O", ("C(=O)OC",)),
    "Ullmann ether synthesis": ("[c:1]I.[OX2H1;$(Oc):2]>>[c:1][O:2]", ("I", "O")),
    "thioether formation": ("[CX4:1]Br.[SX2H1:2]>>[C:1][S:2]", ("CBr", "S")),
    "acylation with an acid chloride": (
        "[C:1](=[O:2])Cl.[NX3;H2,H1;!$(N[C,S]=[O,S]):3]>>[C:1](=[O:2])[N:3]",
        ("C(=O)Cl", "N"),
    ),
    "alcohol oxidation": ("[CX4H2:1][OX2H1:2]>>[CX3H1:1]=[O:2]", ("CO",)),
}
N_EARLIER = 16  # classes that an earlier version of the study had, and scored
CALIBRATION_CLASSES = tuple(TEMPLATES)[:N_EARLIER:2]
TEST_CLASSES = tuple(TEMPLATES)[1:N_EARLIER:2]
KEPT_CLASSES = tuple(TEMPLATES)[N_EARLIER:]
REAGENTS = (
    "CCN(CC)CC", "CCN(C(C)C)C(C)C", "ClCCl", "CN(C)C=O", "C1CCOC1", "O", "CO", "CCO", "CC#N",
    "Cc1ccccc1", "CS(C)=O", "CC(=O)O", "C1COCCO1", "CCOC(C)=O", "CN1CCCC1=O", "c1ccncc1",
    "[Na+]~[OH-]", "O=C([O-])[O-]~[K+]~[K+]", "[Cs+]~[Cs+]~O=C([O-])[O-]", "CC(C)(C)[O-]~[K+]",
    "c1ccc(P(c2ccccc2)c2ccccc2)cc1", "CCCC[N+](CCCC)(CCCC)CCCC~[Br-]", "O=S(=O)(O)O", "[Pd]",
    "CCN=C=NCCCN(C)C~Cl", "On1nnc2ccccc21", "CN(C)c1ccncc1", "[H][H]", "Cl",
)  # fmt: skip
# Fragments: the first atom takes a bond from outside, {} is a place for another fragment.
CORES = (
    "c1ccc{}cc1", "c1cc{}cc{}c1", "c1cc{}c{}cc1", "c1cc{}ccc1{}", "c1nc{}ccc1{}", "c1nc{}ncc1",
    "c1cc{}sc1{}", "c1ccc2cc{}ccc2c1", "c1cc2c(cc1{})n(C)cc2", "C1CCC{}CC1", "C1CCN{}CC1",
    "CCC{}C", "CC{}C", "CCCCC", "c1cc{}cc2ccc{}nc12", "C1CCCC1", "c1c{}noc1{}",
)  # fmt: skip
GROUPS = ("C", "OC", "F", "Cl", "C#N", "C(F)(F)F", "CC", "C(C)C", "C(C)(C)C", "SC", "N(C)C")
LINKERS = ("C{}", "CC{}", "OC{}", "C(=O)N(C){}", "S(=O)(=O){}", "C(=O){}", "O{}", "CCC{}")


def building_block(rng: np.random.Generator, handle: str, atoms: int) -> str:
    """SMILES of a random molecule with a handle, of about so many atoms; not yet checked."""
    fragments = [_attached(handle, 10)]
    _grow(rng, fragments, 10, atoms - handle.count("C") - 1)
    return ".".join(fragments)


def _grow(rng: np.random.Generator, fragments: list[str], bond: int, atoms: int) -> int:
    """Adds a core at a bond, and what hangs on it; returns the number of the last bond used."""
    core, last = str(rng.choice(CORES)), bond
    room = atoms - sum(letter.isalpha() for letter in core)
    hung = []
    for _ in range(core.count("{}")):
        share = room // core.count("{}")
        if share > 6:
            last += 1
            hung.append(last)
            linker = _attached(str(rng.choice(LINKERS)), last)
            inner = last + 1
            fragments.append(linker.replace("{}", f"%{inner}"))
            last = _grow(rng, fragments, inner, share - 3)
        elif share > 0 and rng.random() < 0.7:
            last += 1
            hung.append(last)
            fragments.append(_attached(str(rng.choice(GROUPS)), last))
        else:
            hung.append(0)
    for number in hung:
        core = core.replace("{}", f"%{number}" if number else "", 1)
    fragments.append(_attached(core, bond))
    return last


def _attached(fragment: str, bond: int) -> str:
    """A fragment whose first atom has an open bond: SMILES closes bonds across the dots too."""
    first = re.match(r"\[[^]]*\]|Cl|Br|.", fragment)
    assert first is not None
    return f"{first[0]}%{bond}{fragment[first.end() :]}"


def make_reaction(
    rng: np.random.Generator, template: str, atoms: int, spectators: int
) -> Reaction | None:
    """One reaction of a template; None where the draw is no good.

    That is: the template fits at several places, the tokenizer does not know a token, or the text
    is longer than the model takes.

    Args:
      atoms: heavy atoms of a building block, about.
      spectators: further building blocks that take no part.
    """
    smarts, handles = TEMPLATES[template]
    reactants = [_molecule(building_block(rng, handle, atoms)) for handle in handles]
    others = [_molecule(building_block(rng, "O", atoms)) for _ in range(spectators)]
    if any(molecule is None for molecule in [*reactants, *others]):
        return None
    products = _products(smarts, reactants)
    if len(products) != 1:
        return None
    n_reagents = int(rng.integers(0, 5))
    reagents = [str(x) for x in rng.choice(REAGENTS, n_reagents, replace=False)]
    reactant_smiles = [Chem.MolToSmiles(molecule) for molecule in reactants]
    text = [*reactant_smiles, *map(Chem.MolToSmiles, others), *reagents]
    if len(set(text)) != len(text):  # two copies of a molecule: more right answers than are listed
        return None
    return _assemble(reactants, text, products[0])


def _molecule(smiles: str) -> Chem.Mol | None:
    molecule = Chem.MolFromSmiles(smiles)
    return None if molecule is None else Chem.MolFromSmiles(Chem.MolToSmiles(molecule))


def _products(smarts: str, reactants: list[Chem.Mol]) -> list[Chem.Mol]:
    """The different products of a template, each once, with the origin of their atoms."""
    reaction = rdChemReactions.ReactionFromSmarts(smarts)
    products = {}
    for (product,) in reaction.RunReactants(tuple(reactants)):
        try:
            Chem.SanitizeMol(product)
        except Chem.MolSanitizeException:
            continue
        products.setdefault(Chem.MolToSmiles(product), product)
    return list(products.values())


def _assemble(reactants: list[Chem.Mol], left: list[str], product: Chem.Mol) -> Reaction | None:
    order = sorted(range(len(left)), key=lambda i: left[i])
    right = Chem.MolToSmiles(product)
    text = ".".join(left[i] for i in order) + ">>" + right
    tokens = tokenize(text)
    if tokens is None or len(tokens) > MAX_TOKENS:
        return None
    positions = atom_positions(tokens)
    split = tokens.index(">>")
    reactant_atoms = positions[positions < split]
    counts = [len(atom_positions(tokenize(left[i]) or [])) for i in range(len(left))]
    first = dict(zip(order, np.cumsum([0, *(counts[i] for i in order)])[:-1], strict=True))
    query, numbers, source = [], [], []
    in_product = positions[positions > split]
    for place, (token, atom) in enumerate(zip(in_product, output_order(product), strict=True)):
        origin = product.GetAtomWithIdx(atom)
        if not origin.HasProp("react_atom_idx"):
            continue
        number = origin.GetIntProp("react_idx") if origin.HasProp("react_idx") else 0
        molecule = reactants[number]
        rank = list(Chem.CanonicalRankAtoms(molecule, breakTies=False))
        same = rank[origin.GetIntProp("react_atom_idx")]
        row = np.zeros(len(reactant_atoms), bool)
        row[first[number] + np.flatnonzero(np.array(rank)[output_order(molecule)] == same)] = True
        query.append(token)
        numbers.append(place)
        source.append(row)
    rows = np.array(query), np.array(numbers), reactant_atoms, np.array(source)
    return Reaction(text, tokens, *rows)


def output_order(molecule: Chem.Mol) -> list[int]:
    """Numbers of the atoms in the order of the canonical SMILES, which is written anew."""
    Chem.MolToSmiles(molecule)
    return list(molecule.GetPropsAsDict(True, True)["_smilesAtomOutputOrder"])


def make_reactions(template: str, seed: int) -> Iterator[Reaction]:
    """Different reactions of a template without end, of all sizes that the model takes."""
    rng = np.random.default_rng([seed, *map(ord, template)])
    seen: set[str] = set()
    while True:
        atoms = round(float(np.exp(rng.uniform(np.log(6), np.log(45)))))
        spectators = int(rng.choice([0, 0, 0, 1, 2, 4]))
        reaction = make_reaction(rng, template, atoms, spectators)
        if reaction is not None and reaction.text not in seen:
            seen.add(reaction.text)
            yield reaction
