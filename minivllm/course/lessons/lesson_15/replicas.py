"""The checks of lesson 15 for numbers of replicas: from the work, by simulation, and with spares."""

from __future__ import annotations

import math
import random
from typing import Any

from minivllm.bench.workloads import WorkloadRequest
from minivllm.course.lessons.fleets import Machine, Sample
from minivllm.course.lessons.lesson_15.fitting import random_costs
from minivllm.course.observations import expect, expect_number, fail, require, rounds


def random_sample(rng: random.Random, count: int) -> Sample:
    """Requests of mixed lengths at random times."""
    now, requests = rng.uniform(0, 50), []
    for _ in range(count):
        requests.append(WorkloadRequest([1] * rng.randint(5, 900), rng.choice((1, 8, 30, 200)), now))
        now += rng.expovariate(30)
    return Sample("random", requests)


def work_of(request: WorkloadRequest, machine: Machine, seats: int, parts: str = "fpsc") -> float:
    """Seconds of one request's work, token by token: f for its share of the fixed part, p prompt, s sequences, c context."""
    costs, prompt = machine.costs, len(request.prompt_token_ids)
    seconds = costs.per_prefill_token * prompt * ("p" in parts)
    for number in range(request.output_len):
        seconds += costs.fixed / seats * ("f" in parts) + costs.per_decode_seq * ("s" in parts)
        seconds += costs.per_context_token * (prompt + number) * ("c" in parts)
    return seconds


def check_bound(busy_seconds: Any, bound: Any) -> None:
    """The work of a request on a full machine, and how many machines that is, none of them always busy."""
    for rng in rounds("busy", 20):
        machine, seats = Machine("A", 2.0, random_costs(rng)), rng.choice((1, 8, 64))
        request = random_sample(rng, 1).requests[0]
        prompt, output = len(request.prompt_token_ids), request.output_len
        said = f"A prompt of {prompt} tokens and {output} of output, on a machine with {seats} seats, all of them taken."
        alone = work_of(request, machine, seats, "psc") + machine.costs.fixed * output
        mistakes = {
            "without the prompt": work_of(request, machine, seats, "fsc"),
            "without the context that is read for each token": work_of(request, machine, seats, "fps"),
            "without the fixed part of its steps": work_of(request, machine, seats, "psc"),
            "with the whole fixed part of each step, which all seats share": alone if seats > 1 else math.nan,
            "with the context as long as the prompt all the time": work_of(request, machine, seats, "fps")
            + machine.costs.per_context_token * output * prompt,
        }
        look = "`busy_seconds`: the prompt once; then for each output token a seat's share of the fixed part, one sequence, and the context, which is the prompt and the tokens before it"
        right = work_of(request, machine, seats)
        expect_number(
            said,
            "milliseconds",
            1e3 * right,
            1e3 * busy_seconds(request, machine, seats),
            look,
            {words: 1e3 * wrong for words, wrong in mistakes.items() if wrong != right},
        )
    for rng in rounds("bound", 40):
        machine, seats, max_utilization = Machine("A", 2.0, random_costs(rng)), rng.choice((8, 64)), rng.choice((0.5, 0.7, 0.8))
        sample = random_sample(rng, rng.randint(30, 60))
        works = [work_of(request, machine, seats) for request in sample.requests]
        needed = sum(works) / sample.seconds / max_utilization
        right, always = math.ceil(needed), math.ceil(sum(works) / sample.seconds)
        from_zero = math.ceil(sum(works) / sample.requests[-1].arrival_time / max_utilization)
        if abs(needed - round(needed)) < 1e-6 or len({right, right - 1, always, from_zero}) < 4:
            continue  # a mistake would not show, or not which one
        got = bound(sample, machine, seats, max_utilization)
        said = f"{len(works)} requests in {sample.seconds:.1f} s bring {sum(works):.2f} s of work; a replica may be busy {max_utilization:.0%} of the time at most."
        look = "`bound`: the work that arrives in a second, over the share of it that one replica may spend, rounded up"
        known = {
            "the number for replicas that are always busy: with no time to spare, every burst leaves a queue that never ends": always,
            "rounded down, and what is left over has no machine": right - 1,
            "the number for requests that come from 0 s on: time begins with the first arrival": from_zero,
        }
        named = next((f"{look}. {got} is {words}" for words, number in known.items() if number == got != right), look)
        expect(said, "replicas", right, got, named)


def check_fewest(fewest: Any) -> None:
    """The smallest number that is enough, in a few simulations."""
    for rng in rounds("fewest", 30):
        most = rng.choice((1, 2, 7, 8, 16, 1000))
        right = rng.choice((1, most, most + 1, rng.randint(1, most)))
        asked: list[int] = []

        def is_enough(number: int, asked: list[int] = asked, right: int = right, most: int = most) -> bool:
            require(
                True, 1 <= number <= most,
                f"At most {most} replicas.\nExpected numbers to try: 1 to {most}\nGot: {number}\nLook at the numbers that `fewest` tries.",
            )  # fmt: skip
            asked.append(number)
            if len(asked) > 3000:
                fail(
                    f"At most {most} replicas.\nExpected: an answer\nGot: 3000 simulations\nLook at the loop of `fewest`: it does not end."
                )
            return number >= right

        said = f"{right} or more are enough; at most {most} are available."
        expected = right if right <= most else None
        look = "`fewest`: the smallest number for which `is_enough` says True, and None if it is not even true of `most`"
        expect(said, "replicas", expected, fewest(is_enough, most), look)
        limit = most.bit_length() + 1
        require(
            True, len(asked) <= limit,
            f"{said}\nExpected simulations: {limit} at the most\nGot simulations: {len(asked)}\n"
            "Look at what an answer tells about other numbers: if 8 are too few, so are all below 8. Halve what is left each time.",
        )  # fmt: skip


def probability(up: int, total: int, availability: float) -> float:
    """That at least `up` of `total` machines are up, each by itself."""
    return sum(math.comb(total, k) * availability**k * (1 - availability) ** (total - k) for k in range(up, total + 1))


def smallest_total(needed: int, availability: float, goal: float) -> int:
    """The smallest number of machines of which `needed` are up with this probability."""
    total = needed
    while probability(needed, total, availability) < goal:
        total += 1
    return total


def check_spares(with_spares: Any) -> None:
    """So many that enough are up 99.9 % of the time, or whatever is promised."""
    for number, rng in enumerate(rounds("spares", 40)):
        is_large = number < 8  # where common mistakes give different numbers
        needed, availability = (
            rng.choice((40, 150) if is_large else (1, 2, 5, 12)),
            rng.choice((0.9, 0.95) if is_large else (0.9, 0.99, 0.999)),
        )
        goal = rng.choice((0.9, 0.99, 0.999, 0.99999))
        right = smallest_total(needed, availability, goal)
        if any(abs(probability(needed, total, availability) - goal) < 1e-9 for total in (right - 1, right)):
            continue  # rounding would decide
        got = with_spares(needed, availability, goal)
        said = f"{needed} needed; each is up {availability:.1%} of the time; promised {goal:.3%} of the time."
        exact = next(
            (
                total
                for total in range(needed, needed + 400)
                if math.comb(total, needed) * availability**needed * (1 - availability) ** (total - needed) >= goal
            ),
            None,
        )
        known = {
            "the number of which so many are up on average: half of the time there are fewer": math.ceil(
                needed / availability - 1e-9
            ),
            "one spare, whatever is promised": needed + 1,
            "no spare at all": needed,
            "the number for which exactly so many are up: more than enough is enough, too": exact,
            "one too few": right - 1,
            "one more than it takes": right + 1,
        }
        look = "`with_spares`: add up the probabilities that `needed`, `needed` + 1, … of `total` are up, and raise `total` until that is the goal"
        named = next((f"{look}. {got} is {words}" for words, wrong in known.items() if wrong == got), look)
        expect(said, "machines", right, got, named)
