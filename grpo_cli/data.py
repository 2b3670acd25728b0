"""Files, hub data sets and generators -> Problems, split so that no question is on both sides.

Knows nothing of tokenizers or models. The problems never depend on the run's seed, so arms of a sweep train on the same ones.
"""

import difflib
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from grpo_cli.config import BadGold, Data, Layout, Prompt, Source
from grpo_cli.layouts import lay_out
from grpo_cli.randomness import generator
from grpo_cli.records import Problem, frozen
from grpo_cli.rewards.rules import parse_number

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ENUMERATED = 20_000
"""Additions are listed in full up to this many, and drawn beyond."""


@dataclass(frozen=True)
class _Item:
    """A problem before its prompt is written."""

    id: str
    question: str
    answer: str
    fields: dict[str, Any]
    split_key: str
    """Items with equal keys land on the same side."""


def load_problems(section: Data) -> tuple[list[Problem], list[Problem], list[str]]:
    """Training problems, held-out problems, and notes on what was left out."""
    if not any(place[2] for place in _PLACE.finditer(section.prompt.template)):
        raise ValueError("data.prompt.template names no field, so all prompts would be equal: try 'data.prompt.template={question}'")
    train, heldout, notes = _split_rows(section) if section.source is Source.rows else _generated(section)
    why = "".join(f"; {note}" for note in notes)
    if not train:
        raise ValueError(f"no training problem is left{why}: try another data.path or a smaller data.eval.holdout")
    if not heldout:
        raise ValueError(f"no held-out problem is left{why}: try data.eval.path=FILE or a larger data.eval.holdout")
    return [_problem(item, section.prompt) for item in train], [_problem(item, section.prompt) for item in heldout], notes


def fingerprint(*sides: list[Problem]) -> str:
    """Of the problems: their ids, prompts and gold answers in order."""
    return hashlib.sha256(repr([[(p.id, p.prompt, p.answer) for p in side] for side in sides]).encode()).hexdigest()[:16]


def is_heldout(question: str, share: float) -> bool:
    """Whether a question belongs to the held-out share: a hash of its words decides, so it is the same everywhere and for ever."""
    digest = hashlib.sha256(_normal(question).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _normal(question: str) -> str:
    return " ".join(question.split())


# Rows


def read_rows(
    path: str, hub_config: str | None = None, split: str = "train", limit: int | None = None, key: str = "data.path"
) -> list[dict[str, Any]]:
    """The rows of a file, or of a hub data set when no such file exists; `key` is the config key that messages name."""
    file = Path(path).expanduser()
    if is_hub_id(path):
        return _hub_rows(path, hub_config, split, limit, key)
    if not file.is_file():
        raise ValueError(f"{key}={path} {_absence(file)}")
    name = file.name.lower()
    zipped = name.endswith(".gz")
    reader = next((reader for suffix, reader in _READERS.items() if name.removesuffix(".gz").endswith(suffix)), None)
    if reader is None:
        raise ValueError(f"{key}={path} must end in {', '.join(_READERS)} or one of these with .gz")
    try:
        with gzip.open(file) if zipped else file.open("rb") as stream:
            rows = reader(stream, path, limit)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{key}={path} cannot be read: {error}") from error
    if not rows:
        raise ValueError(f"{path} is empty: {key} needs a file with at least one row")
    return rows


def is_hub_id(path: str) -> bool:
    """org/name that is no file or folder here and has no file's ending."""
    is_file_name = path.lower().removesuffix(".gz").endswith(tuple(_READERS))
    return bool(_HUB_ID.fullmatch(path)) and not is_file_name and not Path(path).exists()


def _absence(file: Path) -> str:
    if file.is_dir():
        names = [name.name for name in sorted(file.iterdir()) if name.is_file()][:5]
        return f"is a folder: name a file in it ({', '.join(names) or 'it has none'})"
    if not file.parent.is_dir():
        return f"does not exist, and there is no folder {file.parent} either (a hub data set is written org/name)"
    names = sorted(name.name for name in file.parent.iterdir() if name.is_file())
    near = difflib.get_close_matches(file.name, names, 3) or names[:5]
    return f"does not exist; that folder holds {', '.join(near) if near else 'no file'} (a hub data set is written org/name)"


def _jsonl_rows(stream: BinaryIO, name: str, limit: int | None) -> list[dict]:
    rows = []
    for number, line in enumerate(stream, 1):
        if limit is not None and len(rows) == limit:
            break
        if line.strip():
            rows.append(_object(_json(line, f"{name} line {number}"), f"{name} line {number}"))
    return rows


def _json_rows(stream: BinaryIO, name: str, limit: int | None) -> list[dict]:
    content = stream.read()
    if not content.strip():
        return []
    try:
        value = _json(content, name)
    except ValueError as error:
        raise ValueError(f"{error}; a file with one object per line must be named .jsonl") from error
    if isinstance(value, dict):
        lists = [field for field in value.values() if isinstance(field, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise ValueError(f"{name} must hold an array of objects, or an object with one such array in it")
    return [_object(row, f"{name} row {number}") for number, row in enumerate(value[:limit], 1)]


def _json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _object(value: Any, where: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f'{where} is a {type(value).__name__}, not an object such as {{"question": "1+1=", "answer": "2"}}')
    return value


def _parquet_rows(stream: BinaryIO, name: str, limit: int | None) -> list[dict]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {name} needs pyarrow: pip install pyarrow") from error
    try:
        return pyarrow.parquet.read_table(pyarrow.BufferReader(stream.read())).slice(0, limit).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{name} is not a readable parquet file: {error}") from error


_READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}


def _hub_rows(path: str, hub_config: str | None, split: str, limit: int | None, key: str) -> list[dict]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{key}={path} is no file here, and hub data sets need the package datasets: pip install datasets, or try {key}=FILE.jsonl"
        ) from error
    try:
        rows = load_dataset(path, hub_config, split=split)
    except Exception as error:  # no network, no such set, configuration or split: each its own class in datasets
        raise ValueError(
            f"{key}={path} is no file here, and the hub did not give split {split!r} of configuration {hub_config!r} "
            f"({type(error).__name__}: {error}): check the names and the network, or try {key}=FILE.jsonl"
        ) from error
    return [dict(row) for row in islice(rows, limit)]


def _split_rows(section: Data) -> tuple[list[_Item], list[_Item], list[str]]:
    path, train, heldout = section.path, section.train, section.eval
    notes = []
    separate = heldout.path or (path if is_hub_id(path) and train.split != heldout.split else None)
    label = _label(path, train.split)
    if not separate:
        items = _items(read_rows(path, section.hub_config, train.split), label, path, section, notes)
        out = [item for item in items if _is_out(item, section)]
        rest = [item for item in items if not _is_out(item, section)]
    else:
        rest = _items(read_rows(path, section.hub_config, train.split, train.limit), label, path, section, notes)
        hub_config = section.hub_config if separate == path else None  # another data set has configurations of its own
        rows = read_rows(separate, hub_config, heldout.split, heldout.limit, "data.eval.path")
        out_label = _label(separate, heldout.split)
        out = _items(rows, out_label if out_label != label else f"eval-{label}", separate, section, notes)
    seen = {item.split_key for item in out}
    kept = [item for item in rest if item.split_key not in seen]
    if len(kept) < len(rest):
        why = f"held out in {separate}" if separate else "their questions are held out as well"
        notes.append(f"{len(rest) - len(kept)} of {len(rest)} rows of {path} left out of training: {why}")
    return kept[: train.limit], out[: heldout.limit], notes


def _is_out(item: _Item, section: Data) -> bool:
    """Whether an item of a file without a held-out file is held out. MBPP says so itself: its test part is tasks 11 to 510."""
    if section.layout is Layout.mbpp:
        return 10 < item.fields["task_id"] <= 510
    return is_heldout(item.split_key, section.eval.holdout)


def _label(path: str, split: str) -> str:
    """What the ids of its problems begin with: train for a/train.jsonl.gz, org/name/test for a split of a hub data set."""
    return f"{path}/{split}" if is_hub_id(path) else Path(path).name.split(".")[0]


def _items(rows: list[dict], label: str, name: str, section: Data, notes: list[str]) -> list[_Item]:
    """Rows -> items; bad golds are refused or dropped as the config says."""
    items, bad = [], []
    for number, row in enumerate(rows, 1):
        row |= lay_out(row, section.layout, f"{name} row {number}")
        for key, field in (("question_field", section.question_field), ("answer_field", section.answer_field)):
            if field is not None and field not in row:
                near = difflib.get_close_matches(field, map(str, row), 1) or list(row)
                hint = f": try data.{key}={near[0]}" if near else ""
                raise ValueError(f"{name} row {number} has no field {field!r} (it has: {', '.join(map(str, row)) or 'none'}){hint}")
        question = row[section.question_field]
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{name} row {number}: field {section.question_field!r} must be a text, not {question!r}")
        try:
            question.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} row {number}: the question holds half a character (a lone surrogate)") from error
        gold = "" if section.answer_field is None else _gold(row[section.answer_field], section)
        if gold is None:
            bad.append(f"row {number}: {str(row[section.answer_field])[-60:]!r}")
            continue
        others = {field: value for field, value in row.items() if field not in (section.question_field, section.answer_field)}
        items.append(_Item(f"{label}:{number}", question, gold, others, _normal(question)))
    if bad:
        wanted = ("no number" if section.numeric else "no text") + (f" behind {section.answer_marker!r}" if section.answer_marker else "")
        found = f"{len(bad)} of {len(rows)} gold answers of {name} have {wanted} ({', '.join(bad[:3])}{', ...' if len(bad) > 3 else ''})"
        if section.bad_gold is BadGold.refuse:
            advice = ["mend them", "leave these rows out with data.bad_gold=drop"]
            advice += ["take any text with data.numeric=false"] if section.numeric else []
            advice += [] if section.answer_marker else ["say what stands before the answer, such as 'data.answer_marker=\"####\"'"]
            raise ValueError(f"{found}: {', or '.join(advice)}")
        notes.append(f"{found}: rows left out")
    return items


def _gold(answer: Any, section: Data) -> str | None:
    """The gold answer as text, None when it is unusable: "...so 1,234.\\n#### 1,234" gives "1,234" with the marker "####"."""
    if answer is None or isinstance(answer, (bool, list, dict)):
        return None
    text = str(answer)
    if section.answer_marker:
        _, marker, text = text.rpartition(section.answer_marker)
        text = text if marker else ""
    text = text.strip()
    usable = parse_number(text) is not None if section.numeric else bool(text)
    return text if usable else None


# Prompts

_PLACE = re.compile(r"\{\{([^{}]*)\}\}|\{([A-Za-z_][^{}]*)\}")


def _filled(template: str, values: dict[str, Any], where: str) -> str:
    """Fill {field} in; {{x}} stands for {x}, other braces (as in \\boxed{}) for themselves. Values are never looked into."""

    def fill(match: re.Match) -> str:
        literal, field = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        if field not in values:
            raise ValueError(
                f"data.prompt.template asks for {{{field}}}, and {where} has no such field (it has: {', '.join(map(str, values))}); "
                f"for the text itself write {{{{{field}}}}}"
            )
        return str(values[field])

    return _PLACE.sub(fill, template)


def _problem(item: _Item, prompt: Prompt) -> Problem:
    fields = frozen(item.fields)
    text = _filled(prompt.template, {**item.fields, "question": item.question, "answer": item.answer}, item.id)
    if not prompt.chat:
        return Problem(item.id, text, item.answer, fields)
    turns = [("system", prompt.system)] if prompt.system else []
    for example in prompt.examples:
        turns += [("user", example.user), ("assistant", example.assistant)]
    messages = [{"role": role, "content": content} for role, content in [*turns, ("user", text)]]
    return Problem(item.id, messages, item.answer, fields)


# Generators


def addition_question(a: int, b: int) -> str:
    """67+15=  (the embedded model reads exactly this)."""
    return f"{a}+{b}="


def addition_pairs(digits: list[int]) -> Iterator[tuple[int, int]]:
    """Pairs of numbers of equal length, in an order that never changes.

    Few possible pairs (the 81 of one digit) come in full and end; else each length is equally likely, without end and with repeats.
    """
    lengths = range(digits[0], digits[1] + 1)
    if _pair_count(digits) <= _ENUMERATED:
        numbers = [range(10 ** (d - 1), 10**d) for d in lengths]
        pairs = [(a, b) for same in numbers for a in same for b in same]
        yield from (pairs[i] for i in generator(0, "addition order").permutation(len(pairs)))
        return
    for block in count():
        rng = generator(0, "addition", block)
        d_N = rng.integers(lengths.start, lengths.stop, 4096)
        low_N = 10 ** (d_N - 1)
        yield from zip(*rng.integers(low_N, 10 * low_N, (2, 4096)).tolist(), strict=True)


def _pair_count(digits: list[int]) -> int:
    return sum((9 * 10 ** (d - 1)) ** 2 for d in range(digits[0], digits[1] + 1))


def _additions(digits: list[int]) -> Iterator[_Item]:
    for a, b in addition_pairs(digits):
        question = addition_question(a, b)
        yield _Item(f"addition:{a}+{b}", question, str(a + b), {"a": a, "b": b}, question)


_PEOPLE = [("Tom", "He"), ("Anna", "She"), ("Ben", "He"), ("Lucy", "She"), ("Sam", "He"), ("Mia", "She"), ("Leo", "He"), ("Emma", "She")]
_THINGS = ["apple", "book", "marble", "pencil", "coin", "sticker", "balloon", "shell", "egg", "card"]
_VERBS = {"+": ["buys", "finds", "gets"], "-": ["gives away", "loses", "sells"]}


def _word_problems(digits: list[int]) -> Iterator[_Item]:
    """Stories of one addition or subtraction, without end; the split goes by the arithmetic, not by the words around it."""
    for block in count():
        rng = generator(0, "word problems", block)
        for _ in range(256):
            a, b = rng.integers(10 ** (digits[0] - 1), 10 ** digits[1], 2).tolist()
            sign = "+-"[rng.integers(2)]
            name, pronoun = _PEOPLE[rng.integers(len(_PEOPLE))]
            thing, verb = _THINGS[rng.integers(len(_THINGS))], _VERBS[sign][rng.integers(len(_VERBS[sign]))]
            if sign == "-":
                a, b = max(a, b), min(a, b)
            many, rest, end = f"{thing}s", *(("more", "now") if sign == "+" else ("of them", "left"))
            question = f"{name} has {a} {thing if a == 1 else many}. {pronoun} {verb} {b} {rest}. How many {many} does {name} have {end}?"
            answer = a + b if sign == "+" else a - b
            digest = hashlib.sha256(question.encode()).hexdigest()[:12]
            yield _Item(f"word_problems:{digest}", question, str(answer), {"a": a, "b": b, "operation": sign}, f"{a}{sign}{b}")


def sign_countdown(rng: np.random.Generator) -> tuple[list[int], int, str]:
    """Three numbers of 1 to 12, a target and a way to reach it: ([6, 1, 5], 2, "6+1-5")."""
    numbers = rng.integers(1, 13, 3).tolist()
    solution, target = signed(rng, numbers)
    return numbers, target, solution


def signed(rng: np.random.Generator, numbers: list[int]) -> tuple[str, int]:
    """The numbers in some order with some signs, and the value: above zero, and on the way there never below."""
    while True:
        first, *rest = rng.permutation(numbers).tolist()
        terms = [first, *(number * sign for number, sign in zip(rest, rng.choice([-1, 1], len(rest)).tolist(), strict=True))]
        *between, value = accumulate(terms)
        if min(between) >= 0 and value > 0:
            return "".join(f"{term:+}" for term in terms)[1:], value


def sign_countdown_question(numbers: list[int], target: int) -> str:
    """6,1,5>2:  (the second embedded model reads exactly this)."""
    return f"{','.join(map(str, numbers))}>{target}:"


def _sign_countdowns(digits: None) -> Iterator[_Item]:
    """Puzzles of three numbers, without end; the split takes all orders of the numbers for one."""
    rng = generator(0, "sign countdown")
    while True:
        numbers, target, solution = sign_countdown(rng)
        question, fields = sign_countdown_question(numbers, target), {"nums": numbers, "target": target, "solution": solution}
        yield _Item(f"sign_countdown:{question}", question, str(target), fields, sign_countdown_question(sorted(numbers), target))


_GENERATORS = {Source.addition: _additions, Source.word_problems: _word_problems, Source.sign_countdown: _sign_countdowns}


def _generated(section: Data) -> tuple[list[_Item], list[_Item], list[str]]:
    """The generator's first distinct problems, dealt to the two sides by the hash of their split key."""
    limits = {"train": section.train.limit, "eval": section.eval.limit}
    finite = section.source is Source.addition and _pair_count(section.digits) <= _ENUMERATED
    for side, limit in limits.items():
        if limit is None and not finite:
            raise ValueError(f"data.{side}.limit is not set, and data={section.source.name} has no end: try data.{side}.limit=256")
    items = _GENERATORS[section.source](section.digits)
    # A tiny holdout or few distinct problems must not draw for ever.
    draws = _ENUMERATED if finite else 100_000 + 10 * sum(limits.values())
    sides, seen = {"train": [], "eval": []}, set()
    for item in islice(items, draws):
        side = "eval" if is_heldout(item.split_key, section.eval.holdout) else "train"
        if item.question not in seen and len(sides[side]) < (limits[side] or math.inf):
            seen.add(item.question)
            sides[side].append(item)
        if all(len(sides[side]) == limit for side, limit in limits.items()):
            break
    notes = [
        f"data={section.source.name} gave {len(found)} {side} problems, not the {limits[side]} of data.{side}.limit"
        for side, found in sides.items()
        if limits[side] and len(found) < limits[side]
    ]
    return sides["train"], sides["eval"], notes
