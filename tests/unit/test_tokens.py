"""Tokens of tokenizer files: compared by content, whatever the file looks like."""

import json

import pytest
from transformers import AutoTokenizer

from masw.engines.tokens import TokensError, first_difference, read_tokens, tokens_sha256
from tests.tiny_tokenizers import KINDS

PIECES = {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": []}
NAMED = {"model": {"vocab": {"b": 1}}, "added_tokens": [{"id": 0, "content": "a"}]}


def write(path, data):
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_that_hugging_face_reads(kind, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(KINDS[kind](tmp_path))
    tokens = read_tokens(tmp_path / "tokenizer.json")
    assert tokens == {number: token for token, number in tokenizer.get_vocab().items()}


def test_files_of_the_same_tokens_are_equal_whatever_their_form(tmp_path):
    one, other = write(tmp_path / "pieces", PIECES), write(tmp_path / "named", NAMED)
    assert read_tokens(one) == read_tokens(other) == {0: "a", 1: "b"}
    assert tokens_sha256(one) == tokens_sha256(other)
    assert first_difference(read_tokens(one), read_tokens(other)) == ""


@pytest.mark.parametrize(
    ("tokens", "difference"),
    [
        ({0: "a", 1: "b", 2: "c"}, "token 2 is 'c' in the target and None in the draft"),
        ({0: "x", 1: "y"}, "token 0 is 'x' in the target and 'a' in the draft"),
        ({0: "a"}, "token 1 is None in the target and 'b' in the draft"),
    ],
)
def test_the_first_token_that_differs_is_named(tokens, difference, tmp_path):
    assert first_difference(tokens, {0: "a", 1: "b"}) == difference
    added = [{"id": number, "content": token} for number, token in tokens.items()]
    file = write(tmp_path / "file", {"model": {"vocab": {}}, "added_tokens": added})
    assert tokens_sha256(file) != tokens_sha256(write(tmp_path / "named", NAMED))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 5}}'])
def test_what_is_no_tokenizer_is_named(text, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    with pytest.raises(TokensError, match=r"tokenizer\.json is no tokenizer\.json"):
        tokens_sha256(file)
    assert tokens_sha256(tmp_path / "absent") is None
