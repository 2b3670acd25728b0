"""Countdown: an arithmetic expression that uses each given number once and equals the target. Nothing is ever evaluated as Python."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from grpo_cli.records import Sample
from grpo_cli.rewards.rules import NOT_APPLICABLE, NotApplicable, parse_number

_CHARACTERS = re.compile(r"[0-9+*/() -]{1,200}")
_SIGNS = str.maketrans({"\u00d7": "*", "÷": "/", "\u2212": "-"})
_OPERATORS: dict[type, Callable] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def countdown(sample: Sample, operators: str = "+-*/") -> float | NotApplicable:
    """1.0 when the one answer tag holds an expression of exactly the row's `nums` that equals the gold, else 0.0.

    With nums [6, 4, 3] and gold 18, "<answer>(6 / 4 * 3) * 4</answer>" gives 0.0 (4 twice), "<answer>6 * (4 - 3) + 12</answer>" too, and
    "<answer>(4 * 3) + 6</answer>" 1.0. Allowed are the operators (also × ÷ −), parentheses and at most 200 characters; the value is
    exact. Not applicable to a row without nums or whose gold is no number.
    """
    numbers, target = sample.problem.fields.get("nums"), parse_number(sample.problem.answer)
    if not numbers or target is None:
        return NOT_APPLICABLE
    tail = sample.text.rsplit("</think>", 1)[-1]
    once = tail.count("<answer>") == tail.count("</answer>") == len(sample.answers) == 1
    text = " ".join(sample.answers[0].translate(_SIGNS).split()) if once else ""
    if not _CHARACTERS.fullmatch(text) or set(text) & set("+-*/") - set(operators):
        return 0.0
    try:
        used: list[int] = []
        value = _value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == target and Counter(used) == Counter(map(int, numbers)))


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The exact value of an expression; the numbers in it are added to `used`. SyntaxError for any other Python."""
    match node:
        case ast.Constant(value=int() as number):
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, used)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, used), _value(right, used))
    raise SyntaxError(f"{type(node).__name__} is no arithmetic")
