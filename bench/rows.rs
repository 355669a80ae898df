//! An evaluation of 1,000,000 rows: submitted, played by an agent that answers at once over the real protocol, paged, scored
//! and exported; times as a client of REST sees them, and the server's peak memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use reqwest::Method;
use rlm_api::cluster::v1::agent_message::Message as FromAgent;
use rlm_api::cluster::v1::cluster_service_client::ClusterServiceClient;
use rlm_api::cluster::v1::record::Payload;
use rlm_api::cluster::v1::server_message::Message as ToAgent;
use rlm_api::cluster::v1::{self, AgentMessage};
use rlm_bench::{Goal, figure, memory_mib, note, quantile};
use rlm_core::evaluation::RunSpec;
use rlm_e2e::processes::Component;
use rlm_e2e::stack::{Options, Stack};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Streaming};

const EPISODES: u64 = 250_000;
const ROWS: u64 = 4 * EPISODES;
/// Records of one message, and messages that may be unanswered, as the agent has them.
const BATCH: usize = 500;
const UNANSWERED: u64 = 8;
const ROUNDS: u64 = 60;

fn main() -> anyhow::Result<()> {
    if rlm_bench::only_tested() {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(measure())
}

async fn measure() -> anyhow::Result<()> {
    let tools = rlm_e2e::tools::tools().context("the programs are not built")?;
    let stack = Stack::start(&tools, Options { agent: false, ..Options::default() }).await?;
    let mut agent = Agent::join(&stack).await?;
    let request = json!({
        "name": "million",
        "models": [{"id": "a", "address": "tcp://127.0.0.1:1"}, {"id": "b", "address": "tcp://127.0.0.1:2"}],
        "environments": [{"id": "walk", "address": "tcp://127.0.0.1:3"}, {"id": "run", "address": "tcp://127.0.0.1:4"}],
        "tasks": [
            {"env": "walk", "taskId": "walk/0", "episodes": EPISODES, "seed": 100},
            {"env": "run", "taskId": "run/0", "episodes": EPISODES, "seed": 200},
        ],
    });
    let started = Instant::now();
    let id = stack.submit(&request).await?;
    figure("rows_million_submit_ms", ms(started), Goal::AtMost(300.0));
    let started = Instant::now();
    agent.play(ROWS).await?;
    note("rows_million_ingested_per_second", ROWS as f64 / started.elapsed().as_secs_f64());
    let evaluation = stack.wait(&id, Duration::from_secs(60)).await?;
    ensure!(evaluation["progress"]["completedEpisodes"] == ROWS, "rows are missing: {evaluation}");

    let path = format!("/v1/evaluations/{id}");
    let started = Instant::now();
    stack.ok(Method::GET, &format!("{path}/scores"), None).await?;
    figure("rows_million_scores_first_ms", ms(started), Goal::AtMost(300.0));
    for (name, page) in [
        ("list", "/v1/evaluations".to_owned()),
        ("evaluation", path.clone()),
        ("scores", format!("{path}/scores")),
        ("rows", format!("{path}/rows?limit=200&cursor=CURSOR")),
        ("rows_of_one_cell", format!("{path}/rows?model=b&task=run/0&limit=200&cursor=CURSOR")),
        ("rows_errored", format!("{path}/rows?outcome=errored&limit=200&cursor=CURSOR")),
    ] {
        let mut times = Vec::new();
        for round in 0..ROUNDS {
            let started = Instant::now();
            stack.ok(Method::GET, &page.replace("CURSOR", &spread(round).to_string()), None).await?;
            times.push(ms(started));
        }
        figure(&format!("rows_million_page_{name}_p95_ms"), quantile(times, 0.95), Goal::AtMost(300.0));
    }
    for format in ["jsonl", "csv"] {
        export(&stack, &path, format).await?;
    }
    let pid = stack.process_id(Component::Server).context("the server does not run")?;
    note("rows_million_server_peak_mib", memory_mib(pid, "VmHWM").context("no memory figure")?);
    stack.end().await
}

/// Positions all over the evaluation, each one once.
fn spread(round: u64) -> u64 {
    round * 7_919_993 % ROWS
}

fn ms(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}

async fn export(stack: &Stack, path: &str, format: &str) -> anyhow::Result<()> {
    let started = Instant::now();
    let client = reqwest::Client::builder().timeout(Duration::from_secs(600)).build()?;
    let url = format!("{}{path}/export?format={format}", stack.url());
    let mut answer = client.get(url).bearer_auth(stack.key()).send().await?.error_for_status()?;
    let mut bytes = 0;
    while let Some(chunk) = answer.chunk().await? {
        bytes += chunk.len();
    }
    ensure!(bytes > 1 << 20, "the export in {format} has {bytes} bytes only");
    note(&format!("rows_million_export_{format}_s"), started.elapsed().as_secs_f64());
    Ok(())
}

/// The agent's side of one session; every row is scored at once.
struct Agent {
    out: mpsc::Sender<AgentMessage>,
    inbound: Streaming<v1::ServerMessage>,
    assigned: VecDeque<v1::Assign>,
    sequence: u64,
    durable: u64,
}

impl Agent {
    async fn join(stack: &Stack) -> anyhow::Result<Self> {
        let cluster = stack.ok(Method::POST, "/v1/clusters", Some(&json!({"name": "cell"}))).await?;
        let tokens = format!("/v1/clusters/{}/join-tokens", cluster["id"].as_str().context("the cluster has no id")?);
        let token = stack.ok(Method::POST, &tokens, Some(&json!({}))).await?;
        let mut client = ClusterServiceClient::connect(stack.url()).await?;
        let join = v1::JoinRequest {
            nonce: uuid::Uuid::new_v4().to_string(),
            kube_system_uid: String::new(),
            versions: Some(v1::Versions::default()),
            purposes: vec!["control".to_owned()],
        };
        let joined = client.join(authorized(join, token["token"].as_str().context("no join token")?)?).await?.into_inner();
        let control = joined.credentials.first().context("no credential")?;
        let (out, queue) = mpsc::channel(16);
        let hello = v1::Hello {
            instance_id: uuid::Uuid::new_v4().to_string(),
            executor: "process".to_owned(),
            versions: Some(v1::Versions::default()),
            ..v1::Hello::default()
        };
        out.send(AgentMessage { message: Some(FromAgent::Hello(hello)) }).await?;
        let mut inbound = client.session(authorized(ReceiverStream::new(queue), &control.secret)?).await?.into_inner();
        match inbound.message().await?.and_then(|message| message.message) {
            Some(ToAgent::Welcome(_)) => Ok(Self { out, inbound, assigned: VecDeque::new(), sequence: 0, durable: 0 }),
            other => bail!("instead of a welcome: {other:?}"),
        }
    }

    /// Plays runs until `rows` rows are durable at the server.
    async fn play(&mut self, rows: u64) -> anyhow::Result<()> {
        let mut played = 0;
        while played < rows {
            let Some(assign) = self.assigned.pop_front() else {
                self.listen().await?;
                continue;
            };
            let run: RunSpec = serde_json::from_str(&assign.run_json)?;
            let status = |phase: v1::run_status::Phase| {
                Payload::RunStatus(v1::RunStatus { phase: phase.into(), at_unix_ms: 1, ..v1::RunStatus::default() })
            };
            self.send(&run, vec![status(v1::run_status::Phase::Running)]).await?;
            for block in &assign.rows {
                let segment = block.to_segment(0);
                for first in (0..segment.count).step_by(BATCH) {
                    let some = first..(first + BATCH as u64).min(segment.count);
                    let episodes = some.filter_map(|offset| segment.row(offset)).map(|row| {
                        let scored = v1::Scored {
                            reward: (row.seed % 200) as f64,
                            steps: 200,
                            truncated: true,
                            success: Some(row.seed % 3 == 0),
                            first_observation_sha256: vec![7; 32].into(),
                            ..v1::Scored::default()
                        };
                        Payload::Episode(v1::Episode {
                            row: row.row,
                            attempt: 0,
                            seed: row.seed,
                            outcome: Some(v1::episode::Outcome::Scored(scored)),
                            started_unix_ms: 1_700_000_000_000,
                            ended_unix_ms: 1_700_000_001_000,
                        })
                    });
                    self.send(&run, episodes.collect()).await?;
                }
                played += segment.count;
            }
            self.send(&run, vec![status(v1::run_status::Phase::Finished)]).await?;
        }
        while self.durable < self.sequence {
            self.listen().await?;
        }
        Ok(())
    }

    async fn send(&mut self, run: &RunSpec, payloads: Vec<Payload>) -> anyhow::Result<()> {
        while self.sequence - self.durable > UNANSWERED * BATCH as u64 {
            self.listen().await?;
        }
        let records = payloads.into_iter().map(|payload| {
            self.sequence += 1;
            v1::Record { sequence: self.sequence, run_id: run.run_id.to_string(), generation: run.generation, payload: Some(payload) }
        });
        let records = v1::Records { records: records.collect() };
        self.out.send(AgentMessage { message: Some(FromAgent::Records(records)) }).await?;
        Ok(())
    }

    /// Takes the next message: acknowledgements are noted, runs wait for their turn.
    async fn listen(&mut self) -> anyhow::Result<()> {
        let message = tokio::time::timeout(Duration::from_secs(60), self.inbound.message()).await.context("the server is silent")??;
        match message.context("the session ended")?.message {
            Some(ToAgent::Ack(ack)) => self.durable = self.durable.max(ack.durable),
            Some(ToAgent::Assign(assign)) => self.assigned.push_back(assign),
            _ => {}
        }
        Ok(())
    }
}

fn authorized<T>(message: T, secret: &str) -> anyhow::Result<Request<T>> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {secret}").parse()?);
    Ok(request)
}
