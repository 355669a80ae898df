//! The runner process of a run: started with a token of its own on standard input, and its end reported.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Context;
use super::child::Start;
use super::component::Stop;
use super::launch::Launch;
use super::logs::{self, LogSink};
use crate::runners::{FromRunner, RunnerToken};
use crate::spool::RunKey;

/// A runner that has ended.
#[derive(Debug)]
pub struct RunnerExit {
    /// `exited with status 1`.
    pub how: String,
    pub log_lines: Vec<String>,
}

/// A running runner.
pub struct RunnerHandle {
    pub stop: Stop,
    ended: CancellationToken,
}

impl RunnerHandle {
    /// Starts a runner and lets it, and no earlier one, attach to the run.
    pub fn start(context: &Arc<Context>, key: RunKey, messages: &mpsc::Sender<FromRunner>, exits: mpsc::Sender<RunnerExit>) -> Self {
        let token = RunnerToken::generate();
        context.runners.register(key.run_id, &token, messages.clone());
        let handle = Self { stop: Stop::default(), ended: CancellationToken::new() };
        let (stop, ended, context) = (handle.stop.clone(), handle.ended.clone(), Arc::clone(context));
        context.tasks.clone().spawn(async move {
            let exit = run(&context, key, &token, &stop).await;
            ended.cancel();
            // The actor may have gone.
            let _ = exits.send(exit).await;
        });
        handle
    }

    /// Asks it to end. The tracker of the agent's tasks sees that it does.
    pub fn end(&self, hurry: bool) {
        if hurry {
            self.stop.hurry.cancel();
        }
        self.stop.stop.cancel();
    }

    /// Returns once it has ended.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }
}

async fn run(context: &Context, key: RunKey, token: &RunnerToken, stop: &Stop) -> RunnerExit {
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
        Err(error) => return RunnerExit { how: format!("could not be started ({error})"), log_lines: Vec::new() },
    };
    let ended = tokio::select! {
        ended = child.ended() => ended,
        () = stop.stop.cancelled() => child.stop(&stop.hurry).await,
    };
    child.finish().await;
    RunnerExit { how: ended.sentence(), log_lines: child.last_lines() }
}
