"""The shape of the code: no circle of imports, and names of classes with one meaning.

The floors of the rooms are in test_packaging.py.
"""

import ast
from collections import Counter
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


# Of the same thing, for JAX and PyTorch.
NAMESAKES = {"QueryBlockSizes"}


def test_a_name_of_a_class_has_one_meaning():
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == NAMESAKES
