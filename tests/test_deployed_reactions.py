"""Reaction heads of the deployed heads: rows on a small ALBERT, and how maps are judged."""

import zipfile

import deployed_reactions
import deployed_reactions_head
import deployed_reactions_package
import numpy as np
import pytest
import torch
from deployed_reactions_smiles import Reaction, atom_positions, tokenize
from tiny_models import tiny_albert

from calibrate.storage.npz import write_arrays

VOCABULARY = ("[PAD]", "[CLS]", "[SEP]", "C", "O", "N", ".", ">>", "(", ")", "=")
TEXT = "CC(=O)O.CN>>CNC(C)=O"


@pytest.mark.parametrize(
    ("smiles", "tokens", "atoms"),
    [
        ("CC(Br)[nH]1", ["C", "C", "(", "Br", ")", "[nH]", "1"], [0, 1, 3, 5]),
        ("[Na+]~[OH-]>>Cl%10", ["[Na+]", "~", "[OH-]", ">>", "Cl", "%10"], [0, 2, 4]),
    ],
)
def test_tokens_of_smiles(smiles, tokens, atoms):
    assert tokenize(smiles) == tokens
    assert tokenize(smiles + "!") is None
    assert atom_positions(tokens).tolist() == atoms


def write_wheel(path, state, configuration, vocabulary=VOCABULARY):
    folder = deployed_reactions_head.WHEEL_FOLDER
    with zipfile.ZipFile(path, "w") as wheel:
        with wheel.open(folder + "pytorch_model.bin", "w") as file:
            torch.save(state, file)
        wheel.writestr(folder + "config.json", configuration)
        wheel.writestr(folder + "vocab.txt", "\n".join(vocabulary))


@pytest.fixture(scope="module")
def albert():
    """With larger weights all tokens are alike after a few of its layers, and so are the layers."""
    return tiny_albert(
        vocab_size=len(VOCABULARY),
        num_attention_heads=8,
        num_hidden_layers=12,
        initializer_range=0.1,
    )


@pytest.fixture
def head(here, albert):
    """The head of a converted wheel, whose model is the small one."""
    state = {f"albert.{name}": tensor for name, tensor in albert.state_dict().items()}
    state["cls.predictions.bias"] = torch.zeros(3)  # of the pretraining; not of the head
    write_wheel(here / "model.whl", state, albert.config.to_json_string())
    deployed_reactions_head.convert(here / "model.whl", here / "model")
    return deployed_reactions_head.PointerHead(here / "model")


@pytest.fixture
def reaction():
    """An amide from an acid and an amine, as the study makes it with RDKit."""
    tokens = tokenize(TEXT)
    split = tokens.index(">>")
    positions = atom_positions(tokens)
    atoms, query = positions[positions < split], positions[positions > split]
    source = np.arange(len(atoms)) == np.array([[4], [5], [1], [0], [2]])
    return Reaction(TEXT, tokens, query, np.arange(len(query)), atoms, source)


def test_logits_are_those_of_the_models_attention_to_reactant_atoms(head, reaction, albert):
    ids = [[VOCABULARY.index(token) for token in ("[CLS]", *reaction.tokens, "[SEP]")]]
    with torch.no_grad():
        own = albert(torch.tensor(ids), output_attentions=True).attentions[10][0, 5, 1:-1, 1:-1]
    own = own.numpy()[np.ix_(reaction.query, reaction.reactant_atoms)]
    probs = np.exp(head.logits(reaction))
    np.testing.assert_allclose(
        probs / probs.sum(1, keepdims=True), own / own.sum(1, keepdims=True), rtol=1e-4
    )


def test_a_weight_of_zero_is_no_mask():
    logits = deployed_reactions_head.log_weights(np.array([0.0, 1.0]))
    assert logits[0] > -100
    assert logits[1] == 0


REACTIONS = [{"product_atoms": [0, 1], "source": [[3, 4], [5]]}] * 2


def answer_of(*atoms, confidence):
    return deployed_reactions_package.Answer(list(atoms), confidence)


def test_an_atom_is_right_if_any_of_its_true_sources_is_chosen():
    answers = [answer_of(4, 5, confidence=0.63), answer_of(4, 3, confidence=0.09)]
    found = deployed_reactions_package.judge(REACTIONS, answers)
    assert (found["atoms"], found["reactions"]) == (0.75, 0.5)
    assert found["confidence"] == pytest.approx(0.36)
    assert found["separation"] == 1


def test_sharpened_weights_are_the_softmax_of_beta_times_their_logarithm():
    weights = np.array([[0.1, 0.2, 0.0], [0.0, 0.0, 0.0]])
    found = deployed_reactions_package.sharpen(weights, 2.0)
    np.testing.assert_allclose(found, [[0.2, 0.8, 0], [0, 0, 0]])


def test_the_confidence_of_a_map_is_the_mean_of_its_calibrated_weights(here):
    matrices = [np.ones((1, 1)), np.array([[0.1, 0.2], [0.3, 0.1]])]
    write_arrays(here / "attention.npz", {str(i): x for i, x in enumerate(matrices)})
    answers = [answer_of(1, -1, confidence=0.2), answer_of(1, 0, confidence=0.2)]
    first, second = deployed_reactions_package.confidences_read(here, answers, [1, 1], 2.0)
    assert first.atoms == [1, -1]
    assert first.confidence == pytest.approx(0.8)
    assert second.confidence == pytest.approx((0.8 + 0.9) / 2)


def test_rows_of_one_item_are_left_out_and_masked_items_too():
    logits = np.array([[1.0, -np.inf, 2.0], [-np.inf, 3.0, -np.inf]])
    right = np.array([[False, False, True], [False, True, False]])
    reaction = deployed_reactions.ReactionRows(logits, right, {})
    (row,) = deployed_reactions.rows_of(reaction, group=7, cluster=2)
    assert (row.logits.tolist(), row.right.tolist()) == ([1, 2], [False, True])
    assert row[2:] == (2, 7, 2)


def test_symmetric_atoms_of_a_mapped_reaction_are_all_right():
    pytest.importorskip("rdkit")
    record = deployed_reactions.read_mapped(
        "[CH3:1][CH:2]([CH3:3])[OH:4].Cl>>[CH3:1][CH:2]([CH3:3])Cl"
    )
    left, right = record["text"].split(">>")
    assert (left, right) == ("CC(C)O.Cl", "CC(C)Cl")
    assert dict(zip(record["product_atoms"], record["source"], strict=True)) == {
        0: [0, 2], 1: [1], 2: [0, 2]
    }  # fmt: skip


def test_solvents_and_reagents_are_left_out_of_a_reaction():
    pytest.importorskip("rdkit")
    text = "CN.ClCCl.O=C(O)C>>CNC(C)=O"
    tokens = tokenize(text)
    positions = atom_positions(tokens)
    atoms, query = positions[positions < tokens.index(">>")], positions[-5:]
    source = np.zeros((5, len(atoms)), bool)
    source[range(5), [0, 1, 6, 8, 5]] = True
    reaction = Reaction(text, tokens, query, np.arange(5), atoms, source)
    found = deployed_reactions.without_agents(reaction)
    assert found.text == "CN.O=C(O)C>>CNC(C)=O"
    assert found.source.argmax(axis=1).tolist() == [0, 1, 3, 5, 2]
    source[0] = np.arange(len(atoms)) == 2  # an atom of the solvent
    assert deployed_reactions.without_agents(reaction) is None


CLASSES = 20


@pytest.mark.parametrize("number", range(CLASSES))
def test_every_class_has_reactions_whose_maps_keep_elements(number):
    pytest.importorskip("rdkit")
    import deployed_reactions_data as data

    assert len(data.TEMPLATES) == CLASSES
    name = list(data.TEMPLATES)[number]
    drawn = data.make_reactions(name, seed=1)
    for reaction in (next(drawn) for _ in range(3)):
        tokens = np.array([token.strip("[]H+-234").upper() for token in reaction.tokens])
        of_reactants, of_product = tokens[reaction.reactant_atoms], tokens[reaction.query]
        assert len(reaction.query) > 0
        for element, source in zip(of_product, reaction.source, strict=True):
            assert source.any()
            assert set(of_reactants[source]) == {element}
