"""Fixtures shared by all tests: tiny random models, made once per session."""

import os
from functools import cache

os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # before torch: threads that wait long sleep

import pytest
import torch
import transformers

from masw.engines.decoder import Decoder
from tests.models import random_model, save_model
from tests.pairs import build_pair

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


@pytest.fixture(scope="module")
def one_thread():
    """Tiny models run faster on one thread, and give the same sums every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A target and a draft of tiny random models, with what Hugging Face makes of them."""
    return build_pair(tmp_path_factory.mktemp("pair"))
