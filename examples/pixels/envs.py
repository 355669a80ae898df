"""Catch the falling ball: an environment that is seen through a camera only."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import rlmesh
from gymnasium import spaces
from rlmesh.adapters import Action, Actuator, EnvTags, ImageTag
from rlmesh.adapters.constants import IMAGE_PRIMARY

SIZE = 64
BALL = 6
PADDLE = 12
FALL = 4
SPEED = 4
FLOOR = SIZE - 4


class CatchEnv(gymnasium.Env):
    """A red ball falls, drifting sideways and off the walls; a green paddle has to be below it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self) -> None:
        self.render_mode = "rgb_array"
        self.observation_space = spaces.Box(0, 255, shape=(SIZE, SIZE, 3), dtype=np.uint8)
        self.action_space = spaces.Box(-1.0, 1.0, shape=(1,), dtype=np.float32)
        self._x = self._y = self._drift = self._paddle = 0

    def render(self) -> np.ndarray:
        frame = np.full((SIZE, SIZE, 3), 24, dtype=np.uint8)
        frame[self._y : self._y + BALL, self._x : self._x + BALL] = (230, 60, 40)
        frame[FLOOR:, self._paddle : self._paddle + PADDLE] = (40, 200, 90)
        return frame

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._x = int(self.np_random.integers(0, SIZE - BALL))
        self._y = 0
        self._drift = int(self.np_random.integers(-3, 4))
        self._paddle = int(self.np_random.integers(0, SIZE - PADDLE))
        return self.render(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        move = round(float(np.clip(action[0], -1.0, 1.0)) * SPEED)
        self._paddle = int(np.clip(self._paddle + move, 0, SIZE - PADDLE))
        self._x += self._drift
        if not 0 <= self._x <= SIZE - BALL:
            self._drift = -self._drift
            self._x = int(np.clip(self._x, 0, SIZE - BALL))
        self._y += FALL
        done = self._y + BALL > FLOOR
        caught = done and self._x + BALL > self._paddle and self._x < self._paddle + PADDLE
        return self.render(), float(caught), done, False, {"is_success": bool(caught)} if done else {}


class Catch(rlmesh.EnvFactory):
    tags = EnvTags(
        observation=ImageTag(IMAGE_PRIMARY, layout="hwc"),
        action=Action(Actuator("x/paddle", 1)),
    )
    workflow_edition = "2026.06"

    def make(self) -> gymnasium.Env:
        return CatchEnv()
