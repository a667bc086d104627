"""A classifier of tables that learns in its context, as a Transformers model, and its training.

A table is labelled rows and query rows, all of them items; the model gives log p of the classes of
the queries in one forward pass. Every row attends to the labelled rows, none to a query: queries
do not see each other, and the order of the labelled rows changes nothing. So the labelled rows are
the keys, n of them, and attention needs no mask.
"""

import math
from pathlib import Path

import numpy as np
import torch
from small_models import save_model, train
from tabular_tasks import CLASSES, FEATURES, Tables, draw
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TRAINED_ROWS = (8, 64)  # labelled rows of a table in training, least and most
QUERIES, TABLES = 32, 48  # of a table and of a step in training
WARM_UP = 200  # steps


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


def random_loss(model: TableModel, rng: np.random.Generator) -> Tensor:
    """The mean NLL of the queries of random tables, of one of the trained sizes."""
    n = int(rng.integers(TRAINED_ROWS[0], TRAINED_ROWS[1] + 1))
    tables = draw(rng, TABLES, n, QUERIES)
    right = torch.from_numpy(tables.labels[:, n:])
    return -log_p_of(model, tables).gather(-1, right[..., None]).mean()


def train_into(folder: Path, seed: int, steps: int, rate: float, checkpoint: Path) -> None:
    """Trains a model from the checkpoint if there is one, and saves it in half precision."""
    model = new_model(seed)

    def rate_at(step: int) -> float:
        return rate * min(1, step / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2

    def loss_at(step: int) -> Tensor:
        return random_loss(model, np.random.default_rng([0, seed, step]))

    train(model, loss_at, rate_at, steps, folder.name, checkpoint)
    save_model(folder, model.half())
