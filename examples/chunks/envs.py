"""A cart on a rail that has to be brought to rest at a mark, with shoves from the wind."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import rlmesh
from gymnasium import spaces
from rlmesh.adapters import Action, Actuator, EnvTags, StateTag

DT = 0.1


class RailEnv(gymnasium.Env):
    def __init__(self, wind: float) -> None:
        self._wind = wind
        self._position = self._velocity = 0.0
        self._steps = self._held = 0
        self.observation_space = spaces.Box(-np.inf, np.inf, shape=(2,), dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, shape=(1,), dtype=np.float32)

    def _observe(self) -> np.ndarray:
        return np.array([self._position, self._velocity], dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._position = float(self.np_random.uniform(-2.0, 2.0))
        self._velocity = 0.0
        self._steps = self._held = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        shove = self._wind * float(self.np_random.normal())
        self._velocity += DT * (float(np.clip(action[0], -1.0, 1.0)) + shove)
        self._position += DT * self._velocity
        self._steps += 1
        self._held = self._held + 1 if abs(self._position) < 0.1 else 0
        resting = self._held >= 10
        truncated = self._steps >= 80
        return self._observe(), -abs(self._position), resting, truncated, {"is_success": resting}


class Rail(rlmesh.EnvFactory):
    """`wind` is how strong the shoves are."""

    tags = EnvTags(
        observation=StateTag("x/rail"),
        action=Action(Actuator("x/push", 1)),
    )
    workflow_edition = "2026.06"
    params = rlmesh.ParamSpec(rlmesh.Param("wind", float, description="how strong the shoves are"))

    def make(self, wind: float = 0.6) -> gymnasium.Env:
        return RailEnv(wind)
