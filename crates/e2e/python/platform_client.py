"""Drives the SDK's own `rlmesh.platform` client, unchanged, and prints what it saw as JSON.

    python platform_client.py <request file>

The address and the key come from RLMESH_PLATFORM_URL and RLMESH_API_KEY.
"""

from __future__ import annotations

import json
import sys

from rlmesh.platform import Client, PlatformError, scenario_tasks


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    request["tasks"] = scenario_tasks(
        "walks", "walk", task_ids=["walk/field", "walk/wall", "walk/maze"], episodes=6, seed=3, workers=2
    )
    client = Client()
    seen: dict[str, object] = {"url": client.url, "preview": client.preview(request)}
    created = [client.submit({**request, "name": f"sdk {number}"}) for number in range(3)]
    seen["created"] = created[0]
    seen["cancelled"] = client.cancel(created[2]["id"])
    ended = [client.wait(one["id"], poll_seconds=0.2, timeout=120, progress=False) for one in created]
    seen["ended"] = [one["status"] for one in ended]
    seen["evaluation"] = ended[0]
    seen["scores"] = {
        by: client.scores(created[0]["id"], group_by=by)
        for by in ("task", "scenario", "benchmark", "perturbation", "model")
    }
    seen["metrics"] = client.metrics(created[0]["id"])
    # One a page, so that the iterator has to follow the cursor.
    seen["listed"] = [one["id"] for one in client.evaluations(tags={"suite": "sdk"}, limit=1)]
    seen["by_status"] = [one["id"] for one in client.evaluations(status="completed", q="sdk 1")]
    errors = {}
    for name, call in {
        "unknown": lambda: client.evaluation("eval_00000000000000000000000000"),
        "invalid": lambda: client.submit({**request, "colour": 1}),
        "grouping": lambda: client.scores(created[0]["id"], group_by="colour"),
        "key": lambda: Client(url=client.url, token="rlm_key_wrong").evaluation(created[0]["id"]),
    }.items():
        try:
            call()
            errors[name] = None
        except PlatformError as error:
            errors[name] = [error.status, str(error)]
    seen["errors"] = errors
    print(json.dumps(seen))


main()
