"""A stick to be held still: light enough for many copies in one process."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import rlmesh
from gymnasium import spaces
from rlmesh.adapters import Action, Actuator, EnvTags, StateTag


class StickEnv(gymnasium.Env):
    """Three angles that drift apart unless pushed back; one step is a few microseconds."""

    def __init__(self) -> None:
        self._angles = np.zeros(3)
        self._steps = 0
        self.observation_space = spaces.Box(-np.inf, np.inf, shape=(3,), dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, shape=(3,), dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._angles = self.np_random.uniform(-0.5, 0.5, size=3)
        self._steps = 0
        return self._angles.astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._angles = 1.1 * self._angles + 0.2 * np.clip(action, -1.0, 1.0)
        self._steps += 1
        fallen = bool(np.abs(self._angles).max() > 2.0)
        done = self._steps >= 40
        return self._angles.astype(np.float32), 1.0, fallen, done and not fallen, {"is_success": not fallen}


class Stick(rlmesh.EnvFactory):
    tags = EnvTags(
        observation=StateTag("x/stick"),
        action=Action(Actuator("x/stick_push", 3)),
    )
    workflow_edition = "2026.06"

    def make(self) -> gymnasium.Env:
        return StickEnv()
