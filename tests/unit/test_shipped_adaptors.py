"""The adaptors shipped for the embedded pair, on text that every Python carries.

Tok./Iter by the evaluation that equals the running loop; answers are the model's own. The modules
differ a little between Python versions, hence the tolerance.
"""

import pydoc_data.topics
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from masw.build.adaptor.answers import Answerer
from masw.build.adaptor.comparison import Comparison, compare, overall
from masw.build.adaptor.prompts import CODE, TEXT, PromptMaker, read_texts
from masw.build.embedded_pair import embedded_model, prepare_embedded_pair, shipped_adaptor
from masw.engines.adaptor import read_adaptor
from masw.engines.decoder import Decoder
from masw.engines.recipe import load_recipe, recipe_folder
from masw.engines.recipes import EMBEDDED
from masw.engines.text import TextCodec

PREFIX, NEW = 1024, 48
MODULES = ("_pydecimal.py", "mailbox.py", "turtle.py")
RECIPE = load_recipe(EMBEDDED).memory
PINNED = {"trained r8": 4.43, "trained r4": 4.43, "trained r8 S16 W240 r8": 4.95}
TOLERANCE = 0.3
FOLDER = recipe_folder() / "embedded"


@pytest.fixture(scope="module")
def tok_iter():
    """Tok./Iter by memory over continued modules and the manual."""
    folder = embedded_model(print)
    maker = PromptMaker(TextCodec(folder), PREFIX)
    library = Path(sysconfig.get_paths()["stdlib"])
    code = read_texts([library / name for name in MODULES])
    manual = [("topics", "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))]
    prompts = [*maker.continuations(code, CODE), *maker.continuations(manual, TEXT)]
    assert len(prompts) == len(MODULES) + 1
    [answered] = Answerer(folder, torch.float32).run(prompts, NEW, len(prompts))
    comparison = Comparison(
        {f"trained r{r}": FOLDER / f"adaptor-r{r}.safetensors" for r in (8, 4)},
        transferred=((RECIPE.sink, RECIPE.window, RECIPE.interval),),
        untrained=((128, 8), (128, 4)),
        equal=(8,),
        swa=(),
        snapkv=False,
        max_tokens=NEW,
    )
    summaries = compare(comparison, Decoder.load(folder), answered, lambda text: None, False)
    return overall(summaries)[str(PREFIX)]


@pytest.mark.parametrize("name", PINNED)
def test_acceptance_is_what_was_pinned(tok_iter, name):
    assert tok_iter[name] == pytest.approx(PINNED[name], abs=TOLERANCE)
    assert tok_iter["full"] > 5


@pytest.mark.parametrize("interval", [8, 4])
def test_training_beats_untrained_copies(tok_iter, interval):
    assert tok_iter[f"trained r{interval}"] > tok_iter[f"untrained W128 r{interval}"]


@pytest.mark.parametrize("interval", [8, 4])
def test_the_files_state_their_memory_and_are_in_bfloat16(interval):
    config, tensors = read_adaptor(FOLDER / f"adaptor-r{interval}.safetensors")
    assert (config.sink, config.window, config.interval) == (128, 128, interval)
    assert config.trained and config.low_rank == 0
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_pair_serves_the_shipped_weights_in_the_recipes_memory():
    config, served = read_adaptor(prepare_embedded_pair() / "adaptor.safetensors")
    shipped = read_adaptor(FOLDER / f"adaptor-r{RECIPE.interval}.safetensors")[1]
    assert config.rule(RECIPE.rollback) == RECIPE and config.trained
    assert served.keys() == shipped.keys()
    assert all(torch.equal(served[name], shipped[name]) for name in served)


def test_a_memory_that_no_adaptor_was_trained_for_has_none():
    assert shipped_adaptor(replace(RECIPE, interval=16)) is None
    assert shipped_adaptor(replace(RECIPE, visibility="materialized")) is None
