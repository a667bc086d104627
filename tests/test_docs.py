"""The README and the guides in calibrate/guides/: every command and every Python block is tested.

Commands of a block ```sh are run by a test; those of a block ```bash are only parsed, since they
need a model, a network or minutes.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from guides import FOLDER, ROOT, blocks, lines_of, section

import calibrate
from calibrate.store.saving import save_to_store

README = (ROOT / "README.md").read_text(encoding="utf-8")
OTHERS = sorted(
    str(page.relative_to(ROOT))
    for folder in ("calibrate", "fits", "scripts")
    for page in (ROOT / folder).rglob("*.md")
)
PAGES = [README, *((ROOT / page).read_text(encoding="utf-8") for page in OTHERS)]


def commands_of(heading, page="README.md"):
    """The shell lines of a section."""
    return lines_of(section(page, heading, folder=""))


def test_ci_runs_the_readmes_test_command():
    (tests,) = commands_of("Tests")
    assert tests in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_the_two_commands_on_a_fresh_clone(tmp_path):
    """Needs the package index. Tests of the store pass beside what the first one published."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    (main_job,), (tests,) = commands_of("Quickstart"), commands_of("Tests")
    options = {"cwd": clone, "capture_output": True, "text": True}
    done = subprocess.run(main_job, shell=True, **options)
    assert done.returncode == 0, done.stderr
    assert "fit = calibrate.load(" in done.stdout
    status = ["git", "-C", str(clone), "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == ""
    of_the_store = f"{tests} tests/test_fits.py tests/test_store.py"
    done = subprocess.run(of_the_store, shell=True, **options)
    assert done.returncode == 0, done.stdout


OWN = [f"{FOLDER}/heads.md", f"{FOLDER}/arrays.md"]
HEADS = [block for page in OWN for block in blocks(page)]
SLOW = [*OWN, f"{FOLDER}/language-models.md", f"{FOLDER}/loading.md"]
ALONE = [
    pytest.param(block, id=f"{page}-{i}", marks=pytest.mark.slow if page in SLOW else [])
    for page in ("README.md", *SLOW)  # serving.md: test_export*.py
    for i, block in enumerate(blocks(page))
]


def write_my_head(folder):
    (module,) = (block for block in HEADS if "class NoisyScorer" in block)
    (folder / "my_head.py").write_text(module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("block", ALONE)
def test_each_python_block_runs_alone(block, here, monkeypatch):
    if "torch" in block or "transformers" in block:
        pytest.importorskip("transformers", reason="needs the extra transformers")
    write_my_head(here)
    save_to_store(
        replace(calibrate.load("max-retrieval"), name="quickstart-constant"), here / "fits"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    exec(compile(block, "page", "exec"), {})
    sys.modules.pop("my_head", None)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 165
    assert len(README.encode()) <= 12_400


def test_the_guides_are_short():
    pages = [ROOT / "fits" / "README.md", *(ROOT / FOLDER).glob("*.md")]
    texts = {page.stem: page.read_text(encoding="utf-8") for page in pages}
    assert sum(len(text.split()) for text in texts.values()) <= 9_000
    assert len(texts["serving"].splitlines()) <= 120
    terms, _ = texts["glossary"].split("| symbol |")
    assert 20 <= len(re.findall(r"^\| ", terms, re.MULTILINE)) - 2 <= 25  # without the head


JOBS = {
    "heads": ["A head in JAX or PyTorch", "A recorded Transformers or Flax model"],
    "arrays": ["Logits of any framework", "scikit-learn", "A pointer head", "Dual softmax"],
    "language-models": ["Fit a model", "Your own prompts", "Evaluate"],
    "serving": [
        "From a fit to a served model",
        "A .gguf file",
        "A LoRA",
        "Does the engine apply it?",
    ],
    "loading": ["JAX", "Flax", "PyTorch", "Transformers"],
}


@pytest.mark.parametrize(("guide", "jobs"), JOBS.items())
def test_each_job_has_a_heading_and_code(guide, jobs):
    for job in jobs:
        assert "```" in section(f"{guide}.md", job), job


@pytest.mark.slow
def test_commands_on_heads_of_ones_own_run(here, monkeypatch):
    """Arrays and module are those of its Python blocks."""
    pytest.importorskip("transformers", reason="needs the extra transformers")
    from typer.testing import CliRunner

    from calibrate.cli.main import app

    for needed in ("np.savez", 'calibrate.capture(model, "captured")'):
        (block,) = (block for block in HEADS if needed in block)
        exec(compile(block, "page", "exec"), {})
    write_my_head(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    pages = "\n".join(block for page in OWN for block in blocks(page, "sh"))
    own = ("example", "captured", "noisy")
    for line in [line for line in pages.splitlines() if any(word in line for word in own)]:
        done = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, f"{line}: {done.output}"
    sys.modules.pop("my_head")


def test_readme_commands_exist():
    """Each `calibrate ...` line parses, with the options that it names."""
    from typer.testing import CliRunner

    from calibrate.cli.main import app

    line = r"^(?:    )?calibrate ((?:fits |model )?[\w-]+)(.*)$"
    lines = re.findall(line, "\n".join(PAGES), re.MULTILINE)
    assert {command for command, _ in lines} >= {"collect", "fit", "model fit", "fits show"}
    options = {command: set() for command, _ in lines}
    for command, rest in lines:
        options[command].update(re.findall(r"--[a-z-]+", rest))
    for command, named in options.items():
        result = CliRunner().invoke(app, [*command.split(), "--help"])
        assert result.exit_code == 0, command
        for option in named:
            assert option in result.stdout, f"calibrate {command} {option}"


def anchors_of(page):
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", *OTHERS])
def test_relative_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


def test_files_that_pages_name_exist():
    """In backticks: all files of the page for developers, and those of the package in others."""
    page = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/.-]+\.(?:py|json|toml)|\w+/)`", page)) - {"runs/"}
    assert {"core/", "calibrate/core/rule.py"} <= files
    files |= set(re.findall(r"`(calibrate/[\w/]+(?:\.py)?)`", "\n".join(PAGES)))
    inside = ("", "calibrate", "calibrate/export", "tests", "scripts", "scripts/studies")
    for file in files:
        assert any((ROOT / folder / file).exists() for folder in inside), file
