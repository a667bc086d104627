"""Every public function and class has an example in its docstring, and the example runs."""

import doctest
import importlib
import io

import numpy as np
import pytest

import calibrate

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Public modules, and the extra that each needs.
MODULES = {
    "calibrate": None,
    "calibrate.jax": None,
    "calibrate.torch": "torch",
    "calibrate.transformers": "transformers",
}
# Public names that have no example yet.
MISSING: set[str] = set()


def public_objects():
    """(name, function or class) of the public modules that can be imported; exceptions left out.

    An object has one name: `calibrate.entropy` is listed as `calibrate.jax.entropy`.
    """
    names = {}
    for module, extra in MODULES.items():
        try:
            public = importlib.import_module(module)
        except ImportError:
            assert extra is not None
            continue
        for name in public.__all__:
            value = getattr(public, name)
            if not (isinstance(value, type) and issubclass(value, Exception)):
                names[value] = f"{module}.{name}"
    return {name: value for value, name in names.items()}


PUBLIC = public_objects()


def run_examples(name, value):
    """The number of examples in the docstrings of an object; fails if one of them does.

    They know `calibrate`, `np` and the object by its own name, and import all else.
    """
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS)
    report = io.StringIO()
    known = {"calibrate": calibrate, "np": np, name.rpartition(".")[2]: value}
    for test in finder.find(value, name, module=False, globs=known):
        runner.run(test, out=report.write)
    assert runner.failures == 0, report.getvalue()
    return runner.tries


SLOW = {"calibrate.capture", "calibrate.jax.dot_product_attention"}
NEEDS_TORCH = {"calibrate.fit_model"}  # others of an extra are in its module


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in PUBLIC]
)
def test_the_examples_of_a_docstring_run(name):
    if name in NEEDS_TORCH:
        pytest.importorskip("torch", exc_type=ImportError)
    examples = run_examples(name, PUBLIC[name])
    assert examples or name in MISSING, f"{name} has no example"


def test_every_name_that_lacks_an_example_is_public():
    """Names of extras that are not installed may be listed, too."""
    installed = tuple(f"{name.rpartition('.')[0]}." for name in PUBLIC)
    assert {name for name in MISSING if name.startswith(installed)} <= PUBLIC.keys()


def double(number):
    """Doubles a number.

    >>> pathlib.Path()
    """
    return 2 * number


def test_a_wrong_example_fails():
    with pytest.raises(AssertionError, match="NameError"):
        run_examples("double", double)
    double.__doc__ = ">>> 1 + 1\n5"
    with pytest.raises(AssertionError, match="Expected:\n *5\n *Got:\n *2"):
        run_examples("double", double)
    double.__doc__ = ">>> 1 + 1\n2"
    assert run_examples("double", double) == 1
