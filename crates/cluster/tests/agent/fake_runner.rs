//! A runner that does what the run's model params say, without any model: started by the agent through this test binary.

use std::collections::HashMap;
use std::io::{BufRead as _, Write as _};
use std::time::Duration;

use rlm_api::cluster::v1;
use rlm_api::cluster::v1::agent_command::Command;
use rlm_api::cluster::v1::component::Phase;
use rlm_api::cluster::v1::runner_message::Message;
use rlm_api::cluster::v1::runner_service_client::RunnerServiceClient;
use rlm_core::evaluation::RunSpec;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

fn params(spec: &RunSpec, name: &str) -> Option<u64> {
    spec.model.params.get(name).and_then(Value::as_u64)
}

fn note(text: &str) {
    let mut err = std::io::stderr().lock();
    writeln!(err, "{text}").unwrap();
}

#[test]
#[ignore = "started by the agent under test"]
fn fake_runner() {
    let args: Vec<String> = std::env::var("FAKE_RUNNER_ARGS").unwrap().split_whitespace().map(str::to_owned).collect();
    let (agent, run) = (args[1].clone(), args[3].clone());
    let mut token = String::new();
    std::io::stdin().lock().read_line(&mut token).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(carry_out(agent, run, token.trim().to_owned()));
}

struct Line {
    outgoing: mpsc::Sender<v1::RunnerMessage>,
    incoming: tonic::Streaming<v1::AgentCommand>,
    components: HashMap<String, v1::Component>,
    acknowledged: u64,
}

impl Line {
    async fn send(&self, message: Message) {
        self.outgoing.send(v1::RunnerMessage { message: Some(message) }).await.unwrap();
    }

    async fn next(&mut self) -> bool {
        let Ok(Some(v1::AgentCommand { command: Some(command) })) = self.incoming.message().await else { return false };
        match command {
            Command::Component(component) => {
                note(&format!("component {} {} {:?}", component.name, component.attempt, component.phase()));
                self.components.insert(component.name.clone(), component);
            }
            Command::Ack(ack) => self.acknowledged = ack.sequence,
            Command::Cancel(_) => std::process::exit(0),
            Command::Plan(_) => {}
        }
        true
    }

    async fn ready(&mut self, name: &str, attempt: u32) -> Result<v1::Component, v1::Failure> {
        loop {
            if let Some(component) = self.components.get(name).filter(|component| component.attempt >= attempt) {
                match component.phase() {
                    Phase::Ready => return Ok(component.clone()),
                    Phase::Failed => return Err(component.failure.clone().unwrap()),
                    _ => {}
                }
            }
            assert!(self.next().await, "the agent closed the stream");
        }
    }
}

async fn carry_out(agent: String, run: String, token: String) {
    let channel = Endpoint::from_shared(agent).unwrap().connect().await.unwrap();
    let (outgoing, stream) = mpsc::channel(16);
    let attach = Message::Attach(v1::Attach { run_id: run, token });
    outgoing.send(v1::RunnerMessage { message: Some(attach) }).await.unwrap();
    let mut incoming = RunnerServiceClient::new(channel).attach(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let Some(v1::AgentCommand { command: Some(Command::Plan(plan)) }) = incoming.message().await.unwrap() else { panic!("no plan") };
    let spec: RunSpec = serde_json::from_str(&plan.run_json).unwrap();
    let mut line = Line { outgoing, incoming, components: HashMap::new(), acknowledged: 0 };
    line.send(Message::Acquire(v1::AcquireBinding { binding: 0, pods: 1, lanes_per_pod: 2 })).await;
    for name in ["model-0", "env-0-0"] {
        if let Err(failure) = line.ready(name, 0).await {
            note(&format!("given up: {failure:?}"));
            line.send(Message::Done(v1::Done { sequence: 1, failure: Some(failure) })).await;
            while line.acknowledged < 1 && line.next().await {}
            return;
        }
    }
    if params(&spec, "await_model_failure").is_some() {
        while line.components["model-0"].phase() != Phase::Failed {
            assert!(line.next().await, "the agent closed the stream");
        }
        let failure = line.components["model-0"].failure.clone();
        line.send(Message::Done(v1::Done { sequence: 1, failure })).await;
        while line.acknowledged < 1 && line.next().await {}
        return;
    }
    if let Some(attempt) = params(&spec, "restart_env_attempt")
        && line.components["env-0-0"].attempt == attempt as u32
    {
        line.send(Message::Restart(v1::RestartComponent {
            component: "env-0-0".to_owned(),
            attempt: attempt as u32,
            reason: "hung".to_owned(),
        }))
        .await;
        let replaced = line.ready("env-0-0", attempt as u32 + 1).await.unwrap();
        note(&format!("replaced by {}", replaced.attempt));
    }
    let pause = Duration::from_millis(params(&spec, "row_ms").unwrap_or(1));
    let provenance = rlm_core::evaluation::Provenance { model_sdk_version: Some("0.1.0".to_owned()), ..Default::default() };
    line.send(Message::Provenance(v1::ProvenanceReport { provenance_json: serde_json::to_string(&provenance).unwrap() })).await;
    let mut sequence = 0;
    for block in &plan.rows {
        for offset in 0..u64::from(block.count) {
            tokio::time::sleep(pause).await;
            let scored = v1::Scored { reward: (block.seed + offset) as f64, steps: 3, terminated: true, ..v1::Scored::default() };
            let episode = v1::Episode {
                row: block.first_row + offset,
                attempt: plan.attempt_base,
                seed: block.seed + offset,
                outcome: Some(v1::episode::Outcome::Scored(scored)),
                started_unix_ms: 1,
                ended_unix_ms: 2,
            };
            sequence += 1;
            line.send(Message::Episodes(v1::Episodes { sequence, episodes: vec![episode] })).await;
            // At most a few unacknowledged, as a real runner is bounded.
            while line.acknowledged + 16 < sequence {
                assert!(line.next().await, "the agent closed the stream");
            }
            if Some(sequence) == params(&spec, "runner_exit_at") && plan.attempt_base == 0 {
                std::process::exit(3);
            }
            if Some(sequence) == params(&spec, "await_env_attempt_at") && line.components["env-0-0"].attempt == 1 {
                line.ready("env-0-0", 2).await.unwrap();
            }
        }
    }
    sequence += 1;
    line.send(Message::Done(v1::Done { sequence, failure: None })).await;
    while line.acknowledged < sequence && line.next().await {}
    note("done");
}
