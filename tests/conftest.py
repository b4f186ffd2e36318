"""Fixtures shared by all tests: tiny random models, made once per session."""

import os
from functools import cache

os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # before torch: threads that wait long sleep

import pytest
import torch
import transformers

from masw.engines.decoder import Decoder
from tests.models import random_model, save_model

torch.set_num_threads(min(2, torch.get_num_threads()))
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """model_dir(name) -> directory of that tiny model's files."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name: save_model(root / name, name))


@pytest.fixture(scope="session")
def hf_model():
    """hf_model(name) -> the Hugging Face model that `model_dir(name)` holds."""
    return cache(random_model)


@pytest.fixture(scope="session")
def decoder(model_dir):
    """decoder(name) -> the decoder loaded from `model_dir(name)` in float32."""
    return cache(lambda name: Decoder.load(model_dir(name)))
