"""Parts that studies of small models share: resumable training, rules, commands."""

import io
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from calibrate.storage.atomic_io import write_atomically

STEPS_PER_LINE = 500
STEPS_PER_CHECKPOINT = 250


def train(
    model: LlamaForCausalLM,
    loss_at: Callable[[int], torch.Tensor],
    steps: int,
    rate: float,
    warm_up: int,
    name: str,
    checkpoint: Path | None = None,
    steps_per_checkpoint: int = STEPS_PER_CHECKPOINT,
) -> None:
    """Trains with AdamW, from the checkpoint if there is one; `loss_at` is called with the step."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / warm_up) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    done = restore(checkpoint, parts) if checkpoint and checkpoint.exists() else 0
    start, losses = time.monotonic(), []
    model.train()
    for step in range(done + 1, steps + 1):
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % STEPS_PER_LINE == 0:
            spent = time.monotonic() - start
            print(f"{name}: step {step:,}, loss {np.mean(losses[-100:]):.4f}, {spent:.0f} s",
                  file=sys.stderr, flush=True)  # fmt: skip
        if checkpoint and step % steps_per_checkpoint == 0:
            save(checkpoint, parts, step)
    model.eval()


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


def kept(path: Path, measure: Callable):
    """A measurement, made only once and kept in a file."""
    if not path.exists():
        write_atomically(path, json.dumps(measure()).encode())
    return json.loads(path.read_text())


def command(*arguments: object) -> None:
    """Runs `calibrate` with arguments; exit code 3, no head is worth a fit, is a result too."""
    words = [sys.executable, "-m", "calibrate", *map(str, arguments)]
    done = subprocess.run(words, stdout=sys.stderr)
    if done.returncode not in (0, 3):
        sys.exit(done.returncode)


def on_one_core(step: Callable, trial: object):
    torch.set_num_threads(1)
    return step(trial)


def mean_and_error(of_seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sizes,) the mean of seeds (seeds, sizes), and its standard error.

    Each seed has a model and inputs of its own, so that the error has both variances.
    """
    return of_seeds.mean(axis=0), of_seeds.std(axis=0, ddof=1) / np.sqrt(len(of_seeds))
