"""A classifier of tables that learns in its context, as a Transformers model, and its training.

A table is labelled rows and query rows, all of them items; the model gives log p of the classes of
the queries in one forward pass. Every row attends to the labelled rows, none to a query: queries
do not see each other, and the order of the labelled rows changes nothing. So the labelled rows are
the keys, n of them, and attention needs no mask.
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from tabular_tasks import CLASSES, FEATURES, Tables, draw
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from calibrate.storage.atomic_io import write_atomically

TRAINED_ROWS = (8, 64)  # labelled rows of a table in training, least and most
QUERIES, TABLES = 32, 48  # of a table and of a step in training
WARM_UP = 200  # steps
STEPS_PER_CHECKPOINT = 500


class TableConfig(PreTrainedConfig):
    """Sizes of the model."""

    model_type = "calibrate-tables"

    def __init__(
        self, n_features: int = FEATURES, n_classes: int = CLASSES, hidden_size: int = 64,
        num_hidden_layers: int = 3, num_attention_heads: int = 4, **others,
    ):  # fmt: skip
        self.n_features, self.n_classes, self.hidden_size = n_features, n_classes, hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        super().__init__(**others)


class TableAttention(nn.Module):
    """Rows attend to the labelled rows."""

    is_causal = False

    def __init__(self, config: TableConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, width = config, layer_idx, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.scaling = (width // config.num_attention_heads) ** -0.5

    def forward(self, rows: Tensor, labelled: Tensor) -> Tensor:
        """(tables, rows, width) of rows, and of the labelled ones."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, sdpa_attention_forward
        )
        query, key, value = (
            x.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)
            for x in (self.q_proj(rows), self.k_proj(labelled), self.v_proj(labelled))
        )
        out, _ = attend(self, query, key, value, None, scaling=self.scaling, dropout=0.0)
        return self.o_proj(out.flatten(2))


class TableLayer(nn.Module):
    def __init__(self, config: TableConfig, layer_idx: int):
        super().__init__()
        width = config.hidden_size
        self.attention = TableAttention(config, layer_idx)
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, rows: Tensor, n_labelled: int, first: int) -> Tensor:
        """The rows from `first` on."""
        normed = self.before_attention(rows)
        attended = self.attention(normed[:, first:], normed[:, :n_labelled])
        rows = rows[:, first:] + attended
        return rows + self.mlp(self.before_mlp(rows))


class TableModel(PreTrainedModel):
    """Classes of the query rows of tables."""

    config_class = TableConfig
    _supports_sdpa = True

    def __init__(self, config: TableConfig):
        super().__init__(config)
        width = config.hidden_size
        self.of_features = nn.Sequential(
            nn.Linear(config.n_features, width), nn.GELU(), nn.Linear(width, width)
        )
        self.of_label = nn.Embedding(config.n_classes, width)
        self.layers = nn.ModuleList(TableLayer(config, i) for i in range(config.num_hidden_layers))
        self.last_norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, config.n_classes)
        self.post_init()

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Log p of the classes, (tables, queries, classes), of the rows behind the labelled ones.

        Args:
          features: (tables, rows, n_features), the labelled rows first; standardised here.
          labels: (tables, labelled rows) int.
        """
        n = labels.shape[1]
        spread, mean = torch.std_mean(features[:, :n], dim=1, keepdim=True)
        rows = self.of_features((features - mean) / (spread + 1e-6))
        rows = torch.cat([rows[:, :n] + self.of_label(labels), rows[:, n:]], dim=1)
        for layer in self.layers:
            is_last = layer is self.layers[-1]
            rows = layer(rows, n, n if is_last else 0)
        return self.classes(self.last_norm(rows)).log_softmax(-1)


def log_p_of(model: TableModel, tables: Tables) -> Tensor:
    """Log p of all classes, (tables, queries, classes)."""
    n = tables.n_labelled
    return model(torch.from_numpy(tables.features), torch.from_numpy(tables.labels[:, :n]))


def new_model(seed: int, **sizes: int) -> TableModel:
    torch.manual_seed(seed)
    return TableModel(TableConfig(**sizes))


def random_loss(model: TableModel, rng: np.random.Generator, count: int = TABLES) -> Tensor:
    """The mean NLL of the queries of random tables, of one of the trained sizes."""
    n = int(rng.integers(TRAINED_ROWS[0], TRAINED_ROWS[1] + 1))
    tables = draw(rng, count, n, QUERIES)
    right = torch.from_numpy(tables.labels[:, n:])
    return -log_p_of(model, tables).gather(-1, right[..., None]).mean()


def train(
    checkpoint: Path,
    model: TableModel,
    seed: int,
    steps: int,
    rate: float,
    loss_of: Callable[[TableModel, np.random.Generator], Tensor] = random_loss,
    steps_per_checkpoint: int = STEPS_PER_CHECKPOINT,
) -> None:
    """Trains on tables of the trained sizes, from the checkpoint if there is one.

    Every step draws by its own number: interrupted or not, the weights are the same.
    """
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.98), weight_decay=0.01)
    first, start, losses = _restored(checkpoint, model, optimizer), time.monotonic(), []
    model.train()
    for step in range(first + 1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, step / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
        loss = loss_of(model, np.random.default_rng([0, seed, step]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % steps_per_checkpoint == 0:
            print(f"{checkpoint.stem}: step {step:,}, loss {np.mean(losses[-200:]):.4f}, "
                  f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
            _save(checkpoint, model, optimizer, step)
    model.eval()


def _save(checkpoint: Path, model: TableModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    tensors = {"step": torch.tensor(step)}
    for name, weights in model.named_parameters():
        tensors[f"weights.{name}"] = weights.detach()
        state = optimizer.state[weights]
        tensors |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    write_atomically(checkpoint, save(tensors))


def _restored(checkpoint: Path, model: TableModel, optimizer: torch.optim.Optimizer) -> int:
    """Steps that were done."""
    if not checkpoint.exists():
        return 0
    tensors = load_file(checkpoint)
    for name, weights in model.named_parameters():
        weights.data.copy_(tensors[f"weights.{name}"])
        moments = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weights] = {"step": tensors["step"].float(), **moments}
    return int(tensors["step"])
