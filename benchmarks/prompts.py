"""Prompts of real text, in many languages, of any length."""

from __future__ import annotations

import random

from minivllm.engine.tokenizer import Tokenizer

SENTENCES = (
    "The engine takes requests at any time and advances every running one by a token in each step.",
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


def mixed_prompts(tokenizer: Tokenizer, num_prompts: int, max_len: int = 900, seed: int = 0) -> list[list[int]]:
    """Prompts of real text as token ids: 1 to `max_len` tokens, many languages, every fourth one a chat.

    Args:
        tokenizer: Turns the text into token ids.
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
