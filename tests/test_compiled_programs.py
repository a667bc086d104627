"""Programs are kept for the user's own processor, where nobody else can write."""

import os
import sys

import pytest

from calibrate.__main__ import MAX_PROGRAM_BYTES, keep_compiled_programs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="folders of POSIX")
FOLDER = "JAX_COMPILATION_CACHE_DIR"


def test_they_are_kept_in_the_users_cache_folder(here):
    environment = {"XDG_CACHE_HOME": str(here)}
    keep_compiled_programs(environment)
    (folder,) = (here / "calibrate").iterdir()
    assert environment[FOLDER] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert int(environment["JAX_COMPILATION_CACHE_MAX_SIZE"]) == MAX_PROGRAM_BYTES


@pytest.mark.parametrize("name", [FOLDER, "JAX_COMPILATION_CACHE_MAX_SIZE"])
def test_what_the_user_says_stays(here, name):
    environment = {"XDG_CACHE_HOME": str(here), name: "7"}
    keep_compiled_programs(environment)
    assert environment == {"XDG_CACHE_HOME": str(here), name: "7"}
    assert not list(here.iterdir())


def test_a_folder_that_others_may_write_to_is_not_used(here):
    environment = {"XDG_CACHE_HOME": str(here)}
    keep_compiled_programs(environment)
    os.chmod(environment.pop(FOLDER), 0o777)
    again = {"XDG_CACHE_HOME": str(here)}
    keep_compiled_programs(again)
    assert FOLDER not in again


def test_without_a_folder_the_command_goes_on(here):
    (here / "calibrate").write_text("a file")
    environment = {"XDG_CACHE_HOME": str(here)}
    keep_compiled_programs(environment)
    assert FOLDER not in environment


def test_another_processor_has_another_folder(here):
    folders = set()
    for flags in ("avx2", "avx2 avx512f"):
        environment = {"XDG_CACHE_HOME": str(here)}
        keep_compiled_programs(environment, flags)
        folders.add(environment[FOLDER])
    assert len(folders) == 2
