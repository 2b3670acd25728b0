import json
import time
from types import MappingProxyType

import pytest

from grpo_cli.records import Ended, Problem, Sample
from grpo_cli.rewards.rules import NOT_APPLICABLE
from grpo_cli.rewards.text import exact, json_schema, length, multiple_choice, parse_json, regex, repetition, response, stated, translation


def sample(text, gold="", prompt="?", ended=Ended.eos, tokens=9, **fields) -> Sample:
    return Sample(Problem("p", prompt, gold, fields), prompt, text, tokens, ended)


@pytest.mark.parametrize(
    ("text", "prompt", "said", "answer"),
    [
        (" Paris ", "?", "Paris", "Paris"),
        ("<think>a</think> Paris", "?", "Paris", "Paris"),
        ("a</think>b</think>c", "?", "c", "c"),
        ("<think>a</think>so <answer> x </answer>", "?", "so <answer> x </answer>", "x"),
        ("<think>never closed", "?", "", ""),
        ("never closed", "<assistant><think>\n", "", ""),
        ("closed</think>now", "<assistant><think>\n", "now", "now"),
        ("<answer>a</answer><answer>b</answer>", "?", "<answer>a</answer><answer>b</answer>", None),
        ("<answer>a", "?", "<answer>a", None),
        ("</answer>a<answer>", "?", "</answer>a<answer>", None),
        ("<think><answer>a</answer></think>b", "?", "b", "b"),
    ],
)
def test_thoughts_are_not_said_and_one_answer_tag_states_the_answer(text, prompt, said, answer):
    assert response(sample(text, prompt=prompt)) == said
    assert stated(sample(text, prompt=prompt)) == answer


@pytest.mark.parametrize(
    ("tokens", "score"), [(100, 1.0), (125, 0.5), (75, 0.5), (110, 0.8), (150, 0.0), (50, 0.0), (10_000, 0.0), (1, 0.0), (99, 0.98)]
)
def test_length_falls_in_a_line_on_both_sides_of_the_target(tokens, score):
    assert length(sample("x", tokens=tokens), 100, 50) == pytest.approx(score)
    assert length(sample("x" * 9999, tokens=tokens, budget=100), "budget", 50) == pytest.approx(score)  # tokens, not characters: B049


@pytest.mark.parametrize("fields", [{}, {"budget": None}, {"budget": "100"}, {"budget": True}])
def test_length_does_not_apply_without_a_budget_in_the_row(fields):
    assert length(sample("x", **fields), "budget", 50) is NOT_APPLICABLE


@pytest.mark.parametrize(
    ("text", "n", "score"),
    [
        ("", 3, 0.0),
        ("a b", 3, 0.0),  # no trigram
        ("the cat sat on the mat", 3, 0.0),
        ("a b a b a b", 3, -2 / 4),  # aba bab aba bab
        ("A b a B a b", 3, -2 / 4),
        ("a  b\na\tb a b", 3, -2 / 4),
        ("no no no no no no", 1, -5 / 6),
        ("no no no no no no", 3, -3 / 4),
        ("x " * 1002, 3, -999 / 1000),
        ("今天天气很好" * 10, 3, -52 / 58),  # 60 characters without a space: 58 trigrams, 6 of them new
        ("ha" * 50, 3, -96 / 98),
        ("a b c d a b c", 2, -2 / 6),  # ab bc cd da ab bc
    ],
)
def test_repetition_is_minus_the_share_of_old_ngrams(text, n, score):
    assert repetition(sample(text), n) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "gold", "strict", "loose"),
    [
        ("<answer>Paris</answer>", "Paris", 1, 1),
        ("<think>London?</think>Paris", "Paris", 1, 1),
        ("<answer> New \n York </answer>", "New York", 1, 1),
        ("<answer>PARIS</answer>", "Paris", 0, 1),
        ("**Paris.**", "Paris", 0, 1),
        ("“Paris”!", "paris", 0, 1),
        ("<answer>Strasse</answer>", "Straße", 0, 1),
        ("<answer>cafe\u0301</answer>", "caf\u00e9", 1, 1),  # composed and decomposed é
        ("<answer>Paris</answer> I am sure.", "Paris", 1, 1),
        ("<answer>London</answer>", "Paris", 0, 0),
        ("<answer>Paris or London</answer>", "Paris", 0, 0),
        ("The answer is Paris", "Paris", 0, 0),
        ("<answer>Paris</answer><answer>Paris</answer>", "Paris", 0, 0),
        ("<think>Paris", "Paris", 0, 0),
        ("<think>Paris</think>", "Paris", 0, 0),
        ("", "Paris", 0, 0),
        ("<answer>5</answer>", "-5", 0, 0),
        ("<answer>15</answer>", "1.5", 0, 0),
        ("<answer>.5</answer>", "5", 0, 0),
        ("<answer>5²</answer>", "52", 0, 0),
        ("<answer>newyork</answer>", "new york", 0, 0),
    ],
)
def test_exact_is_the_gold_text_up_to_the_options(text, gold, strict, loose):
    assert exact(sample(text, gold)) == strict
    assert exact(sample(text, gold), ignore_case=True, ignore_punctuation=True) == loose


def test_exact_needs_a_gold_and_a_finished_answer():
    assert exact(sample("", "")) is NOT_APPLICABLE and exact(sample("", "..."), ignore_punctuation=True) is NOT_APPLICABLE
    assert exact(sample("Paris", "Paris", ended=Ended.length)) == 0.0  # may have been Parisian
    assert exact(sample("<answer>Paris</answer>", "Paris", ended=Ended.length)) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "<answer>B</answer>",
        "<answer>(b).</answer>",
        "<answer>B) Vitamin C</answer>",
        "<answer>B. 4 and 5</answer>",
        "<answer>The answer is B</answer>",
        "The answer is (B).",
        "So the answer is **B**.",
        "The answer is option B.",
        "the correct option is B, because A is too small.",
        "Answer: B",
        "**Answer:** B) Paris",
        r"\boxed{B}",
        r"Thus $\boxed{\text{B}}$.",
        r"The answer is \boxed{(B)}.",
        "B",
        "(B)",
        "**B**",
        "<think>A? The answer is C.</think>The answer is B.",
        "A is too small. The answer is B.",
    ],
)
def test_a_stated_letter_is_read_in_every_usual_form(text):
    assert multiple_choice(sample(text, "B")) == 1.0
    assert multiple_choice(sample(text, "(B)")) == 1.0
    assert multiple_choice(sample(text, "A")) == multiple_choice(sample(text, "C")) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<answer></answer>",
        "<answer>B or C</answer>",
        "<answer>B, C</answer>",
        "<answer>B/C</answer>",
        "<answer>BC</answer>",
        "<answer>B) or C)</answer>",
        "<answer>B) Paris (C) London</answer>",
        "<answer>B. Paris\nC. London</answer>",
        "<answer>A, B, C, D</answer>",
        "<answer>all of them</answer>",
        "<answer>not B</answer>",
        "<answer>B</answer><answer>C</answer>",
        "<answer>The answer is B or C</answer>",
        "<answer>B</answer> The answer is C.",
        r"\boxed{B} \boxed{C}",
        r"\boxed{B",
        "The answer is B or maybe C.",
        "The answer is B. The answer is C.",
        "The answer is not B.",
        "The answer isn't B.",
        "The answer is B-cells.",
        "Between B and C.",
        "<think>The answer is B.</think>",
        "<think>The answer is B.",
        "A B C D",
        "Beta",
    ],
)
@pytest.mark.parametrize("gold", ["A", "B", "C", "D"])
def test_no_letter_or_two_letters_are_never_paid(text, gold):
    assert multiple_choice(sample(text, gold)) == 0.0


@pytest.mark.parametrize("gold", ["", "42", "BC", "Z", "Paris"])
def test_a_gold_that_is_no_letter_does_not_apply(gold):
    assert multiple_choice(sample("B", gold)) is NOT_APPLICABLE


@pytest.mark.parametrize(
    ("text", "args", "score"),
    [
        ("2024-05", {"pattern": "[0-9]{4}-[0-9]{2}"}, 1.0),
        ("2024-05 ", {"pattern": "[0-9]{4}-[0-9]{2}"}, 0.0),
        ("2024-05\n", {"pattern": "[0-9]{4}-[0-9]{2}$"}, 0.0),  # $ would match before the line end; a full match may not
        ("on 2024-05", {"pattern": "[0-9]{4}-[0-9]{2}"}, 0.0),
        ("on 2024-05", {"pattern": "[0-9]{4}-[0-9]{2}", "match": "search"}, 1.0),
        ("on 2024", {"pattern": "[0-9]{4}-[0-9]{2}", "match": "search"}, 0.0),
        ("<think>a\nb</think>7", {"pattern": "(?s)<think>.+</think>[0-9]"}, 1.0),
        ("<think>1</think><answer>7</answer>", {"pattern": "[0-9]", "of": "answer"}, 1.0),
        ("<think>1</think>seven", {"pattern": "[0-9]", "of": "answer", "match": "search"}, 0.0),
        ("<answer>7</answer><answer>8</answer>", {"pattern": "[0-9]", "of": "answer", "match": "search"}, 0.0),
        ("", {"pattern": ".*"}, 1.0),
    ],
)
def test_a_pattern_matches_all_of_the_text_or_is_found_in_it(text, args, score):
    assert regex(sample(text), **args) == score


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Ann", "age": 3}', 1.0),
        (' \n{"age": 3, "name": ""}\n', 1.0),
        ('```json\n{"name": "Ann", "age": 3}\n```', 1.0),
        ('```\n{"name": "Ann", "age": 3}\n```', 1.0),
        ('<think>{}</think><answer>{"name": "Ann", "age": 3}</answer>', 1.0),
        ('{"name": "Ann"}', 0.0),
        ('{"name": "Ann", "age": "3"}', 0.0),
        ('{"name": "Ann", "age": true}', 0.0),
        ('{"name": "Ann", "age": -1}', 0.0),
        ('{"name": "Ann", "age": 3, "sex": "f"}', 0.0),
        ('{"name": "Ann", "age": 3, "age": 4}', 0.0),
        ('{"name": "Ann", "age": NaN}', 0.0),
        ("{'name': 'Ann', 'age': 3}", 0.0),
        ('{"name": "Ann", "age": 3,}', 0.0),
        ('Here: {"name": "Ann", "age": 3}', 0.0),
        ('{"name": "Ann", "age": 3} Done.', 0.0),
        ('Here:\n```json\n{"name": "Ann", "age": 3}\n```', 0.0),
        ('```json\n{"name": "Ann", "age": 3}\n```\n```json\n{}\n```', 0.0),
        ('```python\n{"name": "Ann", "age": 3}\n```', 0.0),
        ('<think>{"name": "Ann", "age": 3}', 0.0),
        ('{"name": "Ann", "age": 3', 0.0),
        ("[" * 100_000, 0.0),
        ('{"name": "Ann", "age": ' + "9" * 100_000 + "}", 0.0),
        ("", 0.0),
    ],
)
def test_json_must_stand_alone_and_satisfy_the_schema(text, score):
    assert json_schema(sample(text), SCHEMA) == score
    assert json_schema(sample(text, schema=json.dumps(SCHEMA))) == score
    frozen = MappingProxyType(
        {**SCHEMA, "properties": MappingProxyType({key: MappingProxyType(value) for key, value in SCHEMA["properties"].items()})}
    )
    assert json_schema(sample(text, schema=frozen | {"required": ("name", "age")})) == score


def test_json_without_a_schema_does_not_apply_and_a_broken_schema_raises():
    assert json_schema(sample("{}")) is NOT_APPLICABLE
    assert json_schema(sample("{}", shape={"type": "object"}), field="shape") == 1.0
    with pytest.raises(Exception, match="is not valid under any of the given schemas"):
        json_schema(sample("{}"), {"type": "thing"})
    begin = time.monotonic()
    with pytest.raises(Exception, match=r"Unresolvable: http://192\.0\.2\.1/x\.json"):  # never fetched
        json_schema(sample("{}"), {"$ref": "http://192.0.2.1/x.json"})
    assert time.monotonic() - begin < 1


def test_json_is_read_strictly():
    assert parse_json("```json\n[1]\n```") == parse_json(" [1] ") == [1]
    for text in ("", "nothing", "[1] [2]", "Infinity", '{"a": 1, "a": 1}', "[" * 10**6):
        with pytest.raises(ValueError):
            parse_json(text)


@pytest.mark.parametrize("metric", ["chrf", "bleu"])
def test_a_translation_is_better_the_nearer_it_is_to_the_gold(metric):
    gold = "The cat sat on the mat and looked at the bird ."
    texts = [
        gold,
        "The cat sat on the mat and saw the bird .",
        "The cat was sitting there with the bird .",
        "Der Hund schläft im Garten",
    ]
    scores = [translation(sample(text, gold), metric) for text in texts]
    assert scores[0] == pytest.approx(1.0) and scores == sorted(scores, reverse=True) and 0 <= scores[-1] < 0.15
    assert translation(sample(f"<think>{gold}</think><answer>{gold}</answer>", gold), metric) == pytest.approx(1.0)
    assert translation(sample(f"<think>{gold}</think>", gold), metric) == translation(sample("", gold), metric) == 0.0
    assert translation(sample(f"<answer>{gold}</answer><answer>{gold}</answer>", gold), metric) == 0.0
    assert translation(sample(" ".join([gold] * 20), gold), metric) < 0.6
    assert translation(sample(gold, " "), metric) is NOT_APPLICABLE


def test_chrf_by_hand():
    # "ab" against "ac": character 1-grams 1 of 2 right, 2-grams 0 of 1, longer ones do not exist: mean of 1/2 and 0
    assert translation(sample("ab", "ac")) == pytest.approx(0.25)


def test_rules_hold_in_linear_time_on_hostile_texts():
    pieces = [
        "*",
        " ",
        "(",
        "\n",
        ",",
        "{",
        "or ",
        "answer ",
        "answer is ",
        "answer:",
        "\\boxed{",
        "\\boxed{{}",
        "B ",
        "B) ",
        "B) or ",
        "a",
        "`",
        "```json\n",
    ]
    begin = time.monotonic()
    for piece in pieces:
        text = piece * (100_000 // len(piece))
        for whole in (text, f"The answer is {text}", f"<answer>B){text}</answer>", f"\\boxed{{B{text}}}"):
            multiple_choice(sample(whole, "A"))
            exact(sample(whole, "A"), True, True)
            repetition(sample(whole))
            json_schema(sample(whole), SCHEMA)
    assert time.monotonic() - begin < 30
