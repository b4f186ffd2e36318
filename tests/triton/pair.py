"""A tiny random pair with a real tokenizer: quick to serve, and hard on everything about text.

The target can say a few hundred tokens: words, characters of several scripts, and single bytes
that begin or continue a character, so that its greedy output is full of characters split over
tokens, and of bytes that are none. The draft is a copy with noise: it is right about every second
time. Hugging Face's `generate` on the same folder says what every answer must be.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers

from masw.engines.adaptor import AdaptorConfig
from masw.engines.decoder import Decoder
from masw.engines.pair import Pair
from masw.engines.text import TextCodec
from masw.plugins.slot_attention.rule import MemoryRule
from tests.pairs import perturbed, reference

PAIR = Pair(
    memory=MemoryRule(sink=16, window=16, rollback=16, interval=8),
    max_length=2048,
    draft_tokens=5,
    chunk=64,
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NOISE = 0.01
ATTENTION = 0.4
SAYABLE = " the and of in to a is was not 中文 日 本 é ö ж ب 🙂 🎉 . , \n"


@dataclass(frozen=True)
class TinyPair:
    """A pair's folder and the oracle of what it answers."""

    folder: Path

    @cached_property
    def codec(self) -> TextCodec:
        return TextCodec(self.folder / "target")

    @cached_property
    def model(self) -> transformers.PreTrainedModel:
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folder / "target", attn_implementation="eager"
        )

    def answer_ids(self, ids, max_tokens: int, end_ids=(), min_tokens: int = 0) -> list[int]:
        """New ids of Hugging Face's greedy `generate`; each answer is made once."""
        key = (tuple(ids), max_tokens, tuple(end_ids), min_tokens)
        if key not in self._answers:
            with one_thread():
                self._answers[key] = reference(self.model, *key)
        return self._answers[key]

    @cached_property
    def _answers(self) -> dict[tuple, list[int]]:
        return {}

    def answer(self, text: str, max_tokens: int, template: bool = False, **options) -> str:
        """The same from text to text."""
        ids = self.encode(text, template)
        return self.decode(self.answer_ids(ids, max_tokens, **options))

    def encode(self, text: str, template: bool = False) -> list[int]:
        """Prompt ids by the tokenizer itself."""
        tokenizer = self.codec.tokenizer
        if not template:
            return tokenizer(text)["input_ids"]
        message = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)

    def decode(self, ids) -> str:
        """Text of all ids at once, without special tokens."""
        return self.codec.tokenizer.decode(ids, skip_special_tokens=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """One compute thread within the block: for a tiny model more of them only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def write_pair(folder: Path, tokenizer_of: Path) -> TinyPair:
    """Writes the pair to `folder`, with the tokenizer of the model folder `tokenizer_of`."""
    for role in ("target", "draft"):
        (folder / role).mkdir(parents=True)
        for name in TOKENIZER_FILES:
            shutil.copy(tokenizer_of / name, folder / role)
    model = _random_model(TextCodec(folder / "target").tokenizer)
    model.save_pretrained(folder / "target")
    perturbed(model, NOISE).save_pretrained(folder / "draft")
    decoder, memory = Decoder.load(folder / "draft"), PAIR.memory
    header = (memory.sink, memory.window, memory.interval, memory.visibility)
    adaptor = decoder.copy_adaptor(AdaptorConfig(decoder.fingerprint(), *header))
    adaptor.save(folder / "adaptor.safetensors")
    PAIR.save(folder)
    return TinyPair(folder)


def _random_model(tokenizer) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:  # the last token counts most, so that a window may do
        layer.self_attn.o_proj.weight.data *= ATTENTION
    said = _sayable(tokenizer)
    head = model.lm_head.weight.data
    kept = head[said].clone()
    head.zero_()[said] = kept
    return model.requires_grad_(False).eval()


def _sayable(tokenizer) -> list[int]:
    """Ids of the tokens of SAYABLE and of all single bytes beyond ASCII."""
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    single = {i for i, name in enumerate(names) if len(name) == 1 and _is_partial(tokenizer, i)}
    return sorted(single.union(tokenizer(SAYABLE)["input_ids"]))


def _is_partial(tokenizer, token: int) -> bool:
    return "\ufffd" in tokenizer.decode([token])
