"""The checks of lesson 01 for text that appears while it is written: whole characters, stop strings, and both in the engine."""

from __future__ import annotations

import codecs
import random
from functools import lru_cache
from typing import Any

from minivllm.course.observations import fail, require, rounds
from minivllm.engine.detokenizer import IncrementalDetokenizer
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


def cut(rng: random.Random, text: Any, shortest: int, longest: int) -> list[Any]:
    """A text or bytes in pieces."""
    pieces = []
    while text:
        size = rng.randint(shortest, longest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def random_bytes(rng: random.Random, is_broken: bool) -> bytes:
    """The bytes of a random text, which may end within a character, or have bytes that are no text."""
    characters = rng.choices(_ALPHABET, k=rng.randint(1, 8))
    if not is_broken:
        return "".join(characters).encode()
    place, wrong = rng.randrange(9), rng.choice((b"\xff", b"\xf8", b"\x80", b"", b"\xe2\x82a", b"\xe2\x7f", b"\xf0\x9f"))
    data = "".join(characters[:place]).encode() + wrong + "".join(characters[place:]).encode()
    return data[: rng.randrange(1, len(data) + 1)]


def check_characters(characters_class: type) -> None:
    """Every whole character at once, never a part of one, and nothing lost."""
    for number, rng in enumerate(rounds("characters", 300)):
        data = random_bytes(rng, is_broken=number % 3 == 2)
        characters, decoder = characters_class(), codecs.getincrementaldecoder("utf-8")(errors="replace")
        given, wanted, fed = "", "", []
        for piece in cut(rng, data, 1, 4):
            new = characters.add(piece)
            if not isinstance(new, str):
                fail(f"Characters.add must return a string, but returned {new!r}. Look at its last line.")
            given, wanted = given + new, wanted + decoder.decode(piece)
            fed.append(f"[{piece.hex(' ').upper()}]")
            require(wanted, given, f"Characters, fed with {', '.join(fed)} so far: expected {wanted!r} to be returned, got {given!r}. "
                    f"Look at {_character_hint(given, wanted)}.")  # fmt: skip
        given += characters.flush()
        wanted = data.decode("utf-8", errors="replace")
        require(wanted, given, f"Characters, after all bytes {data.hex(' ').upper()} and flush: expected {wanted!r} in all, got {given!r}. Look at flush: "
                "it returns what waits, as `�` where it is not a character.")  # fmt: skip
        again = characters.flush()
        nothing = f"A second flush has nothing left to return; expected '', got {again!r}. Look at what flush leaves behind."
        require("", again, nothing)


def _character_hint(given: str, wanted: str) -> str:
    if given.startswith(wanted):
        return "the end of the bytes: an incomplete character must wait"
    if wanted.startswith(given):
        return "what waits: a complete character must not wait, nor must what follows it"
    return "what is kept from one call to the next: no byte may be lost or duplicated"


def check_stop_strings(stop_strings_class: type) -> None:
    """No part of a stop string is shown, and everything that cannot be part of one is."""
    for rng in rounds("stops", 400):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        pieces = cut(rng, "".join(rng.choices("ab", k=rng.randint(1, 14))), 0, 3)
        finder, shown, text, stop = stop_strings_class(list(stops)), "", "", None
        for number, piece in enumerate(pieces, 1):
            answer = finder.add(piece)
            if not isinstance(answer, tuple) or len(answer) != 2:
                fail(f"StopStrings.add must return two things, the text to show and the stop string or None, but returned {answer!r}. "
                     "Look at its last line.")  # fmt: skip
            shown, stop, text = shown + answer[0], answer[1], text + piece
            wanted, wanted_stop = find_stop(text, stops)
            case = f"StopStrings({stops}), after the text {text!r} in pieces {pieces[:number]}"
            require(wanted_stop, stop, f"{case}: expected the stop string {wanted_stop!r}, got {stop!r}. Look at {_ACROSS}.")
            look = _stop_hint(shown, wanted, stop)
            require(wanted, shown, f"{case}: expected {wanted!r} to be shown by now, got {shown!r}. Look at {look}.")
            if stop is not None:
                break
        if stop is None:
            shown += finder.flush()
            case = f"StopStrings({stops}), at the end of the text {text!r}"
            require(text, shown, f"{case}: expected all of it, got {shown!r}. Look at flush: {_AT_THE_END}.")


_ACROSS = "stop strings that begin in one piece and end in another, and at which one begins first"
_AT_THE_END = "nothing can become a stop string any more, so what is held back must be returned"


def _stop_hint(shown: str, wanted: str, stop: str | None) -> str:
    if stop is not None:
        return "where the text ends: right before the stop string, with nothing lost and no part of it shown"
    if len(shown) > len(wanted):
        return "the end of the text: it may be the beginning of a stop string, and must wait"
    return "what is held back: the longest suffix of the text that is the beginning of a stop string, and no more"


def find_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What of a text may be shown by now, and the stop string in it, found the simplest way: by a search of all of it."""
    places = [(text.find(stop), number) for number, stop in enumerate(stops) if stop in text]
    if places:
        place, number = min(places)
        return text[:place], stops[number]
    held = max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - held], None


def check_detokenizer(detokenizer_class: type) -> None:
    """Token by token: never behind the engine's own detokenizer, and the same text in the end."""
    tokenizer = load_tokenizer()

    def compare(token_ids: list[int], prompt: list[int] | None = None, **options: Any) -> None:
        _check_like_the_engine(detokenizer_class, tokenizer, token_ids, SamplingParams(**options), prompt or [])

    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        for stop in (None, ["old tree", "睡", "💤!"], ["a tab", "नि", "quo", "es"], [text[-3:]]):
            for skip in (True, False):
                compare([*token_ids, 2, token_ids[0]], stop=stop, skip_special_tokens=skip)
        for prompt_size in (1, 2):
            compare(token_ids[prompt_size:], token_ids[:prompt_size])
    compare(tokenizer.encode("Good night 🌳")[:-1], stop=["\ufffd"])
    for rng in rounds("detokenizer", 30):
        text = "".join(rng.sample("".join(TEXTS), 12)) + rng.choice(TEXTS)
        stop = [text[start : start + rng.randint(1, 4)] for start in rng.sample(range(8, len(text)), rng.randint(0, 2))]
        stop += rng.choice(([], [text[-2:] + "…"]))  # the end of the text may become this
        compare([*tokenizer.encode(text), 2], stop=stop or None, skip_special_tokens=rng.random() < 0.5)


def _check_like_the_engine(
    detokenizer_class: type, tokenizer: Any, token_ids: list[int], params: SamplingParams, prompt: list[int]
) -> None:
    wanted, got = IncrementalDetokenizer(tokenizer, prompt, params), detokenizer_class(tokenizer, prompt, params)
    case = f"MyDetokenizer with stop={params.stop} and skip_special_tokens={params.skip_special_tokens}"
    before = ""
    for number, token_id in enumerate(token_ids, 1):
        wanted_stop, stop = wanted.update(token_id), got.update(token_id)
        seen = (
            (wanted_stop, stop, f"expected update to return {wanted_stop!r}, got {stop!r}. Look at what update returns."),
            (True, got.text.startswith(before), f"the text was {before!r} and is now {got.text!r}; expected it only to grow. Look at self.text."),
            (True, got.text.startswith(wanted.text), f"expected at least {wanted.text!r} to be shown, got {got.text!r}. Look at what update adds to self.text."),
        )  # fmt: skip
        for right, mine, message in seen:
            require(right, mine, f"{case}, after {number} of the tokens {token_ids}: {message}")
        before = got.text
        if stop is not None:
            break
    else:
        wanted_stop, stop = wanted.finish(), got.finish()
        message = f"expected finish to return {wanted_stop!r}, got {stop!r}. Look at finish."
        require(wanted_stop, stop, f"{case}, at the end: {message}")
    require(wanted.text, got.text, f"{case}, for the tokens {token_ids}: expected the text {wanted.text!r} in the end, got {got.text!r}. "
            "Look at finish, at special tokens, and at where a stop string ends the text.")  # fmt: skip


def check_detokenizer_text(detokenizer_class: type) -> None:
    """In the engine: what it returns for texts of the real model, compared with the engine's own detokenizer on the same tokens."""
    from minivllm import LLM

    tokenizer = load_tokenizer()
    llm = LLM("smollm2-135m", **REAL_MODEL, detokenizer_cls=detokenizer_class)
    for output, params in zip(llm.generate(list(_PROMPTS), list(_TEXT_PARAMS), use_tqdm=False), _TEXT_PARAMS, strict=True):
        completion = output.outputs[0]
        own = IncrementalDetokenizer(tokenizer, output.prompt_token_ids, params)
        shown = completion.token_ids[:-1] if completion.token_ids[-1] == tokenizer.eos_token_id else completion.token_ids
        wanted_stop = next((found for found in map(own.update, shown) if found is not None), None)
        if wanted_stop is None:
            wanted_stop = own.finish()
        stop = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        require((own.text, wanted_stop), (completion.text, stop),
                f"In the engine, with stop={params.stop} and skip_special_tokens={params.skip_special_tokens}: expected the text {own.text!r} and "
                f"the stop string {wanted_stop!r}, got {completion.text!r} and {stop!r}. Look at update and finish of MyDetokenizer.")  # fmt: skip


@lru_cache(maxsize=1)
def load_tokenizer() -> Any:
    """The default model's tokenizer."""
    from minivllm.engine.tokenizer import Tokenizer
    from minivllm.models.hub import resolve_model

    return Tokenizer(resolve_model("smollm2-135m"))


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a token, which may be a part of a character."""
    return tokenizer.token_bytes(token_id)


REAL_MODEL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 * 2**20}
"""How the checks load the default model."""
_PROMPTS = ("The king said:", "Once upon a time", "🌳💤🌳💤🌳💤🌳💤🌳", "猫在老树下睡觉。狗在老树下睡觉。")
_TEXT_PARAMS = tuple(
    SamplingParams(temperature=0, max_tokens=24, stop=stop, skip_special_tokens=skip)
    for stop, skip in ((None, True), (["city", " was"], True), (None, False), (["。"], True))
)
