//! One agent's session, from its first message to its end. Records are stored in the order in which they come, and are
//! acknowledged only once durable; while they are being stored nothing more is read, so that a fast agent waits instead of
//! filling memory.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::DateTime;
use futures::{FutureExt as _, Stream, StreamExt as _};
use rlm_api::cluster::v1::{self, AgentMessage, Record, agent_message, server_message};
use rlm_core::error::{Code, Error};
use rlm_core::ids::{ClusterId, CredentialId, OrganizationId, RunId};
use tokio::sync::{mpsc, watch as watched};

use super::link::{self, Admission, Held, Last};
use super::requests::{Pending, Reply};
use super::{Ending, Live, Outbound};
use crate::app::clusters::credentials;
use crate::app::{ingest, scheduler};
use crate::config::millis;
use crate::state::AppState;
use crate::store::StoreError;
use crate::store::clusters::{Condition, Node, SessionStart, Versions};

/// How long the first message may take.
const HELLO: Duration = Duration::from_secs(10);
/// How long one message may wait for an agent that does not read.
const SEND: Duration = Duration::from_secs(30);
/// Most records stored in one transaction.
const BATCH: usize = 4096;

/// The agent that opened the stream, by its control credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    pub cluster: ClusterId,
    pub organization: OrganizationId,
    pub cluster_name: String,
    pub credential: CredentialId,
    /// End of the credential's overlap.
    pub retires_at: Option<i64>,
}

/// Serves a session until the agent or the control plane ends it. `inbound` fails with a text when the connection does.
pub async fn serve<S>(state: AppState, agent: Agent, mut inbound: S, out: mpsc::Sender<Outbound>)
where
    S: Stream<Item = Result<AgentMessage, String>> + Unpin + Send,
{
    let hello = match tokio::time::timeout(HELLO, inbound.next()).await {
        Ok(Some(Ok(AgentMessage { message: Some(agent_message::Message::Hello(hello)) }))) => hello,
        Ok(Some(Ok(_))) => return refuse(&out, Error::new(Code::BadRequest, "the first message of a session must be hello")).await,
        Ok(Some(Err(_)) | None) => return,
        Err(_) => {
            let message = format!("no hello came within {} s of opening the session", HELLO.as_secs());
            return refuse(&out, Error::new(Code::DeadlineExceeded, message)).await;
        }
    };
    let opened = match Session::open(&state, &agent, &hello, out.clone()).await {
        Ok(opened) => opened,
        Err(error) => {
            tracing::warn!(cluster = %agent.cluster, code = %error.code, "an agent's session was refused: {error}");
            return refuse(&out, error).await;
        }
    };
    drop(out);
    let mut session = opened;
    tracing::info!(
        cluster = %agent.cluster, name = agent.cluster_name, generation = session.live.session_generation, instance = session.instance_id,
        version = hello.versions.as_ref().map_or("", |versions| versions.agent.as_str()), "an agent connected"
    );
    state.cells.wake();
    let ended = session.run(&state, &mut inbound).await;
    state.cells.leave(&session.live);
    match ended {
        End::ByAgent(reason) => {
            tracing::info!(cluster = %agent.cluster, generation = session.live.session_generation, reason, "an agent's session ended")
        }
        End::ByUs(ending) => {
            tracing::info!(cluster = %agent.cluster, generation = session.live.session_generation, ?ending, "an agent's session was ended");
            let goodbye = server_message::Message::Goodbye(ending.goodbye());
            // It may be gone already.
            let _ = tokio::time::timeout(Duration::from_secs(1), session.live.out.send(goodbye.into())).await;
        }
    }
    if let Err(error) = session.note_seen(&state).await {
        tracing::error!(cluster = %agent.cluster, %error, "could not note when an agent was heard last");
    }
    state.cells.wake();
}

async fn refuse(out: &mpsc::Sender<Outbound>, error: Error) {
    // It may be gone already.
    let _ = tokio::time::timeout(SEND, out.send(Outbound::Refused(error))).await;
}

/// Why a session is over.
enum End {
    ByAgent(String),
    ByUs(Ending),
}

struct Session {
    live: Arc<Live>,
    organization: OrganizationId,
    instance_id: String,
    /// Records up to here were acknowledged once; above the durable position they come again, from before a restore.
    replayed_until: u64,
    /// Leases that the agent did not name, while what comes again may still tell of their end.
    unnamed: Vec<Held>,
    /// What was stored last, so that a heartbeat that says nothing new is not written.
    stored: Stored,
}

#[derive(Default)]
struct Stored {
    seen_at: i64,
    conditions: Option<Vec<Condition>>,
    nodes: Option<Vec<Node>>,
    unacknowledged: Option<u64>,
}

impl Session {
    /// Admits the agent and makes it the cluster's session.
    async fn open(state: &AppState, agent: &Agent, hello: &v1::Hello, out: mpsc::Sender<Outbound>) -> Result<Self, Error> {
        check(hello)?;
        let now_ms = state.clock.now_ms();
        let cells = &state.cells;
        let start = SessionStart {
            instance_id: hello.instance_id.clone(),
            executor: hello.executor.clone(),
            versions: versions(hello.versions.as_ref()),
            nodes: nodes(hello.inventory.as_ref()),
            now_ms,
        };
        let mut write = state.store.write().await?;
        let gone = || Error::new(Code::Unauthenticated, format!("cluster {} does not exist any more", agent.cluster));
        let row = write.lock_cluster(agent.cluster).await?.ok_or_else(gone)?;
        if row.archived_at.is_some() {
            return Err(credentials::archived(&row.name));
        }
        let last = Last {
            instance_id: row.instance_id.as_deref(),
            last_seen_at: row.last_seen_at.max(cells.last_seen(agent.cluster)),
            disconnected_at: row.disconnected_at,
        };
        let after = millis(state.config.timings.disconnected_after);
        let admission = link::admit(&row.name, &hello.instance_id, last, cells.listening_since(), now_ms, after)?;
        let session_generation = write.begin_session(agent.cluster, &start).await?;
        write.touch_credential(agent.credential, now_ms).await?;
        write.commit().await?;
        let live = Arc::new(Live {
            cluster: agent.cluster,
            session_generation,
            credential: agent.credential,
            out,
            ending: watched::channel(None).0,
            last_seen: AtomicI64::new(now_ms),
            credential_ends: AtomicI64::new(agent.retires_at.unwrap_or(i64::MAX)),
            pending: Pending::default(),
            cancels: Mutex::default(),
        });
        let mut session = Self {
            live,
            organization: agent.organization,
            instance_id: hello.instance_id.clone(),
            replayed_until: hello.acknowledged,
            unnamed: Vec::new(),
            stored: Stored { seen_at: now_ms, ..Stored::default() },
        };
        let welcome = session.prepare(state, hello, admission).await?;
        session.deliver(welcome).await.map_err(|()| Error::new(Code::Unavailable, "the agent does not read what is sent to it"))?;
        if !cells.enter(&session.live) {
            let why = if cells.is_closing() { Ending::Shutdown } else { Ending::Superseded };
            let goodbye = why.goodbye();
            cells.leave(&session.live);
            let _ = session.deliver(server_message::Message::Goodbye(goodbye)).await;
            return Err(Error::new(Code::Unavailable, "the session ended while it began; connect again"));
        }
        session.recheck(state).await;
        Ok(session)
    }

    /// Brings leases in line with the agent, and says what it has to know first.
    async fn prepare(&mut self, state: &AppState, hello: &v1::Hello, admission: Admission) -> Result<server_message::Message, Error> {
        let cluster = self.live.cluster;
        let durable = state.store.durable_position(cluster, &self.instance_id).await?;
        let replays = hello.acknowledged > durable;
        if replays {
            tracing::warn!(
                %cluster, durable, acknowledged = hello.acknowledged, epoch = hello.epoch,
                "records that were acknowledged once are not here (a restored database?); the agent is asked for them again"
            );
        }
        let held = held(hello);
        scheduler::leases::were_given_out(state, self.organization, &held).await?;
        for run in state.store.runs_of_cluster(cluster).await? {
            let known = held.contains(&(run.id, run.generation));
            match (admission, run.cancel_requested, known) {
                // The agent that held it is gone, and with it what it knew of the run.
                (Admission::Replaces, true, _) | (Admission::Welcome, true, false) => {
                    scheduler::leases::cancel(state, run.id, run.generation).await?;
                }
                // Records that come again may tell of the run's end.
                (Admission::Welcome, false, false) if replays => self.unnamed.push((run.id, run.generation)),
                // It never got the assignment, or knows of the end and this database does not.
                (Admission::Replaces, false, _) | (Admission::Welcome, false, false) => {
                    scheduler::leases::give_up(state, run.id, run.generation).await?;
                }
                (Admission::Welcome, _, true) => {}
            }
        }
        let row = state.store.cluster(cluster).await?;
        let runs = state.store.runs_of_cluster(cluster).await?;
        Ok(server_message::Message::Welcome(v1::Welcome {
            cluster_id: cluster.to_string(),
            epoch: state.epoch.to_string(),
            durable,
            session_generation: self.live.session_generation,
            draining: row.is_some_and(|row| row.draining),
            runs: runs.iter().map(|run| v1::RunRef { run_id: run.id.to_string(), generation: run.generation }).collect(),
        }))
    }

    /// An archive or a rotation that was stored while this session began has not seen it.
    async fn recheck(&self, state: &AppState) {
        match state.store.cluster_credentials(self.live.cluster).await {
            Ok(all) => match all.iter().find(|one| one.id == self.live.credential) {
                Some(one) if one.revoked_at.is_none() => {
                    self.live.credential_ends.fetch_min(one.retires_at.unwrap_or(i64::MAX), Ordering::Relaxed);
                }
                Some(_) | None => self.live.end(Ending::Archived),
            },
            Err(error) => {
                tracing::error!(cluster = %self.live.cluster, %error, "could not check a session's credential again");
                self.live.end(Ending::StoreFailed);
            }
        }
    }

    async fn deliver(&self, message: server_message::Message) -> Result<(), ()> {
        match tokio::time::timeout(SEND, self.live.out.send(message.into())).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(()),
        }
    }

    async fn run<S>(&mut self, state: &AppState, inbound: &mut S) -> End
    where
        S: Stream<Item = Result<AgentMessage, String>> + Unpin + Send,
    {
        let mut ending = self.live.ending.subscribe();
        if let Err(end) = self.catch_up(state).await {
            return end;
        }
        // Held over when a batch of records met another message.
        let mut next: Option<AgentMessage> = None;
        loop {
            let message = match next.take() {
                Some(message) => message,
                None => tokio::select! {
                    biased;
                    why = wait(&mut ending) => return End::ByUs(why),
                    message = inbound.next() => match message {
                        Some(Ok(message)) => message,
                        Some(Err(error)) => return End::ByAgent(error),
                        None => return End::ByAgent("the agent closed it".to_owned()),
                    },
                },
            };
            self.live.seen(state.clock.now_ms());
            let done = match message.message {
                Some(agent_message::Message::Records(records)) => {
                    let (batch, other) = gather(records.records, inbound);
                    next = other;
                    self.store_records(state, batch).await
                }
                Some(agent_message::Message::Heartbeat(heartbeat)) => self.heartbeat(state, heartbeat).await,
                Some(agent_message::Message::LogReply(reply)) => {
                    self.live.pending.answer(&reply.request_id.clone(), Reply::Logs(reply));
                    Ok(())
                }
                Some(agent_message::Message::DescribeReply(reply)) => {
                    self.live.pending.answer(&reply.request_id.clone(), Reply::Describe(reply));
                    Ok(())
                }
                Some(agent_message::Message::Hello(_)) => Err(End::ByAgent("it said hello twice".to_owned())),
                // A newer agent's.
                None => Ok(()),
            };
            if let Err(end) = done {
                return end;
            }
        }
    }

    /// What the agent may have missed: cancellations, new values of its credentials.
    async fn catch_up(&self, state: &AppState) -> Result<(), End> {
        let slow = || End::ByAgent("it does not read what is sent to it".to_owned());
        let runs = state.store.runs_of_cluster(self.live.cluster).await.map_err(|error| self.failed(&error))?;
        for run in runs.iter().filter(|run| run.cancel_requested) {
            state.cells.cancel(self.live.cluster, run.id, run.generation);
        }
        match credentials::replacements(state, self.live.cluster, self.live.credential).await {
            Ok(replacements) => {
                for credential in replacements {
                    let rotate = server_message::Message::Rotate(v1::Rotate { credential: Some(credential) });
                    self.deliver(rotate).await.map_err(|()| slow())?;
                }
                Ok(())
            }
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn failed(&self, error: &StoreError) -> End {
        tracing::error!(cluster = %self.live.cluster, %error, "an agent's session can't go on");
        End::ByUs(Ending::StoreFailed)
    }

    async fn store_records(&mut self, state: &AppState, records: Vec<Record>) -> Result<(), End> {
        if records.first().is_some_and(|first| first.sequence <= self.replayed_until) {
            let given: BTreeSet<Held> =
                records.iter().filter_map(|record| Some((record.run_id.parse::<RunId>().ok()?, record.generation))).collect();
            let given: Vec<Held> = given.into_iter().collect();
            scheduler::leases::were_given_out(state, self.organization, &given).await.map_err(|error| self.failed(&error))?;
        }
        let durable = ingest::records(state, &self.live.cluster, &self.instance_id, records).await.map_err(|error| self.failed(&error))?;
        self.live.seen(state.clock.now_ms());
        if durable >= self.replayed_until {
            for (run, generation) in std::mem::take(&mut self.unnamed) {
                scheduler::leases::give_up(state, run, generation).await.map_err(|error| self.failed(&error))?;
            }
        }
        self.deliver(server_message::Message::Ack(v1::Ack { durable }))
            .await
            .map_err(|()| End::ByAgent("it does not read acknowledgements".to_owned()))?;
        self.note_seen_sometimes(state).await
    }

    async fn heartbeat(&mut self, state: &AppState, heartbeat: v1::Heartbeat) -> Result<(), End> {
        let now_ms = self.live.last_seen();
        let since = |kind: &str, status: &str| {
            let known = self.stored.conditions.iter().flatten().find(|one| one.kind == kind && one.status == status);
            known.and_then(|one| one.since).or_else(|| DateTime::from_timestamp_millis(now_ms))
        };
        let conditions: Vec<Condition> = heartbeat
            .conditions
            .into_iter()
            .map(|one| Condition {
                since: since(&one.r#type, &one.status),
                kind: one.r#type,
                status: one.status,
                reason: one.reason,
                message: one.message,
            })
            .collect();
        let inventory = heartbeat.inventory.as_ref().map(|inventory| nodes(Some(inventory)));
        let unacknowledged = heartbeat.spool_unacknowledged_records;
        let news = self.stored.conditions.as_ref() != Some(&conditions)
            || (inventory.is_some() && self.stored.nodes != inventory)
            || self.stored.unacknowledged != Some(unacknowledged);
        if news {
            let written = async {
                let mut write = state.store.write().await?;
                let (cluster, generation) = (self.live.cluster, self.live.session_generation);
                write.note_heartbeat(cluster, generation, inventory.as_deref(), &conditions, unacknowledged).await?;
                write.note_seen(cluster, generation, now_ms).await?;
                write.commit().await
            };
            written.await.map_err(|error| self.failed(&error))?;
            self.stored = Stored {
                seen_at: now_ms,
                conditions: Some(conditions),
                nodes: inventory.or(self.stored.nodes.take()),
                unacknowledged: Some(unacknowledged),
            };
        }
        self.note_seen_sometimes(state).await
    }

    /// Not with each message: a write per heartbeat of every agent would be much for nothing.
    async fn note_seen_sometimes(&mut self, state: &AppState) -> Result<(), End> {
        let every = millis(state.config.timings.disconnected_after) / 4;
        if self.live.last_seen() - self.stored.seen_at < every {
            return Ok(());
        }
        self.note_seen(state).await.map_err(|error| self.failed(&error))
    }

    async fn note_seen(&mut self, state: &AppState) -> Result<(), StoreError> {
        let now_ms = self.live.last_seen();
        if now_ms <= self.stored.seen_at {
            return Ok(());
        }
        let mut write = state.store.write().await?;
        write.note_seen(self.live.cluster, self.live.session_generation, now_ms).await?;
        write.commit().await?;
        self.stored.seen_at = now_ms;
        Ok(())
    }
}

async fn wait(ending: &mut watched::Receiver<Option<Ending>>) -> Ending {
    let why = ending.wait_for(Option::is_some).await.map(|why| *why);
    match why {
        Ok(why) => why.unwrap_or(Ending::Superseded),
        // The sender lives in the session itself.
        Err(_) => std::future::pending().await,
    }
}

/// Takes the records that have arrived already, so that they are stored and acknowledged together; also the message of
/// another kind that ended them. A failed connection is met again by the next read.
fn gather<S>(mut records: Vec<Record>, inbound: &mut S) -> (Vec<Record>, Option<AgentMessage>)
where
    S: Stream<Item = Result<AgentMessage, String>> + Unpin + Send,
{
    while records.len() < BATCH {
        match inbound.next().now_or_never() {
            Some(Some(Ok(AgentMessage { message: Some(agent_message::Message::Records(more)) }))) => records.extend(more.records),
            Some(Some(Ok(other))) => return (records, Some(other)),
            Some(Some(Err(_)) | None) | None => break,
        }
    }
    (records, None)
}

fn check(hello: &v1::Hello) -> Result<(), Error> {
    let wrong = |message: String| Err(Error::new(Code::BadRequest, message));
    if hello.instance_id.is_empty() || hello.instance_id.len() > 100 {
        return wrong("hello: the instance id must have 1 to 100 characters".to_owned());
    }
    if !["process", "kubernetes"].contains(&hello.executor.as_str()) {
        let executor: String = hello.executor.chars().take(40).collect();
        return wrong(format!("hello: the executor is '{executor}'; this control plane knows process and kubernetes"));
    }
    Ok(())
}

fn held(hello: &v1::Hello) -> Vec<Held> {
    hello.runs.iter().filter_map(|run| Some((run.run_id.parse::<RunId>().ok()?, run.generation))).collect()
}

fn versions(versions: Option<&v1::Versions>) -> Versions {
    versions.map_or_else(Versions::default, |versions| Versions {
        agent: versions.agent.clone(),
        chart: versions.chart.clone(),
        kubernetes: versions.kubernetes.clone(),
    })
}

fn nodes(inventory: Option<&v1::Inventory>) -> Vec<Node> {
    inventory.map_or_else(Vec::new, |inventory| {
        inventory
            .nodes
            .iter()
            .map(|node| Node {
                name: node.name.clone(),
                arch: node.arch.clone(),
                cpu_millis: node.cpu_millis,
                memory_bytes: node.memory_bytes,
                gpu_vendor: node.gpu_vendor.clone(),
                gpu_product: node.gpu_product.clone(),
                gpu_count: node.gpu_count,
                gpu_memory_bytes: node.gpu_memory_bytes,
                gpu_driver: node.gpu_driver.clone(),
            })
            .collect()
    })
}
