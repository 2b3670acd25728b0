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

from grpo_cli.config import Reward, Rule, RuleKind
from grpo_cli.records import END, Group, Sample, Scores
from grpo_cli.rewards.rules import NOT_APPLICABLE, RULES, NotApplicable, check_overlong, overlong

__all__ = ["NOT_APPLICABLE", "LoadedRule", "NotApplicable", "load_rules", "score"]

_FLOAT32_MAX = 3.4e38


@dataclass(frozen=True)
class LoadedRule:
    function: Callable[..., Any]
    weight: float
    args: dict[str, Any]
    kind: RuleKind


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
    return LoadedRule(function, rule.weight, rule.args, rule.kind)


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


def score(rules: dict[str, LoadedRule], groups: list[Group], accuracy: str) -> Scores:
    """Judge every completion by every rule; the total is the weighted sum over the rules that apply, 0 where none does.

    A process rule counts in the total by the mean of its steps.
    """
    import torch

    raw: dict[str, list[float]] = {name: [] for name in rules}
    totals, steps_B, not_applicable = [], [], dict.fromkeys(rules, 0)
    for group in groups:
        for completion in group.completions:
            sample = Sample(group.encoded.problem, group.encoded.prompt_text, completion.text, len(completion.token_ids), completion.ended)
            outcome, process, steps, has_outcome = 0.0, 0.0, [], False
            for name, rule in rules.items():
                judged = _call(name, rule, sample)
                value = math.nan
                if not judged:
                    not_applicable[name] += 1
                else:
                    value = sum(reward for _, reward in judged) / len(judged)
                    if rule.kind is RuleKind.process:
                        process += rule.weight * value
                        steps += [(end, rule.weight * reward) for end, reward in judged if rule.weight != 0]
                    else:
                        outcome, has_outcome = outcome + rule.weight * value, has_outcome or rule.weight != 0
                raw[name].append(value)
            if not abs(outcome + process) < _FLOAT32_MAX:
                raise ValueError(
                    f"the weighted rewards add up to {outcome + process}, too large a number; {_shown(sample)}: lower the weights"
                )
            totals.append(outcome + process)
            steps_B.append([*sorted(steps), *([(END, outcome)] if has_outcome else [])])
    shape = (len(groups), -1)
    rule_PG = {name: torch.tensor(values).view(shape) for name, values in raw.items()}
    return Scores(rule_PG, torch.tensor(totals).view(shape), rule_PG[accuracy] >= 1, steps_B, not_applicable)


def _call(name: str, rule: LoadedRule, sample: Sample) -> list[tuple[int, float]]:
    """The rule's verdicts as (end in the text, score): one for an outcome, one per step of a process, none when it does not apply."""
    try:
        value = rule.function(sample, **rule.args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's rule may raise anything, SystemExit too; a swallowed error would read as a score
        raise ValueError(f"reward rule {name!r} raised {type(error).__name__}: {error}; {_shown(sample)}") from error
    if value is NOT_APPLICABLE:
        return []
    if rule.kind is RuleKind.outcome and _is_score(value):
        return [(END, float(value))]
    if rule.kind is RuleKind.process and isinstance(value, list) and all(_is_step(step, len(sample.text)) for step in value):
        return [(end, float(reward)) for end, reward in value]
    wanted = (
        "one finite number"
        if rule.kind is RuleKind.outcome
        else "a list of (end, number) pairs, end being a position in the text, and its kind is process"
    )
    raise ValueError(
        f"reward rule {name!r} returned {_cut(repr(value))} ({type(value).__name__}); a rule returns {wanted}, or "
        f"grpo_cli.rewards.NOT_APPLICABLE; {_shown(sample)}"
    )


def _is_score(value: Any) -> bool:
    # `abs(value) < max` is false for NaN and infinity, and exact for integers beyond float
    return isinstance(value, Real) and abs(value) < _FLOAT32_MAX


def _is_step(step: Any, length: int) -> bool:
    return isinstance(step, tuple) and len(step) == 2 and isinstance(step[0], int) and 0 < step[0] <= length and _is_score(step[1])


def _shown(sample: Sample) -> str:
    return f"problem {sample.problem.id}, completion {_cut(repr(sample.text))}"


def _cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}"
