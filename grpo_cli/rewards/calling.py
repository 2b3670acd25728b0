"""Finds the functions of rules and calls them, one completion at a time. Runs in the worker processes and imports no torch."""

import difflib
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any

from grpo_cli.config import Rule, RuleKind
from grpo_cli.records import END, Sample
from grpo_cli.rewards.code import code, code_efficiency
from grpo_cli.rewards.countdown import countdown
from grpo_cli.rewards.ifeval import ifeval
from grpo_cli.rewards.mathematics import math
from grpo_cli.rewards.rules import NOT_APPLICABLE, check_overlong, numeric, overlong, r1_format, working_steps
from grpo_cli.rewards.text import exact, json_schema, length, multiple_choice, regex, repetition, translation

FLOAT32_MAX = 3.4e38


RULES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(numeric, math, code, code_efficiency, exact, multiple_choice, regex, json_schema, translation, countdown, ifeval),
        *(r1_format, length, overlong, repetition, working_steps),
    )
}
"""The names that reward.rules.NAME.fn takes beside package.module:function and classifier."""


@dataclass(frozen=True)
class Failed:
    """A call that gave no score, and why."""

    reason: str


Verdict = list[tuple[int, float]] | Failed
"""(end in the text, score): one at END for an outcome, one per step of a process, none where the rule does not apply."""


@dataclass(frozen=True)
class LoadedRule:
    function: Callable[..., Any]
    rule: Rule


def load_rules(rules: dict[str, Rule]) -> dict[str, LoadedRule]:
    """Find the function of every rule, check that it takes the arguments it will get, and let it prepare.

    A function with an attribute `prepare` has it called with the same arguments: to import what it needs, and to refuse.
    """
    return {name: _load(f"reward.rules.{name}", rule) for name, rule in rules.items()}


def _load(key: str, rule: Rule) -> LoadedRule:
    function = _imported(key, rule.fn) if ":" in rule.fn else RULES.get(rule.fn)
    if function is None:
        near = difflib.get_close_matches(rule.fn, RULES, 1)
        hint = f"{key}.fn={near[0]}" if near else f"{key}.fn=package.module:function for your own"
        known = ", ".join([*RULES, "classifier"])
        raise ValueError(f"{key}.fn={rule.fn} is not a rule (there are: {known}): try {hint}")
    if not callable(function):
        raise ValueError(f"{key}.fn={rule.fn} is a {type(function).__name__}, not a function: name a function of one sample")
    _check_args(key, rule, function)
    if hasattr(function, "prepare"):
        function.prepare(**rule.args)
    return LoadedRule(function, rule)


def _imported(key: str, fn: str) -> Any:
    module_name, _, attribute = fn.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        name = module_name.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise ValueError(f"{key}.fn={fn} names a file, and a module is named as in an import: try {key}.fn={name}:{attribute}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, so that a folder of the user's never hides an installed package
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # anything may happen while a user's module runs, sys.exit too
        absent = isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}.")
        raise ValueError(
            f"{key}.fn={fn}: there is no module {error.name} here or among the installed packages; run from the folder that holds it"
            if absent
            else f"{key}.fn={fn}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        near = difflib.get_close_matches(attribute, names, 3) or names[:5]
        raise ValueError(
            f"{key}.fn={fn}: {module.__file__} has no {attribute!r}" + (f"; did you mean {' or '.join(near)}?" if near else " and is empty")
        )
    return getattr(module, attribute)


def _check_args(key: str, rule: Rule, function: Callable) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not say what they take
        return
    try:
        signature.bind(None, **rule.args)
    except TypeError as error:
        raise ValueError(
            f"{key}: {rule.fn}{signature} cannot be called with one sample and {key}.args={rule.args}: {error}; "
            "a rule is a function of one sample, its further parameters come from args"
        ) from error
    if function is overlong:
        check_overlong(key, rule.args)
    for name, value in rule.args.items():
        hint = signature.parameters[name].annotation if name in signature.parameters else None
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else [value]
        if value not in choices:
            raise ValueError(f"{key}.args.{name}={value} is none of {', '.join(map(str, choices))}: try {key}.args.{name}={choices[0]}")


def judge(rules: dict[str, LoadedRule], sample: Sample, known: dict[str, Verdict]) -> Iterator[tuple[str, Verdict]]:
    """The verdicts that are not known yet, in the order of the rules, in which a gate comes before what it guards."""
    verdicts = dict(known)
    for name, loaded in rules.items():
        if name not in verdicts:
            gate = loaded.rule.gate
            closed = gate is not None and not passes(verdicts[gate])
            verdicts[name] = [(END, 0.0)] if closed else _call(loaded, sample)
            yield name, verdicts[name]


def passes(verdict: Verdict) -> bool:
    return not isinstance(verdict, Failed) and bool(verdict) and mean(verdict) >= 1


def mean(steps: list[tuple[int, float]]) -> float:
    """The score of a completion: that of an outcome, or the mean over the steps of a process."""
    return sum(score for _, score in steps) / len(steps)


def _call(loaded: LoadedRule, sample: Sample) -> Verdict:
    rule = loaded.rule
    if rule.split is None:
        return _verdict(loaded, sample, rule.kind)
    verdict = []
    for start, end in split_steps(sample.text, rule.split):
        step = _verdict(loaded, replace(sample, text=sample.text[start:end]), RuleKind.outcome)
        if isinstance(step, Failed):
            return step
        verdict += [(end, score) for _, score in step]
    return verdict


def split_steps(text: str, pattern: str) -> list[tuple[int, int]]:
    """(start, end) of the parts between the matches, blank ones left out."""
    cuts = [(0, 0), *(match.span() for match in re.finditer(pattern, text)), (len(text), len(text))]
    parts = [(before[1], after[0]) for before, after in pairwise(cuts)]
    return [(start, end) for start, end in parts if text[start:end].strip()]


def _verdict(loaded: LoadedRule, sample: Sample, kind: RuleKind) -> Verdict:
    try:
        value = loaded.function(sample, **loaded.rule.args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's rule may raise anything, SystemExit too
        return Failed(f"raised {type(error).__name__}: {_text(error, str)}")
    if value is NOT_APPLICABLE:
        return []
    if kind is RuleKind.outcome and is_score(value):
        return [(END, float(value))]
    if kind is RuleKind.process and isinstance(value, list) and value and all(_is_step(step, len(sample.text)) for step in value):
        return [(end, float(reward)) for end, reward in value]
    steps = "a list of (end, number) pairs, end being a position in the text, since its kind is process"
    return Failed(
        f"returned {_text(value, repr)} ({type(value).__name__}); a rule returns "
        f"{'one finite number' if kind is RuleKind.outcome else steps}, or grpo_cli.rewards.NOT_APPLICABLE"
    )


def is_score(value: Any) -> bool:
    # `abs(value) < max` is false for NaN and infinity, and exact for integers beyond float
    return isinstance(value, Real) and abs(value) < FLOAT32_MAX


def _is_step(step: Any, length: int) -> bool:
    return isinstance(step, tuple) and len(step) == 2 and isinstance(step[0], int) and 0 < step[0] <= length and is_score(step[1])


def _text(value: Any, how: Callable[[Any], str]) -> str:
    """What str or repr says of a user's object, which may raise."""
    try:
        return cut(how(value))
    except Exception as error:
        return f"<{how.__name__} raised {type(error).__name__}>"


def cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}"


def shown(sample: Sample) -> str:
    return f"problem {sample.problem.id}, completion {cut(repr(sample.text))}"
