r"""The math rule: what a completion states as its final answer, and whether that equals the gold.

Extraction and the shapes of answers (lists, intervals, matrices, relations, quantities) are read here; math-verify reads single
expressions, and two of them are equal when their values agree to 50 digits at several points. Nothing is evaluated that could
grow beyond a few thousand digits. Knows nothing of weights, groups or tensors.
"""

# ruff: noqa: RUF001 (signs that look like others are what is read here)

import logging
import re
import unicodedata
import zlib
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any

from grpo_cli.records import Ended, Sample
from grpo_cli.rewards.rules import NOT_APPLICABLE, NotApplicable

_LONGEST = 3000
"""Characters of an answer beyond which nobody means it."""


def math(sample: Sample) -> float | NotApplicable:
    r"""1.0 when the final answer equals the gold, else 0.0: "\boxed{0.5}", "#### 1/2" and "The answer is $\frac12$." for a gold of "1/2".

    The gold may be a GSM8K solution; not applicable when it cannot be read, as "" or "\frac{1}{".
    """
    gold = _gold(sample.problem.answer)
    if gold is None:
        return NOT_APPLICABLE
    # Cut at the token limit: 12 may have been the start of 125 or of 12.5
    text = sample.text
    if sample.ended is Ended.length:
        text = re.sub(r"\A[\w.,/]+", "", text[::-1])[::-1]
    answers = [_plain(answer) for answer in _final_answers(text)]
    if not answers or any(len(answer) > _LONGEST for answer in answers):
        return 0.0
    # Boxes joined by "and" are one list; joined by "or" they may also be one value written in several ways.
    right = all(_equal(gold, answer) for answer in answers) or (len(answers) > 1 and _equal(gold, ",".join(answers)))
    return float(right)


@lru_cache(maxsize=1024)
def _gold(answer: str) -> str | None:
    """The gold in plain notation, None when nothing can be compared with it."""
    answer = answer.rsplit("####", 1)[-1]
    gold = _plain(next(iter(_boxes(answer)[-1:]), (0, 0, answer))[2] or "")
    readable = any(map(str.isalnum, gold)) and _balanced(gold) and len(gold) <= _LONGEST
    leaf = readable and "\\" in gold and "\\text" not in gold and len(_items(gold)) == 1 and "matrix" not in gold
    if (
        leaf
        and not _relation(gold)
        and not _enclosed(gold)
        and all(_number(text) is None and _tree(text) is None for text in (_quantity(gold)[0], gold))
    ):
        return None
    return gold if readable else None


# ---- What is stated as the final answer

_BOX_TOKEN = re.compile(r"\\{1,4}f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<answer>(.*?)(?:(</answer>)|\Z)", re.DOTALL)
# "#### 2. Add them up" and "#### Step 2" are headings.
_HASHES = re.compile(r"####[ \t]*(?![0-9]+[.):][ \t]+\w)(?=[^\w\s]{0,6}[0-9]|[\\$(\[{]|\*{0,4}[A-Z]\b)([^\n]+)")
_SAID = re.compile(
    r"\b(?:answer|(?:final|correct|right) (?:result|solution|option|choice|value))s?\b"
    r"(?:[^\n.?!=:]{0,80}?\b(?:is|are|would be|equals|becomes)\b:?|\**[ \t]*[:=]|(?<=nswer)\**:?\**(?=[ \t]*\n))"
    r"[\s*_`]*(?:therefore|thus|simply|indeed|exactly|then|hence)?[\s*_`]*",
    re.IGNORECASE,
)
_DISPLAY = re.compile(r"(?:\\\[|\$\$|\\begin\{align\*?\})((?:(?!\\\[|\$\$|\\begin\{align).)*?)(?:\\\]|\$\$|\\end\{align\*?\})", re.DOTALL)
_REMARK = re.compile(
    r"\s+(?:because|since|which|where|so|given|based|after|when|i\.e\.|that is|as)\b.*|[;:]\s.*|,\s+(?!or\b|and\b)[a-z]{3,}.*"
    r"|\s+\((?![^)]*\b(?:or|maybe|perhaps|possibly|could|might|may)\b)[^()$\\]*\)$",
    re.DOTALL,
)
# What begins like this states another answer: "; 13", ", alternatively 13", " (13 is another option)", ". Or 13!"
_OTHER = re.compile(
    r"[\s,;:(]*\b(?:or|alternatively|another|maybe|perhaps|possibly|also|as well as)\b|[;:]\s*[-+$(\\]*[0-9]|\s*\(\s*[-+$\\]*[0-9]\S* is\b",
    re.IGNORECASE,
)
_OTHER_BEHIND = re.compile(r"[.!*_`\"')\s]*\b(?:or|no,? wait|actually|alternatively|maybe|perhaps)\b[^\n.]{0,12}[0-9]", re.IGNORECASE)
_NO_ANSWER = re.compile(r"(?:indeed |now |also )?(?:correct|right|reasonable|verified|confirmed|consistent|valid|clear)\b", re.IGNORECASE)
_JOINED = re.compile(r"[\s$*.()\\]*(?:,|;|\bor\b|\band\b|\\text\{\s*(?:or|and)\s*\})+[\s$*()\\]*(?:\b(?:or|and)\b[\s$*()\\]*)?")


def _final_answers(text: str) -> list[str]:
    """The last stated final answer; several when boxes are joined by "and" or "or"; none when it is cut off or absent.

    Text in <think> does not count. Answer tags, boxes and #### stand above a closing sentence, unless a later one states a number.
    """
    text = text.rsplit("</think>", 1)[-1].split("<think>", 1)[0]
    boxes = _boxes(text)
    marked: list[tuple[int, list[str]]] = []
    if boxes:
        joined = [boxes[-1][2]]
        for (_, end, content), (begin, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
            if begin - end > 30 or not _JOINED.fullmatch(text, end, begin):
                break
            joined.insert(0, content)
        marked.append((boxes[-1][1], [] if None in joined else joined))
    for match in list(_TAG.finditer(text))[-1:]:
        marked.append((match.end(), [] if not match[2] else _final_answers(match[1]) or [match[1]]))
    for match in list(_HASHES.finditer(text))[-1:]:
        if "\\boxed" not in match[1]:
            marked.append((match.end(), [_statement(match[1][: 2 * _LONGEST])]))
    end, answers = max(marked, default=(0, []), key=lambda mark: mark[0])
    rests = (text[match.end() : match.end() + _LONGEST] for match in reversed(list(_SAID.finditer(text, end))))
    said = next(filter(None, map(_sentence, rests)), None)
    if said and (not marked or _NUMBER.fullmatch(_plain(said))):
        return [said]
    display = not marked and list(_DISPLAY.finditer(text))[-1:]
    if display and "=" in display[0][1] and not text[display[0].end() :].strip(" \n.$"):
        return [re.sub(r"\\\\\s*$|&", "", display[0][1].rsplit("=", 1)[1])]
    return answers


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    r"""(begin, end, content) of the outermost boxes in order; the content of one that is never closed is None."""
    opened: list[tuple[int, int, bool]] = []
    boxes: list[tuple[int, int, str | None]] = []
    for token in _BOX_TOKEN.finditer(text):
        if token.group().endswith("{") and token.group() != "\\{":
            opened.append((token.start(), token.end(), len(token.group()) > 1))
        elif token.group() == "}" and opened:
            begin, inner, is_box = opened.pop()
            if is_box:
                while boxes and boxes[-1][0] > begin:
                    boxes.pop()
                boxes.append((begin, token.end(), text[inner : token.start()]))
    cut_off: list[tuple[int, int, str | None]] = [(begin, len(text), None) for begin, _, is_box in opened if is_box]
    return sorted(boxes + cut_off, key=lambda box: box[0])


def _sentence(rest: str) -> str:
    """What "the answer is" is followed by: "42" of "42, as we have seen. Next ..."; empty for a question and for "correct"."""
    display = _DISPLAY.match(rest)
    if display:
        return display[1]
    line = rest.split("\n", 1)[0]
    end = re.search(r"([.!?])[*_`\"')]*(?=\s|$)", line)
    if _NO_ANSWER.match(line) or (end and end[1] == "?"):
        return ""
    stated = line[: end.start()] if end else line
    return rest if _OTHER_BEHIND.match(rest, len(stated)) else _statement(stated)


def _statement(line: str) -> str:
    """An answer without the remark behind it: "40 marbles" of "40 marbles (4 bags of 10)"; whole when that is another answer."""
    line = line.strip().replace("**", "").replace("__", "").strip("`* ")
    remark = _REMARK.search(line)
    return line if remark is None or _OTHER.match(remark[0]) else line[: remark.start()]


# ---- Notation

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = str.maketrans("−﹣‐‑÷⁄∕∗⟨⟩º’", "----///*()°'") | str.maketrans(
    dict(re.findall(r"(\S):(\S+ )", r"×:\times ·:\cdot ⋅:\cdot π:\pi θ:\theta ∞:\infty ∅:\emptyset ℝ:\mathbb{R} "))
)
_COMMANDS = dict(
    re.findall(
        r"(\\\w+):(\S*)",
        r"""\le:≤ \leq:≤ \leqslant:≤ \ge:≥ \geq:≥ \geqslant:≥ \lt:< \gt:> \ne:≠ \neq:≠ \approx:≈ \simeq:≈ \cup:∪ \in:∈ \pm:± \lor:,
        \dfrac:\frac \tfrac:\frac \cfrac:\frac \lbrace:\{ \rbrace:\} \langle:( \rangle:) \lvert:| \rvert:| \degree:° \div:/
        \varnothing:\emptyset \left: \right: \big: \Big: \bigl: \bigr: \displaystyle: \textstyle: \limits:""",
    )
) | dict.fromkeys([r"\quad", r"\qquad", r"\thinspace", r"\enspace", r"\space"], " ")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|[mh]box|math(?:rm|bf|it|sf|tt)|operatorname|boldsymbol|bm|f?box(?:ed)?)\s*\{([^{}]*)\}"
)
_BOXED = ("\\box", "\\fbox")
_GROUPED = r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])"
_REWRITES = [
    (re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,|(?<=[0-9])~)\s*(?=[0-9]{3}(?![0-9]))"), ""),  # 4{,}200 and 4,\!200 and 4\,200
    (re.compile(r"(?<!\\)\\[ ,;:!>]|~|\u00a0|\u2009|\u202f|\u200b"), " "),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)"), "°"),
    (re.compile(r"\\?%"), "%"),
    (re.compile(r"\\frac\s*([0-9])"), r"\\frac{\1}"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*([0-9])"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*([0-9a-z])"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(?:\(([^()]*)\)|([0-9]+|[a-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"\bsqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<![0-9.,])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9])"), lambda match: match[0].replace(" ", "")),
    (re.compile(r"\\text\{\s*,?\s*(?:or|and)\s*\}|\s*,?\s(?:or|and)\s+"), ","),
    (re.compile(r"\\text\{\s*([+-]?[0-9][0-9,./]*)\s*\}"), r"\1"),
    (re.compile(r"\\log_\s*([0-9])"), r"\\log_{\1}"),
    (re.compile(r"\\mathbb\s*\{?R\}?|\ball real(?: number)?s\b"), r"(-\\infty,\\infty)"),
    (re.compile(r" +"), " "),
]


def _plain(text: str) -> str:
    r"""One notation for many: "$\dfrac12$." becomes "\frac{1}{2}", "−6" "-6", "\text{ cm}^2" keeps its \text."""
    if len(text) > 2 * _LONGEST:
        return text
    text = re.sub(r"\s+", " ", text)
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("(?<=[0-9])(?=[½⅓⅔¼¾⅕⅛])", " ", text)
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).replace("\u2044", "/")
    text = re.sub(r"^\s*\u2013", "-", text).strip().strip("`").strip()
    text = re.sub(r"\\\$", "＄", text.replace("**", "") if text.startswith("**") else text)
    text = re.sub(r"\\[()\[\]]", "", text) if "matrix" not in text else text
    # A single dollar sign before a number is money, two are math
    text = text.replace("$", "＄") if text.count("$") == 1 else text.replace("$", "")
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[0], match[0]), text)
    while (shorter := _TEXT.sub(lambda match: match[1] if match[0].startswith(_BOXED) else f"\x02{match[1]}\x03", text)) != text:
        text = shorter
    text = re.sub("\x02+([^\x02\x03]*)\x03+", r"\\text{\1}", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;").strip()
    text = _unwrapped(text)
    text = re.sub(r"^(?:\\text\{)?(?:the )?(?:final )?answer(?: is)?:?\s*\}?\s*(?=\S)", "", text, flags=re.IGNORECASE)
    return re.sub(r"^(?:≈|\\text\{(?:about|approximately) ?\}|(?:about|approximately) )\s*", "", text).rstrip(".").strip()


_BRACKET = re.compile(r"\\begin|\\end|\\[{}]|[()\[\]{}]")
_OPENING = {"\\begin", "\\{", "(", "[", "{"}


def _depths(text: str) -> list[tuple[int, int]]:
    """(end, depth behind it) of each bracket; kinds are not matched, as (2,5] is an interval."""
    depth, depths = 0, []
    for match in _BRACKET.finditer(text):
        depth += 1 if match.group() in _OPENING else -1
        depths.append((match.end(), depth))
    return depths


def _closes_at_end(text: str) -> bool:
    depths = _depths(text)
    return bool(depths) and all(depth > 0 for _, depth in depths[:-1]) and depths[-1] == (len(text), 0)


def _unwrapped(text: str) -> str:
    """Text without the braces around all of it: "{a}{b}" of "{{a}{b}}"."""
    depths = [depth for _, depth in _depths(text)]
    begin, end = len(text) - len(text.lstrip("{")), len(text) - len(text.rstrip("}"))
    around = min(begin, end, *depths[begin - 1 : len(depths) - end]) if begin and end and depths[-1] == 0 else 0
    return text[around : len(text) - around].strip() if around > 0 else text


def _balanced(text: str) -> bool:
    depths = [depth for _, depth in _depths(text)]
    return min(depths, default=0) >= 0 and (not depths or depths[-1] == 0)


def _split(text: str, separators: str) -> list[str]:
    """Parts between separators that stand in no bracket; the separators themselves are every second part."""
    parts, begin, depth = [], 0, 0
    for match in re.finditer(rf"{_BRACKET.pattern}|(?P<separator>{separators})", text):
        if match["separator"] is None:
            depth += 1 if match.group() in _OPENING else -1
        elif depth == 0:
            parts += [text[begin : match.start()].strip(), match.group()]
            begin = match.end()
    return [*parts, text[begin:].strip()]


# ---- Shapes


def _equal(gold: str, answer: str) -> bool:
    """Whether two answers in plain notation are the same, part by part."""
    if _key(gold) == _key(answer):
        return True
    golds, answers = _items(gold), _items(answer)
    if len(golds) > 1 or len(answers) > 1:
        sets = gold.startswith(r"\{") and answer.startswith(r"\{")
        if not answer.startswith(r"\{") and len(golds) == 1 and (point := _enclosed(gold)) and point[0] + point[-1] == "()":
            return len(point) - 2 == len(answers) and all(map(_equal, point[1:-1], answers))
        return _same_elements(golds, answers, sets) or (
            re.fullmatch(_GROUPED, gold) is not None and _equal(gold.replace(",", ", "), answer)
        )
    gold, answer = golds[0], answers[0]
    table, other = _matrix(gold), _matrix(answer)
    if table and other:
        return table[0] == other[0] and all(map(_equal, table[1], other[1]))
    if table and set(table[0]) == {1} and (point := _enclosed(answer)) and point[0] == "(":
        return len(point) - 2 == len(table[1]) and all(map(_equal, table[1], point[1:-1]))
    if _relation(gold) or _relation(answer):
        return _equal_relations(gold, answer)
    points = _enclosed(gold), _enclosed(answer)
    if points[0] or points[1]:
        return bool(points[0] and points[1]) and len(points[0]) == len(points[1]) and all(map(_equal, points[0], points[1]))
    return _equal_leaves(gold, answer)


def _key(text: str) -> str:
    """Text without the spaces that mean nothing; the one in "1 2" stays."""
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", text)


def _items(text: str) -> list[str]:
    r"""Elements of a set, union or list, each ± as two: "1±2,\{5\}" gives 1+2, 1-2 and \{5\}; "12,500" is one number."""
    text = re.sub(r"^[a-zA-Z] ?∈ ?", "", text)
    is_set = text.startswith(r"\{") and text.endswith(r"\}") and _closes_at_end(text)
    text = text[2:-2].strip() if is_set else text
    if is_set and not text:
        return [r"\emptyset"]
    if not is_set or re.search(r",\s", text):
        text = re.sub(_GROUPED, lambda match: match[0].replace(",", ""), text)
    items = _split(text, "[,;∪]")[::2]
    return [item.replace("±", sign) for item in items for sign in ("+-" if "±" in item else "+")]


def _same_elements(golds: list[str], answers: list[str], as_sets: bool) -> bool:
    """Whether each element has its partner, in any order; in sets repeated ones are one."""
    if len(golds) > 100 or len(answers) > 100:
        return False
    if as_sets:
        covered = all(any(_equal(gold, answer) for gold in golds) for answer in answers)
        return covered and all(any(_equal(gold, answer) for answer in answers) for gold in golds)
    if len(golds) != len(answers):
        return False
    left = list(answers)
    for gold in golds:
        partner = next((index for index, answer in enumerate(left) if _equal(gold, answer)), None)
        if partner is None:
            return False
        left.pop(partner)
    return True


def _enclosed(text: str) -> list[str] | None:
    """Bracket, coordinates or ends, bracket of a tuple or an interval: ["(", "2", "5", "]"] of "(2,5]"."""
    if not (text.startswith(("(", "[")) and text.endswith((")", "]")) and _closes_at_end(text)):
        return None
    parts = _split(text[1:-1], r",(?=\s)" if re.search(r",\s", text) and re.search(_GROUPED + r"\s*[,)\]]", text) else ",")[::2]
    return [text[0], *parts, text[-1]] if len(parts) > 1 else None


_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)


def _matrix(text: str) -> tuple[list[int], list[str]] | None:
    """Entries in each row, and all entries; a determinant is no matrix."""
    match = _MATRIX.fullmatch(text.strip("[]()"))
    if match is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
    return [len(row) for row in rows], [cell.strip() for row in rows for cell in row]


_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}
_LETTER = r"(?:\\[a-zA-Z]+(?![a-zA-Z])|[a-zA-Z])"
# x, AB, f(3), P(A), x_1, a+b, \angle ABC, \text{Area}, (x,y)
_NAME = re.compile(
    rf"\((?:{_LETTER},?\s*)+\)"
    rf"|(?:\\text\{{[^{{}}]*\}}[\s+-]*|{_LETTER}(?:_(?:\{{\w+\}}|\w))?'*(?:\^\{{-1\}})?(?:\([^()=<>]*\))?[\s+-]*)+"
)


def _relation(text: str) -> list[str] | None:
    """Sides and signs of a chain: ["2", "<", "x", "≤", "5"]; None without a sign."""
    parts = _split(text, "[=<>≤≥≠≈]")
    return parts if len(parts) > 1 else None


def _equal_relations(gold: str, answer: str) -> bool:
    chains = [_relation(gold), _relation(answer)]
    values = [_assigned(chain) if chain else text for chain, text in zip(chains, (gold, answer), strict=True)]
    if not chains[0] or not chains[1]:
        if values[0] and values[1]:
            return _equal(values[0], values[1])
        spans = [_span(chain) if chain else text for chain, text in zip(chains, (gold, answer), strict=True)]
        return bool(spans[0] and spans[1]) and _equal(spans[0], spans[1])
    chain, other = chains
    reverse = [_FLIPPED.get(part, part) for part in reversed(other)]
    for candidate in (other, reverse):
        if candidate[1::2] == chain[1::2] and all(map(_equal, chain[::2], candidate[::2])):
            return True
    if len(chain) != 3 or len(other) != 3:
        return bool(values[0] and values[1]) and chain[0] == other[0] and _equal(values[0], values[1])
    # 2x-y=-3 and y=2x+3: left minus right differ by a constant factor, for inequalities a positive one
    for candidate in (other, reverse):
        ratios = _ratios(f"({chain[0]})-({chain[2]})", f"({candidate[0]})-({candidate[2]})")
        if chain[1] == candidate[1] and ratios and all(_close(ratio, ratios[0]) for ratio in ratios):
            return ratios[0] != 0 and (chain[1] in "=≠" or (ratios[0].is_positive or False))
    return False


def _assigned(chain: list[str]) -> str | None:
    """The value a chain of equations states: "3" of "x=3", "18" of "12+6=18"; None of "x+1=3", "5=6" and "x<3".

    "\\frac{1}{3}≈0.33" states 1/3, "x≈0.33" states 0.33.
    """
    if set(chain[1::2]) - {"=", "≈"} or len(chain) > 20:
        return None
    if len(chain) == 3 and _NAME.fullmatch(chain[2]) and not _named_constant(chain[2]) and not _NAME.fullmatch(chain[0]):
        chain = chain[::-1]
    named = len(chain) > 1 and _NAME.fullmatch(chain[0]) and not _named_constant(chain[0])
    sides = chain[2:] if named else chain
    if "≈" in sides:
        sides = sides[: sides.index("≈")]
    return sides[-1] if all(_equal(sides[0], side) for side in sides[2::2]) else None


def _named_constant(text: str) -> bool:
    return bool(re.fullmatch(r"\\pi ?|e|i|\\infty ?", text.strip()))


def _span(chain: list[str]) -> str | None:
    """The interval of an inequality in one letter: "(5,\\infty)" of "x>5", "[2,7)" of "2≤x<7"."""
    if set(chain[1::2]) & set("=≠≈"):
        return None
    if re.fullmatch(_LETTER, chain[-1]) or (chain[1] in ">≥" and len(chain) == 5):
        chain = [_FLIPPED.get(part, part) for part in reversed(chain)]
    if len(chain) == 3 and re.fullmatch(_LETTER, chain[0]):
        _, sign, end = chain
        chain = ["-\\infty", "<", "x", sign, end] if sign in "<≤" else [end, _FLIPPED[sign], "x", "<", "\\infty"]
    if len(chain) != 5 or not re.fullmatch(_LETTER, chain[2]) or not {chain[1], chain[3]} <= set("<≤"):
        return None
    return f"{'[' if chain[1] == '≤' else '('}{chain[0]},{chain[4]}{']' if chain[3] == '≤' else ')'}"


# ---- One value

_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<digits>{_GROUPED}|[0-9]+|(?=\.[0-9]))(?P<decimals>\.[0-9]*)?(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}}))?"
)
_UNITS: dict[str, tuple[str, Fraction]] = {
    name: (base, Fraction(factor))
    for base, sizes in {
        "m": "mm millimeter millimetre 1/1000,cm centimeter centimetre 1/100,dm decimeter 1/10,m meter metre 1,km kilometer kilometre 1000",
        "inch": "inch inche 1,ft foot feet 12,yd yard 36,mi mile 63360",
        "g": "mg milligram 1/1000,g gram 1,kg kilogram 1000,ton tonne 1000000",
        "lb": "oz ounce 1/16,lb lbs pound 1",
        "s": "s sec second 1,min minute 60,h hr hour 3600,day 86400,week 604800",
        "year": "month 1/12,year yr 1",
        "l": "ml mL milliliter 1/1000,l L liter litre 1",
        "dollar": "cent penny pennies 1/100,dollar usd buck 1",
        "degree": "degree deg ° 1",
        "radian": "rad radian 1",
    }.items()
    for size in sizes.split(",")
    for *names, factor in [size.split()]
    for name in names
}
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SPEEDS = {"mph": "mile / hour", "kmh": "km / h", "kph": "km / h"}
_BEHIND = re.compile(r"(?P<value>.*?(?:[0-9}).]|\\pi))(?P<space>\s*)(?=°|\\text|[A-Za-z])(?:\\text\{[^{}]*\}|\^\{?[23]\}?|[A-Za-z° ./'-])*")
_HEDGE = re.compile(
    r",|\b(?:or|to|not|maybe|perhaps|possibly|probably|either|between|wrong|less|more|least|most|if|unless|n't|"
    r"plus|minus|times|squared|cubed|factorial|alternatively|also)\b|(?<![\^{])[0-9]",
    re.IGNORECASE,
)

Unit = tuple[dict[str, int], Fraction] | None


def _quantity(text: str) -> tuple[str, Unit, bool]:
    r"""Value, unit and whether it is a percentage: ("24", cm) of "24\text{ cm}"; ("5", dollars) of "＄5"."""
    percent = re.fullmatch(r"(.*[0-9})])\s*(?:%|(?:\\text\{ ?)?per ?cent(?:age points?)?\}?)", text)
    if percent:
        return percent[1], None, True
    scale, unit = 1, None
    money = re.match(r"([+-]?)\s*([＄€£¥₹])\s*", text := re.sub(r"^(.*[0-9])\s*([＄€£¥₹])$", r"\2\1", text))
    if money:
        text, unit = money[1] + text[money.end() :], ({"dollar": 1}, Fraction(1)) if money[2] == "＄" else None
    behind = _BEHIND.fullmatch(text)
    if behind and not re.search(r"[a-zA-Z]", re.sub(r"\\(?:frac|sqrt|pi|times|cdot|infty)|[eE]", "", behind["value"])):
        unit_text = text[behind.end("space") :]
        words = re.findall(r"[A-Za-z']+|°|\^\{?[23]|/", re.sub(r"\\text|(?<=[a-z])\.(?=[a-z]?)", "", unit_text))
        first = words[0] if words else ""
        known = _unit_of(first) or first in _SCALES or first in _POWERS
        # "5m" and "2ab" are products
        meant = unit_text.startswith(("\\text", "°")) or (known and len(first) > 1) or (behind["space"] and (known or len(first) > 2))
        if meant and not _HEDGE.search(unit_text):
            scale = prod(_SCALES.get(word, 1) for word in words)
            text, unit = behind["value"], _dimension(words) or unit
    return text if scale == 1 else f"{scale}*({text})", unit, False


def _unit_of(word: str) -> tuple[str, Fraction] | None:
    return _UNITS.get(word) or _UNITS.get(word.lower()) or _UNITS.get(word.lower().removesuffix("s")) if word else None


def _dimension(words: list[str]) -> Unit:
    """Powers of the base units and the factor to them: ({"m": 1, "s": -1}, 1000/3600) of km / h; None when no word is a unit."""
    if (words and words[-1] == "in") or words[-2:-1] == ["in"]:
        words = ["inch" if word == "in" else word for word in words]
    words = [part for word in words for part in _SPEEDS.get(word.lower(), word).split()]
    powers: dict[str, int] = {}
    factor, sign, power = Fraction(1), 1, 1
    last: tuple[str, Fraction] | None = None
    for word in words:
        if word in ("/", "per"):
            sign = -1
        elif word.lower() in _POWERS:
            power = _POWERS[word.lower()]
        elif last and (raised := {"squared": 2, "cubed": 3}.get(word) or (int(word[-1]) if word[0] == "^" else 0)):
            powers[last[0]] += sign * (raised - 1)
            factor *= last[1] ** (sign * (raised - 1))
        elif last := _unit_of(word):
            powers[last[0]] = powers.get(last[0], 0) + sign * power
            factor *= last[1] ** (sign * power)
            power = 1
    return (powers, factor) if powers else None


def _words(text: str) -> str | None:
    r"""A text answer in small letters without articles: "tuesday" of "\text{Tuesday}"; None for xy, 2k and \pi.

    Three letters with a vowel are a word, not a product of symbols.
    """
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    marked = bare != text
    if "\\" in bare or not re.fullmatch(r"[^\W\d_][\w\s.,'?!:/-]*|[0-9][0-9: ]*:[0-9: ]*(?:[ap]\.?m\.?)?", bare.strip(), re.IGNORECASE):
        return None
    words = re.sub(r"[^\w\s:]", "", re.sub(r"[-/!]", " ", re.sub(r"\b(?:the|an?)\s(?=\S)", "", bare.lower()))).split()
    is_word = marked or any(len(word) >= 3 and set(word) & set("aeiou") for word in words) or words == ["no"] or ":" in bare
    return " ".join(words) if words and is_word else None


# "C", "(C)", "C: the third", "(C) 42"
_CHOICE = re.compile(r"\(?([A-Z])(?:\)?[.:]?|(?:\)?[.:]|\))\s(?!.*\b[A-Z]\b).*)", re.DOTALL)


def _equal_leaves(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    bare_gold, bare = (re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip() for text in (gold, answer))
    if re.fullmatch(r"\(?[A-Z]\)?", bare_gold):
        stated = _CHOICE.fullmatch(re.sub(r"^(?:option|choice) +", "", bare, flags=re.IGNORECASE))
        return bool(stated and stated[1] == bare_gold.strip("()"))
    based = re.fullmatch(r"([0-9A-F]+)_\{?([0-9]+)\}?", gold)
    if based:
        return bool(re.fullmatch(rf"{based[1]}(?:_\{{?{based[2]}\}}?)?", answer.replace(" ", "")))
    if _words(gold) or _words(answer):
        return _words(gold) == _words(answer)
    (left, left_unit, left_percent), (right, right_unit, right_percent) = _quantity(gold), _quantity(answer)
    factors = [1, 1]
    if left_unit and right_unit:
        if left_unit[0] != right_unit[0]:
            return False
        factors = [left_unit[1], right_unit[1]]
    if _equal_values(left, right, *factors):
        return True
    if left_percent == right_percent:
        return False
    return _equal_values(left, right, *((Fraction(1, 100), 1) if left_percent else (1, Fraction(1, 100))))


def _number(text: str) -> Fraction | None:
    r"""The exact value of a number, mixed and repeating ones included: "-1,234.50", "3e5", "1 1/2", "3\frac{1}{2}", "0.\overline{3}"."""
    text = text.strip().replace("\\ ", " ")
    match = _NUMBER.fullmatch(text)
    if match:
        digits = match["digits"].replace(",", "") + (match["decimals"] or ".")
        value = Fraction((digits + "0") + (f"e{match['exponent']}" if match["exponent"] else ""))
        return -value if match["sign"] == "-" else value
    mixed = re.fullmatch(r"([+-]?)\s*([0-9]+)\s*(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|\s([0-9]+)/([0-9]+))", text)
    if mixed:
        above, below = int(mixed[3] or mixed[5]), int(mixed[4] or mixed[6])
        return (-1 if mixed[1] == "-" else 1) * (int(mixed[2]) + Fraction(above, below)) if above < below else None
    repeating = re.fullmatch(r"([+-]?)([0-9]*)\.([0-9]*)\\(?:overline|bar)\{([0-9]+)\}", text)
    if repeating:
        sign, whole, fixed, period = repeating.groups()
        tail = Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
        return (-1 if sign == "-" else 1) * (Fraction(int(whole + fixed or "0"), 10 ** len(fixed)) + tail)
    return None


_POINTS = 4
_DIGITS = 60


def _equal_values(gold: str, answer: str, gold_factor: Fraction | int = 1, answer_factor: Fraction | int = 1) -> bool:
    from sympy import Rational

    exact = _number(gold), _number(answer)
    if exact[0] is not None and exact[1] is not None:
        return exact[0] * gold_factor == exact[1] * answer_factor
    for point in range(_POINTS):
        values = _value(gold, point), _value(answer, point)
        if None in values or not _close(values[0] * Rational(gold_factor), values[1] * Rational(answer_factor)):
            return False
    return True


def _close(a: Any, b: Any) -> bool:
    """Exactly equal when both are rational, else to 50 of 60 digits."""
    if a == b:
        return True
    if (a.is_Rational and b.is_Rational) or not (a.is_finite and b.is_finite):
        return False
    # Near 0 only what cancelled is equal: e^{i\pi}+1 is about 1e-60
    return bool(abs(a - b) <= max(abs(a) * 10**-50, 10**-58))


def _ratios(gold: str, answer: str) -> list[Any] | None:
    """gold / answer at each point where answer is not 0; None when either cannot be valued."""
    pairs = [(_value(gold, point), _value(answer, point)) for point in range(_POINTS)]
    if any(a is None or b is None or not b for a, b in pairs):
        return None
    return [a / b for a, b in pairs]


@lru_cache(maxsize=4096)
def _value(text: str, point: int) -> Any:
    """The value of an expression with each variable set to a number that its name and the point decide; None when there is none."""
    from sympy import Rational, nan, zoo

    number = _number(text)
    if number is not None:
        return Rational(number)
    tree = _tree(text)
    try:
        value = None if tree is None else _evaluate(tree, point)
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return None
    return value if value is not None and value.is_number and value not in (nan, zoo) else None


_GIGANTIC = re.compile(
    r"\^\s*\{?[^{}]*(?:\^|!|[0-9]{5})|[0-9]{4}\s*!|[)}!]\s*!|(?:\^\s*\{?[0-9]{2}.*){4}|(?:\^\s*\{?[0-9]{3}.*){2}", re.DOTALL
)
# Its units, boxes and lists are not wanted; "1 2" would be a product; chains of subscripts take it minutes
_UNREAD = re.compile(r"\\lim(?![a-zA-Z])|[0-9]\s+[0-9]|_\{?\w+\}?_|\\text|[$＄%?#&]|\.\.|\\[lc]?dots")
_FUNCTION = re.compile(r"\||\\(?!(?:frac|sqrt|cdot|times|pi|infty)(?![a-zA-Z]))[a-zA-Z]")


@lru_cache(maxsize=4096)
def _tree(text: str) -> Any:
    """What math-verify makes of one expression, unevaluated; None for what it cannot read and for what would take it long."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    depth = max((depth for _, depth in _depths(text)), default=0)
    if len(text) > 300 or depth > 12 or max(map(text.count, "|_^")) > 15 or not _balanced(text) or _UNREAD.search(text):
        return None
    # It works out functions of numbers at once, and backtracks over long chains of functions
    functions = len(_FUNCTION.findall(text))
    if functions > 12 or (functions and _GIGANTIC.search(text)):
        return None
    if re.search("binom|choose|Gamma", text) and re.search(r"[0-9]{4}|[\^!]", text):
        return None
    # It folds case: R becomes r_{up}
    text = re.sub(r"\\[a-zA-Z]+|[A-Z](?!_)", lambda match: match[0] if match[0][0] == "\\" else match[0].lower() + "_{up}", text)
    text = re.sub(r"(?<![0-9.\w^_{])([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}", _mixed, text)
    text = re.sub(r"(?<![0-9])([0-9]*)\.([0-9]+)", lambda match: rf"(\frac{{{match[1]}{match[2]}}}{{{10 ** len(match[2])}}})", text)
    text = re.sub(r"(?<![_0-9])([0-9]+)\s*\(", r"\1\\cdot(", text.replace("°", r"\cdot\frac{\pi}{180}"))
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    latex = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normal)
    logging.getLogger("math_verify.parser").setLevel(logging.ERROR)  # it warns that it has no time limit
    trees = parse(f"${text}$", [latex], fallback_mode="no_fallback", parsing_timeout=None)
    return trees[0] if trees else None


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    return rf"(\frac{{{int(whole) * int(below) + int(above)}}}{{{below}}})" if int(above) < int(below) else match[0]


def _evaluate(tree: Any, point: int) -> Any:
    """Exact for rationals, else to 60 digits; ValueError before anything gigantic is computed."""
    from sympy import Abs, Add, E, Expr, I, Mul, Rational, UnevaluatedExpr, log
    from sympy.core.function import AppliedUndef

    if not isinstance(tree, Expr):
        raise TypeError("no number: a set, a matrix")
    if tree.is_Symbol or isinstance(tree, AppliedUndef):
        if str(tree) in ("i", "e"):
            return I if str(tree) == "i" else E.evalf(_DIGITS)
        # Both signs, no two names alike
        return Rational(zlib.crc32(str(tree).encode()) * (2 * point + 3) % 1_000_003 - 500_001, 250_007)
    if not tree.args:
        return _rounded(tree)
    if getattr(tree, "limits", None):
        raise ValueError("sums and integrals are not worked out")
    args = [_evaluate(arg, point) for arg in tree.args]
    if isinstance(tree, UnevaluatedExpr):
        return args[0]
    if tree.is_Pow:
        base, exponent = args
        size = abs(exponent) * (abs(log(abs(base).evalf(15))) if base else 1)
        if not size < 20_000:
            raise ValueError("too large")
        sign = 1
        if base.is_negative and exponent.is_Rational and exponent.q % 2 and exponent.q > 1:
            base, sign = -base, (-1) ** exponent.p
        if exponent.is_Rational and exponent.q > 64:  # a variable's value: its power in exact numbers would take minutes
            base = base.evalf(_DIGITS)
        return _rounded(sign * tree.func(base, exponent))
    elif not isinstance(tree, (Add, Mul, Abs, log)) and any(abs(arg) > 1000 for arg in args):
        raise ValueError("too large")
    return _rounded(tree.func(*args))


def _rounded(value: Any) -> Any:
    return value if value.is_Rational or value.is_infinite else value.evalf(_DIGITS)
