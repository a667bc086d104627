"""Soak test: kills collect, fit and export at random, and compares with an undisturbed run.

    python scripts/tools/soak.py --kills 200 --seed 0

Each command runs repeatedly in one folder, in a process that is killed with SIGKILL: half the time
after a random delay, half right before one of its system calls on files. Every fourth attempt, such
a call fails as on a full or broken disk instead. Published files must stay readable and unchanged.
When the command finishes, its files must equal those of an undisturbed run, and it starts again in
an empty folder. `collect --overwrite` may lose what is there; `export`, which needs the extra
transformers, writes all or nothing. Heads, collections and the model are small: most of the time is
spent on starting processes.

Prints one line of JSON. The exit code is 1 if bytes were lost, or if a command failed without a
one-line message.
"""

import argparse
import errno
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
from importlib.util import find_spec
from pathlib import Path

from calibrate.errors import CalibrateError

JOBS = ["collect", "fit", "overwrite", *(["export"] if find_spec("transformers") else [])]
RESUMED = ("collect", "fit")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
ATTEMPTS_PER_FAULT = 4
PARALLEL_JOBS = 2  # one core each
TIMEOUT = 300  # seconds of one attempt

COUNTED = (
    "open", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "listdir",
)  # fmt: skip
COLLECTED = {"sizes": [64, 256], "sets": 600, "seed": 0}


class Disk:
    """A stand-in for the module os of what writes files: counts calls, and fails one of them.

    Args:
      at: number of the call, from 0, that fails.
      error: its errno; 0 kills the process.
    """

    def __init__(self, at: int, error: int):
        self.at, self.error, self.calls = at, error, 0

    def __getattr__(self, name):
        attribute = getattr(os, name)
        if name not in COUNTED:
            return attribute

        def call(*arguments, **options):
            self.calls += 1
            if self.calls - 1 == self.at:
                if not self.error:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(self.error, os.strerror(self.error))
            return attribute(*arguments, **options)

        return call


def work(job: str, folder: Path, disk: Disk) -> None:
    """Runs one job in this process, in small steps."""
    # Slow imports come before "ready".
    from calibrate.cli import main
    from calibrate.report import collection_record, fit_record, plots  # noqa: F401
    from calibrate.rows import resume
    from calibrate.rows.collect import collect_from_head  # noqa: F401
    from calibrate.storage import atomic_io, safetensors_file

    if job == "export":
        import calibrate.export.folder
        import calibrate.export.numerical_check  # noqa: F401
    atomic_io.os = resume.os = safetensors_file.os = disk
    print("ready", flush=True)
    if job in ("collect", "overwrite"):
        collect_in_small_units(folder, overwrite=job == "overwrite")
        return
    place = folder.parent
    arguments = {
        "fit": ["fit", str(place / "collection"), "--name", "x", "--store", str(folder)],
        "export": [
            "export",
            str(place / "fit.json"),
            "--any-model",
            "--model",
            str(place / "model"),
            "--out",
            str(folder / "exported"),
        ],
    }[job]
    main.app(arguments, standalone_mode=False)


def collect_in_small_units(folder: Path, overwrite: bool) -> None:
    """Collects rows of the example head, in many shards."""
    from calibrate.rows.collect import collect_from_head
    from calibrate.rows.heads import load_head
    from calibrate.rows.resume import discard_collection
    from calibrate.rows.units import UnitSizes

    if overwrite:
        discard_collection(folder)
    head = load_head("max-retrieval")
    collect_from_head(head, folder=folder, unit_sizes=UnitSizes(max_sets=64), **COLLECTED)


def make_model(place: Path) -> None:
    """A small model, and a fit that can be exported into it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibrate.evidence.baselines import one_constant
    from calibrate.store.fit import dumps

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=512, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(place / "model")
    (place / "fit.json").write_text(dumps(one_constant(1.5, "x")))


def products(job: str, folder: Path) -> dict[str, bytes]:
    """The job's published files, without times and versions: a kill may use up a version."""
    paths = [
        p for p in folder.rglob("*") if p.is_file() and "/." not in f"/{p.relative_to(folder)}"
    ]
    if job != "fit":
        return {str(p.relative_to(folder)): p.read_bytes() for p in paths}
    contents = {}
    for path in sorted(paths):
        if path.suffix == ".json":
            document = json.loads(path.read_bytes())
            del document["version"], document["provenance"]["created"]
            contents["fit"] = json.dumps(document).encode()
    return contents


def unsound(job: str, folder: Path) -> list[str]:
    """Errors of published files that cannot be read."""
    from calibrate.report.store_records import audit_store
    from calibrate.rows.collection import RowCollection, open_collection
    from calibrate.storage.npz import read_arrays

    if job == "fit":
        return [v["error"] for v in audit_store(folder) if v["error"]] if folder.exists() else []
    errors = []
    for manifest in folder.rglob("manifest.json"):
        try:
            list(open_collection(manifest.parent, RowCollection).shards())
        except CalibrateError as failure:
            expected = "is unfinished" in str(failure)
            expected |= job == "overwrite" and "is missing" in str(failure)  # partly deleted
            errors += [] if expected else [str(failure)]
    for path in folder.rglob("[!.]*.npz"):
        try:
            read_arrays(path)
        except CalibrateError as failure:
            errors.append(str(failure))
    return errors


class Soak:
    """One job in one folder, compared with an undisturbed run of it."""

    def __init__(self, job: str, place: Path, rng: random.Random, log=print):
        self.job, self.folder, self.rng, self.log = job, place / job, rng, log
        self.done: Counter[str] = Counter()
        self.work_seconds = float(TIMEOUT)
        self.undisturbed = place / f"{job}-undisturbed"
        started = time.monotonic()
        code, out, error = self.attempt(self.undisturbed, -1, 0, None)
        assert code == 0, error
        self.seconds = time.monotonic() - started
        self.calls = int(out.split()[-1])
        self.expected = products(job, self.undisturbed)

    def attempt(self, folder: Path, at: int, error: int, delay: float | None):
        """(exit code, stdout, stderr) of one process, killed after a delay if it is not None."""
        if self.job == "export":  # a new name
            shutil.rmtree(folder / "exported", ignore_errors=True)
        command = [sys.executable, __file__, "--child", self.job, str(folder), str(at), str(error)]
        # Share the compiled code of the undisturbed run, so that processes start quickly.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": f"{self.folder}-cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | cache,
        )  # fmt: skip
        assert process.stdout
        process.stdout.readline()  # waits for "ready"
        started = time.monotonic()
        try:
            out, messages = process.communicate(timeout=TIMEOUT if delay is None else delay)
        except subprocess.TimeoutExpired:
            process.kill()
            out, messages = process.communicate()
        if process.returncode == 0:  # the first attempt had to compile
            self.work_seconds = min(self.work_seconds, time.monotonic() - started)
        return process.returncode, out, messages

    def disturb(self) -> None:
        """Makes one attempt that is killed, fails or finishes, and counts its outcome."""
        before = products(self.job, self.folder)
        attempts = self.done["attempts"]
        self.done["attempts"] += 1
        fault = attempts % ATTEMPTS_PER_FAULT == 1
        at, error, delay = -1, 0, None
        if fault or self.rng.random() < 0.5:
            at = self.rng.randrange(self.calls // 2)  # a resumed run makes fewer
            error = self.rng.choice(ERRORS) if fault else 0
        else:
            delay = self.rng.uniform(0, 0.7 * self.work_seconds)
        code, _, messages = self.attempt(self.folder, at, error, delay)
        self.count_outcome(code, messages, before, fault)

    def count_outcome(
        self, code: int, messages: str, before: dict[str, bytes], fault: bool
    ) -> None:
        """Counts the outcome of an attempt."""
        after = products(self.job, self.folder)
        final = {name for name, data in before.items() if self.expected.get(name) == data}
        lost = [name for name in final if after.get(name) != before[name]]
        lost = lost if self.job in RESUMED else []
        self.done["kills"] += code == -signal.SIGKILL
        self.done["faults"] += fault and code != 0
        problems = unsound(self.job, self.folder)
        if self.job == "export" and after and after.keys() != self.expected.keys():
            problems.append("an export is not whole")
        if code not in (0, -signal.SIGKILL) and (not fault or "Traceback" in messages or code != 1):
            problems.append(f"exit code {code}: {messages.strip()[-300:]}")
        if code == 0 and not fault:  # a fit succeeds without its figure
            self.done["finished"] += 1
            lost += [name for name in self.expected if after.get(name) != self.expected[name]]
            problems += [f"unexpected file {name}" for name in after.keys() - self.expected.keys()]
            shutil.rmtree(self.folder)
        self.done["bytes_lost"] += sum(len(self.expected[name]) for name in set(lost))
        self.done["problems"] += len(problems) + len(lost)
        for problem in problems + lost:
            self.log(f"{self.job}: {problem}")


def soak(kills: int, seed: int, place: Path, log=print) -> dict[str, int]:
    """Disturbs each job until its share of kills is reached, and then lets it finish."""
    collection = Soak("collect", place, random.Random(), log)
    os.rename(collection.undisturbed, place / "collection")
    if "export" in JOBS:
        make_model(place)

    def disturb_often(number: int) -> Counter[str]:
        job = JOBS[number]
        trial = Soak(job, place, random.Random(f"{seed} {job}"), log)
        while trial.done["kills"] < (kills + number) // len(JOBS):
            trial.disturb()
        before = products(job, trial.folder)
        code, _, messages = trial.attempt(trial.folder, -1, 0, None)
        trial.count_outcome(code, messages, before, fault=False)
        log(f"{job}: {dict(trial.done)}, {trial.calls} calls, {trial.seconds:.1f} s if undisturbed")
        return trial.done

    with ThreadPoolExecutor(PARALLEL_JOBS) as pool:
        total = sum(pool.map(disturb_often, range(len(JOBS))), Counter())
    return {name: total[name] for name in ("kills", "faults", "finished", "bytes_lost", "problems")}


def child(job: str, folder: str, at: str, error: str) -> None:
    """Runs a job in the process that is killed; failures end as those of the command line."""
    disk = Disk(int(at), int(error))
    try:
        work(job, Path(folder), disk)
    except CalibrateError as failure:
        sys.exit(f"calibrate: {failure}")
    print("calls", disk.calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of all jobs together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        totals = soak(options.kills, options.seed, Path(place), lambda x: print(x, file=sys.stderr))
    print(json.dumps(totals))
    sys.exit(bool(totals["problems"] or totals["bytes_lost"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
