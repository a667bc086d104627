"""What is installed: a light import, package data, the README's commands."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import calibrate
from calibrate.files.store import published_store

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HEAVY = {
    "jax", "jaxlib", "scipy", "sklearn", "matplotlib", "typer", "optax", "rich", "joblib", "dask",
    "distributed",
}  # fmt: skip


def python(code, cwd, **environment):
    done = subprocess.run(
        [sys.executable, *code], cwd=cwd, env=os.environ | environment, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def wheel_folder(tmp_path_factory):
    """The wheel, installed without index or dependencies into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ["-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "-q", "-w", ".", str(ROOT)]
    python(build, folder)
    (wheel,) = folder.glob("calibrate-*.whl")
    install = [*pip, "install", "--no-index", "--no-deps", "-q", "--target", "site", str(wheel)]
    python(install, folder)
    return folder / "site"


def test_wheel_carries_fits_and_weights(wheel_folder, tmp_path):
    code = """
import calibrate, pathlib
from calibrate.heads import load_head
for name in ("paper", "max-retrieval"):
    print(calibrate.load(name).path)
print(load_head("max-retrieval").fingerprint)
"""
    done = python(["-c", code], tmp_path, PYTHONPATH=str(wheel_folder))
    *paths, fingerprint = done.stdout.split()
    for path in paths:
        assert Path(path).is_relative_to(wheel_folder / "calibrate" / "published_fits")
    assert fingerprint == calibrate.load("max-retrieval").source["fingerprint"]
    published = wheel_folder / "calibrate" / "published_fits"
    listed = {str(path.relative_to(published)) for path in published.rglob("*") if path.is_file()}
    assert listed == {"max-retrieval/1.json", "paper/1.json"}  # and nothing of a user's
    schemas = wheel_folder / "calibrate" / "files" / "schemas"
    for version in ("1.0", "1.1"):
        assert (schemas / f"coefficient-file-{version}.json").exists()


def test_editable_install_finds_the_folder_beside_the_package():
    assert published_store() == ROOT / "fits"
    assert calibrate.load("max-retrieval").path.is_relative_to(ROOT / "fits")


def test_published_fit_is_of_the_shipped_head():
    from calibrate.heads import load_head

    assert calibrate.load("max-retrieval").source["fingerprint"] == (
        load_head("max-retrieval").fingerprint
    )


@pytest.mark.parametrize(
    "code",
    [
        "import calibrate",
        "import calibrate; calibrate.load('paper'); calibrate.identity()",
        "from calibrate.cli.main import app; app(['fits', 'verify'], standalone_mode=False)",
        "import calibrate.cli.main",
    ],
)
def test_light_import(code, tmp_path):
    allowed = {"typer", "rich"} if "cli" in code else set()
    code += f"; import sys; print(*sorted({HEAVY - allowed} & set(sys.modules)))"
    assert python(["-c", code], tmp_path).stdout.splitlines()[-1] == ""


def test_public_names_exist_and_are_documented():
    for name in calibrate.__all__:
        assert getattr(calibrate, name).__doc__, name
    assert set(calibrate.__all__) <= set(dir(calibrate))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        calibrate.nonsense  # noqa: B018


def test_no_public_function_bears_a_modules_name():
    modules = {path.stem for path in (ROOT / "calibrate").rglob("*.py")}
    assert not modules & set(calibrate.__all__)


# Lowest first; of the two folders on one floor neither imports the other.
FLOORS = {
    "errors": 0, "maths": 1, "parallel": 1, "files": 2, "softmax": 3, "attention": 3,
    "capturing": 3, "flax": 3, "torch": 3, "transformers": 3, "heads": 4, "collecting": 5,
    "fitting": 6, "evaluation": 7, "report": 8, "cli": 9,
}  # fmt: skip
RUNTIME = [room for room, floor in FLOORS.items() if floor == 3]


def test_a_folder_imports_only_from_its_floor_and_below():
    for path in (ROOT / "calibrate").rglob("*.py"):
        room = path.relative_to(ROOT / "calibrate").with_suffix("").parts[0]
        if room.startswith("__"):
            continue
        for imported in re.findall(r"(?:from|import) calibrate\.(\w+)", path.read_text()):
            below = FLOORS[imported] < FLOORS[room]
            beside = imported == room or {imported, room} <= set(RUNTIME)
            assert below or beside, f"{path} imports {imported}"


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
    done = subprocess.run(main_job, shell=True, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "calibrate.load(" in done.stdout.strip().splitlines()[-2]
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
    """Each `calibrate ...` line of the README parses, with the options that it names."""
    from typer.testing import CliRunner

    from calibrate.cli.main import app

    line = r"^(?:\.venv/bin/)?calibrate ((?:fits )?\w+)(.*)$"
    lines = re.findall(line, README, re.MULTILINE)
    assert {command for command, _ in lines} >= {"collect", "fit", "train", "fits show"}
    for command, rest in lines:
        result = CliRunner().invoke(app, [*command.split(), "--help"])
        assert result.exit_code == 0, command
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in result.stdout, f"calibrate {command} {option}"
