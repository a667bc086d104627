"""The shape of the code: no circle of imports, names with one meaning, short functions.

The floors of the rooms are in test_packaging.py.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "calibrate"


def graph_of_imports(package):
    """By module of a package, the modules that it imports: at its top, in functions, for types."""
    paths = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path
        for path in package.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {}
    for module, path in modules.items():
        graph[module] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else node.module for name in inside]
            graph[module] |= {name for name in names if name in modules}
    return graph


def circles_of(graph):
    """The modules that lead back to themselves, in groups that lead to each other."""

    def reached(module):
        seen, ahead = set(), [module]
        while ahead:
            new = graph[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    all_reached = {module: reached(module) for module in graph}
    groups = {
        frozenset(x for x in below if module in all_reached[x])
        for module, below in all_reached.items()
        if module in below
    }
    return sorted(map(sorted, groups))


def test_no_imports_of_files_form_a_circle(tmp_path):
    """Nor those inside functions: what two files need of each other lies below both."""
    assert circles_of(graph_of_imports(PACKAGE)) == []
    planted = {
        "__init__": "from p.a import A",
        "a": "def f():\n    from p import b",
        "b": "from p.c import C",
        "c": "import p.a",
        "d": "import p.a",
    }
    (tmp_path / "p").mkdir()
    for name, text in planted.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    assert circles_of(graph_of_imports(tmp_path / "p")) == [["p.a", "p.b", "p.c"]]


# The same thing for several backends, each in a room of its own.
NAMESAKES = {
    "QUERY_BLOCKS", "QueryBlockSizes", "adaptive_softmax", "apply_mask", "capture", "entropy",
    "head_table", "inverse_temperature", "log_n_unmasked", "wide",
}  # fmt: skip
# What is left of today's code: entries are taken out as the code is mended.
NAMED_OF = {"of_whole_model"}
LONG = {"jax/flax.py:attention_fn"}
DOORS = {"__main__.py", "capturing.py"}  # and each command, a file of its own
MOST_LINES = 40


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def names_defined_by(tree):
    """The names of functions, classes and constants at the top of a module, without underscore."""
    for node in tree.body:
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def modules_by_name(package):
    """The modules that define each name."""
    modules = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for name in names_defined_by(parse(path)):
            modules[name].append(path.relative_to(package).as_posix())
    return modules


def several_meanings(package):
    """Names that several modules define, but for one in each room of a name in NAMESAKES."""
    several = {}
    for name, modules in modules_by_name(package).items():
        rooms = {module.split("/")[0] for module in modules}
        if len(modules) > 1 and not (name in NAMESAKES and len(rooms) == len(modules)):
            several[name] = modules
    return several


def test_a_name_has_one_meaning(tmp_path):
    """Of functions, classes and constants; methods and private names are left out."""
    several = several_meanings(PACKAGE)
    assert several == {}
    rooms = {"jax": "QUERY_BLOCKS = 1\ndef run(): ...", "torch": "QUERY_BLOCKS: int = 1"}
    for room, text in rooms.items():
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("class run: ...\n_x = 1")
    assert several_meanings(tmp_path) == {"run": ["b.py", "jax/a.py"]}


def functions_of(package):
    """(module, function) of every function and method."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                yield path.relative_to(package).as_posix(), node


def body_lines(function):
    """Lines of a function after its parameters and its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_names_of_functions_are_verbs():
    """Or nouns of mathematics: a name `of_...` says neither."""
    named_of = {node.name for _, node in functions_of(PACKAGE) if node.name.startswith("of_")}
    assert named_of <= NAMED_OF


def test_functions_are_short():
    lines = {f"{path}:{node.name}": body_lines(node) for path, node in functions_of(PACKAGE)}
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert long.keys() <= LONG, long
    planted = ast.parse("def f(a,\n  b):\n  '''A\n  docstring.'''\n  a = 1\n  b = 2").body[0]
    assert body_lines(planted) == 2


def small_modules(package, graph):
    """Short modules that only one other module imports: they belong into it."""
    importers = Counter(name for names in graph.values() for name in names)
    for module, count in importers.items():
        path = package.parent / (module.replace(".", "/") + ".py")
        if count == 1 and path.exists() and len(path.read_text().splitlines()) < MOST_LINES:
            yield path.relative_to(package).as_posix()


def test_a_small_module_has_several_importers(tmp_path):
    small = small_modules(PACKAGE, graph_of_imports(PACKAGE))
    small = {module for module in small if not module.startswith("cli/")} - DOORS
    assert small == set()
    (tmp_path / "p").mkdir()
    for name, text in {"a": "", "b": "import p.a\nimport p.c", "c": "", "d": "import p.c"}.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    assert list(small_modules(tmp_path / "p", graph_of_imports(tmp_path / "p"))) == ["a.py"]
