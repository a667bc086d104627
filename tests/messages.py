"""What the tests of wording share: those in test_messages*.py, and in no other file."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import reopen
from test_cli import call

from calibrate.store.fits_store import published_store


def full(text: str) -> re.Pattern[str]:
    """A message in full: {here} is the working folder, {store} the published fits, <*> varies."""
    text = text.replace("{here}", os.getcwd()).replace("{store}", str(published_store()))
    return re.compile(re.escape(text).replace(re.escape("<*>"), ".*"))


@contextmanager
def says(kind: type[Exception], text: str) -> Iterator[None]:
    """An error of that very class, with a message in full."""
    with pytest.raises(kind) as failed:
        yield
    assert type(failed.value) is kind
    assert full(text).fullmatch(str(failed.value)), str(failed.value)


@contextmanager
def warns(text: str) -> Iterator[None]:
    """A warning with a message in full."""
    with pytest.warns(UserWarning, match=f"^(?:{full(text).pattern})$"):
        yield


def collections_of_a_head(folder: Path) -> Path:
    """A folder with collections of a head: of all rows, of misranked ones, of a part."""
    small = ("--sizes", 16, "--sets", 64)
    call("collect", *small, "--out", folder / "all")
    call("collect", *small, "--keep", "misranked", "--out", folder / "misranked")
    call("collect", *small, "--out", folder / "part")
    reopen(folder / "part")
    return folder
