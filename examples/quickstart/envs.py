"""Two Gymnasium environments, made ready to be evaluated.

RLMesh matches a model to an environment by the *roles* of what each reads and
writes, so an environment says what its observation and its action mean (`tags`).
Roles that start with `x/` are our own. An adapted action is a vector of numbers;
the wrappers below turn that vector into the choice that Gymnasium's environment
expects.
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import rlmesh
from gymnasium import spaces
from rlmesh.adapters import Action, Actuator, EnvTags, StateTag


class PushByForce(gymnasium.ActionWrapper):
    """One number as action: above zero pushes right, otherwise left."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_space = spaces.Box(-1.0, 1.0, shape=(1,), dtype=np.float32)

    def action(self, action: Any) -> int:
        return int(action[0] > 0.0)


class CartPole(rlmesh.EnvFactory):
    """CartPole-v1: a point for each step that the pole stays up.

    Gymnasium says nothing about success here, so the evaluation brings its own
    rule (`tasks[].success` in quickstart.json).
    """

    tags = EnvTags(
        observation=StateTag("x/cartpole"),
        action=Action(Actuator("x/push", 1)),
    )
    workflow_edition = "2026.06"

    def make(self) -> gymnasium.Env:
        return PushByForce(gymnasium.make("CartPole-v1", disable_env_checker=True))


class LakeByScores(gymnasium.Wrapper):
    """FrozenLake with numbers: the position as one-hot, the move as four scores.

    Says `is_success` in the info: true on the step that reaches the goal.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._cells = int(env.observation_space.n)
        moves = int(env.action_space.n)
        self.observation_space = spaces.Box(0.0, 1.0, shape=(self._cells,), dtype=np.float32)
        self.action_space = spaces.Box(-np.inf, np.inf, shape=(moves,), dtype=np.float32)

    def _one_hot(self, cell: int) -> np.ndarray:
        position = np.zeros(self._cells, dtype=np.float32)
        position[cell] = 1.0
        return position

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        cell, _ = self.env.reset(seed=seed, options=options)
        return self._one_hot(cell), {}

    def step(self, action: Any) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        cell, reward, terminated, truncated, _ = self.env.step(int(np.argmax(action)))
        info = {"is_success": bool(terminated and reward > 0.0)}
        return self._one_hot(cell), reward, terminated, truncated, info


class FrozenLake(rlmesh.EnvFactory):
    """FrozenLake-v1 on slippery ice: reach the goal without falling into a hole."""

    tags = EnvTags(
        observation=StateTag("x/cell"),
        action=Action(Actuator("x/move_scores", 4)),
    )
    workflow_edition = "2026.06"

    def make(self) -> gymnasium.Env:
        return LakeByScores(gymnasium.make("FrozenLake-v1", map_name="4x4", is_slippery=True, disable_env_checker=True))
