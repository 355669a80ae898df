"""Env steps per second of the SDK's own `rlmesh.run`: sdk_run.py MODEL_ADDRESS ENV_ADDRESS EPISODES MAX_STEPS."""

from __future__ import annotations

import sys
import time

import rlmesh

model_address, env_address, episodes, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = rlmesh.RemoteModel(model_address)
# What is timed is the loop: connecting and the first episode are not.
rlmesh.run(model, env_address, seeds=[0], max_episode_steps=steps)
started = time.monotonic()
result = rlmesh.run(model, env_address, seeds=list(range(episodes)), max_episode_steps=steps)
took = time.monotonic() - started
print(sum(episode.steps for episode in result.episodes) / took)
