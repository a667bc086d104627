"""Parts that studies of small models share: resumable training, and models in folders."""

import io
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from transformers import LlamaForCausalLM, PreTrainedModel

from calibrate.storage.atomic_io import write_atomically

STEPS_PER_LINE = 500
STEPS_PER_CHECKPOINT = 250


def train(
    model: PreTrainedModel,
    loss_at: Callable[[int], torch.Tensor],
    rate_at: Callable[[int], float],
    steps: int,
    name: str,
    checkpoint: Path | None = None,
    steps_per_checkpoint: int = STEPS_PER_CHECKPOINT,
) -> None:
    """Trains with AdamW, from the checkpoint if there is one.

    Args:
      loss_at, rate_at: loss and learning rate of a step, from 1 on. A loss that draws by the number
        of the step gives the same weights after an interruption.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 0.0, (0.9, 0.98), weight_decay=0.01)
    parts = {"model": model, "optimizer": optimizer}
    done = restore(checkpoint, parts) if checkpoint and checkpoint.exists() else 0
    start, losses = time.monotonic(), []
    model.train()
    for step in range(done + 1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % STEPS_PER_LINE == 0:
            spent = time.monotonic() - start
            print(f"{name}: step {step:,}, loss {np.mean(losses[-100:]):.4f}, {spent:.0f} s",
                  file=sys.stderr, flush=True)  # fmt: skip
        if checkpoint and step % steps_per_checkpoint == 0:
            save(checkpoint, parts, step)
    model.eval()


def warm_up_and_cosine(rate: float, warm_up: int, steps: int) -> Callable[[int], float]:
    """The learning rate of a step, from 1 on: it rises from 0, and falls as a cosine."""

    def rate_at(step: int) -> float:
        done = step - 1
        return rate * (min(1, done / warm_up) * (1 + math.cos(math.pi * done / steps)) / 2)

    return rate_at


def save(checkpoint: Path, parts: dict, step: int) -> None:
    """Writes all that the next step depends on, whole or not at all."""
    data = io.BytesIO()
    torch.save({"step": step} | {key: part.state_dict() for key, part in parts.items()}, data)
    write_atomically(checkpoint, data.getvalue())


def restore(checkpoint: Path, parts: dict) -> int:
    """Puts a checkpoint into the parts; returns the steps that are done."""
    states = torch.load(checkpoint, weights_only=True)
    for key, part in parts.items():
        part.load_state_dict(states[key])
    return states["step"]


def load_model(folder: Path, kind: type[PreTrainedModel] = LlamaForCausalLM):
    """A model in float32, whatever its file holds."""
    return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def save_model(folder: Path, model: PreTrainedModel) -> None:
    """Saves a model, whole or not at all."""
    model.set_attn_implementation("sdpa")
    partial = folder.with_name(f"{folder.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted run
    model.save_pretrained(partial)
    partial.rename(folder)


def on_all_cores(step: Callable, trials: Iterable) -> list:
    """The results of a step for each trial, one core each."""
    return Parallel(n_jobs=-1)(delayed(_on_one_core)(step, trial) for trial in trials)


def _on_one_core(step: Callable, trial: object):
    torch.set_num_threads(1)
    return step(trial)
