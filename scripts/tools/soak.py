#!/usr/bin/env python
"""Soak test: kills collect, fit and export at random, and compares with an undisturbed run.

    python scripts/tools/soak.py --kills 200 --seed 0

Each command runs repeatedly in one folder, and is killed with SIGKILL once the files in the folder
have changed a random number of times. Every published file must equal that of an undisturbed run,
and must still be there after the next kill; `export` writes all or nothing. A command that finishes
starts again in an empty folder.

Prints one line of JSON. The exit code is 1 if a file was lost or differs, or if a command failed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COMMANDS = {
    "collect": "collect --head max-retrieval --sizes 16..256 --sets 300 --out {folder}",
    "fit": "fit {place}/collection --name x --store {folder}",
    "export": "export {place}/fit.json --any-model --model {place}/model --out {folder}/exported",
}
PARALLEL_COMMANDS = 2  # one core each
SECONDS_PER_LOOK = 0.001
Files = dict[str, bytes]


def make_model(place: Path) -> None:
    """A small model, and a fit that can be exported into it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibrate.evidence.baselines import one_constant

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=512, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(place / "model")
    one_constant(1.5, "x").save(place / "fit.json")


def published(folder: Path) -> Files:
    """The files that are not hidden; of a fit, its file without version and time."""
    files = {}
    for path in folder.rglob("[!.]*"):
        name = str(path.relative_to(folder))
        if path.is_file() and "/." not in f"/{name}" and not name.startswith("x/"):
            files[name] = path.read_bytes()
        elif path.match("x/*.json"):  # a kill may use up a version
            document = json.loads(path.read_bytes())
            del document["version"], document["provenance"]["created"]
            files["fit"] = json.dumps(document).encode()
    return files


class Soak:
    """One command in one folder, compared with an undisturbed run of it."""

    def __init__(self, command: str, place: Path):
        self.command, self.place, self.folder = command, place, place / command
        self.done: Counter[str] = Counter()
        undisturbed = place / f"{command}-undisturbed"
        code, self.changes, messages = self.attempt(undisturbed)
        assert code == 0, messages
        self.expected = published(undisturbed)

    def attempt(self, folder: Path, kill_at: int | None = None) -> tuple[int, int, str]:
        """Exit code, changes of the files, and messages of a process; killed at that change."""
        shutil.rmtree(folder / "exported", ignore_errors=True)  # an export takes a new name
        words = COMMANDS[self.command].format(folder=folder, place=self.place).split()
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.place / "cache"),
                 "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "calibrate", *words], env=os.environ | cache,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        seen, changes = None, -1
        while process.poll() is None:
            files = sorted(folder.rglob("*"))
            changes += files != seen
            seen = files
            if kill_at is not None and changes >= kill_at:
                process.kill()
            time.sleep(SECONDS_PER_LOOK)
        return process.returncode, changes, process.communicate()[1]

    def disturb(self, kill_at: int | None) -> None:
        """Makes one attempt, and counts its outcome and what is wrong with the files."""
        # Not of an export: the next attempt begins by removing it.
        before = {} if self.command == "export" else published(self.folder)
        code, _, messages = self.attempt(self.folder, kill_at)
        after = published(self.folder)
        is_whole = code == 0
        problems = [f"lost: {name}" for name in before.keys() - after.keys() - {"manifest.json"}]
        problems += [
            f"differs: {name}" for name, data in after.items()
            if self.expected.get(name) != data and (is_whole or name != "manifest.json")
        ]  # fmt: skip
        if is_whole or (after and self.command == "export"):
            problems += [f"missing: {name}" for name in self.expected.keys() - after.keys()]
        if code not in (0, -signal.SIGKILL):
            problems.append(f"exit code {code}: {messages.strip()[-300:]}")
        kills = int(code == -signal.SIGKILL)
        self.done.update(kills=kills, finished=int(is_whole), problems=len(problems))
        for problem in problems:
            print(f"{self.command}: {problem}", file=sys.stderr)
        if is_whole:
            shutil.rmtree(self.folder)


def soak(kills: int, seed: int, place: Path) -> dict[str, int]:
    """Disturbs each command until its share of kills is reached, and then lets it finish."""
    make_model(place)
    Soak("collect", place)
    os.rename(place / "collect-undisturbed", place / "collection")

    def disturb_often(number: int) -> Counter[str]:
        command = list(COMMANDS)[number]
        trial, rng = Soak(command, place), random.Random(f"{seed} {command}")
        while trial.done["kills"] < (kills + number) // len(COMMANDS):
            trial.disturb(rng.randint(0, trial.changes))
        trial.disturb(None)
        return trial.done

    with ThreadPoolExecutor(PARALLEL_COMMANDS) as pool:
        total = sum(pool.map(disturb_often, range(len(COMMANDS))), Counter())
    return {name: total[name] for name in ("kills", "finished", "problems")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of all commands together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        totals = soak(options.kills, options.seed, Path(place))
    print(json.dumps(totals))
    sys.exit(bool(totals["problems"]))


if __name__ == "__main__":
    main()
