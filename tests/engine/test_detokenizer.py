"""Streamed pieces join to the exact text, whatever the tokens and wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import SENTENCES
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from minivllm import SamplingParams
from minivllm.engine.detokenizer import DecodeStream
from minivllm.engine.output_processor import SequenceText
from minivllm.engine.tokenizer import Tokenizer

TEXTS = [
    *SENTENCES,
    "👩‍👩‍👧‍👦 and 🏳️‍🌈 and 🇺🇳",
    "नमस्ते दुनिया, क्या हाल है?",
    "你好,世界!這是一個測試。",
    "e\u0301 is not \u00e9; \ufffd is a character too",
    "  leading, trailing and    many spaces  \n\n\t",
    "<|im_start|>user\nhi<|im_end|>",
]


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    stream = DecodeStream(tokenizer, prompt or [], skip)
    return [*(stream.step(token_id) for token_id in token_ids), stream.flush()]


def make_byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer of Llama 2's kind: words begin with ▁, unknown characters are spelled in bytes."""
    words = ["<unk>", "▁Hello", "▁world", "lo", "▁", "a", "é", "▁▁"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    rust = Rust(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer.hf_tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust)
    tokenizer.skipped_token_ids, tokenizer._texts = frozenset(), {}
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback():
    return make_byte_fallback_tokenizer()


def byte_tokens(text: str) -> list[int]:
    return [8 + byte for byte in text.encode()]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_join_to_the_text(tokenizer, text):
    token_ids = tokenizer.encode(text)
    for skip in (True, False):
        assert "".join(stream(tokenizer, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_join_wherever_prompt_and_output_are_divided(tokenizer, text):
    token_ids = tokenizer.encode(text)
    for cut in range(len(token_ids)):
        prompt_text = tokenizer.decode(token_ids[:cut])
        joined = "".join(stream(tokenizer, token_ids[cut:], token_ids[:cut]))
        if not prompt_text.endswith("\ufffd"):
            assert prompt_text + joined == tokenizer.decode(token_ids)
        else:
            assert joined == tokenizer.decode(token_ids[cut:])


@settings(max_examples=settings().max_examples * 3)
@given(st.data())
def test_pieces_of_any_tokens_join_to_their_text(tokenizer, data):
    """Any ids at all, broken characters included."""
    alphabet = st.one_of(st.integers(0, 49151), st.sampled_from(tokenizer.encode("👩‍🔬🎉नमस्ते你好 \ufffd")), st.integers(0, 16))
    token_ids = data.draw(st.lists(alphabet, max_size=40))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(st.text(max_size=30))
def test_pieces_of_any_text_join_to_it(tokenizer, text):
    token_ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("text", ["👋🎉", "नमस्ते", "你好", "é ö"])
def test_no_piece_holds_half_a_character(tokenizer, byte_fallback, text):
    for tok, token_ids in ((tokenizer, tokenizer.encode(text)), (byte_fallback, byte_tokens(text))):
        pieces = stream(tok, token_ids)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == text


def test_a_broken_text_is_given_out_at_the_end(byte_fallback):
    pieces = stream(byte_fallback, [5, *byte_tokens("👋")[:3]])
    assert pieces == ["a", "", "", "", "\ufffd\ufffd\ufffd"]


def test_spaces_between_words_survive_a_tokenizer_that_strips_the_first(byte_fallback):
    hello_world = [1, 2, 3, *byte_tokens("👋"), 4, 2, 7, 5, 2]
    assert "".join(stream(byte_fallback, hello_world)) == byte_fallback.decode(hello_world)
    assert "".join(stream(byte_fallback, [2], prompt=[1])) == " world"


@given(st.lists(st.one_of(st.sampled_from([1, 2, 3, 4, 5, 6, 7]), st.text(min_size=1, max_size=3)), max_size=20))
def test_pieces_join_with_byte_fallback(items):
    tokenizer = make_byte_fallback_tokenizer()
    token_ids = [token for item in items for token in ([item] if isinstance(item, int) else byte_tokens(item))]
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


BYTE_F0 = 239
"""SmolLM2's token for the byte 0xF0, which begins a character of four bytes."""


class Watched(Tokenizer):
    """Notes how many tokens each call decodes."""

    def __init__(self, tokenizer: Tokenizer):
        vars(self).update(vars(tokenizer))
        self.counts: list[int] = []

    def decode(self, token_ids, skip_special_tokens=True):
        self.counts.append(len(token_ids))
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize(
    "make",
    [
        lambda tokenizer: [BYTE_F0] * 500,  # bytes that never form a character
        lambda tokenizer: tokenizer.encode("\ufffd" * 300),  # a genuine character, decoded as broken ones are
        lambda tokenizer: tokenizer.encode("👩‍🔬")[:-1] * 60,
        lambda tokenizer: (
            [*tokenizer.encode("a"), *range(60_000, 60_200), *tokenizer.encode("b")] * 3
        ),  # ids beyond the vocabulary
    ],
    ids=["lone bytes", "U+FFFD", "cut characters", "unknown ids"],
)
@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_a_token_costs_no_more_whatever_came_before_and_text_keeps_flowing(tokenizer, byte_fallback, make, kind):
    token_ids = make(tokenizer)
    if kind == "fallback":
        token_ids = byte_tokens_of(b"".join(tokenizer.token_bytes(token) for token in token_ids if tokenizer.has(token)))
    watched = Watched(tokenizer if kind == "bytes" else byte_fallback)
    stream = DecodeStream(watched, [], True)
    whole, longest_wait, wait, text = watched.decode(token_ids), 0, 0, ""
    watched.counts.clear()
    for token_id in token_ids:
        calls = len(watched.counts)
        text += (piece := stream.step(token_id))
        assert len(watched.counts) - calls <= 14
        wait = 0 if piece or not watched.has(token_id) else wait + 1
        longest_wait = max(longest_wait, wait)
    assert max(watched.counts) <= DecodeStream.MOST_TOKENS + DecodeStream.MOST_WAITING + 1
    assert longest_wait <= 9  # three characters of three bytes
    text += stream.flush()
    assert text == whole or (
        kind == "fallback" and text.startswith("👩\u200d")
    )  # whose other bytes make the tokenizer take it back


def byte_tokens_of(data: bytes) -> list[int]:
    return [8 + byte for byte in data]


@given(st.lists(st.sampled_from([0xF0, 0x9F, 0x8C, 0xB3, 0xC3, 0xA9, 0x41, 0x0A, 0xFF]), max_size=60))
def test_any_bytes_give_as_many_characters_as_they_must(values):
    tokenizer = make_byte_fallback_tokenizer()
    text = "".join(pieces := stream(tokenizer, byte_tokens_of(bytes(values))))
    assert len(text) <= len(values) and all(len(piece) <= DecodeStream.MOST_TOKENS for piece in pieces)
    if (whole := bytes(values).decode(errors="replace")).find("\ufffd") < 0:
        assert text == whole


@given(st.lists(st.integers(0, 49151), max_size=20), st.booleans())
def test_tokens_are_decoded_as_transformers_decodes_them(tokenizer, token_ids, skip_special_tokens):
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    assert tokenizer.decode(token_ids, skip_special_tokens) == tokenizer.hf_tokenizer.decode(token_ids, **options)


def generate_text(tokenizer, text: str, **params) -> tuple[list[str], str, str | None]:
    """The text after each token of a sequence that spells `text`, at the end, and the stop string found."""
    sequence = SequenceText([1], SamplingParams(max_tokens=1000, **params), 0, tokenizer)
    texts, stop = [], None
    for token_id in tokenizer.encode(text):
        stop = sequence.add(token_id, None)
        texts.append(sequence.output.text)
        if stop is not None:
            return texts, sequence.output.text, stop
    stop = sequence.finish()
    return texts, sequence.output.text, stop


@pytest.mark.parametrize(
    "text,stop,expected",
    [
        ("The cat sat on the mat.", "sat", "The cat "),
        ("The cat sat on the mat.", "at sat on", "The c"),  # across tokens, beginning within one
        ("The cat sat on the mat.", ".", "The cat sat on the mat"),
        ("one two three", ["three", "two"], "one "),  # the earliest wins
        ("aaab", "aab", "a"),
        ("Hi 👋 there", "👋", "Hi "),
    ],
)
def test_a_stop_string_ends_the_text_before_it(tokenizer, text, stop, expected):
    texts, final, found = generate_text(tokenizer, text, stop=stop)
    assert final == expected
    assert found in ([stop] if isinstance(stop, str) else stop)
    assert all(expected.startswith(streamed) for streamed in texts), "nothing of the stop string was ever shown"


def test_what_might_become_a_stop_string_is_held_back_and_then_given_out(tokenizer):
    texts, final, found = generate_text(tokenizer, "The cat sat", stop="sat down")
    assert found is None
    assert final == "The cat sat"
    assert texts[-1] == "The cat sat"[: -len("at down")]


def test_a_streamed_text_only_grows(tokenizer):
    for text in TEXTS:
        texts, final, _ = generate_text(tokenizer, text, stop=["zzz", "\n\n\n\n"])
        for before, after in zip(texts, [*texts[1:], final], strict=True):
            assert after.startswith(before)


def test_stop_strings_have_no_effect_before_min_tokens(tokenizer):
    num_tokens = len(tokenizer.encode("a b a b"))
    _, final, found = generate_text(tokenizer, "a b a b a b", stop="b", min_tokens=num_tokens)
    assert (final, found) == ("a b a b a ", "b")
