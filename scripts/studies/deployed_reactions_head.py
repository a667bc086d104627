"""RXNMapper's attention head, which points from atoms of the product to atoms of the reactants.

The PyPI package `rxnmapper` contains an ALBERT of 12 layers, which share one set of weights. Layer
10, head 5 (from 0) is the atom map. A row is what that head has for one product atom over all
reactant atoms: the softmax over these is RXNMapper's own normalisation, before its rules of
chemistry. The logarithm of attention weights is the logits up to a constant of each row.
"""

import hashlib
import zipfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from deployed_reactions_smiles import Reaction
from deployed_rows import log_weights
from safetensors.torch import save_file
from transformers import AlbertModel

MODEL = Path(__file__).parents[2] / "runs" / "deployed-heads" / "rxnmapper" / "model"
LAYER, HEAD = 10, 5  # from 0
N_POSITIONS = 512  # of the model
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
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes())
        self.fingerprint = "sha256:" + digest.hexdigest()

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


class Batch(NamedTuple):
    """One product atom of each of several reactions; places without an item have the number -1."""

    tokens: np.ndarray  # (count, 512) int32, of the vocabulary
    query: np.ndarray  # (count,) positions of the product atom
    items: np.ndarray  # (count, size) positions of the reactant atoms
    target: np.ndarray  # (count, size) bool
    logits: np.ndarray | None = None  # (count, size) float32


class ReactionHead:
    """The same head as `--head deployed_reactions_head:ReactionHead` of `calibrate collect`.

    Inputs of size n are reactions of n / 2 to n reactant atoms, of the calibration classes.
    """

    name = "rxnmapper"

    def __init__(self, folder: Path = MODEL):
        self._pointer = PointerHead(folder)
        self.fingerprint = self._pointer.fingerprint

    def sample(self, seed: int, size: int, count: int) -> Batch:
        rng = np.random.default_rng(seed)
        batch = Batch(
            tokens=np.full((count, N_POSITIONS), -1, np.int32),
            query=np.zeros(count, np.int32),
            items=np.full((count, size), -1, np.int32),
            target=np.zeros((count, size), bool),
        )
        for row in range(count):
            reaction = self._draw(rng, size)
            atom = int(rng.integers(len(reaction.query)))
            ids = self._pointer.ids(reaction.tokens)
            n = len(reaction.reactant_atoms)
            batch.tokens[row, : len(ids)] = ids
            batch.query[row] = reaction.query[atom]
            batch.items[row, :n] = reaction.reactant_atoms
            batch.target[row, :n] = reaction.source[atom]
        return batch

    def _draw(self, rng: np.random.Generator, size: int) -> Reaction:
        """A reaction of half of `size` to `size` reactant atoms, of a random class."""
        from deployed_reactions_data import CALIBRATION_CLASSES, make_reactions  # RDKit

        name = str(rng.choice(CALIBRATION_CLASSES))
        for reaction in make_reactions(name, seed=int(rng.integers(2**31))):
            if size / 2 < len(reaction.reactant_atoms) <= size and self._pointer.knows(reaction):
                return reaction
        raise AssertionError("make_reactions has no end")

    def attend(self, batch: Batch) -> Batch:
        """One forward pass a reaction; masked items have the logit -inf."""
        logits = np.full(batch.items.shape, -np.inf, np.float32)
        for row, (tokens, query, items) in enumerate(
            zip(batch.tokens, batch.query, batch.items, strict=True)
        ):
            weights = self._pointer.attention(tokens[tokens >= 0])[query, items[items >= 0]]
            logits[row, items >= 0] = log_weights(weights)
        return batch._replace(logits=logits)

    def correct(self, attended: Batch, weights: np.ndarray) -> np.ndarray:
        """True where the right atoms have more than half of the attention."""
        return (np.asarray(weights) * attended.target).sum(axis=1) > 0.5


def reactions_of(head: PointerHead, name: str, count: int) -> list[Reaction]:
    """So many reactions of a class that the vocabulary of the model can spell."""
    from deployed_reactions_data import make_reactions  # RDKit

    known = (reaction for reaction in make_reactions(name, seed=0) if head.knows(reaction))
    return list(islice(known, count))
