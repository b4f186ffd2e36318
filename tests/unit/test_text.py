"""Text in and out: streamed pieces add up whatever the ids and the split; stop words; one BOS."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from masw.engines.messages import InvalidRequest
from masw.engines.text import TextCodec
from tests.tiny_tokenizers import KINDS, TEXT, byte_level

SAMPLES = ("Hello", "中文测试 🙂🎉", " the  cat", "e\u0301 ö ж", "日本語\n\nthe end", "🙂")


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    """A codec of each kind of tokenizer, by name."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: TextCodec(make(root / kind)) for kind, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def codec(request, codecs):
    """A codec of every kind in turn."""
    return codecs[request.param]


@pytest.fixture
def bytewise(codecs):
    """A codec whose tokens are any bytes."""
    return codecs["byte-level"]


def split(ids, cuts):
    """The ids in pieces, cut at the places given (taken modulo their number)."""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(places)]


def stream(codec, pieces, stop_words=()):
    """What a stream gives for each piece of ids, the last one final."""
    text = codec.stream(stop_words)
    return [text.push(piece, final=i == len(pieces) - 1) for i, piece in enumerate(pieces)]


def cut(text, stop_words):
    """The reference: character by character up to the first stop word that is complete."""
    for end in range(len(text) + 1):
        ended = [word for word in stop_words if text[:end].endswith(word)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


def ids_of(codec, text):
    return codec.tokenizer(text, add_special_tokens=False)["input_ids"]


CUTS = st.lists(st.integers(0, 200), max_size=30)
NUMBERS = st.lists(st.integers(0, 10**6), max_size=40)


@given(numbers=NUMBERS, cuts=CUTS)
def test_pieces_of_random_bytes_add_up_to_the_whole(codecs, numbers, cuts):
    codec = codecs["byte-level"]
    ids = [number % len(codec.tokenizer) for number in numbers]
    assert "".join(stream(codec, split(ids, cuts))) == codec.decode(ids)


@given(text=st.text(st.sampled_from(TEXT + " 𝔸ß\u200d"), max_size=30), cuts=CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_real_text_add_up_to_the_whole(codecs, kind, text, cuts):
    codec = codecs[kind]
    ids = ids_of(codec, text)
    pieces = stream(codec, split(ids, cuts))
    assert "".join(pieces) == codec.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(text=st.text(st.sampled_from(TEXT), max_size=20), places=CUTS, cuts=CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_within_the_text_change_nothing(codecs, kind, text, places, cuts):
    codec = codecs[kind]
    ids = ids_of(codec, text)
    for place in places:
        ids.insert(place % (len(ids) + 1), codec.tokenizer.eos_token_id)
    assert "".join(stream(codec, split(ids, cuts))) == codec.decode(ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_every_split_in_two_adds_up(codec, text):
    ids = ids_of(codec, text)
    for place in range(len(ids) + 1):
        assert "".join(stream(codec, [ids[:place], ids[place:]])) == codec.decode(ids)


def test_a_space_between_two_pieces_is_kept(codec):
    ids = ids_of(codec, "the cat the cat")
    pieces = stream(codec, [[token] for token in ids] + [[]])
    assert "".join(pieces) == "the cat the cat"


def test_only_the_incomplete_character_is_held_back(bytewise):
    smile = ids_of(bytewise, "\U0001f980")  # a crab: not in the training text, so byte by byte
    assert len(smile) > 1
    text = bytewise.stream()
    assert text.push([*ids_of(bytewise, "中 and "), *smile[:-1]]) == "中 and "
    assert text.push(smile[-1:]) == "\U0001f980"


def test_an_incomplete_end_comes_with_the_final_piece(bytewise):
    ids = [*ids_of(bytewise, "ab"), *ids_of(bytewise, "\U0001f980")[:-1]]
    text = bytewise.stream()
    assert text.push(ids) + text.push([], final=True) == bytewise.decode(ids)
    assert "\ufffd" in bytewise.decode(ids)


LETTERS = st.text(st.sampled_from("ab 🙂\n"), max_size=24)
WORDS = st.lists(st.text(st.sampled_from("ab 🙂\n"), min_size=1, max_size=4), max_size=4)


@given(text=LETTERS, words=WORDS, cuts=CUTS)
def test_stop_words_cut_alike_whatever_the_pieces(codecs, text, words, cuts):
    codec = codecs["byte-level"]
    pieces = stream(codec, split(ids_of(codec, text), cuts), words)
    assert "".join(pieces) == cut(text, words)


@given(numbers=NUMBERS, place=st.integers(0, 10**6), size=st.integers(1, 6), cuts=CUTS)
def test_a_stop_word_among_random_bytes_is_found(codecs, numbers, place, size, cuts):
    codec = codecs["byte-level"]
    ids = [number % len(codec.tokenizer) for number in numbers]
    whole = codec.decode(ids)
    word = whole[place % (len(whole) + 1) :][:size] or "absent"
    assert "".join(stream(codec, split(ids, cuts), [word])) == cut(whole, [word])


def test_text_is_held_back_only_while_a_stop_word_may_begin(bytewise):
    text = bytewise.stream(["END", "NDX"])
    given_out = [text.push(ids_of(bytewise, part)) for part in ("say E", "N", "d EN", "D more")]
    assert given_out == ["say ", "", "ENd ", ""]
    assert text.stopped and text.push(ids_of(bytewise, "x"), final=True) == ""


def test_a_stop_word_that_never_completes_is_given_at_the_end(bytewise):
    assert stream(bytewise, [ids_of(bytewise, "the EN"), []], ["END"]) == ["the ", "EN"]


def test_an_empty_stop_word_is_refused(bytewise):
    with pytest.raises(InvalidRequest, match="stop_words"):
        bytewise.stream(["a", ""])


def test_one_bos_with_and_without_template(codecs):
    codec = codecs["sentence-piece"]
    bos = codec.tokenizer.bos_token_id
    for template in (False, True):
        ids = codec.encode("the cat", chat_template=template)
        assert ids[0] == bos and ids.count(bos) == 1


def test_a_tokenizer_without_bos_adds_none(bytewise):
    assert bytewise.tokenizer.bos_token_id not in bytewise.encode("the cat")
    assert bytewise.decode(bytewise.encode("the 🙂")) == "the 🙂"


def test_the_template_wraps_the_text_as_one_user_message(codec):
    assert codec.decode(codec.encode("the cat", chat_template=True)) == "[user] the cat ->"


def test_an_empty_prompt_is_refused(codec):
    for template in (False, True):
        with pytest.raises(InvalidRequest, match="text_input"):
            codec.encode("", template)


def test_a_template_that_the_model_lacks_is_refused(tmp_path):
    codec = TextCodec(byte_level(tmp_path, template=None))
    with pytest.raises(InvalidRequest, match="apply_chat_template"):
        codec.encode("the cat", chat_template=True)
