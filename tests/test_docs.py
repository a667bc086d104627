"""The README and its companions: every command and every Python block is tested."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OTHERS = ("fits/README.md", "fits/SERVE.md", "scripts/README.md", "scripts/results/README.md")
PAGES = [README, *((ROOT / page).read_text(encoding="utf-8") for page in OTHERS)]


def commands_of(heading):
    """The shell lines of a README section."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
        for line in block.splitlines() if line and not line.startswith("#")
    ]  # fmt: skip


def test_ci_runs_the_readmes_test_command():
    _, tests = commands_of("Two commands")
    assert tests in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_the_two_commands_on_a_fresh_clone(tmp_path):
    """Needs the package index."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    main_job, _ = commands_of("Two commands")
    as_users = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    options = {"cwd": clone, "env": as_users, "capture_output": True, "text": True}
    done = subprocess.run(main_job, shell=True, **options)
    assert done.returncode == 0, done.stderr
    assert "fit = calibrate.load(" in done.stdout
    status = ["git", "-C", str(clone), "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == ""


PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OF_TORCH = [block for block in PYTHON if "import torch" in block or "import LlamaConfig" in block]


def run_in_one_namespace(blocks):
    assert blocks
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_readme_python_runs():
    """Every Python block, in order, in one namespace."""
    run_in_one_namespace([block for block in PYTHON if block not in OF_TORCH])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_readme_python_of_torch_runs():
    pytest.importorskip("transformers", reason="needs the extra transformers")
    run_in_one_namespace(OF_TORCH)


@pytest.mark.slow
def test_readme_commands_on_heads_of_ones_own_run(here, monkeypatch):
    """Arrays and module are those of its Python blocks."""
    from typer.testing import CliRunner

    from calibrate.cli.main import app

    (arrays,) = (block for block in PYTHON if "np.savez" in block)
    (module,) = (block for block in PYTHON if "class NoisyScorer" in block)
    exec(compile(arrays, "README.md", "exec"), {})
    if importlib.util.find_spec("transformers"):
        (capture,) = (block for block in PYTHON if "calibrate.capture(" in block)
        exec(compile(capture, "README.md", "exec"), {})
    (here / "my_head.py").write_text(module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    lines = commands_of("Bring your own head")
    for line in lines if Path("captured").exists() else [x for x in lines if "captured" not in x]:
        done = CliRunner().invoke(app, line.split()[1:])
        assert done.exit_code == 0, f"{line}: {done.output}"
    sys.modules.pop("my_head")


def test_readme_commands_exist():
    """Each `calibrate ...` line parses, with the options that it names."""
    from typer.testing import CliRunner

    from calibrate.cli.main import app

    line = r"^(?:\.venv/bin/)?calibrate ((?:fits )?\w+)(.*)$"
    lines = re.findall(line, "\n".join(PAGES), re.MULTILINE)
    assert {command for command, _ in lines} >= {"collect", "fit", "train", "fits show"}
    for command, rest in lines:
        result = CliRunner().invoke(app, [*command.split(), "--help"])
        assert result.exit_code == 0, command
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in result.stdout, f"calibrate {command} {option}"
