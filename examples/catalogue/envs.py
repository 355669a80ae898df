"""One environment with several tasks, listed in its catalogue.

A task is an entry of `enumerate_variants`: an id and the parameters that the
environment is constructed with. An evaluation names the id (`tasks[].taskId`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import rlmesh
from gymnasium import spaces
from rlmesh.adapters import Action, Actuator, EnvTags, StateTag

# Free cells are dots; S is where the walk starts, G where it should end.
MAPS = {
    "field": ("S.....", "......", "......", "......", ".....G"),
    "wall": ("S..#..", "...#..", "...#..", "...#..", ".....G"),
    "maze": ("S#...#", ".#.#..", ".#.##.", "...#..", ".#...G"),
}
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


class Walk(gymnasium.Env):
    """Walk to the goal on a grid of walls; with `gusts`, some moves go astray.

    The observation is the position, the goal and whether each of the four neighbours
    (left, below, right, above) is free; the action is a score for each of the four.
    """

    def __init__(self, layout: str, gusts: float) -> None:
        self._rows = MAPS[layout]
        self._gusts = gusts
        self._goal = self._find("G")
        self._start = self._find("S")
        self._at = self._start
        self.observation_space = spaces.Box(0.0, 10.0, shape=(8,), dtype=np.float32)
        self.action_space = spaces.Box(-np.inf, np.inf, shape=(4,), dtype=np.float32)

    def _find(self, mark: str) -> tuple[int, int]:
        return next((y, row.index(mark)) for y, row in enumerate(self._rows) if mark in row)

    def _free(self, y: int, x: int) -> bool:
        return 0 <= y < len(self._rows) and 0 <= x < len(self._rows[0]) and self._rows[y][x] != "#"

    def _observe(self) -> np.ndarray:
        y, x = self._at
        neighbours = [float(self._free(y + dy, x + dx)) for dy, dx in MOVES]
        return np.array([*self._at, *self._goal, *neighbours], dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._at = self._start
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        move = int(np.argmax(action))
        if self.np_random.random() < self._gusts:
            move = int(self.np_random.integers(4))
        target = (self._at[0] + MOVES[move][0], self._at[1] + MOVES[move][1])
        if self._free(*target):
            self._at = target
        arrived = self._at == self._goal
        return self._observe(), 1.0 if arrived else -0.01, arrived, False, {"is_success": arrived}


class Walks(rlmesh.EnvFactory):
    """Three walks. `gusts` is a free dial: every task can be run with another value of it."""

    tags = EnvTags(
        observation=StateTag("x/walk"),
        action=Action(Actuator("x/move_scores", 4)),
    )
    workflow_edition = "2026.06"
    params = rlmesh.ParamSpec(
        rlmesh.Param("layout", "enum", choices=tuple(MAPS), description="which map"),
        rlmesh.Param("gusts", float, description="share of the moves that go astray"),
    )

    @classmethod
    def enumerate_variants(cls) -> Iterator[rlmesh.Variant]:
        yield rlmesh.Variant("walk/field", {"layout": "field"}, name="Across the open field")
        yield rlmesh.Variant("walk/wall", {"layout": "wall"}, name="Around a wall")
        yield rlmesh.Variant("walk/maze", {"layout": "maze"}, name="Through the maze")

    def make(self, layout: str = "field", gusts: float = 0.2) -> gymnasium.Env:
        print(f"walk: constructed layout={layout} gusts={gusts}", file=sys.stderr, flush=True)
        return Walk(layout, gusts)
