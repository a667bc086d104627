#!/usr/bin/env python
"""Trains max-retrieval heads as in the paper's appendix A.4.

scripts/studies/train_heads.py --seeds 0 1 2 3 --steps 100000 --jobs 2

The same command continues from the last checkpoint; the weights are the same bytes. A seed takes
about five minutes of one core. Needs optax.
"""

import argparse
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a head per seed")
    parser.add_argument("--steps", type=positive, default=100_000, help="gradient steps")
    parser.add_argument("--out", type=Path, default=Path("runs/train"),
                        help="folder of the weights and checkpoints")  # fmt: skip
    parser.add_argument("--jobs", type=positive, default=1, help="heads trained at once")
    options = parser.parse_args()
    print(f"training {options.steps:,} steps each; compiling first", file=sys.stderr, flush=True)
    import head_training

    from calibrate.errors import CalibrateError

    try:
        paths = head_training.train_seeds(options.seeds, options.steps, options.out, options.jobs)
    except CalibrateError as failure:
        sys.exit(f"train_heads: {failure}")
    except KeyboardInterrupt:
        sys.exit("train_heads: interrupted; the same command continues")
    print(*paths, sep="\n")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


if __name__ == "__main__":
    main()
