"""Requests to measure with: random token ids of given lengths, and real text in several languages."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import ConfigError

DISTRIBUTIONS = ("uniform", "longtail")


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload: its prompt, exactly how many tokens it generates, and when it arrives, in seconds."""

    prompt_token_ids: list[int]
    output_len: int
    arrival_time: float = 0.0


def warm_up_requests(requests: list[WorkloadRequest], width: int) -> list[WorkloadRequest]:
    """A short workload to warm up with: as many requests as may run at once, and then fewer and fewer.

    So what an engine makes for a batch size, at the first step of that size, is made before anything is measured.
    """
    return [
        WorkloadRequest(request.prompt_token_ids, min(request.output_len, 1 + i)) for i, request in enumerate(requests[:width])
    ]


def make_workload(
    distribution: str,
    num_requests: int,
    *,
    mean_prompt_len: int = 48,
    mean_output_len: int = 48,
    vocab_size: int = 49152,
    max_len: int = 8192,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Random token ids with lengths that repeat for the same seed.

    Args:
        distribution: "uniform": every request has the mean lengths. "longtail": prompt and output lengths are
            log-normal, as those of real services are: most are short, a few very long. Sigma is 1, so one request in
            twenty is more than five times the median.
        num_requests: How many.
        mean_prompt_len, mean_output_len: Mean lengths in tokens. Those of a long-tailed sample are scaled to it, so
            that both kinds of workload come to the same number of tokens.
        vocab_size: Token ids are below this.
        max_len: The longest prompt and output together.
        seed: Of lengths and token ids.

    Raises:
        ConfigError: The distribution is unknown, or a number is less than 1.
    """
    for name, value in (
        ("num_requests", num_requests),
        ("mean_prompt_len", mean_prompt_len),
        ("mean_output_len", mean_output_len),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1.")
    if distribution not in DISTRIBUTIONS:
        raise ConfigError(f"distribution is {distribution!r}, but must be one of {', '.join(map(repr, DISTRIBUTIONS))}.")
    rng = random.Random(seed)
    if distribution == "uniform":
        prompt_lens, output_lens = [mean_prompt_len] * num_requests, [mean_output_len] * num_requests
    else:
        prompt_lens = _lognormal_lengths(rng, num_requests, mean_prompt_len)
        output_lens = _lognormal_lengths(rng, num_requests, mean_output_len)
    requests = []
    for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True):
        prompt_len = min(prompt_len, max_len // 2)
        # Ids below 100 are special tokens in many vocabularies.
        token_ids = [rng.randrange(min(100, vocab_size - 1), vocab_size) for _ in range(prompt_len)]
        requests.append(WorkloadRequest(token_ids, min(output_len, max_len - prompt_len)))
    return requests


def _lognormal_lengths(rng: random.Random, count: int, mean: int) -> list[int]:
    """Log-normal lengths of at least 1 that sum to count * mean."""
    raw = [rng.lognormvariate(0.0, 1.0) for _ in range(count)]
    scale = count * mean / sum(raw)
    lengths = [max(1, round(value * scale)) for value in raw]
    while difference := count * mean - sum(lengths):  # what rounding has added or taken
        lengths[lengths.index(max(lengths))] += difference if difference > 0 else -1
    return lengths


def load_workload(file: Path) -> list[WorkloadRequest]:
    """A workload from a JSON list of objects with "ids" (the prompt) and "out" (how many tokens to generate).

    Raises:
        ConfigError: The file is missing or has another form.
    """
    try:
        items = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"There is no workload file {file} that can be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not a workload: it is not valid JSON ({error}).") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{file} is not a workload: it must hold a JSON list with at least one request.")
    requests = []
    for i, item in enumerate(items):
        ids, out = (item.get("ids"), item.get("out")) if isinstance(item, dict) else (None, None)
        if not isinstance(ids, list) or not ids or not all(isinstance(token_id, int) for token_id in ids):
            raise ConfigError(f"{file} is not a workload: request {i} must have 'ids', a list of token ids.")
        if not isinstance(out, int) or out < 1:
            raise ConfigError(f"{file} is not a workload: request {i} must have 'out', how many tokens to generate.")
        requests.append(WorkloadRequest(ids, out))
    return requests


SENTENCES = (
    "The engine takes requests at any time and brings all of them one token further with every step.",
    "A block table says where in memory the keys and values of a sequence lie, sixteen tokens to a block.",
    "Yesterday it rained so hard that the river rose over the old stone bridge and into the market square.",
    "How many eggs do I need for a cake that feeds twelve people, and how long must it stay in the oven?",
    "Dear Ms. Okafor, thank you for your letter of 3 March; I am glad to confirm the order of 250 chairs.",
    "In 1969 two people walked on the Moon while a third one circled above them, alone, for 21 hours.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3.5]))\n",
    "SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY name ORDER BY 2 DESC;",
    '{"id": 17, "tags": ["new", "sale"], "price": 12.50, "in_stock": true}',
    "Die Lokomotive stand schon unter Dampf, als die letzten Fahrgäste über den Bahnsteig liefen.",
    "Combien de temps faut-il pour aller à pied de la gare jusqu'au vieux port ?",
    "El perro del vecino ladra cada mañana a las seis, menos los domingos, nadie sabe por qué.",
    "Вчера вечером мы долго сидели на кухне и говорили о том, каким был город раньше.",
    "今天下午我们在图书馆见面,然后一起去吃晚饭。",
    "駅前の小さな喫茶店で、彼女は毎朝同じ席に座って新聞を読む。",
    "आज सुबह बाज़ार में बहुत भीड़ थी, इसलिए हम देर से घर पहुँचे।",
    "في الصباح يفتح البائع دكانه الصغير ويرتب الفواكه أمام الباب.",
    "오늘은 날씨가 좋아서 강가를 따라 한참 걸었다.",
    "Launch day 🚀🎉 – thanks to everyone 👩‍💻👨‍🔬 who stayed up late! ❤️",
    "x² + y² = r², so for r = 5 the point (3, 4) lies on the circle; π ≈ 3.14159.",
)
"""Plain sentences of many kinds, from which prompts of any length are put together."""


def mixed_prompts(tokenizer, num_prompts: int, max_len: int = 900, seed: int = 0) -> list[list[int]]:  # noqa: ANN001
    """Prompts of real text as token ids: 1 to `max_len` tokens, many languages, every fourth one a chat.

    Args:
        tokenizer: A `minivllm.engine.tokenizer.Tokenizer`.
        num_prompts: How many.
        max_len: Tokens in the longest.
        seed: The same seed gives the same prompts.
    """
    rng = random.Random(seed)
    prompts = []
    for i in range(num_prompts):
        # Lengths spread evenly on a logarithmic scale, the shortest and the longest among them for sure.
        share = i / max(1, num_prompts - 1)
        length = max(1, round(max_len**share))
        text = ""
        while len(token_ids := tokenizer.encode(text)) < length:
            text += rng.choice(SENTENCES) + " "
        if i % 4 == 3:
            token_ids = tokenizer.apply_chat_template([{"role": "user", "content": tokenizer.decode(token_ids[:length])}])
        prompts.append(token_ids[:max_len] if i % 4 == 3 else token_ids[:length])
    rng.shuffle(prompts)
    return prompts
