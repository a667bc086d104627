"""Soak: kills collect, train and fit again and again, and compares with a quiet run.

    python scripts/soak.py --kills 200 --seed 0

Each command runs over and over in one folder, in a process that is killed (-9): half the times
after a random time, half right before one of its system calls on files; and now and then such a
call fails as on a full or broken disk. What is published must stay readable and as it is all along,
and once the command gets to its end, all files must be those of a run that nothing disturbed; then
it starts anew in an empty folder. Heads and collections are small, so most of the time goes into
starting processes.

Prints one line of JSON; exit code 1 if bytes were lost, or a command failed in any other way than
with one clear line.
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
from pathlib import Path

from calibrate.errors import CalibrateError

JOBS = ("collect", "train", "fit")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
FAULT_EVERY = 4  # attempts
AT_ONCE = 2  # jobs, a core each
LONGEST = 300  # seconds of one attempt

COLLECT = ["collect", "--head", "max-retrieval", "--sizes", "64,256", "--sets", "600"]


class Disk:
    """The module os as `calibrate.files.atomic_io` sees it: it counts calls, and picks one.

    Args:
      at: number of the call, from 0, that does not happen.
      error: what it fails with; 0 kills the process.
    """

    def __init__(self, at: int, error: int):
        self.at, self.error, self.calls = at, error, 0

    def __getattr__(self, name):
        found = getattr(os, name)
        if name not in ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "listdir"):
            return found

        def call(*arguments, **options):
            self.calls += 1
            if self.calls - 1 == self.at:
                if not self.error:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(self.error, os.strerror(self.error))
            return found(*arguments, **options)

        return call


def work(job: str, folder: Path, disk: Disk) -> None:
    """Does one job in this process, in small steps."""
    # What takes long to load.
    from calibrate.cli import collect_steps, fit_steps, main, report_steps  # noqa: F401
    from calibrate.collecting import work_units
    from calibrate.files import atomic_io
    from calibrate.heads import training

    work_units.SETS_PER_UNIT = (1, 64)
    training.SIZES, training.STEPS_PER_LOG_ROW, training.STEPS_PER_CHECKPOINT = (5, 5), 10, 20
    atomic_io.os = disk
    print("ready", flush=True)
    if job == "train":
        training.train(0, 400, folder, print)
        return
    arguments = {
        "collect": [*COLLECT, "--out", str(folder)],
        "fit": ["fit", str(folder.parent / "collection"), "--name", "x", "--store", str(folder)],
    }[job]
    main.app(arguments, standalone_mode=False)


def products(job: str, folder: Path) -> dict[str, bytes]:
    """What the job has published, save times, and versions, of which a kill may use one up."""
    paths = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")]
    if job != "fit":
        return {str(p.relative_to(folder)): p.read_bytes() for p in paths}
    found = {}
    for path in sorted(paths):
        if path.suffix == ".json":
            document = json.loads(path.read_bytes())
            del document["version"], document["provenance"]["created"]
            found["fit"] = json.dumps(document).encode()
        if path.suffix == ".png":  # its title has the version: its beginning and its end
            found["figure"] = path.read_bytes()[:8] + path.read_bytes()[-12:]
    return found


def unsound(job: str, folder: Path) -> list[str]:
    """What is published and cannot be read."""
    from calibrate.files.collection_audit import audit_collection
    from calibrate.files.npz import read_arrays
    from calibrate.files.store_audit import audit_store

    if job == "fit":
        return [v.error for v in audit_store(folder) if v.error] if folder.exists() else []
    found = []
    for manifest in folder.rglob("manifest.json"):
        found += [fault.error for fault in audit_collection(manifest.parent).faults]
    for path in folder.rglob("*.npz"):
        try:
            if not path.name.startswith("."):
                read_arrays(path)
        except CalibrateError as failure:
            found.append(str(failure))
    return found


class Soak:
    """One job in one folder, beside a quiet run of it."""

    def __init__(self, job: str, place: Path, rng: random.Random, log=print):
        self.job, self.folder, self.rng, self.log = job, place / job, rng, log
        self.done: Counter[str] = Counter()
        self.work_seconds = float(LONGEST)
        self.quiet = place / f"{job}-quiet"
        started = time.monotonic()
        code, out, error = self.attempt(self.quiet, -1, 0, None)
        assert code == 0, error
        self.seconds = time.monotonic() - started
        self.calls = int(out.split()[-1])
        self.wanted = products(job, self.quiet)

    def attempt(self, folder: Path, at: int, error: int, delay: float | None):
        """(exit code, stdout, stderr) of one process, killed after a delay if there is one."""
        command = [sys.executable, __file__, "--child", self.job, str(folder), str(at), str(error)]
        # What the quiet run compiled is not compiled again: little of a process is lead time.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": f"{self.folder}-cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | cache,
        )  # fmt: skip
        assert process.stdout
        process.stdout.readline()  # it is ready
        started = time.monotonic()
        try:
            out, said = process.communicate(timeout=LONGEST if delay is None else delay)
        except subprocess.TimeoutExpired:
            process.kill()
            out, said = process.communicate()
        if process.returncode == 0:  # the first time it had to compile
            self.work_seconds = min(self.work_seconds, time.monotonic() - started)
        return process.returncode, out, said

    def disturb(self) -> None:
        """One attempt that is killed, fails, or comes to its end; and what is to be said of it."""
        before = products(self.job, self.folder)
        tries = self.done["attempts"]
        self.done["attempts"] += 1
        fault = tries % FAULT_EVERY == 1
        at, error, delay = -1, 0, None
        if fault or self.rng.random() < 0.5:
            at = self.rng.randrange(self.calls // 2)  # of one that carries on there are fewer
            error = self.rng.choice(ERRORS) if fault else 0
        else:
            delay = self.rng.uniform(0, 0.7 * self.work_seconds)
        code, _, said = self.attempt(self.folder, at, error, delay)
        self.judge(code, said, before, fault)

    def judge(self, code: int, said: str, before: dict[str, bytes], fault: bool) -> None:
        """Counts what came of an attempt."""
        after = products(self.job, self.folder)
        final = {name for name, data in before.items() if self.wanted.get(name) == data}
        lost = [name for name in final if after.get(name) != before[name]]
        self.done["kills"] += code == -signal.SIGKILL
        self.done["faults"] += fault and code != 0
        problems = unsound(self.job, self.folder)
        if code not in (0, -signal.SIGKILL) and (not fault or "Traceback" in said or code != 1):
            problems.append(f"exit code {code}: {said.strip()[-300:]}")
        if code == 0 and not fault:  # a figure that the disk did not take is no failure of a fit
            self.done["finished"] += 1
            lost += [name for name in self.wanted if after.get(name) != self.wanted[name]]
            problems += [f"{name} is there" for name in after.keys() - self.wanted.keys()]
            shutil.rmtree(self.folder)
        self.done["bytes_lost"] += sum(len(self.wanted[name]) for name in set(lost))
        self.done["problems"] += len(problems) + len(lost)
        for problem in problems + lost:
            self.log(f"{self.job}: {problem}")


def soak(kills: int, seed: int, place: Path, log=print) -> dict[str, int]:
    """Disturbs each job until it was killed so often, and then lets it finish."""
    collection = Soak("collect", place, random.Random(), log)
    os.rename(collection.quiet, place / "collection")

    def disturb_often(number: int) -> Counter[str]:
        job = JOBS[number]
        one = Soak(job, place, random.Random(f"{seed} {job}"), log)
        while one.done["kills"] < (kills + number) // len(JOBS):
            one.disturb()
        before = products(job, one.folder)
        code, _, said = one.attempt(one.folder, -1, 0, None)
        one.judge(code, said, before, fault=False)
        log(f"{job}: {dict(one.done)}, {one.calls} calls, {one.seconds:.1f} s if undisturbed")
        return one.done

    with ThreadPoolExecutor(AT_ONCE) as pool:
        total = sum(pool.map(disturb_often, range(len(JOBS))), Counter())
    return {name: total[name] for name in ("kills", "faults", "finished", "bytes_lost", "problems")}


def child(job: str, folder: str, at: str, error: str) -> None:
    """The process that is killed; its failures are those of the command line."""
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
        found = soak(options.kills, options.seed, Path(place), lambda x: print(x, file=sys.stderr))
    print(json.dumps(found))
    sys.exit(bool(found["problems"] or found["bytes_lost"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
