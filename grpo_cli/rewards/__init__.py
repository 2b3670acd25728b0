"""The reward pipeline: loads the rules that a config names and weighs their scores. Knows nothing of models or advantages."""

import difflib
import importlib
import inspect
import math
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from grpo_cli.config import Reward, Rule
from grpo_cli.records import Group, Sample, Scores
from grpo_cli.rewards.rules import NOT_APPLICABLE, RULES, NotApplicable

__all__ = ["NOT_APPLICABLE", "LoadedRule", "NotApplicable", "load_rules", "score"]

_FLOAT32_MAX = 3.4e38


@dataclass(frozen=True)
class LoadedRule:
    function: Callable[..., float | NotApplicable]
    weight: float
    args: dict[str, Any]


def load_rules(section: Reward) -> dict[str, LoadedRule]:
    """Find the function of every rule and check that it takes the arguments it will get."""
    return {name: _load(f"reward.rules.{name}", rule) for name, rule in section.rules.items()}


def _load(key: str, rule: Rule) -> LoadedRule:
    function = _imported(key, rule.fn) if ":" in rule.fn else RULES.get(rule.fn)
    if function is None:
        near = difflib.get_close_matches(rule.fn, RULES, 1)
        hint = f"{key}.fn={near[0]}" if near else f"{key}.fn=package.module:function for your own"
        raise ValueError(f"{key}.fn={rule.fn} is not a rule (there are: {', '.join(RULES)}): try {hint}")
    if not callable(function):
        raise ValueError(f"{key}.fn={rule.fn} is a {type(function).__name__}, not a function: name a function of one sample")
    _check_args(key, rule, function)
    return LoadedRule(function, rule.weight, rule.args)


def _imported(key: str, fn: str) -> Any:
    module_name, _, attribute = fn.partition(":")
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
    for name, value in rule.args.items():
        hint = signature.parameters[name].annotation if name in signature.parameters else None
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else [value]
        if value not in choices:
            raise ValueError(f"{key}.args.{name}={value} is none of {', '.join(map(str, choices))}: try {key}.args.{name}={choices[0]}")


def score(rules: dict[str, LoadedRule], groups: list[Group], accuracy: str) -> Scores:
    """Judge every completion by every rule; the total is the weighted sum over the rules that apply, 0 where none does."""
    import torch

    raw = {name: [] for name in rules}
    totals, not_applicable = [], dict.fromkeys(rules, 0)
    for group in groups:
        for values in raw.values():
            values.append([])
        totals.append([])
        for completion in group.completions:
            sample = Sample(group.encoded.problem, group.encoded.prompt_text, completion.text, len(completion.token_ids), completion.ended)
            total = 0.0
            for name, rule in rules.items():
                value = _call(name, rule, sample)
                raw[name][-1].append(math.nan if value is None else value)
                if value is None:
                    not_applicable[name] += 1
                else:
                    total += rule.weight * value
            if not abs(total) < _FLOAT32_MAX:
                raise ValueError(f"the weighted rewards add up to {total}, too large a number; {_shown(sample)}: lower the weights")
            totals[-1].append(total)
    rule_PG = {name: torch.tensor(values, dtype=torch.float32) for name, values in raw.items()}
    return Scores(rule_PG, torch.tensor(totals, dtype=torch.float32), rule_PG[accuracy] >= 1, not_applicable)


def _call(name: str, rule: LoadedRule, sample: Sample) -> float | None:
    """The rule's score, None when it does not apply."""
    try:
        value = rule.function(sample, **rule.args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's rule may raise anything, SystemExit too; a swallowed error would read as a score
        raise ValueError(f"reward rule {name!r} raised {type(error).__name__}: {error}; {_shown(sample)}") from error
    if value is NOT_APPLICABLE:
        return None
    # `abs(value) < max` is false for NaN and infinity, and exact for integers beyond float
    if not isinstance(value, Real) or not abs(value) < _FLOAT32_MAX:
        raise ValueError(
            f"reward rule {name!r} returned {_cut(repr(value))} ({type(value).__name__}); a rule returns one finite number, or "
            f"grpo_cli.rewards.NOT_APPLICABLE; {_shown(sample)}"
        )
    return float(value)


def _shown(sample: Sample) -> str:
    return f"problem {sample.problem.id}, completion {_cut(repr(sample.text))}"


def _cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}"
