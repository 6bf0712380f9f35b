"""The checks of lesson 01 for text that appears while it is written: whole characters, stop strings, and both in the engine."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from minivllm.sampling_params import SamplingParams

TEXTS = (
    "The cat sleeps under the old tree.",
    "Good night 🌳💤! 🐈‍⬛",
    "बिरालो पुरानो रूखमुनि सुतिरहेको छ।",
    "猫在老树下睡觉。",
    "naïve café, 5 € – “quoted”",
    "  two  spaces\n\n\tand a tab",
)
_ALPHABET = "aé€🌳\x7f\x80\u07ff\u0800\uffff\U00010000\U0010ffff"
"""Characters of one to four bytes, the first and the last of each length among them."""


def random_bytes(rng: random.Random) -> bytes:
    """The bytes of a random text."""
    return "".join(rng.choices(_ALPHABET, k=rng.randint(1, 8))).encode()


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """Bytes in pieces of one to four."""
    pieces = []
    while data:
        size = rng.randint(1, 4)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def check_characters(characters_class: type) -> None:
    """Every whole character at once, never a part of one, and nothing lost."""
    rng = random.Random(18)
    for number in range(300):
        data = random_bytes(rng)
        if number % 3 == 2:  # a text that ends within a character, or has bytes that are no text
            place = len(data.decode()[: rng.randrange(9)].encode())
            data = (
                data[:place] + rng.choice((b"\xff", b"\xf8", b"\x80", b"", b"\xe2\x82a", b"\xe2\x7f", b"\xf0\x9f")) + data[place:]
            )
            data = data[: rng.randrange(1, len(data) + 1)]
        pieces = cut(rng, data)
        characters, given, seen = characters_class(), "", b""
        for count, piece in enumerate(pieces, 1):
            new = characters.add(piece)
            assert isinstance(new, str), f"Characters.add must return a string, but returned {new!r}. Look at its last line."
            seen, given = seen + piece, given + new
            wanted = complete_text(seen)
            assert given == wanted, (
                f"Characters, fed with {', '.join(f'[{_hex(fed)}]' for fed in pieces[:count])} so far: expected {wanted!r} to be returned, "
                f"got {given!r}. Look at {_character_hint(given, wanted)}."
            )
        last = characters.flush()
        wanted = data.decode("utf-8", errors="replace")
        assert given + last == wanted, (
            f"Characters, after all bytes {_hex(data)} and flush: expected {wanted!r} in all, got {given + last!r}. Look at flush: it returns what "
            f"waits, as `�` where it is not a character."
        )
        again = characters.flush()
        assert again == "", (
            f"A second flush has nothing left to return; expected '', got {again!r}. Look at what flush leaves behind."
        )


def complete_text(data: bytes) -> str:
    """The text of bytes, without an incomplete character at the end."""
    for size in range(1, min(3, len(data)) + 1):
        lead = data[-size]
        if lead & 0b1100_0000 != 0b1000_0000:
            needed = 2 if 0xC0 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF8 else 1
            if needed > size:
                data = data[:-size]
            break
    return data.decode("utf-8", errors="replace")


def _hex(data: bytes) -> str:
    return data.hex(" ").upper() or "(none)"


def _character_hint(given: str, wanted: str) -> str:
    if given.startswith(wanted):
        return "the end of the bytes: an incomplete character must wait"
    if wanted.startswith(given):
        return "what waits: a complete character must not wait, nor must what follows it"
    return "what is kept from one call to the next: no byte may be lost or duplicated"


def check_stop_strings(stop_strings_class: type) -> None:
    """No part of a stop string is shown, and everything that cannot be part of one is."""
    rng = random.Random(19)
    for _ in range(400):
        stops = [_letters(rng, rng.randint(1, 5)) for _ in range(rng.randint(0, 3))]
        text = _letters(rng, rng.randint(1, 14))
        pieces = []
        while text:
            size = rng.randint(0, 3)
            pieces.append(text[:size])
            text = text[size:]
        finder, shown = stop_strings_class(list(stops)), ""
        expected, seen = StopFinder(stops), ""
        for number, piece in enumerate(pieces, 1):
            answer = finder.add(piece)
            assert isinstance(answer, tuple) and len(answer) == 2, (
                f"StopStrings.add must return two things, the text to show and the stop string or None, but returned {answer!r}. Look at its last line."
            )
            new, stop = answer
            wanted_stop = expected.add(piece)
            shown, seen = shown + new, seen + piece
            case = f"StopStrings({stops}), after the text {seen!r} in pieces {pieces[:number]}"
            assert stop == wanted_stop, (
                f"{case}: expected the stop string {wanted_stop!r}, got {stop!r}. Look at stop strings that begin in one piece and end in another, and "
                f"at which one begins first."
            )
            assert shown == expected.shown, (
                f"{case}: expected {expected.shown!r} to be shown by now, got {shown!r}. Look at "
                + _stop_hint(shown, expected.shown, stop)
                + "."
            )
            if stop is not None:
                break
        else:
            last = finder.flush()
            assert shown + last == seen, (
                f"StopStrings({stops}), at the end of the text {seen!r}: expected all of it, got {shown + last!r}. Look at flush: nothing can "
                f"become a stop string any more, so what is held back must be returned."
            )


def _letters(rng: random.Random, size: int) -> str:
    return "".join(rng.choices("ab", k=size))


def _stop_hint(shown: str, wanted: str, stop: str | None) -> str:
    if stop is not None:
        return "where the text ends: right before the stop string, with nothing lost and no part of it shown"
    if len(shown) > len(wanted):
        return "the end of the text: it may be the beginning of a stop string, and must wait"
    return "what is held back: the longest suffix of the text that is the beginning of a stop string, and no more"


class StopFinder:
    """What `StopStrings` must do, the simplest way: keep the whole text and search all of it."""

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.text, self.shown = stops, "", ""

    def add(self, piece: str) -> str | None:
        """One more piece. Returns the stop string found; `shown` is the text that may be shown."""
        self.text += piece
        places = [(self.text.find(stop), number) for number, stop in enumerate(self.stops) if stop in self.text]
        if places:
            place, number = min(places)
            self.shown = self.text[:place]
            return self.stops[number]
        held = max((size for stop in self.stops for size in range(len(stop)) if self.text.endswith(stop[:size])), default=0)
        self.shown = self.text[: len(self.text) - held]
        return None


def check_detokenizer(detokenizer_class: type) -> None:
    """Token by token: never behind the engine's own detokenizer, and the same text in the end."""
    tokenizer = load_tokenizer()
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        for stop in (None, ["old tree", "睡", "💤!"], ["a tab", "नि", "quo", "es"], [text[-3:]]):
            for skip in (True, False):
                params = SamplingParams(stop=stop, skip_special_tokens=skip)
                _check_like_the_engine(detokenizer_class, tokenizer, [*token_ids, 2, token_ids[0]], params)
        half = tokenizer.encode("Good night 🌳")[:-1]
        _check_like_the_engine(detokenizer_class, tokenizer, half, SamplingParams(stop=["\ufffd"]))
        for prompt_size in (1, 2):
            params = SamplingParams()
            _check_like_the_engine(detokenizer_class, tokenizer, token_ids[prompt_size:], params, token_ids[:prompt_size])


def check_detokenizer_text(detokenizer_class: type) -> None:
    """In the engine: what it returns for texts of the real model, compared with the engine's own detokenizer on the same tokens."""
    from minivllm import LLM
    from minivllm.engine.detokenizer import IncrementalDetokenizer

    tokenizer = load_tokenizer()
    llm = LLM(
        "smollm2-135m", max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=64 * 2**20, detokenizer_cls=detokenizer_class
    )  # fmt: skip
    for output, params in zip(llm.generate(list(_PROMPTS), list(_TEXT_PARAMS), use_tqdm=False), _TEXT_PARAMS, strict=True):
        completion = output.outputs[0]
        own, wanted_stop = IncrementalDetokenizer(tokenizer, output.prompt_token_ids, params), None
        shown = completion.token_ids[:-1] if completion.token_ids[-1] == tokenizer.eos_token_id else completion.token_ids
        for token_id in shown:
            wanted_stop = own.update(token_id)
            if wanted_stop is not None:
                break
        else:
            wanted_stop = own.finish()
        stop = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        assert (completion.text, stop) == (own.text, wanted_stop), (
            f"In the engine, with stop={params.stop} and skip_special_tokens={params.skip_special_tokens}: expected the text {own.text!r} and the "
            f"stop string {wanted_stop!r}, got {completion.text!r} and {stop!r}. Look at update and finish of MyDetokenizer."
        )


def _check_like_the_engine(
    detokenizer_class: type, tokenizer: Any, token_ids: list[int], params: SamplingParams, prompt: list[int] | None = None
) -> None:
    from minivllm.engine.detokenizer import IncrementalDetokenizer

    wanted, got = IncrementalDetokenizer(tokenizer, prompt or [], params), detokenizer_class(tokenizer, prompt or [], params)
    case = f"MyDetokenizer with stop={params.stop} and skip_special_tokens={params.skip_special_tokens}"
    before = ""
    for number, token_id in enumerate(token_ids, 1):
        wanted_stop, stop = wanted.update(token_id), got.update(token_id)
        said = f"{case}, after {number} of the tokens {token_ids}"
        assert stop == wanted_stop, (
            f"{said}: expected update to return {wanted_stop!r}, got {stop!r}. Look at what update returns."
        )
        assert got.text.startswith(before), (
            f"{said}: the text was {before!r} and is now {got.text!r}; expected it only to grow. Look at self.text."
        )
        assert got.text.startswith(wanted.text), (
            f"{said}: expected at least {wanted.text!r} to be shown, got {got.text!r}. Look at what update adds to self.text."
        )
        before = got.text
        if stop is not None:
            break
    else:
        wanted_stop, stop = wanted.finish(), got.finish()
        assert stop == wanted_stop, (
            f"{case}, at the end: expected finish to return {wanted_stop!r}, got {stop!r}. Look at finish."
        )
    assert got.text == wanted.text, (
        f"{case}, for the tokens {token_ids}: expected the text {wanted.text!r} in the end, got {got.text!r}. Look at finish, at special tokens, "
        f"and at where a stop string ends the text."
    )


@lru_cache(maxsize=1)
def load_tokenizer() -> Any:
    """The default model's tokenizer."""
    from minivllm.engine.tokenizer import Tokenizer
    from minivllm.models.hub import resolve_model

    return Tokenizer(resolve_model("smollm2-135m"))


_PROMPTS = ("The king said:", "Once upon a time", "🌳💤🌳💤🌳💤🌳💤🌳", "猫在老树下睡觉。狗在老树下睡觉。")
_TEXT_PARAMS = tuple(
    SamplingParams(temperature=0, max_tokens=24, stop=stop, skip_special_tokens=skip)
    for stop, skip in ((None, True), (["city", " was"], True), (None, False), (["。"], True))
)
