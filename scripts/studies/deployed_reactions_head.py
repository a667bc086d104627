"""RXNMapper's attention head, which points from atoms of the product to atoms of the reactants.

The PyPI package `rxnmapper` contains an ALBERT of 12 layers, which share one set of weights. Layer
10, head 5 (from 0) is the atom map. A row is what that head has for one product atom over all
reactant atoms: the softmax over these is RXNMapper's own normalisation, before its rules of
chemistry. The logarithm of attention weights is the logits up to a constant of each row.
"""

import zipfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from deployed_reactions_smiles import Reaction
from deployed_rows import log_weights
from safetensors.torch import save_file
from transformers import AlbertModel

LAYER, HEAD = 10, 5  # from 0
WHEEL_FOLDER = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"


def convert(wheel: Path, folder: Path) -> None:
    """Writes the model of the wheel as safetensors, with its configuration and vocabulary.

    The wheel holds a pickle: it is read with `weights_only=True`, which runs no code in it.
    """
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as package:
        with package.open(WHEEL_FOLDER + "pytorch_model.bin") as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
        for name in ("config.json", "vocab.txt"):
            (folder / name).write_bytes(package.read(WHEEL_FOLDER + name))
    own = {
        name.removeprefix("albert."): tensor.clone().contiguous()
        for name, tensor in state.items()
        if name.startswith("albert.")
    }
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})


class PointerHead:
    """Its attention weights and rows, loaded from a folder that `convert` wrote."""

    def __init__(self, folder: Path):
        self.model = AlbertModel.from_pretrained(folder, attn_implementation="eager").eval()
        tokens = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
        self._id = {token: number for number, token in enumerate(tokens)}

    def knows(self, reaction: Reaction) -> bool:
        """True if the vocabulary has every token."""
        return all(token in self._id for token in reaction.tokens)

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """Numbers of the vocabulary, with [CLS] before and [SEP] after the tokens."""
        return [self._id[token] for token in ("[CLS]", *tokens, "[SEP]")]

    @torch.no_grad()
    def attention(self, ids: Sequence[int] | np.ndarray, special: bool = False) -> np.ndarray:
        """(tokens, tokens) attention weights of the head; [CLS] and [SEP] only if `special`."""
        batch = torch.tensor(np.array([ids], np.int64))
        weights = self.model(batch, output_attentions=True).attentions[LAYER][0, HEAD]
        return (weights if special else weights[1:-1, 1:-1]).double().numpy()

    def logits(self, reaction: Reaction) -> np.ndarray:
        """(product atoms, reactant atoms) logits, up to a constant of each row; nats."""
        weights = self.attention(self.ids(reaction.tokens))
        return log_weights(weights[np.ix_(reaction.query, reaction.reactant_atoms)])


def reactions_of(head: PointerHead, name: str, count: int) -> list[Reaction]:
    """So many reactions of a class that the vocabulary of the model can spell."""
    from deployed_reactions_data import make_reactions  # RDKit

    known = (reaction for reaction in make_reactions(name, seed=0) if head.knows(reaction))
    return list(islice(known, count))
