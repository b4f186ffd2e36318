"""Text in and out of the loop: tokenizer, chat template, UTF-8-safe streaming, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .messages import InvalidRequest

INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are no whole character (yet)


class TextCodec:
    """A pair's tokenizer."""

    def __init__(self, directory: Path):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)

    def encode(self, text: str, chat_template: bool = False) -> list[int]:
        """Ids of a prompt with exactly one BOS where the model has one.

        chat_template: wrap `text` as one user message with the model's own template. Raises
        InvalidRequest for an empty prompt or a model without template.
        """
        if not text:
            raise InvalidRequest("text_input is empty; give 1 or more characters")
        if not chat_template:
            return self._single_bos(self.tokenizer(text)["input_ids"])
        if not self.tokenizer.chat_template:
            raise InvalidRequest("apply_chat_template is true; this tokenizer has no template")
        message = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
        return self._single_bos(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens; bytes that are no character show as U+FFFD."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def stream(self, stop_words: Sequence[str] = ()) -> TextStream:
        """A stream of the text of one generation."""
        return TextStream(self, stop_words)

    def _single_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


class TextStream:
    """Turns growing ids into text, piece by piece.

    The pieces add up to the decoded whole, cut before the first stop word. Characters whose bytes
    are not complete, and text that may be the start of a stop word, are held back until decided.
    What is decided depends on the ids so far, not on the pieces in which they came.
    """

    def __init__(self, codec: TextCodec, stop_words: Sequence[str] = ()):
        if any(not word for word in stop_words):
            raise InvalidRequest("stop_words has an empty string; give 1 or more characters each")
        self._codec, self._stop_words = codec, tuple(stop_words)
        self._recent: list[int] = []  # read already, but decoded again with what follows
        self._unread: list[int] = []
        self._held = ""
        self.stopped = False

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """The new text that is decided once `ids` follow; all that is left when `final`."""
        if self.stopped:
            return ""
        for token in ids:
            self._unread.append(token)
            self._held += self._new_text(final=False)
        if final:
            self._held += self._new_text(final=True)
        found = [(self._held.find(w), w) for w in self._stop_words if w in self._held]
        if found:  # the first one to be complete, whatever the size of the pieces
            self.stopped = True
            return self._held[: min((place + len(w), place) for place, w in found)[1]]
        keep = 0 if final else self._undecided()
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready

    def _new_text(self, final: bool) -> str:
        """Text of the ids not read yet, unless it ends inside a character."""
        text = self._codec.decode(self._recent + self._unread)
        if not final and text.endswith(INCOMPLETE):
            return ""
        before = self._codec.decode(self._recent)
        if text == before:  # special tokens only: without text they are no context to decode in
            return ""
        self._recent, self._unread = self._unread, []
        return text[len(before) :]

    def _undecided(self) -> int:
        """Length of the longest held ending that a stop word may begin with."""
        longest = min(len(self._held), max(map(len, self._stop_words), default=0))
        for length in range(longest, 0, -1):
            if any(word.startswith(self._held[-length:]) for word in self._stop_words):
                return length
        return 0
