"""Which problems a run trains on: every one once per epoch, or those of a band of difficulty.

The pass rates that a run measures are kept per problem and can be handed to a later run. Knows nothing of models or rewards.
"""

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_cli.randomness import generator, permutation

MEMORY = 0.5
"""Weight of the newest group in a problem's pass rate: the policy moves, so old groups fade."""

LOOKS_PER_PROMPT = 256
"""Problems looked at for one that lies in the band; then the one nearest to it is taken."""


def load_pass_rates(path: str) -> dict[str, dict]:
    """The map in an earlier run's difficulty.json. ValueError says what is wrong with the file."""
    try:
        file = Path(path).expanduser()
        file = file / "difficulty.json" if file.is_dir() else file
        rates = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home folder, or JSON nested too deep
        raise _no_map(path, str(error)) from error
    if not isinstance(rates, dict):
        raise _no_map(path, "it holds no mapping of problem ids")
    for problem_id, entry in rates.items():
        if not _is_entry(entry):
            raise _no_map(path, f"problem {problem_id} has no rate in [0, 1] with whole numbers tried and step")
    if not rates:
        raise _no_map(path, "it holds no problem")
    return rates


def _no_map(path: str, why: str) -> ValueError:
    return ValueError(
        f"data.difficulty_map={path}: not the difficulty.json of a run that has taken a step ({why}): try data.difficulty_map=RUN_FOLDER"
    )


def _is_entry(entry: Any) -> bool:
    """{"rate": 0.25, "tried": 8, "step": 3}"""
    if not isinstance(entry, dict) or any(type(entry.get(key)) is not int for key in ("tried", "step")):
        return False
    return type(entry.get("rate")) in (int, float) and 0 <= entry["rate"] <= 1 and entry["tried"] >= 0


class Curriculum:
    """Draws problems and remembers how often each was solved. Its state is (cursor, pass rates)."""

    def __init__(self, ids: list[str], seed: int, band: list[float] | None, revisit: float, pass_rates: dict[str, dict]):
        """ValueError when `pass_rates` are given and not one of them is of these problems."""
        if pass_rates and not any(problem_id in pass_rates for problem_id in ids):
            raise ValueError(
                f"data.difficulty_map: none of its {len(pass_rates)} problems is among this run's {len(ids)} training problems, "
                "so it is of other data: try the map of a run on the same data, or data.difficulty_map=null"
            )
        self._ids, self._seed, self._band, self._revisit = ids, seed, band, revisit
        self.cursor = 0
        """Problems looked at so far; the order is a function of (seed, cursor)."""
        self.pass_rates = dict(pass_rates)
        self.passed_over = 0
        """Problems that the last draw left out."""

    def draw(self, count: int) -> list[int]:
        """Numbers of the next problems."""
        drawn, start = [], self.cursor
        while len(drawn) < count:
            drawn.append(self._next(drawn))
        self.passed_over = self.cursor - start - count
        return drawn

    def _next(self, taken: list[int]) -> int:
        """The next problem of the band that is not taken; with chance `revisit` the next one from outside."""
        if self._band is None:
            return self._look()
        outside = generator(self._seed, "revisit", self.cursor).random() < self._revisit
        best, least = None, math.inf
        for _ in range(LOOKS_PER_PROMPT):
            number = self._look()
            if number in taken:
                continue
            distance = self._distance(number)
            if (distance > 0) == outside:
                return number
            if distance < least:
                best, least = number, distance
        return number if best is None else best

    def _look(self) -> int:
        place, self.cursor = self.cursor, self.cursor + 1
        return _epoch(self._seed, place // len(self._ids), len(self._ids))[place % len(self._ids)]

    def _distance(self, number: int) -> float:
        """How far the pass rate lies outside the band; a problem not tried yet lies inside."""
        known = self.pass_rates.get(self._ids[number])
        return 0.0 if known is None else max(self._band[0] - known["rate"], known["rate"] - self._band[1], 0.0)

    def note(self, problem_id: str, right: int, tried: int, step: int) -> None:
        """Remember a group: `right` of `tried` completions solved the problem."""
        rate = right / tried
        known = self.pass_rates.get(problem_id)
        if known is not None:
            rate = MEMORY * rate + (1 - MEMORY) * known["rate"]
        tried += known["tried"] if known else 0
        self.pass_rates[problem_id] = {"rate": rate, "tried": tried, "step": step}


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, n: int) -> list[int]:
    return permutation(seed, "order", epoch, n).tolist()
