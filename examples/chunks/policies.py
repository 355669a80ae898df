"""A policy that plans eight actions at a time."""

from __future__ import annotations

import numpy as np
from rlmesh.adapters import Action, Actuator, ModelSpec, State
from rlmesh.numpy import Model

DT = 0.1
CHUNK = 8


class Planner(Model):
    """Rolls its own model of the cart forward and answers with all the pushes of that plan.

    `native_chunk` says how long a plan is. How many of its actions are executed before
    the next plan is the evaluation's choice (`executionHorizon`): the longer, the fewer
    forwards, and the older the observation that an action rests on.
    """

    spec = ModelSpec(
        input=State("x/rail"),
        output=Action(Actuator("x/push", 1)),
    )
    workflow_edition = "2026.06"
    native_chunk = CHUNK

    def predict_chunk_batch(self, observations: np.ndarray) -> np.ndarray:
        position, velocity = observations[:, 0].copy(), observations[:, 1].copy()
        plan = np.empty((len(observations), CHUNK, 1), dtype=np.float32)
        for step in range(CHUNK):
            push = np.clip(-2.0 * position - 2.5 * velocity, -1.0, 1.0)
            plan[:, step, 0] = push
            velocity += DT * push
            position += DT * velocity
        return plan
