import gzip
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_cli import cli
from grpo_cli.compose import Composer, convert
from grpo_cli.config import BadGold, Data, EvalSplit, Example, Layout, Prompt, Source, TrainSplit
from grpo_cli.data import addition_pairs, addition_question, is_heldout, load_problems, read_rows, signed
from grpo_cli.randomness import generator
from grpo_cli.records import Ended, Sample
from grpo_cli.rewards.countdown import countdown
from grpo_cli.rewards.ifeval import ifeval
from grpo_cli.rewards.rules import parse_number

SHARED = Path(__file__).parents[1] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not beside this checkout")


def section(source=Source.rows, path=None, limits=(None, None), eval_path=None, holdout=0.5, template="{question}", **changes) -> Data:
    values = {
        "source": source,
        "path": path and str(path),
        "hub_config": None,
        "train": TrainSplit("train", limits[0]),
        "eval": EvalSplit(eval_path and str(eval_path), "test", limits[1], holdout),
        "digits": [1, 1],
        "layout": Layout.plain,
        "question_field": "question",
        "answer_field": "answer",
        "answer_marker": None,
        "numeric": True,
        "bad_gold": BadGold.refuse,
        "max_prompt_tokens": 512,
        "difficulty": None,
        "difficulty_map": None,
        "revisit": 0.1,
        "prompt": Prompt(template, False, None, []),
    }
    return Data(**values | changes)


def written(path, rows, dump=json.dumps) -> Path:
    path.write_text("".join(f"{dump(row)}\n" for row in rows))
    return path


def sums(n, start=0) -> list[dict]:
    return [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(start, start + n)]


# Reading


def test_every_format_and_its_gz_give_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = sums(5)
    written(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps({"version": 1, "data": rows}))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "b.json", "a.parquet"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        assert read_rows(str(tmp_path / name)) == rows
        assert read_rows(str(tmp_path / f"{name}.gz")) == rows
        assert read_rows(str(tmp_path / name), limit=2) == rows[:2]


def test_jsonl_takes_a_bom_windows_line_ends_blank_lines_and_separators_inside_texts(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": "x\xe2\x80\xa8y"}\r\n')  # E2 80 A8 is U+2028, a line end to str.splitlines
    assert read_rows(str(path)) == [{"a": 1}, {"a": "x\u2028y"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b"\n\n", "a.jsonl is empty"),
        ("a.json", b"", "a.json is empty"),
        ("a.json", b"[]", "a.json is empty"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n', "a.jsonl line 2 is not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', "a.jsonl line 3 is a list, not an object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl line 2 is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl line 1 is not valid JSON"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "must be named .jsonl"),
        ("a.json", b'{"a": 1}', "must hold an array"),
        ("a.json", b'[{"a": 1}, 2]', "a.json row 2 is a int"),
        ("a.csv", b"a,b\n", r"must end in .jsonl, .json, .parquet"),
        ("noending", b"a", r"must end in .jsonl, .json, .parquet"),
        ("a.jsonl.gz", b'{"a": 1}', "cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}' * 999)[:-9], "cannot be read"),
    ],
)
def test_a_broken_file_is_one_message_with_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(str(tmp_path / name))


def test_a_broken_parquet_file_is_one_message(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable parquet file"):
        read_rows(str(tmp_path / "a.parquet"))


def test_an_absent_file_shows_near_names(tmp_path):
    written(tmp_path / "train.jsonl", sums(1))
    with pytest.raises(ValueError, match=r"demos\.path=.*trian\.jsonl does not exist; that folder holds train\.jsonl"):
        read_rows(str(tmp_path / "trian.jsonl"), key="demos.path")
    with pytest.raises(ValueError, match="there is no folder"):
        read_rows(str(tmp_path / "no" / "train.jsonl"))
    with pytest.raises(ValueError, match=r"is a folder: name a file in it \(train\.jsonl\)"):
        read_rows(str(tmp_path))


def test_a_relative_file_name_with_one_slash_is_not_taken_for_a_hub_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets").mkdir()
    written(tmp_path / "sets" / "train.jsonl", sums(1))
    assert read_rows("sets/train.jsonl") == sums(1)
    with pytest.raises(ValueError, match=r"holds train\.jsonl"):
        read_rows("sets/trains.jsonl.gz")


def test_a_hub_set_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets, or try data\.path=FILE\.jsonl"):
        read_rows("openai/gsm8k")


def test_a_hub_set_out_of_reach_is_one_message(monkeypatch):
    def load_dataset(path, config, split):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"ConnectionError: Couldn't reach the hub\): check the names and the network"):
        read_rows("openai/gsm8k", "main")


def test_a_hub_set_is_held_out_by_its_own_split_or_by_hash_when_it_has_one(monkeypatch):
    splits = {"train": sums(40), "test": sums(10, start=100)}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda path, config, split: splits[split]))
    train, heldout, notes = load_problems(section(path="org/name", limits=(30, 5)))
    assert [len(train), len(heldout), notes] == [30, 5, []]
    assert (train[0].id, heldout[0].id) == ("org/name/train:1", "org/name/test:1")
    one = section(path="org/name")
    one.eval.split = "train"
    train, heldout, _ = load_problems(one)
    assert len(train) + len(heldout) == 40 and train and heldout


# Rows to problems


def test_a_missing_field_lists_the_fields_there_are(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"query": "1+1=", "answer": "2"}])
    with pytest.raises(ValueError, match=r"row 1 has no field 'question' \(it has: query, answer\): try data.question_field=query"):
        load_problems(section(path=path))


@pytest.mark.parametrize("question", ["", "  ", None, 7, "\ud800"])
def test_a_question_that_is_no_text_names_its_row(tmp_path, question):
    path = written(tmp_path / "a.jsonl", [*sums(2), {"question": question, "answer": "2"}])
    with pytest.raises(ValueError, match="row 3"):
        load_problems(section(path=path))


def test_bad_golds_are_counted_and_three_are_shown(tmp_path):
    rows = [*sums(20), *({"question": f"bad {i}", "answer": answer} for i, answer in enumerate(["", "five", None, "1 or 2", True]))]
    path = written(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as refused:
        load_problems(section(path=path))
    assert "5 of 25 gold answers" in str(refused.value) and "data.bad_gold=drop" in str(refused.value)
    assert "(row 21: '', row 22: 'five', row 23: 'None', ...)" in str(refused.value)
    train, heldout, notes = load_problems(section(path=path, bad_gold=BadGold.drop))
    assert len(train) + len(heldout) == 20 and len(notes) == 1 and "5 of 25" in notes[0]


def test_only_an_empty_text_is_bad_gold_when_answers_need_not_be_numbers(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"question": f"q{i}", "answer": f"word{i}"} for i in range(9)])
    train, heldout, _ = load_problems(section(path=path, numeric=False))
    assert {problem.answer for problem in train + heldout} == {f"word{i}" for i in range(9)}
    written(path, [{"question": "q", "answer": " "}])
    with pytest.raises(ValueError, match="1 of 1 gold answers"):
        load_problems(section(path=path, numeric=False))


def test_gold_is_what_follows_the_last_marker(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"question": f"q{i}", "answer": "#### 1\nno: #### 1,234 \n"} for i in range(9)])
    train, _, _ = load_problems(section(path=path, answer_marker="####"))
    assert {problem.answer for problem in train} == {"1,234"}
    written(path, [{"question": "q", "answer": "7"}])
    with pytest.raises(ValueError, match="no number behind '####'"):
        load_problems(section(path=path, answer_marker="####"))


def test_the_same_question_is_never_on_both_sides_of_a_holdout(tmp_path):
    rows = sums(50) * 3 + [{"question": f" {row['question']}\n", "answer": row["answer"]} for row in sums(50)]
    random.Random(0).shuffle(rows)
    train, heldout, _ = load_problems(section(path=written(tmp_path / "a.jsonl", rows), holdout=0.3))
    assert len(train) + len(heldout) == 200
    assert not {problem.prompt.strip() for problem in train} & {problem.prompt.strip() for problem in heldout}
    assert len({problem.id for problem in train + heldout}) == 200


def test_questions_of_an_explicit_held_out_file_leave_training(tmp_path):
    train_path = written(tmp_path / "train.jsonl", sums(10))
    (tmp_path / "other").mkdir()
    eval_path = written(tmp_path / "other" / "train.jsonl", sums(10, start=7))
    train, heldout, notes = load_problems(section(path=train_path, eval_path=eval_path))
    assert [problem.id for problem in train] == [f"train:{i}" for i in range(1, 8)]
    assert [problem.id for problem in heldout] == [f"eval-train:{i}" for i in range(1, 11)]
    assert "3 of 10 rows" in notes[0] and "left out of training" in notes[0]


def test_an_empty_side_says_which_and_why(tmp_path):
    path = written(tmp_path / "a.jsonl", sums(5))
    with pytest.raises(ValueError, match=r"no training problem is left; 5 of 5 rows .* held out in"):
        load_problems(section(path=path, eval_path=path))
    with pytest.raises(ValueError, match=r"no held-out problem is left.*data\.eval\.path=FILE or a larger data\.eval\.holdout"):
        load_problems(section(path=path, holdout=1e-9))
    with pytest.raises(ValueError, match=r"data\.eval\.path=.*gone.jsonl does not exist"):
        load_problems(section(path=path, eval_path=tmp_path / "gone.jsonl"))


def test_limits_keep_the_first_rows(tmp_path):
    path, eval_path = written(tmp_path / "a.jsonl", sums(30)), written(tmp_path / "b.jsonl", sums(9, start=50))
    train, heldout, _ = load_problems(section(path=path, eval_path=eval_path, limits=(4, 3)))
    assert [problem.id for problem in train + heldout] == ["a:1", "a:2", "a:3", "a:4", "b:1", "b:2", "b:3"]
    everything, _, _ = load_problems(section(path=path))
    assert load_problems(section(path=path, limits=(4, 3)))[0] == everything[:4]


def test_templates_fill_fields_and_leave_other_braces_alone(tmp_path):
    row = {"question": "What is {target}?", "answer": 3, "target": "{answer}", "nums": [1, 2]}
    path = written(tmp_path / "a.jsonl", [row], dump=json.dumps)
    eval_path = written(tmp_path / "b.jsonl", [row | {"question": "Else?"}])
    template = r"{question} {target} {nums} \boxed{} \frac{1}{2} {{answer}} \boxed{{}} \boxed{\frac{1}{2}}"
    train, _, _ = load_problems(section(path=path, eval_path=eval_path, template=template))
    assert train[0].prompt == r"What is {target}? {answer} [1, 2] \boxed{} \frac{1}{2} {answer} \boxed{} \boxed{\frac{1}{2}}"
    assert train[0].fields == {"target": "{answer}", "nums": (1, 2)} and train[0].answer == "3"


def test_an_unknown_field_in_a_template_lists_the_fields(tmp_path):
    path = written(tmp_path / "a.jsonl", sums(9))
    with pytest.raises(ValueError, match=r"asks for \{level\}, and a:\d has no such field \(it has: question, answer\).*\{\{level\}\}"):
        load_problems(section(path=path, template="{question} {level}"))
    with pytest.raises(ValueError, match="names no field"):
        load_problems(section(path=path, template="Solve it."))


def test_a_chat_has_system_examples_and_question_in_this_order(tmp_path):
    chat = Prompt("Q: {question}", True, "Be brief {x}.", [Example("1+1=", "2"), Example("2+2=", "4")])
    train, _, _ = load_problems(section(path=written(tmp_path / "a.jsonl", sums(9)), prompt=chat))
    assert [(turn["role"], turn["content"]) for turn in train[0].prompt][:-1] == [
        ("system", "Be brief {x}."),
        ("user", "1+1="),
        ("assistant", "2"),
        ("user", "2+2="),
        ("assistant", "4"),
    ]
    assert train[0].prompt[-1]["role"] == "user" and re.fullmatch(r"Q: \d\+1=", train[0].prompt[-1]["content"])


@needs_shared
def test_gsm8k_loads_with_every_gold():
    common = {"path": SHARED / "gsm8k/train.jsonl.gz", "answer_marker": "####"}
    train, heldout, notes = load_problems(section(**common, eval_path=SHARED / "gsm8k/test.jsonl"))
    assert (len(train), len(heldout), notes) == (7473, 1319, [])
    assert sum("," in problem.answer for problem in train) == 79
    assert all(parse_number(problem.answer) is not None for problem in train + heldout)
    train, heldout, _ = load_problems(section(**common, holdout=0.1))
    assert len(train) + len(heldout) == 7473 and 650 < len(heldout) < 850  # 747 expected, standard deviation 26


# The data sets that have a config of their own


def configured(option, *overrides) -> Data:
    words = [f"data={option}", *overrides]
    with Composer(cli.TRAIN, None, None) as composer:
        return convert(composer.compose(words), words).data


DATA_SETS = {
    "math": ("math500/test.jsonl", 500),
    "svamp": ("svamp/SVAMP.json", 1000),
    "countdown": ("countdown/train.jsonl", 2048),
    "mbpp": ("mbpp/mbpp.jsonl", 974 - 3),  # three questions of its test part occur in its training part as well
    "humaneval": ("humaneval/HumanEval.jsonl.gz", 164),
    "ifeval": ("ifeval/input_data.jsonl", 541),
}


def loaded(option, *overrides):
    path = (SHARED / DATA_SETS[option][0]).resolve()
    return load_problems(configured(option, f"data.path={path}", "data.eval.limit=null", *overrides))


def words(problem) -> str:
    return "\n".join(turn["content"] for turn in problem.prompt)


@needs_shared
@pytest.mark.parametrize("option", DATA_SETS)
def test_a_data_set_loads_in_full_with_stable_ids_and_sides_that_share_no_prompt(option):
    train, heldout, _ = loaded(option)
    assert len(train) + len(heldout) == DATA_SETS[option][1]
    assert not {words(problem) for problem in train} & {words(problem) for problem in heldout}
    assert len({problem.id for problem in train + heldout}) == DATA_SETS[option][1]
    assert (train, heldout) == loaded(option)[:2]
    assert loaded(option, "data.train.limit=9")[0] == train[:9]


@needs_shared
def test_math_prompts_ask_for_a_box_and_keep_latex_golds():
    problems = {problem.id: problem for side in loaded("math")[:2] for problem in side}
    first = problems["test:1"]
    assert words(first).startswith("Convert the point $(0,3)$ in rectangular") and words(first).endswith(r"final answer into \boxed{}.")
    assert [problems[f"test:{i}"].answer for i in (1, 2, 3)] == [r"\left( 3, \frac{\pi}{2} \right)", "p - q", r"\frac{14}{3}"]
    assert first.fields["level"] == 2


@needs_shared
def test_svamp_joins_story_and_question():
    problems = {problem.id: problem for side in loaded("svamp")[:2] for problem in side}
    assert [(problems[f"SVAMP:{i}"].prompt[-1]["content"], problems[f"SVAMP:{i}"].answer) for i in (1, 2, 3)] == [
        (
            "Each pack of dvds costs 76 dollars. If there is a discount of 25 dollars on each pack, "
            "How much do you have to pay to buy each pack?",
            "51.0",
        ),
        (
            "Dan had $ 3 left with him after he bought a candy bar. If he had $ 4 at the start, How much did the candy bar cost?",
            "1.0",
        ),
        (
            "Paco had 26 salty cookies and 17 sweet cookies. He ate 14 sweet cookies and 9 salty cookies. "
            "How many salty cookies did Paco have left?",
            "17.0",
        ),
    ]
    assert "<answer>" in problems["SVAMP:1"].prompt[0]["content"]


@needs_shared
def test_countdown_states_numbers_and_target_and_its_reward_pays_its_solutions():
    train, heldout, notes = loaded("countdown", f"data.eval.path={(SHARED / 'countdown/test.jsonl').resolve()}")
    assert (len(train), len(heldout), notes) == (2048, 1024, [])
    for problem, nums, target in zip(train, ([4, 95, 36], [18, 95, 14], [76, 55, 5]), ("55", "99", "16"), strict=False):
        assert f"the numbers {nums} exactly once" in words(problem) and f"to make {target}." in words(problem)
        assert problem.answer == target and problem.fields["nums"] == tuple(nums)
    for problem in train[:50]:
        text = f"<think>?</think><answer>{problem.fields['solution']}</answer>"
        assert countdown(Sample(problem, "", text, 9, Ended.eos)) == 1.0


def test_a_countdown_puzzle_is_on_one_side_whatever_the_order_of_its_numbers(tmp_path):
    rows = [{"nums": nums, "target": 10 + i} for i in range(40) for nums in ([1, 2, i], [i, 2, 1], [2, 1, i])]
    path = written(tmp_path / "a.jsonl", rows)
    sides = load_problems(configured("countdown", f"data.path={path}", "data.eval.holdout=0.5"))[:2]
    puzzles = [{(tuple(sorted(problem.fields["nums"])), problem.answer) for problem in side} for side in sides]
    assert all(puzzles) and not puzzles[0] & puzzles[1]


@needs_shared
@pytest.mark.parametrize(("file", "total"), [("mbpp.jsonl", 974 - 3), ("sanitized-mbpp.json", 427 - 1)])
def test_mbpp_trains_on_its_own_training_tasks_and_tells_what_the_code_rule_needs(file, total):
    train, heldout, notes = loaded("mbpp", f"data.path={(SHARED / 'mbpp' / file).resolve()}")
    assert len(train) + len(heldout) == total and "left out of training: their questions are held out" in notes[0]
    assert {problem.fields["task_id"] for problem in heldout} <= set(range(11, 511))
    assert {problem.fields["task_id"] for problem in train} <= {*range(1, 11), *range(511, 975)}
    for problem in train + heldout:
        fields = problem.fields
        assert (
            fields["mode"] == "asserts"
            and len(fields["tests"]) >= 3
            and all(test.startswith(("assert ", "import")) for test in fields["tests"])
        )
        assert words(problem).count(fields["tests"][0]) == 1
        assert fields["entry_point"] and fields["entry_point"] in fields["tests"][0] and fields["solution"].strip() == problem.answer
    similar = train[1] if file == "mbpp.jsonl" else train[0]
    assert similar.fields["entry_point"] == "similar_elements" and similar.fields["setup"] == ""
    assert similar.fields["tests"][1] not in words(similar)  # the reward runs tests that the prompt does not show
    assert words(similar).endswith("Answer with the whole program in one ```python block.")
    if file == "sanitized-mbpp.json":
        assert "import math" in {problem.fields["setup"] for problem in heldout}


@needs_shared
def test_humaneval_asks_for_the_whole_function_and_its_solutions_define_it():
    train, heldout, _ = loaded("humaneval")
    problems = {problem.id: problem for problem in train + heldout}
    for i, entry_point in ((1, "has_close_elements"), (2, "separate_paren_groups"), (3, "truncate_number")):
        problem = problems[f"HumanEval:{i}"]
        fields = problem.fields
        assert (fields["mode"], fields["entry_point"], fields["setup"], len(fields["tests"])) == ("check", entry_point, "", 1)
        assert "def check(candidate):" in fields["tests"][0] and fields["prompt_code"] in words(problem)
        assert fields["solution"].startswith(fields["prompt_code"]) and len(fields["solution"]) > len(fields["prompt_code"])
        compile(fields["solution"], "solution", "exec")


@needs_shared
def test_ifeval_has_no_gold_and_instructions_for_its_reward():
    train, heldout, notes = loaded("ifeval")
    assert notes == [] and {problem.answer for problem in train + heldout} == {""} and 200 < len(train) < 341
    problems = {problem.id: problem for problem in train + heldout}
    assert problems["input_data:2"].fields["instruction_id_list"] == ("punctuation:no_comma",)
    sample = Sample(problems["input_data:2"], "", "Forsooth thou shalt behold Kyoto", 9, Ended.eos)
    assert ifeval(sample) == 1.0 and ifeval(replace(sample, text="Hark, Kyoto")) == 0.0
    assert words(problems["input_data:3"]).startswith("Write a resume for a fresh high school graduate")


@pytest.mark.parametrize(
    ("option", "row", "message"),
    [
        ("svamp", {"Question": "?", "Answer": 1}, r"a\.jsonl row 1 has no field 'Body' \(it has: Question, Answer\)"),
        ("svamp", {"Body": "a", "Question": "?"}, r"row 1 has no field 'Answer'"),
        ("svamp", {"Body": 3, "Question": "?", "Answer": 1}, r"row 1: field 'Body' must be a text, not 3"),
        ("countdown", {"target": 3}, r"row 1 has no field 'nums'"),
        ("countdown", {"nums": [1, "2"], "target": 3}, r"row 1: field 'nums' must be a list of whole numbers, not \[1, '2'\]"),
        ("countdown", {"nums": [1, 2], "target": "3"}, r"row 1: field 'target' must be a whole number, not '3'"),
        ("mbpp", {"task_id": 1, "code": "a", "test_list": "b", "text": "c"}, r"row 1: field 'test_list' must be a list of texts, not 'b'"),
        ("mbpp", {"task_id": 1, "code": "a", "test_list": []}, r"row 1 has no field 'prompt'"),
        ("mbpp", {"code": "a", "test_list": [], "text": "c"}, r"row 1 has no field 'task_id'"),
        ("humaneval", {"prompt": "a"}, r"row 1 has no field 'canonical_solution'"),
        ("math", {"problem": "a"}, r"row 1 has no field 'answer'"),
        ("ifeval", {"text": "a"}, r"row 1 has no field 'prompt'"),
    ],
)
def test_a_row_of_another_shape_names_the_row_and_the_field(tmp_path, option, row, message):
    with pytest.raises(ValueError, match=message):
        load_problems(configured(option, f"data.path={written(tmp_path / 'a.jsonl', [row])}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["jsonl", "data.path=a.jsonl", "data.answer_field=null"],
            "data.answer_field=null leaves no gold answer to read: try data.numeric=false",
        ),
        (["addition", "data.layout=mbpp"], "data.layout=mbpp is not read by data=addition"),
    ],
)
def test_data_options_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        configured(*overrides)


# Generators


def test_the_hash_of_a_question_is_fixed_for_ever():
    # sha256("67+15=") begins 8693: 34451/65536 = 0.5257
    assert not is_heldout("67+15=", 0.52) and is_heldout(" 67+15=\n", 0.53)


def test_one_digit_addition_has_all_81_sums_once():
    pairs = list(addition_pairs([1, 1]))
    assert sorted(pairs) == [(a, b) for a in range(1, 10) for b in range(1, 10)]
    train, heldout, notes = load_problems(section(Source.addition, limits=(8192, 5), holdout=0.1))
    assert len(train) + 5 <= 81 and len(heldout) == 5 and "not the 8192" in notes[0]


@pytest.mark.parametrize("source", [Source.addition, Source.word_problems])
def test_generated_problems_are_distinct_disjoint_and_right(source):
    train, heldout, notes = load_problems(section(source, limits=(2000, 200), holdout=0.1, digits=[2, 3]))
    assert (len(train), len(heldout), notes) == (2000, 200, [])
    assert len({problem.prompt for problem in train + heldout}) == len({problem.id for problem in train + heldout}) == 2200
    for problem in train + heldout:
        a, b, sign = problem.fields["a"], problem.fields["b"], problem.fields.get("operation", "+")
        assert [int(number) for number in re.findall(r"\d+", problem.prompt)] == [a, b]
        assert problem.answer == str(a + b if sign == "+" else a - b) and int(problem.answer) >= 0
        if source is Source.addition:
            assert problem.prompt == addition_question(a, b) and len(str(a)) == len(str(b)) in (2, 3)
        else:
            assert ("more" in problem.prompt) == (sign == "+") != ("of them" in problem.prompt)
    longer = load_problems(section(source, limits=(2100, 210), holdout=0.1, digits=[2, 3]))
    assert longer[0][:2000] == train and longer[1][:200] == heldout


def test_each_length_of_sum_is_as_likely():
    train, _, _ = load_problems(section(Source.addition, limits=(4000, 200), holdout=0.1, digits=[2, 3]))
    assert 0.4 < sum(problem.fields["a"] < 100 for problem in train) / 4000 < 0.55  # below a half: repeats among 8100 pairs are left out


def test_word_problems_never_share_their_arithmetic_across_the_split():
    train, heldout, _ = load_problems(section(Source.word_problems, limits=(512, 64), holdout=0.1))
    sides = [{tuple(problem.fields.values()) for problem in side} for side in (train, heldout)]
    assert all(sides) and not sides[0] & sides[1]
    assert not any(re.search(r"\b1 \w+s\.", problem.prompt) for problem in train)


def reachable(numbers) -> set[int]:
    """The values above zero that some signs give."""
    return {value for signs in product([-1, 1], repeat=3) if (value := sum(s * n for s, n in zip(signs, numbers, strict=True))) > 0}


def test_sign_countdown_has_solutions_that_its_reward_pays_and_covers_all_puzzles():
    train, heldout, notes = load_problems(configured("sign_countdown", "reward=sign_countdown"))
    assert (len(train), len(heldout), notes) == (4096, 256, [])
    assert len({problem.prompt for problem in train + heldout}) == len({problem.id for problem in train + heldout}) == 4352
    keys = set()
    for problem in train + heldout:
        numbers, target = problem.fields["nums"], int(problem.answer)
        assert problem.prompt == "{},{},{}>{}:".format(*numbers, target) and target in reachable(numbers)
        keys.add((tuple(sorted(numbers)), target))
        for answer, score in [(problem.fields["solution"], 1.0), (problem.answer, 0.0)]:
            assert countdown(Sample(problem, "", f"<think>?</think><answer>{answer}</answer>", 9, Ended.eos), "+-") == score
    possible = {
        (numbers, target)
        for numbers in product(range(1, 13), repeat=3)
        if list(numbers) == sorted(numbers)
        for target in reachable(numbers)
    }
    assert len(possible) == 1264 and keys <= possible and len(keys) > 1200


def test_a_sign_countdown_puzzle_is_on_one_side_whatever_the_order_of_its_numbers():
    sides = load_problems(configured("sign_countdown", "reward=sign_countdown", "data.eval.limit=500"))[:2]
    puzzles = [{(tuple(sorted(problem.fields["nums"])), problem.answer) for problem in side} for side in sides]
    assert 80 < len(puzzles[1]) < 170 and not puzzles[0] & puzzles[1]  # 126 expected, standard deviation 11
    assert len(sides[1]) == 500  # several orders of most puzzles, so the check above can fail


def test_signs_go_from_left_to_right_and_never_below_zero():
    rng, seen = generator(0, "test"), set()
    for _ in range(300):
        expression, value = signed(rng, [6, 1, 5])
        terms = [int(term) for term in re.findall(r"[+-]?\d+", expression)]
        assert sorted(map(abs, terms)) == [1, 5, 6] and sum(terms) == value > 0 <= terms[0] + terms[1]
        seen.add(expression)
    assert seen == {
        *("6+1+5", "6+5+1", "1+6+5", "1+5+6", "5+6+1", "5+1+6"),  # 12
        *("6+5-1", "5+6-1", "6-1+5", "5-1+6"),  # 10
        *("6+1-5", "1+6-5", "6-5+1"),  # 2; the other eleven are 0 or fall below it
    }


def test_generators_end_when_asked_for_too_much_and_refuse_no_limit():
    tiny = section(Source.word_problems, limits=(20, 64), holdout=0.01)
    with pytest.raises(ValueError, match=r"no held-out problem is left; .*not the 64"):
        load_problems(replace(tiny, eval=replace(tiny.eval, holdout=1e-9)))
    with pytest.raises(ValueError, match=r"data\.train\.limit is not set, and data=addition has no end"):
        load_problems(section(Source.addition, limits=(None, 5), digits=[2, 3]))


def test_reading_data_imports_no_torch():
    code = "import sys, grpo_cli.data, grpo_cli.rewards; sys.exit(any(m in sys.modules for m in ('torch', 'pyarrow', 'datasets')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
