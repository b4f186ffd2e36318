"""A prompt of a document and a question, cut to a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..engines.text import TextCodec


@dataclass(frozen=True)
class FittedPrompt:
    """The prompt as text and ids. whole: nothing of the document was cut."""

    text: str
    ids: tuple[int, ...]
    whole: bool


def fit_prompt(codec: TextCodec, document: str, question: str, length: int) -> FittedPrompt | None:
    """Document and question in at most `length` tokens, the chat template included if there is one.

    The document is cut at its end to fit; None if the question alone does not.
    """
    ids = codec.tokenizer(document, add_special_tokens=False)["input_ids"]
    room, chat = min(len(ids), length), bool(codec.tokenizer.chat_template)
    while True:
        text = f"{codec.decode(ids[:room]).strip()}\n\n{question}".strip()
        prompt = tuple(codec.encode(text, chat_template=chat))
        if len(prompt) <= length:
            return FittedPrompt(text, prompt, room == len(ids))
        if room == 0:
            return None
        room = max(0, room - (len(prompt) - length))
