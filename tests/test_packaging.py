"""What is installed: a light import, package data, the README's commands."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import numpy
import pytest

import calibrate
from calibrate.storage.fingerprints import sha256_of

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
    """The wheel, unpacked into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ["-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "-q", "-w", ".", str(ROOT)]
    python(build, folder)
    (wheel,) = folder.glob(f"calibrate_softmax-{calibrate.__version__}-*.whl")
    ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_wheel_carries_fits_and_weights(wheel_folder, tmp_path):
    code = """
import calibrate, pathlib
from calibrate.rows.heads import load_head
for name in ("paper", "max-retrieval"):
    print(calibrate.load(name).path)
print(load_head("max-retrieval").fingerprint)
from calibrate.report.fit_record import load_line
assert load_line(calibrate.load("rxnmapper")) == 'calibrate.load("rxnmapper@1")'
"""
    done = python(["-c", code], tmp_path, PYTHONPATH=str(wheel_folder))
    *paths, fingerprint = done.stdout.split()
    for path in paths:
        assert Path(path).is_relative_to(wheel_folder / "calibrate" / "published_fits")
    assert fingerprint == calibrate.load("max-retrieval").source["fingerprint"]
    published = wheel_folder / "calibrate" / "published_fits"
    listed = {str(path.relative_to(published)) for path in published.rglob("*") if path.is_file()}
    # And nothing of a user's.
    assert listed == {
        "chython-rxnmap/1.json",
        "max-retrieval/1.json",
        "paper/1.json",
        "rxnmapper/1.json",
        "smollm2-135m-instruct/1.json",
        "smollm2-135m-instruct-polynomial/1.json",
    }
    schemas = (wheel_folder / "calibrate" / "store" / "schemas").glob("*.json")
    assert [path.name for path in schemas] == ["coefficient-file-1.0.json"]
    guides = {path.name for path in (wheel_folder / "calibrate" / "guides").iterdir()}
    assert guides == {path.name for path in (ROOT / "calibrate" / "guides").iterdir()}
    assert {"heads.md", "serving.md"} <= guides


@pytest.mark.parametrize(
    "code",
    [
        "import calibrate; calibrate.load('paper'); calibrate.identity()",
        "from calibrate.cli.main import app; app(['fits', 'verify'], standalone_mode=False)",
        "import calibrate.cli.main",
    ],
)
def test_light_import(code, tmp_path):
    heavy = HEAVY - {"typer", "rich"} if "cli" in code else HEAVY
    heavy = heavy | {"numpy"} if code.endswith("cli.main") else heavy
    code += f"; import sys; print(*sorted({heavy} & set(sys.modules)))"
    assert python(["-c", code], tmp_path).stdout.splitlines()[-1] == ""


ALONE = """
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
import calibrate
server = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
fit = calibrate.load(f"http://127.0.0.1:{server.server_port}/fit.json#PIN")
print(fit.reference, calibrate.load(fit.address).path.name)
"""


def test_a_fit_loads_from_its_address_where_numpy_is_all_there_is(tmp_path):
    fit = calibrate.load("paper").path.read_bytes()
    (tmp_path / "fit.json").write_bytes(fit)
    (tmp_path / "only").mkdir()
    site = Path(numpy.__file__).parents[1]
    for folder in [*site.glob("numpy*"), *site.glob("msgspec*")]:
        (tmp_path / "only" / folder.name).symlink_to(folder)
    path = os.pathsep.join([str(ROOT), str(tmp_path / "only")])
    code = ALONE.replace("PIN", sha256_of(fit))
    where = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path), "no_proxy": "*"}
    printed = python(["-S", "-c", code], tmp_path, **where).stdout.split()
    assert printed == ["paper@1", f"{sha256_of(fit)[7:]}.json"]


def test_public_names_exist_and_are_documented():
    for name in calibrate.__all__:
        assert getattr(calibrate, name).__doc__, name
    public = {name for name in dir(calibrate) if not name.startswith("__")}
    assert public == set(calibrate.__all__)
    assert {"__version__", "__doc__"} <= set(dir(calibrate))
    # `import calibrate.x` would put a module in the place of a function.
    assert not public & {path.stem for path in (ROOT / "calibrate").iterdir()}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        calibrate.nonsense  # noqa: B018


# From the ground up: a room imports only from rooms above it in this list, as in scripts/README.md.
ROOMS = [
    "defaults version",
    "errors",
    "core parallel",
    "storage",
    "store",
    "evidence",
    "rows",
    "jax torch transformers capturing",
    "prompts conformance",
    "export",
    "vllm fitting",
    "model pipeline array_fit",
    "report",
    "batch_fit sklearn cli",
]
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms.split()}
RUNTIME = ROOMS[FLOORS["jax"]].split()  # rooms that import from each other


def higher_imports(package):
    """(module, room) of every import that leads to a room beside or above."""
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).with_suffix("")
        room = module.parts[0]
        for imported in set(re.findall(r"(?:from|import) calibrate\.(\w+)", path.read_text())):
            beside = imported == room or {imported, room} <= set(RUNTIME)
            if not room.startswith("__") and not beside and FLOORS[imported] >= FLOORS[room]:
                yield module.as_posix(), imported


def test_a_room_imports_only_from_rooms_below(tmp_path):
    assert list(higher_imports(ROOT / "calibrate")) == []
    for name, text in {
        "core/a": "from calibrate.parallel import run",  # beside
        "jax/a": "from calibrate.torch import entropy",
        "store/a": "def f():\n    import calibrate.model.fit",
    }.items():
        path = (tmp_path / name).with_suffix(".py")
        path.parent.mkdir()
        path.write_text(text)
    assert list(higher_imports(tmp_path)) == [("core/a", "parallel"), ("store/a", "model")]


def definitions_of(module):
    """The names that a module defines at its top level; none if there is no such file."""
    path = (ROOT / "calibrate" / module.replace(".", "/")).with_suffix(".py")
    if not path.exists():
        return set()
    named = ast.ClassDef | ast.FunctionDef
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, named)}


PACKAGES = sorted(path.parent for path in (ROOT / "calibrate").rglob("__init__.py"))


def signposts_of(package):
    """The files, modules and names in backticks in the docstring of a package."""
    about = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    quoted = (text.partition("(")[0] for text in re.findall(r"`([^`]+)`", about))
    return [text for text in quoted if not text.startswith("calibrate ")]  # a command


@pytest.fixture(scope="module")
def all_definitions():
    paths = (path.relative_to(ROOT / "calibrate") for path in (ROOT / "calibrate").rglob("*.py"))
    modules = [".".join(path.with_suffix("").parts) for path in paths]
    return {name for module in modules for name in definitions_of(module)}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_docstrings_of_packages_name_what_exists(package, all_definitions):
    inside = "" if package == ROOT / "calibrate" else f"{package.name}."
    for text in signposts_of(package):
        if text.endswith((".py", ".json", ".md")):
            there = (package / text).exists() or (ROOT / "calibrate" / text).exists()
        elif "." in text:
            module, _, name = text.rpartition(".")
            there = name in definitions_of(module) | definitions_of(inside + module)
        else:
            there = text in all_definitions or (package / f"{text}.py").exists()
        assert there, f"{package.name}/__init__.py names {text}"


# Those that are run, not the modules that they share.
SCRIPTS = [
    path
    for path in sorted((ROOT / "scripts").rglob("*.py"))
    if b'\nif __name__ == "__main__":\n' in path.read_bytes()
]


def imports_of(script):
    """(script, module of the package, name) of every import."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("calibrate"):
            yield from ((script.name, node.module, alias.name) for alias in node.names)


def test_scripts_import_what_the_package_has():
    modules = (ROOT / "scripts").rglob("*.py")
    found = [name for script in {*SCRIPTS, *modules} for name in imports_of(script)]
    assert len({script for script, *_ in found}) > 10
    for script, module, name in found:
        path = ROOT / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        is_module = (path / f"{name}.py").exists() or (path / name).is_dir()
        defined = re.search(rf"\b{name}\b", file.read_text(encoding="utf-8"))
        assert is_module or defined, f"{script}: {module} has no {name}"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda x: x.stem)
def test_a_script_asked_for_help_does_nothing_else(script):
    about = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    command = [sys.executable, script, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])  # needs an extra
    assert done.returncode == 0, done.stderr
    assert about.split("\n")[0] in " ".join(done.stdout.split())
