"""The examples are what they say: ready for the SDK, repeatable, and valid requests."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import rlmesh

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent
REQUESTS = sorted(EXAMPLES.glob("*.json"))
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/policies.py"))


def load(folder: str, module: str) -> types.ModuleType:
    """Imports one example's module; the examples share the names `envs` and `policies`."""
    name = f"example_{folder}_{module}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / folder / f"{module}.py")
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded
        spec.loader.exec_module(loaded)
    return sys.modules[name]


def servable(folder: pathlib.Path) -> list[tuple[str, str]]:
    """(folder, entrypoint) of every factory and model that an example defines."""
    found = []
    for module in ("envs", "policies"):
        if not (folder / f"{module}.py").exists():
            continue
        loaded = load(folder.name, module)
        for name, value in vars(loaded).items():
            if not isinstance(value, type) or value.__module__ != loaded.__name__:
                continue
            if issubclass(value, rlmesh.EnvFactory) or hasattr(value, "predict_batch"):
                found.append((folder.name, f"{module}:{name}"))
    return found


CLASSES = [entry for folder in FOLDERS for entry in servable(folder)]


def python(folder: str, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RLMESH_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES / folder,
        env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=timeout,
    )


def hangs(folder: str, code: str) -> bool:
    """Whether the code announces that it hangs, and then is still there."""
    process = subprocess.Popen([sys.executable, "-B", "-c", code], cwd=EXAMPLES / folder, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        announced = any(b"hanging, as ordered" in line for line in process.stderr)
        try:
            process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return announced
        return False
    finally:
        process.kill()
        process.communicate()


def episodes(model: Any, env: Any, seeds: list[int], **options: Any) -> dict[int, tuple[Any, ...]]:
    result = model.run(env, seeds=seeds, **options)
    return {episode.seed: (episode.reward, episode.steps, episode.success) for episode in result.episodes}


def test_every_example_has_classes_to_check() -> None:
    assert {folder for folder, _ in CLASSES} == {path.name for path in FOLDERS}
    assert len(CLASSES) >= 18


@pytest.fixture(scope="session")
def checks() -> dict[tuple[str, str], subprocess.CompletedProcess[bytes]]:
    """The SDK's check of every class, several at a time: each starts an interpreter."""
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(lambda entry: python(entry[0], "-m", "rlmesh", "check", "--json", entry[1]), CLASSES)
        return dict(zip(CLASSES, done, strict=True))


@pytest.mark.parametrize("entry", CLASSES, ids="/".join)
def test_class_passes_the_sdk_check(
    entry: tuple[str, str], checks: dict[tuple[str, str], subprocess.CompletedProcess[bytes]]
) -> None:
    report = json.loads(checks[entry].stdout)
    assert (checks[entry].returncode, report["failed"], report["warnings"]) == (0, [], []), report


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_request_names_what_exists(path: pathlib.Path) -> None:
    request = json.loads(path.read_text(encoding="utf-8"))
    for definition in request["models"] + request["environments"]:
        folder = path.parent / definition["pythonPath"]
        assert (folder.name, definition["entrypoint"]) in CLASSES
        for checkpoint in definition.get("checkpoints", []):
            content = (path.parent / checkpoint["uri"].removeprefix("file:")).read_bytes()
            assert hashlib.sha256(content).hexdigest() == checkpoint["sha256"]
    models = {model["id"] for model in request["models"]}
    environments = {env["id"] for env in request["environments"]}
    assert {task["env"] for task in request["tasks"]} <= environments
    for pair in request.get("pairs", []):
        assert pair["model"] in models and pair["env"] in environments


# (folder, environment, its parameters, model, its parameters, options of the run)
CELLS = [
    ("quickstart", "CartPole", {}, "Balancer", {}, {"max_episode_steps": 200}),
    ("quickstart", "CartPole", {}, "Distracted", {}, {"max_episode_steps": 200}),
    ("quickstart", "FrozenLake", {}, "CarefulWalker", {}, {"max_episode_steps": 100}),
    ("quickstart", "FrozenLake", {}, "HastyWalker", {}, {"max_episode_steps": 100}),
    ("catalogue", "Walks", {"layout": "maze"}, "Straight", {}, {"max_episode_steps": 60}),
    ("catalogue", "Walks", {"layout": "maze"}, "Explorer", {}, {"max_episode_steps": 60}),
    ("chunks", "Rail", {"wind": 1.5}, "Planner", {}, {"execution_horizon": 8}),
    ("batched", "Stick", {}, "Heavy", {"forward_ms": 0.0, "gain": 0.3}, {}),
    ("pixels", "Catch", {}, "Chaser", {}, {}),
    ("pixels", "Catch", {}, "Nearsighted", {}, {}),
    ("misbehaving", "Counter", {}, "Follower", {}, {}),
    ("misbehaving", "Counter", {}, "Doubter", {}, {}),
]


@pytest.mark.parametrize(("folder", "env", "kwargs", "model", "config", "options"), CELLS)
def test_an_episode_depends_on_its_seed_alone(
    folder: str, env: str, kwargs: dict[str, Any], model: str, config: dict[str, Any], options: dict[str, Any]
) -> None:
    make = getattr(load(folder, "envs"), env)().make
    build = getattr(load(folder, "policies"), model).from_config
    # The trial index goes by an episode's place in the run: without it, order must not matter.
    factory = getattr(load(folder, "envs"), env)
    seeds = [11, 3, 7, 4_000_000_000, 5]
    first = episodes(build(**config), make(**kwargs), seeds, **options)
    assert list(first) == seeds
    if not factory.reset_options:
        shuffled = random.Random(0).sample(seeds, len(seeds))
        assert episodes(build(**config), make(**kwargs), shuffled, **options) == first
    else:
        assert episodes(build(**config), make(**kwargs), seeds, **options) == first


def test_the_quickstart_shows_a_clear_difference() -> None:
    envs, policies = load("quickstart", "envs"), load("quickstart", "policies")
    seeds = list(range(20))
    upright = {
        name: [
            reward >= 195
            for reward, _, _ in episodes(
                getattr(policies, name)(), envs.CartPole().make(), seeds, max_episode_steps=200
            ).values()
        ]
        for name in ("Balancer", "Distracted")
    }
    assert sum(upright["Balancer"]) == 20
    assert sum(upright["Distracted"]) <= 10
    crossed = {
        name: [
            success
            for _, _, success in episodes(
                getattr(policies, name)(), envs.FrozenLake().make(), seeds, max_episode_steps=100
            ).values()
        ]
        for name in ("CarefulWalker", "HastyWalker")
    }
    assert None not in crossed["CarefulWalker"] + crossed["HastyWalker"]
    assert sum(crossed["CarefulWalker"]) >= 10
    assert sum(crossed["HastyWalker"]) <= 5


def test_cartpole_leaves_success_open() -> None:
    envs, policies = load("quickstart", "envs"), load("quickstart", "policies")
    done = episodes(policies.Balancer(), envs.CartPole().make(), [0], max_episode_steps=10)
    assert done == {0: (10.0, 10, None)}


def test_catalogue_entries_construct_different_environments() -> None:
    envs = load("catalogue", "envs")
    described = envs.Walks.describe()["variants"]["catalog"]
    assert [entry["id"] for entry in described] == ["walk/field", "walk/wall", "walk/maze"]
    # A straight walk to the right meets a wall after another number of steps in each.
    right = np.array([0, 0, 1, 0], dtype=np.float32)
    reached = []
    for entry in described:
        env = envs.Walks().make(**entry["params"], gusts=0.0)
        env.reset(seed=0)
        for _ in range(10):
            observation, *_ = env.step(right)
        reached.append(float(observation[1]))
    assert reached == [5.0, 2.0, 0.0]


def test_a_longer_horizon_asks_the_model_less_often() -> None:
    envs, policies = load("chunks", "envs"), load("chunks", "policies")
    calls = {1: 0, 8: 0}
    for horizon in calls:

        class Counted(policies.Planner):  # type: ignore[name-defined, misc]
            def predict_chunk_batch(self, observations: np.ndarray) -> np.ndarray:
                calls[horizon] += 1  # noqa: B023
                return super().predict_chunk_batch(observations)

        episodes(Counted(), envs.Rail().make(wind=5.0), [1], execution_horizon=horizon)
    assert calls[1] >= 4 * calls[8] > 0


def test_checkpoints_are_what_their_script_writes() -> None:
    script = load("checkpoint", "make_checkpoints")
    assert set(script.CHECKPOINTS) == {path.stem for path in (EXAMPLES / "checkpoint").glob("*.npz")}
    for name, weights in script.CHECKPOINTS.items():
        with np.load(EXAMPLES / "checkpoint" / f"{name}.npz", allow_pickle=False) as stored:
            assert stored["weights"].tolist() == list(weights)


def test_a_model_without_its_checkpoint_says_so() -> None:
    with pytest.raises(ValueError, match="weights"):
        load("checkpoint", "policies").Linear.from_config()


def play(env: Any, seed: int, trial: int | None = None) -> tuple[float, int, bool]:
    """An episode of the counting environment in which every hint is believed."""
    observation, _ = env.reset(seed=seed, options=None if trial is None else {"trial_index": trial})
    score, steps = 0.0, 0
    while True:
        action = np.array([1.0 if observation[2] > 0 else -1.0], dtype=np.float32)
        observation, reward, terminated, _, info = env.step(action)
        score, steps = score + reward, steps + 1
        if terminated:
            return score, steps, info["is_success"]


def test_counter_is_a_function_of_seed_trial_and_actions() -> None:
    make = load("misbehaving", "envs").Counter().make
    rows = [play(make(), seed) for seed in range(300)]
    again = make()
    assert [play(again, seed) for seed in reversed(range(300))] == rows[::-1]
    assert {steps for _, steps, _ in rows} == {3, 4, 5, 6, 7}
    assert {success for _, _, success in rows} == {True, False}
    assert len({score for score, _, _ in rows}) > 20
    assert play(again, 1, trial=0) == play(again, 1)
    assert len({play(again, 1, trial=trial) for trial in range(50)}) > 10


def test_counter_gets_its_trial_index_from_the_sdk() -> None:
    envs, policies = load("misbehaving", "envs"), load("misbehaving", "policies")
    served = policies.Follower().run(envs.Counter().make(), seeds=[1, 1, 1, 1], trial_index_base=10)
    direct = envs.Counter().make()
    assert [(e.reward, e.steps, e.success) for e in served.episodes] == [
        play(direct, 1, trial=10 + index) for index in range(4)
    ]


STEP = "import envs; e = envs.Misbehaving().make({}); e.reset(seed={}); [e.step([1.0]) for _ in range(3)]; print('done')"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("'none'", 0),
        ("'exit'", 3),
        ("'kill'", -signal.SIGKILL),
        ("'raise'", 1),
        ("'exit_zero'", 0),
        ("'exit_make'", 0),
        ("'raise_make'", 1),
        ("'garbage'", 0),
        ("'slow_make', seconds=0.01", 0),
        ("'slow_step', seconds=0.01", 0),
        ("'exit', seed=5", 3),
        ("'exit', seed=6", 0),
        ("'exit', at=9", 0),
    ],
)
def test_environment_misbehaves_as_ordered(arguments: str, status: int) -> None:
    done = python("misbehaving", "-c", STEP.format(arguments, 5))
    assert done.returncode == status, done.stderr
    finished = done.stdout.endswith(b"done\n")
    assert finished == (status == 0 and "exit_" not in arguments)
    if arguments == "'garbage'":
        with pytest.raises(UnicodeDecodeError):
            done.stdout.decode()


@pytest.mark.parametrize("mode", ["hang", "hang_make", "hang_reset"])
def test_environment_hangs_as_ordered(mode: str) -> None:
    assert hangs("misbehaving", STEP.format(f"'{mode}'", 5))
    assert not hangs("misbehaving", STEP.format("'none'", 5))


def test_environment_raises_in_reset_as_ordered() -> None:
    assert b"raised in reset" in python("misbehaving", "-c", STEP.format("'raise_reset'", 5)).stderr


def test_environment_returns_wrong_values_as_ordered() -> None:
    make = load("misbehaving", "envs").Misbehaving().make

    def second_step(mode: str) -> tuple[Any, ...]:
        env = make(mode=mode)
        env.reset(seed=0)
        env.step([1.0])
        return env.step([1.0])

    assert second_step("wrong_shape")[0].shape == (7,)
    assert np.isnan(second_step("nan_observation")[0]).all()
    assert np.isnan(second_step("nan_reward")[1])
    endless = make(mode="never_ends")
    endless.reset(seed=0)
    assert not any(endless.step([1.0])[2] for _ in range(50))
    silent = make(mode="no_success")
    silent.reset(seed=0)
    for _ in range(7):
        _, _, terminated, _, info = silent.step([1.0])
        if terminated:
            break
    assert terminated and "is_success" not in info


def test_once_means_once(tmp_path: pathlib.Path) -> None:
    marker = str(tmp_path / "done")
    assert python("misbehaving", "-c", STEP.format(f"'exit', once={marker!r}", 5)).returncode == 3
    assert python("misbehaving", "-c", STEP.format(f"'exit', once={marker!r}", 5)).returncode == 0


def test_modes_are_checked_before_anything_is_constructed() -> None:
    for folder, target in (("misbehaving", "envs:Misbehaving"), ("misbehaving", "policies:Misbehaving")):
        kind = ["--env"] if target.startswith("envs") else []
        done = python(folder, "-m", "rlmesh.serve", *kind, target, "--kwargs-json", '{"mode": "nonsense"}')
        assert done.returncode == 1
        assert b"ParamError" in done.stderr and b"nonsense" in done.stderr


PREDICT = """
import numpy as np, policies
model = policies.Misbehaving.from_config({})
row = lambda index, seed: dict(episode_id=str(seed), episode_seed=seed, predict_index=index, predict_seed=1, state=dict())
observations = np.ones((3, 4), dtype=np.float32)
for index in range(3):
    print(model.predict_batch(observations, [row(index, 1), row(index, 2), row(index, 3)]).tolist())
"""


@pytest.mark.parametrize(
    ("arguments", "status", "rows"),
    [
        ("mode='none'", 0, 3),
        ("mode='exit'", 3, 1),
        ("mode='exit_zero'", 0, 1),
        ("mode='kill'", -signal.SIGKILL, None),
        ("mode='raise'", 1, 1),
        ("mode='raise', seed=9", 0, 3),
        ("mode='exit_load'", 0, 0),
        ("mode='raise_load'", 1, 0),
        ("mode='slow_load', seconds=0.01", 0, 3),
        ("mode='slow_predict', seconds=0.01", 0, 3),
    ],
)
def test_model_misbehaves_as_ordered(arguments: str, status: int, rows: int | None) -> None:
    done = python("misbehaving", "-c", PREDICT.format(arguments))
    assert done.returncode == status, done.stderr
    if rows is not None:
        assert done.stdout.count(b"\n") == rows


def test_model_returns_wrong_values_as_ordered() -> None:
    build = load("misbehaving", "policies").Misbehaving.from_config
    observations = np.ones((2, 4), dtype=np.float32)
    context = [
        {"episode_id": str(seed), "episode_seed": seed, "predict_index": 1, "predict_seed": 1, "state": {}}
        for seed in (1, 2)
    ]
    assert build(mode="wrong_shape").predict_batch(observations, context).shape == (2, 5)
    assert build(mode="short_batch").predict_batch(observations, context).shape == (1, 1)
    poisoned = build(mode="nan_action", seed=2).predict_batch(observations, context)
    assert np.isnan(poisoned).tolist() == [[False], [True]]


@pytest.mark.parametrize("arguments", ["mode='hang'", "mode='hang_load'"])
def test_model_hangs_as_ordered(arguments: str) -> None:
    assert hangs("misbehaving", PREDICT.format(arguments))
