"""Rules on what a completion says: its length and repetitions, its final answer as text, letter, pattern, JSON or translation.

Knows nothing of mathematics or programs.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from grpo_cli.records import Ended, Sample
from grpo_cli.rewards.rules import NOT_APPLICABLE, NotApplicable


def response(sample: Sample) -> str:
    """What follows the last </think>: "Hi" in "<think>a</think> Hi"; nothing while a thought is still open."""
    _, closed, tail = sample.text.rpartition("</think>")
    opened = "<think>" in sample.text or sample.prompt_text.rstrip().endswith("<think>")
    return "" if opened and not closed else tail.strip()


def stated(sample: Sample) -> str | None:
    """The content of the one <answer>..</answer> after the thought, or the whole response when it has no such tag.

    None when tags are unpaired or several, and when a response without tags was cut off at the token limit.
    """
    tail = sample.text.rsplit("</think>", 1)[-1]
    tags = [tail.count(tag) for tag in ("<answer>", "</answer>")]
    if tags == [0, 0]:
        return None if sample.ended is Ended.length else response(sample)
    return sample.answers[0].strip() if tags == [1, 1] and sample.answers else None


# How much is said


def length(sample: Sample, target: int | str, tolerance: int) -> float | NotApplicable:
    """1.0 at `target` tokens, falling in a line to 0.0 at `tolerance` tokens off: 75 or 125 tokens give 0.5 at target 100, tolerance 50.

    L1's exact length reward (arXiv:2503.04697 eq. 1) on a scale from 0 to 1. `target` may name a field of the row instead, for prompts that
    state a budget each; not applicable to a row whose field is no number.
    """
    tokens = sample.problem.fields.get(target) if isinstance(target, str) else target
    if isinstance(tokens, bool) or not isinstance(tokens, (int, float)):
        return NOT_APPLICABLE
    return max(0.0, 1 - abs(sample.tokens - tokens) / tolerance)


_LONGEST_WORD = 20
"""Longer runs without a space are counted by character: Chinese, or "haha" without end."""


def repetition(sample: Sample, n: int = 3) -> float:
    """Minus the share of n-grams that occurred before: "a b a b a b" has 4 trigrams, 2 of them new, so -0.5; 0.0 without repeats.

    The repetition penalty of arXiv:2502.03373 with words for tokens, so that its size does not depend on the tokenizer.
    """
    units = [unit for word in sample.text.casefold().split() for unit in ([word] if len(word) <= _LONGEST_WORD else word)]
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0


# What the answer is


def exact(sample: Sample, ignore_case: bool = False, ignore_punctuation: bool = False) -> float | NotApplicable:
    """1.0 when the stated answer is the gold answer, white space aside, else 0.0; not applicable without a gold answer.

    ignore_punctuation drops .,:;!? at the end and quotes and Markdown's *_` at both ends, never signs or points within: "-5" stays unlike
    "5". With both options "<answer>**New  York.**</answer>" equals "new york".
    """
    gold = _plain(sample.problem.answer, ignore_case, ignore_punctuation)
    answer = stated(sample)
    if not gold:
        return NOT_APPLICABLE
    return float(answer is not None and _plain(answer, ignore_case, ignore_punctuation) == gold)


_QUOTES = "\"'`*_“”\u2018\u2019«»„「」 "


def _plain(text: str, ignore_case: bool, ignore_punctuation: bool) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    text = text.casefold() if ignore_case else text
    return text.lstrip(_QUOTES).rstrip(_QUOTES + ".,:;!?。\uff0c\uff01\uff1f") if ignore_punctuation else text


_MARKUP = r"[\s*_$\"'“`(\[{]*(?:\\(?:text|textbf|mathrm|mathbf)\{[\s*_(]*)?"
_LETTER = r"[A-J](?![\w'\u2019+#-])"
_LEADING = re.compile(rf"{_MARKUP}(?P<letter>{_LETTER})[*_}}$\"'”`]*(?P<mark>[).:\]]?)(?P<rest>.*)", re.DOTALL)
_ALONE = re.compile(rf"{_MARKUP}([A-Ja-j])[\s*_}}$\"'”`)\].:]*")
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
# The lookahead lets two statements stand on one line.
_CUE = re.compile(
    r"(?i:(?:\bthe\s+)?(?:\banswer(?:\s+(?:is|would\s+be|must\s+be)\b|[*_\s]*:)|\b(?:correct|right|best)\s+(?:option|choice)\s+is\b))"
    r"[\s:]*(?i:(?:option|choice)\s)?(?=([^\n]{0,200}))"
)
_OTHERS = re.compile(rf"(?<!\w){_LETTER}")
_OTHER_OPTIONS = re.compile(
    rf"\({_LETTER}\s*\)|(?<![\w(]){_LETTER}[).:]\s+\w|\b(?:or|and/or)\W+{_LETTER}|\A[\s*_]*(?:and\b|[&/,])[\s*_(]*{_LETTER}"
)


def multiple_choice(sample: Sample) -> float | NotApplicable:
    r"""1.0 when the one letter that the completion states is the gold letter (A to J), else 0.0; not applicable to other golds.

    Stated is what stands in an answer tag or a box, behind "the answer is", "Answer:" or "the correct option is", or alone: "The answer is
    (B).", "\boxed{B}", "<answer>B) Paris</answer>". All statements must agree, and none may name a second letter: "B or C" gives 0.0.
    """
    gold = _ALONE.fullmatch(sample.problem.answer.strip())
    if gold is None:
        return NOT_APPLICABLE
    text = response(sample)
    parts = [part for part in [*sample.answers, *_BOX.findall(text), *_CUE.findall(text)] if not part.lstrip(" *_$").startswith("\\boxed")]
    letters = {_letter(part) for part in parts or [text]}
    return float(letters == {gold[1].upper()})


def _letter(part: str) -> str | None:
    """The letter that a statement names: B in "B", "(b)", "B) Paris" and "B, because A is too small."; None for none or several."""
    cue = _CUE.match(part.strip())
    part = cue[1] if cue else part
    if alone := _ALONE.fullmatch(part.strip()):
        return alone[1].upper()
    match = _LEADING.match(part)
    if match is None:
        return None
    if match["mark"] and match["rest"].strip(" *_"):  # an option and its text, where "vitamin C" is no second choice
        return None if _OTHER_OPTIONS.search(match["rest"]) else match["letter"]
    sentence = re.split(r"\.\s|\n|\b(?:because|since)\b", match["rest"])[0]
    return None if _OTHERS.search(sentence) else match["letter"]


def regex(
    sample: Sample, pattern: str, match: Literal["fullmatch", "search"] = "fullmatch", of: Literal["text", "answer"] = "text"
) -> float:
    r"""1.0 when the pattern (Python's re) matches the whole completion, or its stated answer, else 0.0.

    With pattern "[0-9]{4}-[0-9]{2}" and of=answer, "<answer>2024-05</answer>" gives 1.0; match=search takes it anywhere in the text.
    """
    text = sample.text if of == "text" else stated(sample)
    return float(text is not None and getattr(re, match)(pattern, text) is not None)


# JSON

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*)```", re.DOTALL)


def parse_json(text: str) -> Any:
    """The value of a text that is JSON and nothing else, bare or in one fenced block: [1] of "```json\\n[1]\\n```".

    ValueError for everything else, also for NaN, a name given twice, and nesting too deep to read.
    """
    match = _FENCED.fullmatch(text.strip())
    try:
        return json.loads(match[1] if match else text, parse_constant=_refused, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name is given twice")
    return value


def json_schema(sample: Sample, schema: dict[str, Any] | None = None, field: str = "schema") -> float | NotApplicable:
    """1.0 when the stated answer is JSON with nothing around it and satisfies the schema, else 0.0.

    The schema is the argument, or the row's field as an object or as JSON text; not applicable to a row without one. With {"type": "array"}
    "[1, 2]" and a fenced block of it give 1.0, "Here it is: [1, 2]" 0.0. References to other documents are never fetched.
    """
    schema = sample.problem.fields.get(field) if schema is None else schema
    if schema is None:
        return NOT_APPLICABLE
    # default=dict writes the read-only mappings of a problem's fields, which jsonschema takes for no object
    validator = _validator(schema if isinstance(schema, str) else json.dumps(schema, default=_plain_dict))
    answer = stated(sample)
    try:
        return float(answer is not None and validator.is_valid(parse_json(answer)))
    except (ValueError, RecursionError):
        return 0.0


def _plain_dict(value: Any) -> dict:
    assert isinstance(value, Mapping), value
    return dict(value)


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """jsonschema's validator for a schema as JSON text; its SchemaError when it is none."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    content = json.loads(schema)
    kind = validator_for(content, default=Draft202012Validator)
    kind.check_schema(content)
    return kind(content, registry=Registry())


# Translation


def translation(sample: Sample, metric: Literal["chrf", "bleu"] = "chrf") -> float | NotApplicable:
    """Sentence chrF or BLEU of the stated answer against the gold, from 0.0 to 1.0; not applicable without a gold.

    The gold itself gives 1.0. BLEU counts words divided by spaces: take chrF for languages written without them.
    """
    gold = sample.problem.answer.strip()
    if not gold:
        return NOT_APPLICABLE
    answer = stated(sample)
    return min(1.0, _metric(metric).sentence_score(answer, [gold]).score / 100) if answer else 0.0


@lru_cache
def _metric(name: str) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    return CHRF() if name == "chrf" else BLEU(effective_order=True)
