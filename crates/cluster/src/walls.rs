//! *Is it enforced?* Whether the cluster's network enforces NetworkPolicies, found out by trying what they forbid.
//!
//! A small pod in the namespace of runs, under the same policies as they are, opens one port that a policy allows the agent
//! and one that none does, and tries a way out that none allows. The agent asks it and judges. A network that enforces
//! nothing lets everything through, silently; so does one that enforces one direction alone.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// The port that a policy allows the agent.
pub const ALLOWED: u16 = 7080;
/// The port that no policy allows anyone.
pub const FORBIDDEN: u16 = 7081;
/// Label `rlmesh.dev/component` of the pod.
pub const COMPONENT: &str = "wall-probe";
/// Of one try to connect: policies drop or refuse.
const TRY: Duration = Duration::from_secs(2);
const ANSWER: Duration = Duration::from_secs(8);
const LONGEST: u64 = 4 << 10;

/// What connecting came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reached {
    Open,
    Shut,
}

/// What the pod answers at its allowed port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    /// The way out that it tried: the Kubernetes API.
    tried: SocketAddr,
    out: Reached,
}

/// Whether the walls stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Walls {
    Enforced,
    NotEnforced(String),
    Unknown(String),
}

/// Serves both ports until `stop`. `outside` is what the pod must not reach.
pub async fn serve(outside: SocketAddr, stop: CancellationToken) -> anyhow::Result<()> {
    let bind =
        async |port| TcpListener::bind((IpAddr::from([0, 0, 0, 0]), port)).await.with_context(|| format!("port {port} can't be opened"));
    let (allowed, forbidden) = (bind(ALLOWED).await?, bind(FORBIDDEN).await?);
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            // Whoever gets this far has seen enough.
            accepted = forbidden.accept() => drop(accepted),
            accepted = allowed.accept() => match accepted {
                // One asker at a time: there is one agent, and a try has a deadline.
                Ok((stream, _)) => {
                    if let Err(error) = answer(stream, outside).await {
                        tracing::debug!(%error, "an asker went away");
                    }
                }
                Err(error) => tracing::warn!(%error, "an asker could not be let in"),
            },
        }
    }
}

async fn answer(mut stream: TcpStream, outside: SocketAddr) -> anyhow::Result<()> {
    let answer = Answer { tried: outside, out: reach(outside).await };
    tracing::info!(outside = %answer.tried, out = ?answer.out, "asked");
    tokio::time::timeout(TRY, async {
        stream.write_all(&serde_json::to_vec(&answer)?).await?;
        stream.shutdown().await.map_err(anyhow::Error::from)
    })
    .await?
}

async fn reach(address: SocketAddr) -> Reached {
    match tokio::time::timeout(TRY, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Reached::Open,
        Ok(Err(_)) | Err(_) => Reached::Shut,
    }
}

/// Asks the pod at `address` and judges.
pub async fn check(address: IpAddr) -> Walls {
    let answer = match tokio::time::timeout(ANSWER, ask(SocketAddr::new(address, ALLOWED))).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(format!("{error:#}")),
        Err(_) => Err("it does not answer".to_owned()),
    };
    judge(answer, reach(SocketAddr::new(address, FORBIDDEN)).await)
}

async fn ask(address: SocketAddr) -> anyhow::Result<Answer> {
    let stream = TcpStream::connect(address).await?;
    let mut text = Vec::new();
    stream.take(LONGEST).read_to_end(&mut text).await?;
    serde_json::from_slice(&text).context("it answers what no wall probe would")
}

fn judge(answer: Result<Answer, String>, forbidden: Reached) -> Walls {
    const WHY: &str =
        "evaluations would not be walled off. Use a CNI that enforces NetworkPolicy in both directions, such as Cilium or Calico";
    match (answer, forbidden) {
        (_, Reached::Open) => Walls::NotEnforced(format!("a port that no NetworkPolicy allows is open (ingress is not enforced): {WHY}")),
        (Ok(Answer { tried, out: Reached::Open }), Reached::Shut) => {
            Walls::NotEnforced(format!("a pod reaches {tried}, which no NetworkPolicy allows (egress is not enforced): {WHY}"))
        }
        (Ok(Answer { out: Reached::Shut, .. }), Reached::Shut) => Walls::Enforced,
        (Err(why), Reached::Shut) => Walls::Unknown(format!("the wall probe can't be asked: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(out: Reached) -> Result<Answer, String> {
        Ok(Answer { tried: "10.96.0.1:443".parse().unwrap(), out })
    }

    #[test]
    fn both_directions_must_hold() {
        assert_eq!(judge(answer(Reached::Shut), Reached::Shut), Walls::Enforced);
        assert!(
            matches!(judge(answer(Reached::Open), Reached::Shut), Walls::NotEnforced(why) if why.contains("egress") && why.contains("10.96.0.1:443"))
        );
        assert!(matches!(judge(answer(Reached::Shut), Reached::Open), Walls::NotEnforced(why) if why.contains("ingress")));
        assert!(matches!(judge(Err("no".to_owned()), Reached::Open), Walls::NotEnforced(_)));
        assert!(matches!(judge(Err("no".to_owned()), Reached::Shut), Walls::Unknown(why) if why.ends_with("no")));
    }

    #[tokio::test]
    async fn what_listens_is_open_and_what_does_not_is_shut() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(reach(address).await, Reached::Open);
        drop(listener);
        assert_eq!(reach(address).await, Reached::Shut);
    }
}
