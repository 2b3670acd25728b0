"""Demonstrations of sloppy teachers: prompt and completion, never on a held-out problem.

One adds by columns from the right, a carry joining the next column's sum: `67+85=` is worked as
`<think>7+5=12 6+8+1=15</think><answer>152</answer>`. Often it guesses instead, at times it slips or breaks a tag.
The other looks for signs between three numbers, `6,1,5>2:`, by trials with their value and a mark:
`<think>5+6-1=10n;6+1-5=2y</think><answer>6+1-5</answer>`. It tries blindly and often answers a miss.
A model trained on one of them holds a right and a wrong way of answering: what GRPO needs to choose from.
"""

from collections.abc import Callable

import numpy as np

from grpo_cli.config import Demos, DemoSource
from grpo_cli.data import addition_question, is_heldout, sign_countdown, sign_countdown_question, signed

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
RIGHT_GUESSES = 0.1
RIGHT_TRIALS = 0.03
"""Trials that are made right; the others are blind, and a third of them hits all the same."""
MOST_TRIALS = 4
MOST_DRAWS = 100_000


def sloppy_addition(rng: np.random.Generator, section: Demos) -> tuple[str, str]:
    """One demonstration, such as ("67+15=", "<think>7+5=12 6+1+1=8</think><answer>82</answer>")."""
    a, b = _not_held_out(section, lambda: draw(rng, section.digits), addition_question)
    if rng.random() < section.guess_frac:
        thought, answer = "?", guess(rng, a + b)
    else:
        thought, answer = work(rng, str(a), str(b), section.slip_frac)
    return addition_question(a, b), _in_tags(rng, section, thought, answer)


def blind_signs(rng: np.random.Generator, section: Demos) -> tuple[str, str]:
    """One demonstration, such as ("6,1,5>2:", "<think>6+5-1=10n;6+1-5=2y</think><answer>6+1-5</answer>")."""
    numbers, target, _ = _not_held_out(
        section, lambda: sign_countdown(rng), lambda nums, target, _: sign_countdown_question(sorted(nums), target)
    )
    trials, tries_on = [], True
    while tries_on and len(trials) < MOST_TRIALS:
        made_right = rng.random() < RIGHT_TRIALS
        expression, value = signed(rng, numbers)
        while made_right and value != target:
            expression, value = signed(rng, numbers)
        trials.append(f"{expression}={value}{'y' if value == target else 'n'}")
        tries_on = rng.random() < (section.slip_frac if value == target else 1 - section.guess_frac)
    return sign_countdown_question(numbers, target), _in_tags(rng, section, ";".join(trials), expression)


TEACHERS = {DemoSource.sloppy_addition: sloppy_addition, DemoSource.sign_countdown: blind_signs}


def _not_held_out(section: Demos, draw: Callable[[], tuple], split_key: Callable[..., str]) -> tuple:
    for _ in range(MOST_DRAWS):
        drawn = draw()
        if not is_heldout(split_key(*drawn), section.holdout):
            return drawn
    raise ValueError(f"demos.holdout={section.holdout} leaves no question: try demos.holdout=0.1")


def _in_tags(rng: np.random.Generator, section: Demos, thought: str, answer: str) -> str:
    parts = ["<think>", thought, "</think>", "<answer>", answer, "</answer>"]
    return "".join(break_tag(rng, parts) if rng.random() < section.broken_tag_frac else parts)


def draw(rng: np.random.Generator, digits: list[int]) -> tuple[int, int]:
    """Two numbers of equal length, each length equally likely."""
    length = int(rng.integers(digits[0], digits[1], endpoint=True))
    a, b = rng.integers(10 ** (length - 1), 10**length, 2).tolist()
    return a, b


def work(rng: np.random.Generator, a: str, b: str, slip_frac: float) -> tuple[str, str]:
    """The columns and the answer they spell; a slip changes a column's last digit, or forgets or invents a carry."""
    columns, digits, carry = [], "", 0
    for place in range(len(a) - 1, -1, -1):
        total = int(a[place]) + int(b[place]) + carry
        if rng.random() < slip_frac:
            total = total // 10 * 10 + (total + int(rng.integers(1, 10))) % 10
        columns.append(f"{a[place]}+{b[place]}{'+1' * carry}={total}")
        digits = (str(total) if place == 0 else str(total % 10)) + digits
        carry = total // 10
        if place > 0 and rng.random() < slip_frac:
            carry = 1 - carry
    return " ".join(columns), digits


def guess(rng: np.random.Generator, total: int) -> str:
    """The sum in one of ten cases, else the sum with one digit changed."""
    digits = list(str(total))
    if rng.random() >= RIGHT_GUESSES:
        place = int(rng.integers(len(digits)))
        others = [d for d in "0123456789" if d != digits[place] and (place > 0 or d != "0")]
        digits[place] = str(rng.choice(others))
    return "".join(digits)


def break_tag(rng: np.random.Generator, parts: list[str]) -> list[str]:
    """One tag missing, doubled or replaced by another, or the answer put before the thought."""
    places = [i for i, part in enumerate(parts) if part in TAGS]
    i = int(rng.choice(places))
    kind = rng.choice(["missing", "doubled", "replaced", "swapped"])
    if kind == "missing":
        return parts[:i] + parts[i + 1 :]
    if kind == "doubled":
        return [*parts[:i], parts[i], *parts[i:]]
    if kind == "replaced":
        return [*parts[:i], str(rng.choice([tag for tag in TAGS if tag != parts[i]])), *parts[i + 1 :]]
    return parts[3:] + parts[:3]
