"""A policy whose forward takes the same time for one observation as for sixteen."""

from __future__ import annotations

import time

import numpy as np
import rlmesh
from rlmesh.adapters import Action, Actuator, ModelSpec, State
from rlmesh.numpy import Model


class Heavy(Model):
    """Stands for a network on a GPU: `forward_ms` per call, whatever the batch."""

    spec = ModelSpec(
        input=State("x/stick"),
        output=Action(Actuator("x/stick_push", 3)),
    )
    workflow_edition = "2026.06"
    params = rlmesh.ParamSpec(
        rlmesh.Param("forward_ms", float, description="how long one forward takes"),
        rlmesh.Param("gain", float, description="how firmly it pushes back"),
    )

    def load(self, forward_ms: float = 5.0, gain: float = 2.0) -> None:
        self._seconds = forward_ms / 1000.0
        self._weights = -gain * np.eye(3, dtype=np.float32)

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        time.sleep(self._seconds)
        return np.clip(observations @ self._weights, -1.0, 1.0)
