"""Small tokenizers of the two kinds the decoder's families use, made in memory and saved."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

TEXT = "The cat, the dog and the 🙂 sat. 中文测试和日本語 ö é ж ب 🎉 e\u0301 the end\n" * 4
SPECIAL = ["<s>", "</s>", "<unk>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} ->"


def byte_level(directory: Path, template: str | None = TEMPLATE) -> Path:
    """Byte-level BPE, as Llama 3 and Qwen have: a token is any run of bytes; no BOS of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    return _save(tokenizer, directory, template)


def sentence_piece(directory: Path, template: str | None = TEMPLATE) -> Path:
    """BPE with byte fallback, as Llama 2 and Mistral have: no leading space, BOS added."""
    pieces = [*sorted(set(TEXT) - set(" \n🙂文本")), "▁", "▁the", "▁cat", "▁中", "he", "and"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [("h", "e")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    prepend, spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([prepend, spaces])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return _save(tokenizer, directory, template)


def _save(tokenizer: Tokenizer, directory: Path, template: str | None) -> Path:
    tokenizer.add_special_tokens(SPECIAL)
    names = dict(zip(("bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


KINDS = {"byte-level": byte_level, "sentence-piece": sentence_piece}
