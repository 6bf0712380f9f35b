"""Tokens to text as they come: never half a character, and nothing of a stop string.

`IncrementalDetokenizer` is what the engine gives each sequence; `LLM(detokenizer_cls=...)` takes another. Mirrors
`vllm/v1/engine/detokenizer.py`.
"""

from __future__ import annotations

from os.path import commonprefix

from minivllm.engine.tokenizer import REPLACEMENT, Tokenizer
from minivllm.sampling_params import SamplingParams


class IncrementalDetokenizer:
    """The text of one sequence, token by token, up to the first stop string. The first token's text depends on the end of the prompt.

    Attributes:
        text: What may be shown: a growing text. Its end is held back while it may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.text = ""
        self._stream = DecodeStream(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stop_strings, self._min_tokens = params.stop_strings, params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._whole_text = ""
        longest = max((len(stop) for stop in params.stop_strings), default=1)
        self._num_held = 0 if self._include_stop else longest - 1

    def update(self, token_id: int) -> str | None:
        """Add a token. Returns the stop string that it completes, if any; `text` then ends before it, or with it (`include_stop_str_in_output`)."""
        self._num_tokens += 1
        stop = self._add(self._stream.step(token_id))
        if stop is None:
            self.text = self._whole_text[: max(0, len(self._whole_text) - self._num_held)]
        return stop

    def finish(self) -> str | None:
        """Give out what was held back, after the last token. Returns the stop string that it contains, if any."""
        stop = self._add(self._stream.flush())
        self.text = self._whole_text
        return stop

    def _add(self, new: str) -> str | None:
        """Add text; cut the whole text before the earliest stop string that ends in what was added."""
        self._whole_text += new
        if not new or not self._stop_strings or self._num_tokens <= self._min_tokens:
            return None
        text = self._whole_text
        ends = range(len(text) - len(new) + 1, len(text) + 1)
        # Not text.find(stop), which would read as many characters as the stop string has, for each token.
        found = [(end - len(stop), stop) for stop in self._stop_strings for end in ends if text.endswith(stop, 0, end)]
        if not found:
            return None
        position, stop = min(found, key=lambda match: match[0])
        self.text = self._whole_text = text[: position + len(stop)] if self._include_stop else text[:position]
        return stop


class DecodeStream:
    """Decodes a growing list of tokens piece by piece; the pieces joined are the text.

    A token is not always whole characters: an emoji may take four tokens, and some tokenizers drop the space before the first word that
    they decode. So a short window is decoded that starts with tokens already returned; the text after theirs is new. Trailing bytes
    that do not yet make a character are held back. This is the method of Hugging Face's TGI and vLLM (`detokenize_incrementally`).
    Here the window stays short even if its bytes never make a character, so that a token's cost is bounded. The last tokens of the
    prompt open the first window.
    """

    PROMPT_WINDOW = 5
    """Prompt tokens in the first window: enough for the tokenizer to see that the text has begun before."""
    MOST_WAITING = 3
    """A character has at most four bytes, so at most three tokens may wait for the one that completes it."""
    MOST_TOKENS = 16
    """A longer window is shortened."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = prompt_token_ids[-self.PROMPT_WINDOW :]
        text = self._decode()
        if text.endswith(REPLACEMENT):  # the prompt ends within a character: decode the output by itself
            self._window, text = [], ""
        self._num_old_tokens, self._old_text = len(self._window), text
        """What the window starts with: tokens whose text was returned before."""
        self._num_given = len(text)
        """Characters of the window's text already returned."""

    def step(self, token_id: int) -> str:
        """The new text after one more token; "" while a character is incomplete."""
        if (self._skip_special_tokens and token_id in self._tokenizer.skipped_token_ids) or not self._tokenizer.has(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode()
        if not text.startswith(self._old_text):  # some tokenizers take back a character if the bytes after it make none
            self._window, self._num_old_tokens = self._window[self._num_old_tokens :], 0
            self._num_given, self._old_text = self._num_given - len(self._old_text), ""
            text = self._decode()
        texts, num_stable = [text], max(self._num_given, len(text))
        if text.endswith(REPLACEMENT):  # what the last tokens did not change, those to come will not
            texts = [self._decode(missing) for missing in range(self.MOST_WAITING + 1)]
            num_stable = max(self._num_given, len(text.rstrip(REPLACEMENT)), len(commonprefix(texts)))  # noqa: RUF071 - of characters
        new, self._num_given = text[self._num_given : num_stable], num_stable
        if new and num_stable == len(text):
            self._window = self._window[self._num_old_tokens :]
            self._num_old_tokens, self._old_text = len(self._window), self._decode()
            self._num_given = len(self._old_text)
        elif len(self._window) > self.MOST_TOKENS and all(len(text) <= len(other) + i for i, other in enumerate(texts)):
            self._shorten_window(text[num_stable:])  # not while the last tokens break characters, as an incomplete one can
        return new

    def flush(self) -> str:
        """The text held back, after the last token."""
        text = self._decode()
        new = text[self._num_given :]
        self._num_given = len(text)
        return new

    def _shorten_window(self, held: str) -> None:
        """Keep few tokens whose text has the same end: the last ones, cut between characters, or with the first if a byte breaks them all."""
        new, last = self._window[self._num_old_tokens :], self._window
        choices = [last[-size:] for size in range(self.MOST_WAITING + 1, self.MOST_TOKENS // 2)] + [new[:4] + last[-4:]]
        same = [(len(text), tokens) for tokens in choices if (text := self._text_of(tokens)).endswith(held)]
        num_characters, self._window = min(same, default=(len(held), last[-1:]))
        self._num_old_tokens, self._old_text = 0, ""
        self._num_given = num_characters - len(held)

    def _decode(self, num_missing: int = 0) -> str:
        return self._text_of(self._window[: len(self._window) - num_missing])

    def _text_of(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)
