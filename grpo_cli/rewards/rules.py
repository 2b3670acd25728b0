"""Reward rules: each looks at one completion and returns a score, or NOT_APPLICABLE when it has no say.

A rule knows nothing of weights, groups or tensors, and gives the same score from any thread or process.
"""

import math
import re
from enum import Enum
from fractions import Fraction
from typing import Any, Literal

from grpo_cli.records import Ended, Sample


class NotApplicable(Enum):
    NOT_APPLICABLE = "not applicable"


NOT_APPLICABLE = NotApplicable.NOT_APPLICABLE
"""Returned by a rule that cannot judge this sample: it is left out of the sample's weighted sum, and counted."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# U+2212 is the minus sign of typeset text
_PREFIX = r"(?:[+\-\u2212]?[$€£¥₹]|[$€£¥₹]?[+\-\u2212])"
_VALUE = rf"(?:{_DIGITS}/{_DIGITS}|(?:{_DIGITS}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][+-]?(?P<exponent>[0-9]+))?)"
_NUMBER = re.compile(rf"(?P<prefix>{_PREFIX}?)(?P<value>{_VALUE})\.?")
# A minus after a digit, letter or bracket subtracts; digits glued to a letter (x2) or behind "1." belong to something else.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![0-9A-Za-z_)\]]){_PREFIX})?(?<![0-9A-Za-z_])(?<![0-9]\.){_VALUE}")


def parse_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number and nothing else: "-1,234.50", "$5", "+5", "3/4", "1e3", "12." and "−5".

    None for everything else, such as "5%", "5 km", "1,23", "1 1/2", "3/0", and for numbers too long to be meant (4000
    characters, or an exponent of more than three digits).
    """
    match = _NUMBER.fullmatch(text.strip()) if len(text) < 4000 else None
    if match is None or len(match["exponent"] or "") > 3:
        return None
    try:
        value = Fraction(match["value"].replace(",", ""))
    except ZeroDivisionError:
        return None
    return -value if set(match["prefix"]) & {"-", "\u2212"} else value


def _last_number(sample: Sample) -> Fraction | None:
    """The last number after the last </think>: 12 in "7+5=12", 1234 in "it costs $1,234.", -5 in "x = -5", 5 in "7-5"."""
    text = sample.text.rsplit("</think>", 1)[-1]
    *_, last = [None, *_NUMBER_IN_TEXT.finditer(text)]
    if last is None:
        return None
    # Cut at the token limit right behind the number: 12 may have been the start of 125 or of 12.5.
    unfinished = sample.ended is Ended.length and not text[last.end() :].strip(".,/")
    return None if unfinished else parse_number(last.group())


def _tagged_number(sample: Sample) -> Fraction | None:
    """The number in the one <answer>..</answer> after the last </think>: 8 in "<think>5+3</think><answer> 8 </answer>"."""
    tail = sample.text.rsplit("</think>", 1)[-1]
    once = tail.count("<answer>") == tail.count("</answer>") == len(sample.answers) == 1
    return parse_number(sample.answers[0]) if once else None


_EXTRACT = {"answer_tag": _tagged_number, "last_number": _last_number}


def numeric(sample: Sample, extract: Literal["answer_tag", "last_number"] = "answer_tag") -> float | NotApplicable:
    """1.0 when the stated number equals the gold answer exactly, else 0.0; not applicable when the gold is no number.

    answer_tag: exactly one answer tag after the thinking, and nothing but a number in it. last_number: the last number there is.
    With gold "82", "<answer>82</answer>" gives 1.0, "<answer>82 or 83</answer>" 0.0; "1,234.0" equals a gold of "1234".
    """
    gold = parse_number(sample.problem.answer)
    if gold is None:
        return NOT_APPLICABLE
    return 1.0 if _EXTRACT[extract](sample) == gold else 0.0


_R1_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_R1 = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


def r1_format(sample: Sample, partial: bool = False) -> float:
    """1.0 when the completion is <think>..</think> <answer>..</answer> and then the end token, else 0.0.

    Each tag occurs once, neither part is blank ("<think>?</think>" will do), and only white space stands around them. A prompt
    that already opens <think> counts as the beginning of the completion. partial: a broken format is worth 0.25 for each tag that
    occurs once and in its place, 0.75 at most.
    """
    opened = "<think>" if sample.prompt_text.rstrip().endswith("<think>") else ""
    text = opened + sample.text
    once = all(text.count(tag) == 1 for tag in _R1_TAGS)
    match = _R1.fullmatch(text) if once and sample.ended is Ended.eos else None
    if match and match[1].strip() and match[2].strip():
        return 1.0
    credit, end = 0.0, 0
    for tag in _R1_TAGS if partial else ():
        if text.count(tag) == 1 and text.index(tag) >= end:
            credit, end = credit + 0.25, text.index(tag) + len(tag)
    return min(credit, 0.75)


_SUM = re.compile(r"([0-9]+(?:\+[0-9]+)+)=([0-9]+)")

_MOST_DIGITS = 4300
"""Longer numbers are not meant, and int() refuses them."""


def working_steps(sample: Sample) -> list[tuple[int, float]] | NotApplicable:
    """Process rule: every sum in the thought is a step, worth 1.0 when it is true: "7+5=12 6+1+1=9" gives [(6, 1.0), (14, 0.0)].

    A sum with a number of more than 4300 digits counts as false. Not applicable to a completion without a sum before </think>.
    """
    steps = []
    for match in _SUM.finditer(sample.text.split("</think>", 1)[0]):
        terms, total = match[1].split("+"), match[2]
        readable = all(len(number) <= _MOST_DIGITS for number in (*terms, total))
        steps.append((match.end(), float(readable and sum(map(int, terms)) == int(total))))
    return steps or NOT_APPLICABLE


def overlong(sample: Sample, max_tokens: int, buffer: int) -> float:
    """0 up to max_tokens - buffer tokens, then falling in a line to -1 at max_tokens (DAPO's soft punishment, arXiv:2503.14476 eq. 13)."""
    excess = sample.tokens - (max_tokens - buffer)
    return -min(1.0, max(0.0, excess / buffer))


def check_overlong(key: str, args: dict[str, Any]) -> None:
    """Refuse arguments with which `overlong` would have no line to fall along; `key` is reward.rules.NAME."""
    most, buffer = (args.get(name) for name in ("max_tokens", "buffer"))
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (most, buffer))
    if not numbers or not 0 < buffer <= most < math.inf:
        raise ValueError(
            f"{key}.args: overlong needs numbers with 0 < buffer <= max_tokens, not max_tokens={most}, buffer={buffer}: "
            f"try '++{key}.args={{max_tokens: 1024, buffer: 128}}'"
        )
