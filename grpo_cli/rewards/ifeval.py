"""IFEval: verifiable instructions (arXiv:2311.07911), each checked by code written from the paper's definitions.

Stricter than the paper's own checker where a trick would pass it: keywords are whole words, text in no language is in no language, a
repeated prompt needs an answer behind it, JSON is an object or array, and only one of the constrained answers may be given.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from grpo_cli.records import Sample
from grpo_cli.rewards.rules import NOT_APPLICABLE, NotApplicable
from grpo_cli.rewards.text import parse_json, response


def ifeval(sample: Sample, credit: Literal["fraction", "all"] = "fraction") -> float | NotApplicable:
    """The share of the row's instructions that the response follows, or with credit=all 1.0 when it follows every one, else 0.0.

    The row's `instruction_id_list` names the instructions and `kwargs` says how many, which word and so on, None standing for unset. A
    blank response follows nothing. Not applicable to a row without instructions; ValueError for a kind there is not.
    """
    fields, text = sample.problem.fields, response(sample)
    kinds = fields.get("instruction_id_list")
    if not kinds:
        return NOT_APPLICABLE
    followed = []
    for kind, given in zip(kinds, fields["kwargs"], strict=True):
        if kind not in INSTRUCTIONS:
            raise ValueError(f"there is no instruction {kind!r} (there are: {', '.join(INSTRUCTIONS)})")
        arguments = {name: value for name, value in given.items() if value is not None}
        followed.append(bool(text) and bool(INSTRUCTIONS[kind](text, **arguments)))
    return sum(followed) / len(followed) if credit == "fraction" else float(all(followed))


def _holds(count: int, relation: str, limit: int) -> bool:
    return {"at least": count >= limit, "less than": count < limit}[relation]


def _has_word(text: str) -> bool:
    return re.search(r"\w", text) is not None


# A letter or digit of a script that divides words by spaces: in Chinese, Japanese and Thai a keyword may touch its neighbours.
_GLUE = r"[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]"


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!{_GLUE}){re.escape(word.strip())}(?!{_GLUE})", text, re.IGNORECASE))


def _keyword_frequency(text: str, keyword: str, relation: str, frequency: int) -> bool:
    return _holds(_occurrences(text, keyword), relation, frequency)


def _letter_frequency(text: str, letter: str, let_relation: str, let_frequency: int) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


@lru_cache
def _detectors() -> Any:
    """langdetect's language profiles, with a seed: without one the same text may be judged twice differently."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.seed = 0
    factory.load_profile(PROFILES_DIRECTORY)
    return factory


def _language(text: str, language: str) -> bool:
    from langdetect.lang_detect_exception import LangDetectException

    detector = _detectors().create()
    detector.append(text.lower())  # langdetect passes over words in capitals
    try:
        found = detector.detect()
    except LangDetectException:  # nothing to tell a language by
        return False
    return found == language or found.startswith(f"{language}-")


# A full stop behind one of these ends no sentence: a title, an initial, the number of a list item.
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|e\.g|i\.e|Inc|Ltd|Vol|Fig)|(?<![\w.])[A-Z]|\.[A-Za-z]|(?:\A|\n)\s*[0-9]{1,2})\.\Z"
)
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”\u2019)\]*_]*\s+|(?<=[。\uff01\uff1f।])")


def sentences(text: str) -> int:
    """How many sentences: 2 in "Mr. Li paid 3.50. Why?"."""
    count, begin = 0, 0
    for end in [*(match.start() for match in _SENTENCE_END.finditer(text)), len(text)]:
        if end < len(text) and _ABBREVIATION.search(text[max(begin, end - 7) : end]):
            continue
        count += _has_word(text[begin:end])
        begin = end
    return count


def _number_sentences(text: str, relation: str, num_sentences: int) -> bool:
    return _holds(sentences(text), relation, num_sentences)


def _number_words(text: str, relation: str, num_words: int) -> bool:
    return _holds(len(re.findall(r"\w+", text)), relation, num_words)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = re.split(r"(?:^|(?<=\s))\*\*\*(?=\s|$)", text)
    inner = parts[not parts[0].strip() : len(parts) - (not parts[-1].strip())]  # a divider may open or close the text
    return len(inner) == num_paragraphs and all(part.strip() for part in inner)


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = re.search(r"\w+(?:-\w+)*", paragraphs[nth_paragraph - 1])
    return first is not None and first.group().lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = re.escape(postscript_marker.strip()).replace(r"\.", r"\.\s?")
    return re.search(rf"(?:^|[\s*_\"“]){marker}.*\w", text, re.IGNORECASE) is not None


def _number_placeholders(text: str, num_placeholders: int) -> bool:
    return sum(_has_word(inside) for inside in re.findall(r"\[([^\[\]\n]+)\]", text)) >= num_placeholders


def _number_bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*[*-][ \t]+\S", text, re.MULTILINE)) == num_bullets


def _title(text: str) -> bool:
    return any(_has_word(inside) for inside in re.findall(r"<<([^<>\n]+)>>", text))


def _constrained(text: str) -> bool:
    return len(set(re.findall(r"My answer is (yes|no|maybe)\.", text))) == 1


def _highlights(text: str, num_highlights: int) -> bool:
    return len(re.findall(r"(?<!\*)(\*{1,3})(?![\s*])[^*\n]*(?<!\s)\1(?!\*)", text)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    label = rf"^(?:[^\w\n]|_)*{re.escape(section_spliter.strip())}\s+(\d+|[IVX]+|[A-Z])\b"
    return len(set(re.findall(label, text, re.MULTILINE))) >= num_sections


def _json(text: str) -> bool:
    try:
        return isinstance(parse_json(text), (dict, list))
    except ValueError:
        return False


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    prompt = prompt_to_repeat.strip().lower()
    return text.lower().startswith(prompt) and _has_word(text[len(prompt) :])


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in re.split(r"(?<!\*)\*{6}(?!\*)", text)]
    answers = [part for part in parts if part]
    return len(answers) == 2 and answers[0] != answers[1]


def _capital_words(text: str, capital_relation: str, capital_frequency: int) -> bool:
    return _holds(sum(word.isupper() for word in re.findall(r"\w[\w'\u2019-]*", text)), capital_relation, capital_frequency)


def _end(text: str, end_phrase: str) -> bool:
    return text.rstrip(' \n"”').lower().endswith(end_phrase.strip().strip('"').lower())


def _quotation(text: str) -> bool:
    return len(text) > 2 and text[0] in '"“' and text[-1] in '"”' and bool(text[1:-1].strip())


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_occurrences(text, word) for word in keywords),
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": lambda text, forbidden_words: not any(_occurrences(text, word) for word in forbidden_words),
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": _number_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: text.isupper() and _language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _language(text, "en"),
    "punctuation:no_comma": lambda text: not re.search("[,،\uff0c]", text),
}
"""What each kind of instruction asks of the response; the parameters are the names that the data set's `kwargs` use."""
