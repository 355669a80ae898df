"""Two policies that look at the picture."""

from __future__ import annotations

import numpy as np
from rlmesh.adapters import Action, Actuator, Image, ModelSpec
from rlmesh.adapters.constants import IMAGE_PRIMARY
from rlmesh.numpy import Model

SPEC = ModelSpec(
    input=Image(IMAGE_PRIMARY, size=64, channels=3),
    output=Action(Actuator("x/paddle", 1)),
)


def centre(mask: np.ndarray, otherwise: np.ndarray | float) -> np.ndarray:
    """The mean column of each picture's marked pixels."""
    columns = np.arange(mask.shape[2])
    count = mask.sum(axis=(1, 2))
    total = (mask * columns).sum(axis=(1, 2))
    return np.where(count > 0, total / np.maximum(count, 1), otherwise)


class Chaser(Model):
    """Moves the green thing below the red one."""

    spec = SPEC
    workflow_edition = "2026.06"

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        red, green = observations[..., 0], observations[..., 1]
        paddle = centre(green > 128, 32.0)
        ball = centre(red > 128, paddle)
        return np.clip((ball - paddle) / 4.0, -1.0, 1.0).astype(np.float32)[:, None]


class Nearsighted(Model):
    """The same, but it sees nothing above the lower third of the picture."""

    spec = SPEC
    workflow_edition = "2026.06"

    def predict_batch(self, observations: np.ndarray) -> np.ndarray:
        red, green = observations[:, 43:, :, 0], observations[..., 1]
        paddle = centre(green > 128, 32.0)
        ball = centre(red > 128, paddle)
        return np.clip((ball - paddle) / 4.0, -1.0, 1.0).astype(np.float32)[:, None]
