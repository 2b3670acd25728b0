import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_cli.records import Ended, Problem, Sample
from grpo_cli.rewards.ifeval import INSTRUCTIONS, ifeval, sentences
from grpo_cli.rewards.rules import NOT_APPLICABLE

SHARED = Path(__file__).parents[2] / "../shared/data/ifeval/input_data.jsonl"


def judged(text, *instructions, credit="fraction", prompt="?"):
    fields = {"instruction_id_list": tuple(kind for kind, _ in instructions), "kwargs": tuple(given for _, given in instructions)}
    return ifeval(Sample(Problem("p", prompt, "", fields), prompt, text, 9, Ended.eos), credit)


ENGLISH = "the weather is nice today and we will all go to the beach with our friends"
# kind, what is asked, responses that follow it, responses that do not
TABLE = [
    ("keywords:existence", {"keywords": ["age", "sea"]}, ["Sea and age.", "(AGE)\nsea"], ["sea and pages", "age", "agesea"]),
    ("keywords:existence", {"keywords": ["犬"]}, ["私の犬です"], ["私の猫です"]),
    ("keywords:existence", {"keywords": ["c++ code"]}, ["My C++ code."], ["My c code."]),
    (
        "keywords:frequency",
        {"keyword": "story", "relation": "at least", "frequency": 2},
        ["A story, a Story!", "story story story"],
        ["A story.", "story history stories", "storystory"],
    ),
    ("keywords:frequency", {"keyword": "story", "relation": "less than", "frequency": 2}, ["A story.", "History"], ["story story"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock", "sea"]}, ["Rocket in season."], ["A ROCK.", "x sea", "sea-side"]),
    ("keywords:letter_frequency", {"letter": "q", "let_relation": "at least", "let_frequency": 3}, ["Q qQ"], ["qq", "p"]),
    ("keywords:letter_frequency", {"letter": "#", "let_relation": "less than", "let_frequency": 2}, ["# one", "none"], ["## two"]),
    ("language:response_language", {"language": "de"}, ["Das Wetter ist heute schön und wir gehen spazieren."], [ENGLISH, "123 !!"]),
    ("language:response_language", {"language": "hi"}, ["आज मौसम बहुत अच्छा है और हम बाहर जा रहे हैं।"], [ENGLISH, "Hindi"]),
    ("language:response_language", {"language": "zh"}, ["今天天气很好,我们去公园散步吧。"], ["今日は天気がいいので散歩に行きましょう。"]),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 3}, ["A b. C d! E f?"], ["A b. C d", "! ! ! !"]),
    (
        "length_constraints:number_sentences",
        {"relation": "less than", "num_sentences": 3},
        ["Dr. Li paid 3.50. Why?"],
        ["One. Two. Three."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "a *** b", "***\na\n***\nb\n***"],
        ["a\n\nb", "a\n***", "a\n***\n***\nb"],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, ["a ****** b", "***bold*** a"], ["a\n***\nb"]),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, ["one two, three"], ["one two !", "one"]),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, ["one two"], ["one two three"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        ["One.\n\nPresident X.", "One.\nstill one\n\n\n**President** X"],
        ["President.\n\nOne.", "One.\n\nPresidents", "One.\n\nPresident\n\nThree", "One.\nPresident", "One.\n\n***"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [street address]"], ["[name]", "[] [ ]", "[name [x]"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. Call me", "Bye.\n**P. S.** Call"],
        ["Bye.", "Bye. P.S.", "P.P.S. me"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye.\n\nP.P.S. Call me", "x P.P.S: me"], ["P.S. me", "XP.P.S me"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "x\n- a\n - b\ny"],
        ["* a", "* a\n* b\n* c", "*a* b\n**c**", "*\n*"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "I think so. My answer is maybe."],
        ["Yes.", "My answer is yes. My answer is no. My answer is maybe.", "My answer is yesterday."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a b* and **c**", "* x\n* *a* *b*"],
        ["*a*", "* a\n* b\n* c", "** **", "****"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "**SECTION I**\na\n# SECTION II\nb"],
        ["SECTION 1\na", "SECTION 1\nSECTION 1", "see SECTION 1 and SECTION 2", "Section 1\nSection 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "[]"],
        ['x {"a": 1}', "{a: 1}", '"a text"', "1", '{"a": NaN}'],
    ),
    ("detectable_format:title", {}, ["<<Poem of joy>>\nx", "x <<a>>"], ["<Poem>", "<<>>", "<< >>", "<<Poem\nof joy>>", "Poem"]),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******a******b"],
        ["a\n******\na", "a", "a******b******c", "a***b", "a\n*******\nb"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["Write a poem.\nRoses"],
        ["Roses", "write a poem.", "Sure: Write a poem. x"],
    ),
    ("startend:end_checker", {"end_phrase": "Peace!"}, ["All good. Peace!", 'x PEACE!"\n'], ["Peace! Bye.", "Peace"]),
    ("startend:quotation", {}, ['"All of it."', "“All of it.”"], ['"All" of it.', "'All'", '""', '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        ["NASA and COVID-19"],
        ["NASA", "Nasa Esa"],
    ),
    ("change_case:capital_word_frequency", {"capital_relation": "less than", "capital_frequency": 2}, ["NASA here"], ["NASA ESA"]),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, ENGLISH.title(), "DAS WETTER IST HEUTE SCHÖN UND WIR GEHEN", "123"]),
    (
        "change_case:english_lowercase",
        {},
        [ENGLISH],
        [ENGLISH.upper(), ENGLISH.capitalize(), "das wetter ist heute schön und wir gehen", "123"],
    ),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b", "甲\uff0c乙", "أ، ب"]),
]


@pytest.mark.parametrize(
    ("kind", "given", "text", "followed"),
    [(k, g, t, ok) for k, g, *sides in TABLE for ok, side in zip((1, 0), sides, strict=True) for t in side],
)
def test_each_instruction_is_followed_or_not(kind, given, text, followed):
    assert judged(text, (kind, given)) == followed
    assert judged(f"<think>, {ENGLISH} *a*</think>{text}", (kind, given)) == followed
    assert judged("", (kind, given)) == judged(f"<think>{text}", (kind, given)) == judged(f"<think>{text}</think> \n", (kind, given)) == 0.0


def test_every_instruction_has_both_rows():
    assert {kind for kind, *_ in TABLE} == set(INSTRUCTIONS) and len(INSTRUCTIONS) == 25  # table 1 of the paper
    assert all(right and wrong for _, _, right, wrong in TABLE)


@pytest.mark.parametrize(
    ("text", "fraction", "everything"),
    [("a sea", 1.0, 1.0), ("a sea, b", 0.5, 0.0), ("a rock", 0.5, 0.0), ("a, b", 0.0, 0.0), ("", 0.0, 0.0)],
)
def test_credit_is_a_share_or_all_or_nothing(text, fraction, everything):
    asked = [("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["sea"], "num_words": None})]
    assert judged(text, *asked) == fraction
    assert judged(text, *asked, credit="all") == everything


def test_rows_without_instructions_do_not_apply_and_unknown_kinds_raise():
    assert judged("a") is NOT_APPLICABLE
    assert ifeval(Sample(Problem("p", "?", ""), "?", "a", 9, Ended.eos)) is NOT_APPLICABLE
    with pytest.raises(ValueError, match="there is no instruction 'startend:rhyme'"):
        judged("a", ("startend:rhyme", {}))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two.", 2),
        ("Mr. Li paid 3.50. Why?", 2),
        ("He said (e.g. here) so. Yes.", 2),
        ("It is in the U.S. and J. R. wrote it.", 1),
        ('"Go!" he said. "Why?"', 3),
        ("Wait... what?! No.", 3),
        ("今天很好。我们去公园\uff01", 2),
        ("1. One.\n2. Two.", 2),
        ("It was in 1999. We were 12. Yes.", 3),
        ("... !!! ???", 0),
    ],
)
def test_sentences_are_counted_as_a_reader_would(text, count):
    assert sentences(text) == count


def test_the_language_of_a_text_is_the_same_in_every_thread():
    texts = ["ok then", "la casa", "die", "une table", "no", "si", "het is"] * 5
    languages = ["en", "es", "de", "fr", "it", "nl"]
    calls = [(text, ("language:response_language", {"language": language})) for text in texts for language in languages]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda call: judged(*call), calls)) == [judged(*call) for call in calls]


def test_hostile_texts_are_judged_in_time():
    asked = [(kind, given) for kind, given, *_ in TABLE]
    for piece in [
        "*",
        "* ",
        " ",
        "\n",
        "<<",
        "<<a",
        "[",
        "[a",
        "P.S. ",
        "P.P.S.\n",
        '"',
        "A. ",
        '."',
        "***\n",
        "SECTION ",
        "_",
        "story",
        "a",
        "{",
        "!",
    ]:
        begin = time.monotonic()
        judged(piece * (100_000 // len(piece)), *asked)
        assert time.monotonic() - begin < 5, piece


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data sets are not beside this checkout")
def test_every_row_of_the_data_set_can_be_judged():
    seen = set()
    for row in map(json.loads, SHARED.read_text().splitlines()):
        asked = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        seen |= {kind for kind, _ in asked}
        assert judged("", *asked) == 0.0 <= judged(row["prompt"], *asked) <= 1.0
    assert seen == set(INSTRUCTIONS)
