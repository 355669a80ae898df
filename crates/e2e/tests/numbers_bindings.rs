//! A catalogue environment with three entries is constructed three ways, once each per worker, while the model loads once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rlm_e2e::{Options, Stack, tools};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn each_entry_is_constructed_once_per_worker_and_the_model_loads_once() -> anyhow::Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let stack = Stack::start(&tools, Options::default()).await?;
    for (workers, lanes_per_pod) in [(1_usize, None), (4, Some(2)), (4, Some(1))] {
        let notes = stack.folder().join(format!("notes-{workers}-{lanes_per_pod:?}"));
        let tasks: Vec<Value> = ["room/small", "room/large", "room/huge"]
            .iter()
            .map(|task| json!({"env": "rooms", "taskId": task, "episodes": 12, "seed": 5, "workers": workers}))
            .collect();
        let folder = tools.test_python();
        let request = json!({
            "name": format!("rooms {workers} {lanes_per_pod:?}"),
            "models": [{"id": "walker", "entrypoint": "counted:Walker", "pythonPath": folder, "env": {"NOTES": notes}}],
            "environments": [{"id": "rooms", "entrypoint": "counted:Rooms", "pythonPath": folder,
                "env": {"NOTES": notes, "TOGETHER": workers.to_string()}, "params": {"paint": "blue"}, "lanesPerPod": lanes_per_pod}],
            "tasks": tasks,
        });
        let id = stack.submit(&request).await?;
        assert_eq!(stack.wait(&id, Duration::from_secs(60)).await?["status"], "completed");

        let text = std::fs::read_to_string(&notes)?;
        let mut made: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for line in text.lines() {
            let (what, pid) = line.rsplit_once(' ').unwrap_or((line, ""));
            made.entry(what).or_default().push(pid);
        }
        let names: Vec<&str> = made.keys().copied().collect();
        assert_eq!(names, ["env huge blue", "env large blue", "env small blue", "model"], "{workers} workers:\n{text}");
        assert_eq!(made["model"].len(), 1, "{workers} workers:\n{text}");
        for room in &names[..3] {
            assert_eq!(made[room].len(), workers, "{room} with {workers} workers:\n{text}");
            if let Some(lanes) = lanes_per_pod {
                assert_eq!(made[room].iter().collect::<BTreeSet<_>>().len(), workers / lanes, "processes of {room}:\n{text}");
            }
        }
        // It was not only called with other arguments: the rows are those of three different rooms.
        let rows = stack.rows(&id).await?;
        assert_eq!(rows.len(), 36);
        for row in &rows {
            let size = match row["taskId"].as_str() {
                Some("room/small") => 2,
                Some("room/large") => 3,
                Some("room/huge") => 5,
                _ => 0,
            };
            assert_eq!((row["steps"].as_u64(), row["reward"].as_f64()), (Some(size), Some((size * size) as f64)), "{row}");
        }
    }
    stack.end().await
}
