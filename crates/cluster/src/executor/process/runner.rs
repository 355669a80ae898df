//! The runner process of a run: started with a token of its own on standard input, and its end reported.

use std::collections::BTreeMap;

use super::Context;
use super::child::Start;
use super::launch::Launch;
use super::logs::{self, LogSink};
use crate::executor::run::RunnerExit;
use crate::executor::run::components::Stop;
use crate::runners::RunnerToken;
use crate::spool::RunKey;

pub async fn run(context: &Context, key: RunKey, token: &RunnerToken, stop: &Stop) -> RunnerExit {
    let folder = context.log_folder(key.run_id);
    let number = logs::attempts(&folder).get("runner").copied().unwrap_or(0) + 1;
    logs::forget_old_attempt(&folder, "runner", number);
    let log = LogSink::create(logs::path(&folder, "runner", number));
    let mut env = BTreeMap::new();
    if let Ok(filter) = std::env::var("RLMESH_LOG") {
        env.insert("RLMESH_LOG".to_owned(), filter);
    }
    let launch = Launch {
        program: context.runner.clone(),
        args: vec!["--agent".to_owned(), format!("unix://{}", context.runner_socket.display()), "--run".to_owned(), key.run_id.to_string()],
        env,
        folder: None,
    };
    let stdin = Some(format!("{}\n", token.expose()).into_bytes());
    let start = Start { launch: &launch, folder: &context.state, log, stdin };
    let mut child = match context.launcher.start(start).await {
        Ok(child) => child,
        Err(error) => return RunnerExit::new(format!("could not be started ({error})")),
    };
    let ended = tokio::select! {
        ended = child.ended() => ended,
        () = stop.stop.cancelled() => child.stop(&stop.hurry).await,
    };
    child.finish().await;
    RunnerExit { log_lines: child.last_lines(), ..RunnerExit::new(ended.sentence()) }
}
