import ast
import os
import re
import shlex
from dataclasses import is_dataclass
from pathlib import Path
from typing import Optional, get_args, get_type_hints

import pytest

from grpo_cli import cli, config
from grpo_cli.compose import CONF, Composer, convert
from grpo_cli.config import GrpoRun, KlSchedule, Rule, ScoreRun, SftRun
from grpo_cli.rewards import Rules
from grpo_cli.rewards.calling import LoadedRule

ROOT = Path(__file__).parents[1]
OPTIONS = sorted((path.parent.name, path.stem) for path in CONF.glob("*/[!_]*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
NEEDED = {
    ("model", "hf"): ["model.path=x"],
    ("data", "jsonl"): ["data.path=x.jsonl"],
    ("data", "sign_countdown"): ["reward=sign_countdown"],
    ("demos", "jsonl"): ["demos.path=x.jsonl"],
}


def compose(overrides, command=cli.TRAIN, name=None, directory=None):
    with Composer(command, name, directory) as composer:
        return convert(composer.compose(overrides), overrides)


def refusal(*overrides):
    with pytest.raises(ValueError) as caught:
        compose(list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(group, option):
    command = cli.SFT if group == "demos" else cli.TRAIN
    compose([f"{group}={option}", *NEEDED.get((group, option), [])], command)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_composes(recipe):
    if recipe.stem.endswith("_slurm"):
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm")
    compose([], {"grpo": cli.TRAIN, "sweeps": cli.TRAIN, "sft": cli.SFT}[recipe.parent.name], recipe.stem, recipe.parent)


def shown_commands():
    text = "\n".join(cli._help(command) for command in (cli.TRAIN, cli.SFT, cli.SCORE, cli.EVAL))
    readme = ROOT / "README.md"
    if readme.exists():
        text += "\n" + readme.read_text(encoding="utf-8")
    lines = (line.strip().removeprefix("$ ") for line in text.splitlines())
    found = [shlex.split(line, comments=True) for line in lines if re.match(r"grpo-(train|sft|score)\b( |$)", line)]
    return [words for words in found if not re.search(r"[A-Z]{3}|<|\[overrides\]|`", " ".join(words)) and "resume" not in str(words)]


@pytest.mark.parametrize("words", shown_commands(), ids=" ".join)
def test_examples_in_the_help_and_the_readme_compose(words):
    command = {"grpo-train": cli.TRAIN, "grpo-sft": cli.SFT, "grpo-score": cli.SCORE}[words[0]]
    args = cli._parse(command, words[1:])
    folder = args.config_dir and ROOT / args.config_dir
    if folder and not folder.is_dir():
        pytest.skip(f"{args.config_dir} is a run folder of the reader's")
    with Composer(command, args.config_name, folder) as composer:
        for job in composer.jobs(args.overrides)[1] if args.multirun else [args.overrides]:
            convert(composer.compose(job), job)


SECTIONS = {name: kind for name, kind in vars(config).items() if is_dataclass(kind)}
HOLDERS = {kind.__name__: kind for kind in (LoadedRule, Rules)}
"""Classes whose annotated fields are sections."""
KINDS = SECTIONS | HOLDERS


class Reads(ast.NodeVisitor):
    """Collects `Section.key` for each attribute read off a variable that is known, by its annotation or origin, to be a section."""

    def __init__(self):
        self.found, self.types, self.owner = set(), {}, None

    def type_of(self, node):
        """The type that an expression has if it leads to a section, else None."""
        if isinstance(node, ast.Name):
            return self.types.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value)
            hint = get_type_hints(owner).get(node.attr) if isinstance(owner, type) else self.types.get(ast.unparse(node))
            return next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), hint)
        if isinstance(node, ast.Subscript):
            return self.type_of(node.value)  # dict[str, Section] counts as the section
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items":
            return self.type_of(node.func.value)
        return None

    def visit_ClassDef(self, node):
        outer, self.types = self.types, {**self.types, "self": KINDS.get(node.name)}
        self.generic_visit(node)  # what __init__ binds to self.NAME holds for the methods behind it
        self.types = outer

    def visit_FunctionDef(self, node):
        if node.name == "__post_init__":
            return  # a check reads every key
        outer = self.types
        self.types = dict(outer)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.annotation:
                names = re.findall(r"\w+", ast.unparse(argument.annotation))
                self.types[argument.arg] = next((KINDS[name] for name in names if name in KINDS), None)
        self.generic_visit(node)
        self.types = outer | {name: kind for name, kind in self.types.items() if name.startswith("self.")}

    def bind(self, target, value):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its_value in zip(target.elts, value.elts, strict=False):
                self.bind(one, its_value)
        elif isinstance(target, (ast.Name, ast.Attribute)):
            self.types[ast.unparse(target)] = self.type_of(value)

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            self.bind(target, node.value)

    def visit_For(self, node):
        kind = self.type_of(node.iter)
        target = node.target.elts[-1] if isinstance(node.target, ast.Tuple) else node.target
        if isinstance(target, ast.Name):
            self.types[target.id] = kind  # list[Section] counts as the section
        self.generic_visit(node)

    def visit_Attribute(self, node):
        owner = self.type_of(node.value)
        if is_dataclass(owner) and isinstance(node.ctx, ast.Load):
            self.found.add(f"{owner.__name__}.{node.attr}")
        self.generic_visit(node)


def reads(code):
    visitor = Reads()
    visitor.visit(ast.parse(code))
    return visitor.found


def keys(schema):
    """Every key as Section.key, such as Kl.beta."""
    for name, hint in get_type_hints(schema).items():
        yield f"{schema.__name__}.{name}"
        yield from (key for kind in (hint, *get_args(hint)) if is_dataclass(kind) for key in keys(kind))


@pytest.mark.parametrize("schema", [GrpoRun, SftRun, ScoreRun, Rule])
def test_every_key_is_read_by_something(schema):
    found = set().union(*(reads(path.read_text(encoding="utf-8")) for path in (ROOT / "grpo_cli").rglob("*.py")))
    found.add(f"{schema.__name__}.debug")  # cli._job asks the DictConfig, since a config that cannot be converted has it too
    assert sorted(set(keys(schema)) - found) == []


def test_a_key_of_the_same_name_elsewhere_does_not_count_as_read():
    code = """
class Sampler:
    def __init__(self, section: Rollout, cfg: GrpoRun):
        self._section, kl = section, cfg.kl
        print(kl.beta, cfg.tracker.name, other.temperature)

    def run(self):
        return self._section.rows_at_once
"""
    assert reads(code) == {"GrpoRun.kl", "GrpoRun.tracker", "Kl.beta", "TrackerSection.name", "Rollout.rows_at_once"}


def test_a_key_without_a_value_is_an_error_that_says_what_to_type():
    assert refusal("model=hf") == "model.path is empty: try model.path=FOLDER or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"


def test_a_rule_of_ones_own_is_added_from_the_command_line():
    run = compose(["+reward.rules.short.fn=my.module:short", "+reward.rules.short.weight=-0.1"])
    assert run.reward.rules["short"] == Rule("my.module:short", -0.1, {})
    assert list(run.reward.rules) == ["accuracy", "format", "short"]


def test_a_rule_is_dropped_from_the_command_line():
    assert list(compose(["~reward.rules.format"]).reward.rules) == ["accuracy"]


def test_a_value_beats_its_group():
    run = compose(["kl=linear", "kl.beta=0.02"])
    assert (run.kl.schedule, run.kl.beta, run.kl.end_beta) == (KlSchedule.linear, 0.02, 0.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["kl.betta=0.1"], "kl.betta is unknown: did you mean kl.beta"),
        (["+kl.betta=0.1"], "Try kl.beta=0.1"),
        (["beta=0.1"], "Try kl.beta=0.1"),
        (["modle=tiny"], "Try model=tiny"),
        (["kl={beta: 1, bogus: 2}"], "kl.bogus is unknown: kl has schedule, beta"),
        (["reward.rules.acuracy.weight=1"], "Try reward.rules.accuracy.weight=1"),
        (["reward.rules.format.wieght=1"], "Try reward.rules.format.weight=1"),
        (["+reward.rules.format.wieght=1"], "did you mean reward.rules.format.weight?"),
        (["+reward.rules.new.weight=1"], "reward.rules.new.fn is not set: try +reward.rules.new.fn=package.module:function"),
        (["hydra.run.dirr=x"], "Try hydra.run.dir=x"),
        (["+hydra.job.bogus=1"], "hydra.job.bogus=1 is unknown: hydra.job has name, chdir"),
        (["group_size=g3"], "group_size has g2, g4, g8, g16, g32, g64: try group_size=g2 or group_size=g4"),
        (["kl=cosin"], "try kl=cosine"),
        (["model=null"], "a group takes the name of an option: model has hf, tiny"),
        (["kl.beta=abc"], "a number is expected: try kl.beta=0.1"),
        (["kl.beta=null"], "a number is expected: try kl.beta=0.1"),
        (["steps=1.5"], "a whole number is expected: try steps=1"),
        (["debug=maybe"], "true or false is expected: try debug=true"),
        (["data.digits=3"], "a list is expected: try 'data.digits=[2,3]'"),
        (["algorithm.std=foo"], "expected one of [sample, population]: try algorithm.std=sample"),
        (["model.lora=5"], "model.lora is a section: try model.lora.rank=VALUE"),
        (["kl.beta=${nope}"], "kl.beta=${nope}: Interpolation key 'nope' not found"),
        (["model.lora=null", "model.lora.rank=4"], "model.lora.rank=4: model.lora is null here"),
        (["model.lora=null", "model.lora={rank: 4}"], "drop model.lora=null, or write the whole section into a config"),
        (["+kl.beta=1"], "kl.beta exists already: drop the +"),
        (["~kl.beta"], "kl.beta cannot be left out: drop ~kl.beta, or try kl.beta=VALUE"),
        (["~kl.beta=0.04"], "kl.beta cannot be left out: drop ~kl.beta=0.04, or try kl.beta=VALUE"),
        (["~model.lora"], "model.lora cannot be left out: drop ~model.lora, or try model.lora=null"),
        (["reward.accuracy=null"], "drop it, or try reward.accuracy=TEXT"),
        (["resume=true"], "resume=True is neither auto nor a run folder: try resume=auto"),
        (["resume="], "resume= is neither auto nor a run folder: try resume=auto"),
        (["data.answer_marker=####"], """put the value in quotes: try "data.answer_marker='####'\""""),
        (["hydra.run.dir=ünï"], """put the value in quotes: try "hydra.run.dir='ünï'\""""),
        (["hydra.run.dir=~/x"], """put the value in quotes: try "hydra.run.dir='~/x'\""""),
        (["hydra.run.dir=a=b"], """put the value in quotes: try "hydra.run.dir='a=b'\""""),
        (["hydra.run.dir=a,b"], """one text as "hydra.run.dir='a,b'\""""),
        (["~kl"], "kl is not set: try kl="),
        (["kl.beta=0,1"], "add -m"),
        (["kl.beta=[1,"], "cannot read the override kl.beta=[1,"),
        (["kl.beta"], "write key=value"),
        (["group_size.samples_per_prompt=1"], "try group_size=g8 or group_size.samples_per_prompt=2"),
        (["group_size.completions_per_step=30"], "try group_size.completions_per_step=24 or 32"),
        (["kl.beta=-1"], "try kl.beta=0"),
        (["steps=0"], "try steps=1"),
        (["kl=adaptive", "kl.beta=0"], "try kl.beta=0.04"),
        (["kl=none", "kl.beta=0.1"], "try kl=constant kl.beta=0.1"),
        (["model.lora.init=pissa"], "try model.lora.init=default"),
        (["data=jsonl"], "try data.path=FILE.jsonl"),
        (["data.prompt.system=Hi"], "try data.prompt.chat=true"),
        (["reward.accuracy=nope"], "try reward.accuracy=accuracy"),
        (["device=gpu"], "try device=auto"),
        (["device=cuda:x"], "device=cuda:x is unknown: try device=auto"),
        (["device=cpu:0"], "device=cpu:0 is unknown: try device=auto"),
        (["threads=100000"], f"cores: try threads={os.cpu_count()}"),
        (["data.path=x.jsonl"], "data.path=x.jsonl is not read by data=addition: drop it, or try data=jsonl data.path=FILE.jsonl"),
        (["data=word_problems", "data.eval.path=x"], "data.eval.path=x is not read by data=word_problems"),
        (["data.answer_marker='####'"], "data.answer_marker=#### is not read by data=addition"),
        (["data=sign_countdown", "data.digits=[1,2]"], "data.digits=[1, 2] is not read by data=sign_countdown, whose numbers are 1 to 12"),
        (["data=sign_countdown"], "would pay for the target itself: try model=tiny_countdown reward=sign_countdown"),
        (["data.digits=null"], "try 'data.digits=[2,3]'"),
        (["data.hub_config=main"], "data.hub_config=main is not read by data=addition"),
        (["kl.end_beta=0"], "kl.end_beta=0.0 is not read by kl=constant: try kl=linear kl.end_beta=0.0"),
        (["kl=adaptive", "kl.end_beta=1"], "kl.end_beta=1.0 is not read by kl=adaptive: try kl=linear"),
        (["kl=linear", "kl.target=1"], "kl.target=1.0 is not read by kl=linear: try kl=adaptive kl.target=1.0"),
        (["optimizer.momentum=0.9"], "optimizer.momentum=0.9 is not read by optimizer=adamw: try optimizer=sgd"),
        (["evaluation.pass_at=[8]"], "try evaluation.samples_per_problem=8"),
        (["steps=10000001"], "steps must be at most 10000000, not 10000001: try steps=10000000"),
        (["rollout.max_new_tokens=1000001"], "try rollout.max_new_tokens=1000000"),
        (["model.lora.rank=65537"], "try model.lora.rank=65536"),
        (["algorithm.resample_tries=1001"], "try algorithm.resample_tries=1000"),
        (["group_size.completions_per_step=10000008"], "try group_size.completions_per_step=10000000"),
        (["group_size.samples_per_prompt=10000001"], "try group_size.samples_per_prompt=10000000"),
        (["algorithm.updates_per_rollout=10001"], "try algorithm.updates_per_rollout=10000"),
        (["evaluation.samples_per_problem=1000001"], "try evaluation.samples_per_problem=1000000"),
        (["kl=none", "kl.warmup_steps=5"], "kl.warmup_steps=5 is not read by kl=none: drop it, or try kl=constant"),
        (["kl.max_beta=0"], "kl.max_beta must be above 0, not 0.0: try kl.max_beta=10"),
        (["kl.min_beta=0"], "kl.min_beta must be above 0, not 0.0: try kl.min_beta=0.0001"),
        (["kl=adaptive", "kl.gain=0"], "kl.gain must be above 0 with kl=adaptive, not 0: try kl.gain=0.1"),
        (["kl=adaptive", "kl.min_beta=1", "kl.max_beta=0.1"], "kl.min_beta must be below kl.max_beta=0.1, not 1: try kl.min_beta=0.0001"),
        (["kl.min_beta=10"], "kl.min_beta must be below kl.max_beta=10, not 10"),
        (["kl=adaptive", "kl.min_beta=1"], "try kl.beta=1"),
        (["kl=adaptive", "kl.max_beta=0.01"], "try kl.beta=0.01"),
        (["evaluation.pass_at=[0]"], "k counts samples, at least 1: try 'evaluation.pass_at=[1]'"),
        (["algorithm.dual_clip=3", "algorithm.clip_high=inf"], "try algorithm.clip_high=0.2 or algorithm.dual_clip=null"),
        (["algorithm.dual_clip=3", "algorithm.clip_high=4"], "try algorithm.dual_clip=10"),
        (["algorithm.dual_clip=1"], "must be above 1 + algorithm.clip_high = 1.2, not 1: try algorithm.dual_clip=3"),
        (["algorithm.dual_clip=inf"], "algorithm.dual_clip must be a finite number, not inf: try algorithm.dual_clip=3, or null"),
        (["optimizer.betas=0.9"], "a list is expected: try 'optimizer.betas=[0.9,0.95]'"),
        (["optimizer.betas=[0.9,x]"], "a list is expected: try 'optimizer.betas=[0.9,0.95]'"),
        (["data.difficulty=0.2"], "a list is expected: try 'data.difficulty=[0.2,0.8]'"),
        (["evaluation.pass_at=4"], "a list is expected: try 'evaluation.pass_at=[1]'"),
        (["tracker.tags=a"], "a list is expected: try 'tracker.tags=[first,second]'"),
        (["reward.rules.accuracy.kind=process"], "adding needs a +: try +reward.rules.accuracy.kind=process"),
        (["reward.rules.accuracy.args.limit=3"], "adding needs a +: try +reward.rules.accuracy.args.limit=3"),
        (["reward.rules.short.fn=mine:short"], "adding needs a +: try +reward.rules.short.fn=mine:short"),
        (
            ["+reward.rules.o.fun=x"],
            "timeout_s, split): did you mean reward.rules.o.fn?",
        ),
        (["+kl=none"], "kl=none: the group kl has its option already: drop the +"),
        (["kl.beta = 3"], "write it without blanks around the =: try kl.beta=3"),
        (["reward.rules={}"], "reward.rules={} changes nothing, since a mapping is merged with what is there: drop entries"),
        (["reward.rules={}"], "one by one: try ~reward.rules.format"),
        (["reward.rules.accuracy.args={}"], "try ~reward.rules.accuracy.args.extract"),
        (["data.prompt={}"], "changes nothing, since a mapping is merged with what is there: try data.prompt.template=VALUE"),
        (["stop.metric=eval/pass@2"], "try stop.metric=eval/accuracy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named_with_what_to_type_instead(overrides, words):
    assert words in refusal(*overrides)


def test_a_section_that_is_null_by_default_is_not_blamed_on_the_user():
    with pytest.raises(ValueError, match=r"^model\.lora\.rank=4: model\.lora is null here.* line: write the whole section into"):
        compose(["demos=sloppy_addition", "model.lora.rank=4"], cli.SFT)


def test_demonstrations_that_a_generator_would_not_read_are_refused():
    with pytest.raises(ValueError, match=r"demos.path=x.jsonl is not read by demos=sloppy_addition: drop it, or try demos=jsonl"):
        compose(["demos=sloppy_addition", "demos.path=x.jsonl"], cli.SFT)


def numbers(schema, prefix=""):
    for name, hint in get_type_hints(schema).items():
        inner = next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), None)
        if inner:
            yield from numbers(inner, f"{prefix}{name}.")
        elif hint in (float, Optional[float]):
            yield prefix + name


OF_A_DEMO = [key for key in numbers(SftRun) if key.startswith("demos.")]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("key", [*numbers(GrpoRun), *OF_A_DEMO])
def test_a_number_must_be_finite_unless_infinity_means_off(key, value):
    command, first = (cli.SFT, ["demos=sloppy_addition"]) if key in OF_A_DEMO else (cli.TRAIN, [])
    words = [*first, f"{key}={value}"]
    if value == "inf" and key in ("optimizer.grad_clip", "algorithm.clip_high"):
        assert compose(words, command)
    else:
        with pytest.raises(ValueError, match=rf"^{key}( must|=\S+ is not read|.*starts from)"):
            compose(words, command)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [grpo, _self_]\nkl: {bta: 1}", "kl.bta is unknown: did you mean kl.beta?"),
        ("defaults: [grpo, _self_]\nkl: {beta: x}", "kl.beta: Value 'x' of type 'str' could not be converted to Float"),
        ("defaults: [grpo, override kl: cosin, _self_]", "there is no option cosin"),
        ("kl: {beta: 1}", "mine is not a config of grpo-train: its defaults list must start from grpo"),
        ("{", "a config file cannot be read"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(tmp_path, text, words):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        compose([], name="mine", directory=tmp_path)


def test_an_unknown_config_name_lists_the_known_ones(tmp_path):
    (tmp_path / "long_run.yaml").write_text("defaults: [grpo, _self_]")
    with pytest.raises(ValueError, match=r"there are: grpo, long_run, score, sft\): try -cn long_run"):
        compose([], name="longrun", directory=tmp_path)


def test_a_recipe_named_like_one_of_ours_is_refused_since_hydra_would_not_read_it(tmp_path):
    (tmp_path / "grpo.yaml").write_text("defaults: [_grpo, _self_]")
    with pytest.raises(ValueError, match="give yours another name"):
        compose([], name="grpo", directory=tmp_path)
