"""Architectures by name: what the recipes state, and the check against a real folder."""

import json

import pytest
import torch
import transformers
import yaml

from masw.engines.architectures import ArchitectureError, architecture, check_folder, names
from masw.engines.config import DecoderConfig
from masw.engines.decoder import Decoder
from masw.engines.recipe import recipe_folder

PARAMETERS = {"llama-3.2-3b": 3.21e9, "llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.55e9}


@pytest.mark.parametrize("name", names())
def test_numbers_make_a_model_of_the_published_size(name):
    """The published parameter count, by the decoder's own tensors."""
    with torch.device("meta"):
        decoder = Decoder(architecture(name))
    count = sum(parameter.numel() for parameter in decoder.parameters())
    assert count == pytest.approx(PARAMETERS[name], rel=0.002)


@pytest.mark.parametrize("name", names())
def test_hugging_face_reads_the_same_architecture(name, tmp_path):
    entries = yaml.safe_load((recipe_folder() / "architectures.yaml").read_text())[name]
    assert entries.pop("source").startswith("meta-llama/")
    transformers.AutoConfig.for_model(**entries).save_pretrained(tmp_path)
    assert DecoderConfig.load(tmp_path) == architecture(name)
    assert check_folder(name, tmp_path) == architecture(name)


def test_a_folder_of_another_model_is_named_by_its_first_difference(tmp_path):
    entries = yaml.safe_load((recipe_folder() / "architectures.yaml").read_text())["llama-3.1-8b"]
    (tmp_path / "config.json").write_text(json.dumps(entries | {"num_hidden_layers": 31}))
    with pytest.raises(ArchitectureError, match=r"layers is 31, but llama-3\.1-8b has 32"):
        check_folder("llama-3.1-8b", tmp_path)
    with pytest.raises(ArchitectureError, match=r"'gpt'; known: llama-3\.2-3b"):
        architecture("gpt")
