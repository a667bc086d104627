"""Wording of the one line in which a command refuses: a part of it that tells its cause.

Those that Python raises too are in the other files of messages, in full.
"""

import gzip
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from messages import collections_of_a_head, full
from test_cli import call, refusal

ONE_OF = "is not one of 'all', 'misranked'"
BAD = [
    ("collect --head nope", 1, "no head is named 'nope'; use one of"),
    ("collect --head [/x]", 1, "no head is named '[/x]'"),
    ("collect --head no.npz", 1, "no.npz does not exist"),
    ("collect --logits no.npz", 1, "no.npz does not exist; check the path"),
    *((f"collect --logits x.npz {option}", 2, "cannot be used with --logits")
      for option in ("--sizes 16", "--head max-retrieval", "--sets 1")),
    ("collect --sizes 4..2", 2, "write set sizes, 2 to 1,048,576"),
    ("collect --sizes 16,x", 2, "'x': write set sizes, 2 to 1,048,576: 16..256 or 16,100"),
    ("collect --sizes 16..99999999999", 2, "write set sizes"),
    (f"collect --sizes {'9' * 5_000}", 2, "write set sizes"),
    ("collect --sets 0", 2, "--sets"),
    *((f"{command} {10**30}", 2, "less than or equal to") for command in (
        "collect --sets", "collect --jobs", "evaluate --sets", "run --sets",
        "model collect --model . --task retrieval --examples",
    )),
    ("collect --timeout 0", 2, "--timeout"),
    ("collect --max-bytes lots", 2, "--max-bytes"),
    ("collect --max-bytes 1e999", 2, "--max-bytes"),
    ("collect --max-bytes 1e3", 1, "give at least"),
    ("collect --keep some", 2, f"'some' {ONE_OF}"),
    ("fit nowhere --name x", 1, "nowhere is not a collection"),
    ("fit runs/[/b] --name x", 1, "runs/[/b] is not a collection"),
    ("fit nowhere --name ../x", 1, "'../x' is not a valid fit name"),
    ("fit nowhere --name x --q 2", 2, "--q"),
    ("fit nowhere --name x --min-beta 2", 2, "--min-beta"),
    ("fit nowhere --name x --rows some", 2, f"'some' {ONE_OF}"),
    ("fit nowhere --name x --paper --min-entropy 0.5", 2, "cannot be used with --paper"),
    ("fit nowhere --name x --kind quartic", 2, "'quartic' is not one of 'auto', 'constant'"),
    ("fit nowhere --name x --loss log-least-squares", 2, "goes with --kind polynomial"),
    *((f"fit nowhere --name x --kind polynomial --loss least-squares {option} {value}", 2,
       f"leave out {option}") for option, value in (
        ("--q", 1), ("--head", "a:b"), ("--trained-up-to", 128), ("--tolerance", 0),
    )),
    *((command, 2, f"'{command.split()[-2]}': it is {now} now") for command, now in (
        ("fit nowhere --name x --force-polynomial --json", "--kind polynomial"),
        ("fit nowhere --name x --gate 0.5", "--min-entropy"),
        ("collect --fresh --json", "--overwrite"),
        ("collect --stall 5", "--timeout"),
        ("export --check x --engine y --served z", "--served-model-name"),
        ("model collect --model . --text book.txt", "--retention-text"),
        ("model run --model . --no-text --json", "--no-retention-text"),
        ("model fit nowhere --name x --strength 0.5", "--interpolation"),
        ("model fit nowhere --name x --allowed-loss 0.1",
         "--max-kl (for KL divergence) and --tolerance (for NLL)"),
    )),
    ("solve nowhere --stall=5", 2, "it is --timeout now"),
    ("solve nowhere --text x", 2, "No such option: --text"),  # it has no --retention-text
    ("model fit nowhere --name x --tolerance 0.1", 2, "--tolerance is for --trained-up-to"),
    ("fit nowhere --name x --paper --tolerance 0.1", 2, "cannot be used with --paper"),
    ("fit nowhere --name x --tolerance -1", 2, "--tolerance"),
    ("run --paper --kind constant", 2, "cannot be used with --paper"),
    ("fit nowhere --name x --head a:b --q 1", 2, "--head chooses q, and cannot be used with --q"),
    ("fit nowhere --name x --paper --head a:b", 2, "cannot be used with --paper"),
    ("fit nowhere --name x --paper --min-beta 1", 2, "cannot be used with --paper"),
    ("run --logits x.npz --sizes 16", 2, "--sizes and --sets cannot be used with --logits"),
    ("run --task retrieval", 2, "for a model: `calibrate model run`"),
    ("collect --model org/name", 2, "for a model: `calibrate model collect`"),
    ("evaluate --model=x", 2, "for a model: `calibrate model evaluate`"),
    ("collect --head my_head.Head", 1, "did you mean my_head:Head? Use one of"),
    ("collect --head max-retreival-3", 1, "did you mean max-retrieval-3? Use one of"),
    *((f"{command} --model org/name", 1, "'org/name' is not a local folder. Models are not "
       "downloaded; run `hf download org/name --local-dir FOLDER` first.")
      for command in ("model run", "model collect", "export paper --out o")),
    ("run --name Bad-Name", 1, "not a valid fit name"),
    ("evaluate --head max-retrieval-10", 1, "no head is named 'max-retrieval-10'"),
    ("evaluate --fits nope", 1, "no fit is named 'nope'"),
    ("evaluate --sets 1", 2, "--sets"),
    ("evaluate --sizes 1", 2, "set sizes, 2 to"),
    ("train", 2, "No such command"),
    ("verify nowhere", 2, "No such command"),
    ("model collect --model . --retention-text absent", 2, "'absent' does not exist"),
    ("model run --model . --name My_Fit", 1, "'My_Fit' is not a valid fit name"),
    ("model run --model . --prompts no.jsonl", 2, "'no.jsonl' does not exist"),
    ("model fit nowhere --name x --max-kl -1", 2, "--max-kl"),
    ("export nofit --model . --out new", 1, "no fit is named 'nofit'"),
    *((f"{command} --model no/such.gguf", 1, "no/such.gguf does not exist; give the folder of a")
      for command in ("model run", "model collect", "model evaluate runs/a", "export paper --out o",
                      "report paper --out x.html")),
    ("export paper --model no.gguf --out new.gguf", 1, "no.gguf does not exist; give one of"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "code", "message"), BAD)
def test_bad_input_gets_one_clear_line(here, monkeypatch, command, code, message):
    """Before anything is collected, or a model is loaded."""
    monkeypatch.setitem(sys.modules, "calibrate.transformers", None)  # an import fails
    assert message in refusal(*command.split(), code=code)
    assert os.listdir(here) == []


def test_a_working_folder_that_was_deleted_is_named(here, monkeypatch):
    """By whatever fails for it; what needs no folder runs."""
    gone = "the working folder does not exist any more; change to another"
    (here / "x").mkdir()
    monkeypatch.chdir("x")
    (here / "x").rmdir()
    for command in ("fits list", "fits verify", "collect --sizes 16 --sets 64 --out y"):
        assert refusal(*command.split()) == f"calibrate: {gone}"
    for command in ("export paper --model m --out y", "fit runs/a --name y"):
        assert refusal(*command.split()).endswith(f" ({gone})")
    assert "paper@1" in call("fits", "show", "paper").stdout
    monkeypatch.chdir(here)
    assert gone not in refusal("fit", "runs/a", "--name", "y")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "nothing"], 1, "no fit is named 'nothing'"),
        (["diff", "paper", "nothing"], 1, "no fit is named 'nothing'"),
        (["verify", "nothing"], 1, "no fit is named 'nothing'"),
        (["verify", "--store", "nowhere"], 1, "nowhere does not exist"),
        (["alias", "paper", "stable"], 1, "'paper' has no version number; use"),
        (["yank", "paper@1"], 1, "which is not changed; name its store"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_commands_of_fits(here, arguments, code, message):
    assert message in refusal("fits", *arguments, code=code)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["max-retrieval", "--out", "nope/r.html"], 2, "'nope/r.html' is not an .html file in an"),
        (["max-retrieval", "--out", "."], 2, "'.' is not an .html file"),
        (["max-retrieval", "--out", "folder.html"], 1, "cannot write folder.html"),
        (["max-retrieval", "--out", "r.pdf"], 2, "'r.pdf' is not an .html file"),
        (["nope", "--out", "r.html"], 1, "nope"),
        (["max-retrieval", "--out", "r.html", "--run", "runs/other"], 1, "was not fitted to"),
        (["paper", "--out", "r.html"], 1, "was made for no head that comes with the package"),
        (["max-retrieval", "--head", "max-retrieval-3", "--out", "r.html"], 1, "was made for"),
    ],
)
def test_reports(here, arguments, code, message):
    (here / "folder.html").mkdir()
    (here / "runs/none").mkdir(parents=True)
    if "runs/other" in arguments:
        call("collect", "--sizes", "16", "--sets", "8", "--out", "runs/other")
    assert message in refusal("report", *arguments, code=code)
    assert not (here / "r.html").exists()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return collections_of_a_head(tmp_path_factory.mktemp("commands"))


# A command in a folder with collections, and its line in full.
LINES = {
    "fit misranked --name x --rows all": (
        "misranked keeps misranked rows only, and all are asked for; collect into another folder "
        "and keep all rows, or fit with --rows misranked"
    ),
    "diagnose misranked": (
        "misranked keeps misranked rows only, and a diagnosis needs a sample of all rows; collect "
        "into another folder and keep all rows"
    ),
    "fit part --name x": (
        "part is unfinished; run the same command again or fit its finished shards: `calibrate "
        "fit --allow-partial`"
    ),
    "model diagnose all": (
        "all holds rows of a head; use `calibrate fit` or `calibrate diagnose`, or collect into a "
        "new folder"
    ),
    "fits show ./nothing": "nothing does not exist; check the path",
    "collect --sizes 16 --sets 65 --out all": (
        "all is another collection: sets is 64 in the folder and 65 in this call; give the same "
        "options, another folder with --out, or --overwrite to replace it"
    ),
    "export paper --model . --out o": "o is within the model's folder; choose another",
    "export --check all": "all has no config.json; give a folder that calibrate export wrote",
}


@pytest.mark.parametrize("command", LINES)
def test_a_command_on_collections(command, home, monkeypatch):
    if command.startswith("export"):
        pytest.importorskip("transformers", reason="needs the extra transformers")
    monkeypatch.chdir(home)
    line = refusal(*command.split())
    assert full(f"calibrate: {LINES[command]}").fullmatch(line), line


def test_what_is_complete_or_unchanged(home, monkeypatch):
    monkeypatch.chdir(home)
    again = call("collect", "--sizes", 16, "--sets", 64, "--out", "all")
    assert again.stderr.endswith("all is already complete\n")


def test_other_formats_are_named_with_what_to_do():
    logits, target = np.zeros((9, 4)), np.zeros(9, int)
    np.save("mine.npy", logits)
    np.savez("mine.npz", logits=logits, target=target)
    Path("mine.npz.gz").write_bytes(gzip.compress(Path("mine.npz").read_bytes()))
    Path("mine.gz").write_bytes(b"")
    shutil.make_archive("all", "zip", ".", "mine.npz")
    np.savez_compressed("small.npz", logits=logits, target=target)
    for file, message in (
        ("mine.npy", 'one array without a name; .* numpy.savez("mine.npz", logits=logits, '),
        ("mine.npz.gz", "is compressed; unpack it first: gunzip / .* /mine.npz.gz"),
        ("mine.gz", "is compressed; unpack it first: gunzip / .* /mine.gz"),
        ("all.zip", "is a zip archive; unpack it first, and give the folder with its .npz files"),
        ("small.npz", "write the file with numpy.savez, not numpy.savez_compressed"),
    ):
        line = refusal("collect", "--logits", file)
        assert all(words in line for words in (file, *message.split(" .* "))), line
