"""A model that carries a fit takes no second one: beta would be beta^2."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import transformers
from commands import call, refusal
from test_export import constants, export
from test_export_gguf import FACTORS
from test_export_gguf import constants as constants_of_layers
from tiny_causal import causal_model, save
from tiny_gguf import small_model, write_gguf

from calibrate.errors import CalibrateError
from calibrate.export.gguf_file import export_gguf
from calibrate.export.gguf_model import GgufModel
from calibrate.export.lora import by_lora
from calibrate.export.numerical_check import exportable
from calibrate.export.plan import TAGS
from calibrate.export.preparation import prepare
from calibrate.store.publishing import publish
from calibrate.transformers.folders import ModelFolder

FIT = constants(causal_model().config)


@pytest.fixture
def exported(here):
    return export(FIT, save(Path("m"), causal_model(), tokenizer=False))


def saved_again(folder):
    """By Transformers, which keeps the key of config.json, and copies no other file."""
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained("again")
    return Path("again")


def without_its_key(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["calibrate"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("change", [lambda folder: folder, saved_again, without_its_key])
def test_an_exported_folder(exported, change):
    folder = ModelFolder(change(exported))
    with pytest.raises(CalibrateError, match="carries the fit .* give the original"):
        prepare(FIT, folder, any_model=True)
    with pytest.raises(CalibrateError, match="carries the fit .* give the original"):
        prepare(FIT, folder, any_model=True, export=by_lora)


def test_no_fit_is_made_for_the_export_of_an_export(exported):
    with pytest.raises(CalibrateError, match="carries the fit"):
        exportable(ModelFolder(exported))


def fit_of_file():
    return constants_of_layers(FACTORS, FACTORS[::-1])


def test_an_exported_file(here):
    original = write_gguf(Path("m"), small_model()) / "tiny.gguf"
    export_gguf(fit_of_file(), GgufModel(original), Path("mine.gguf"))
    with pytest.raises(CalibrateError, match=r"mine\.gguf carries the fit"):
        export_gguf(fit_of_file(), GgufModel(Path("mine.gguf")), Path("out.gguf"), any_model=True)
    assert not Path("out.gguf").exists()


@pytest.mark.parametrize("tags", [[*TAGS], ["text-generation", *TAGS]])
def test_a_file_that_was_converted_from_an_exported_folder(here, tags):
    """llama.cpp's converter writes the tags of the folder's card."""

    def add(writer):
        writer.add_tags(tags)

    converted = write_gguf(Path("m"), small_model(), add_keys=add) / "tiny.gguf"
    with pytest.raises(CalibrateError, match=r"tiny\.gguf carries the fit"):
        export_gguf(fit_of_file(), GgufModel(converted), Path("out.gguf"), any_model=True)


def test_a_file_with_tags_of_its_own(here):
    def add(writer):
        writer.add_tags([TAGS[0], "text-generation"])

    original = write_gguf(Path("m"), small_model(), add_keys=add) / "tiny.gguf"
    export_gguf(fit_of_file(), GgufModel(original), Path("out.gguf"))
    fields = gguf.GGUFReader("out.gguf").fields
    assert fields["calibrate.fit"]


def test_the_original_of_a_check_is_no_export(exported):
    reference = publish(FIT, Path("fits"))[0].reference
    shutil.rmtree(exported)
    call("export", reference, "--model", "m", "--out", exported)
    options = ("--engine", "http://localhost:1", "--model", exported)
    assert "carries the fit" in refusal("export", "--check", exported, *options)
