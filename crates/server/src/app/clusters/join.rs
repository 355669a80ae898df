//! Joining: a one-time token becomes the cluster's own credentials. The exchange can be repeated by the agent that made it
//! until the token's hour ends, so that neither a lost reply nor a crash burns a token; nobody else gets anything.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rlm_api::cluster::v1;
use rlm_core::error::{Code, Error, Problem};
use rlm_core::ids::ClusterId;
use rlm_core::tokens::{Secret, SecretKind};
use serde_json::json;

use super::credentials;
use crate::app::access::Actor;
use crate::app::audit;
use crate::app::identity::limits::TOKEN;
use crate::config::millis;
use crate::state::AppState;
use crate::store::clusters::{ClusterRow, Versions};
use crate::store::join_tokens::{Exchange, JoinToken, Purpose};

/// What a token's owner asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Random, made by the agent before its first try.
    pub nonce: String,
    /// Empty where there is no Kubernetes.
    pub kube_system_uid: String,
    pub versions: Versions,
    pub purposes: Vec<String>,
}

/// What a token's state allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Nobody used it.
    Fresh,
    /// This agent used it: the same credentials again.
    Again(Exchange),
}

/// Decides by the token and the server's clock alone.
pub fn judge(token: &JoinToken, nonce: &str, now_ms: i64) -> Result<Verdict, Error> {
    const NEXT: &str = "issue a new install command for the cluster";
    let refused = |code, what: &str| Err(Error::new(code, format!("the join token {} {what}; {NEXT}", token.id)));
    if token.revoked_at.is_some() {
        return refused(Code::TokenRevoked, "was revoked");
    }
    match (&token.exchange, token.used_at) {
        (Some(exchange), Some(_)) if token.used_nonce.as_deref() == Some(nonce) => {
            if now_ms >= token.expires_at {
                return refused(Code::TokenExpired, "was used by this agent, and its hour has ended, so it is not answered again");
            }
            Ok(Verdict::Again(exchange.clone()))
        }
        (_, Some(_)) => refused(Code::TokenUsed, "was used already, by another agent: it works once"),
        (_, None) if token.superseded_at.is_some() => refused(Code::TokenSuperseded, "was replaced by a newer install command"),
        (_, None) if now_ms >= token.expires_at => refused(Code::TokenExpired, "has expired: it is valid for an hour"),
        (_, None) => Ok(Verdict::Fresh),
    }
}

/// Whether the Kubernetes cluster that asks may be this registration. `elsewhere` is the registration of the same
/// organization that it has already; `connected` says that the agent of this registration is.
pub fn judge_place(
    cluster: &ClusterRow,
    kube_system_uid: &str,
    elsewhere: Option<&(ClusterId, String)>,
    connected: bool,
) -> Result<(), Error> {
    let other = |message: String| Err(Error::new(Code::TokenOtherCluster, message));
    if kube_system_uid.is_empty() {
        return Ok(());
    }
    if let Some((_, name)) = elsewhere.filter(|(id, _)| *id != cluster.id) {
        return other(format!(
            "this token is of cluster {}, but the Kubernetes cluster that presents it is registered as {name}; use an install command of {name}, or \
             archive {name} first",
            cluster.name
        ));
    }
    match &cluster.kube_system_uid {
        Some(known) if known != kube_system_uid && connected => other(format!(
            "this token is of cluster {}, whose agent is connected from another Kubernetes cluster (kube-system {known}); uninstall it there first, or \
             register this one as a cluster of its own",
            cluster.name
        )),
        _ => Ok(()),
    }
}

fn check(request: &Request) -> Result<Vec<Purpose>, Error> {
    let mut problems = Vec::new();
    if request.nonce.len() < 16 || request.nonce.len() > 200 {
        problems.push(Problem::new("nonce", "must be 16 to 200 random characters, made once and kept until the join is stored"));
    }
    if request.kube_system_uid.len() > 100 {
        problems.push(Problem::new("kubeSystemUid", "must be the UID of the namespace kube-system, or empty"));
    }
    let mut purposes: Vec<Purpose> = Vec::new();
    for (index, text) in request.purposes.iter().enumerate().take(20) {
        match Purpose::parse(text) {
            Some(purpose) if purposes.contains(&purpose) => {}
            Some(purpose) => purposes.push(purpose),
            None => problems.push(Problem::new(format!("purposes[{index}]"), "must be control, pull or relay")),
        }
    }
    if !purposes.contains(&Purpose::Control) && problems.is_empty() {
        problems.push(Problem::new("purposes", "must contain control: without it an agent can't connect"));
    }
    if problems.is_empty() { Ok(purposes) } else { Err(Error::invalid(problems)) }
}

/// Exchanges a join token. `bearer` is the token.
pub async fn join(state: &AppState, bearer: Option<&str>, request: &Request, remote_address: &str) -> Result<v1::JoinResponse, Error> {
    let unknown = |why: &str| Error::new(Code::TokenUnknown, format!("{why}; copy the install command again, or issue a new one"));
    let text = bearer.ok_or_else(|| unknown("no join token: send it as `authorization: Bearer rlm_jt_...`"))?;
    let secret = Secret::parse(text).map_err(|error| unknown(&format!("the join token is malformed: {error}")))?;
    if secret.kind() != SecretKind::JoinToken {
        return Err(unknown(&format!("a join needs a join token (rlm_jt_...), not {secret:?}")));
    }
    let purposes = check(request)?;
    let hash = secret.hash();
    let not_known = || unknown("this join token is not known here; check that the command is of this platform");
    let now_ms = state.clock.now_ms();
    state.identity.limits.check("joins", remote_address, TOKEN, now_ms)?;
    // Looked up before anything is locked: guesses must not hold up the database's writer.
    let id = state.store.join_token_cluster(&hash).await?.ok_or_else(not_known)?;
    let mut write = state.store.write().await?;
    // Clusters are locked before their tokens: an archive can't slip between.
    let cluster = write.lock_cluster(id).await?.ok_or_else(not_known)?;
    let token = write.lock_join_token(&hash).await?.ok_or_else(not_known)?;
    if cluster.archived_at.is_some() {
        return Err(credentials::archived(&cluster.name));
    }
    let exchange = match judge(&token, &request.nonce, now_ms)? {
        Verdict::Again(exchange) => exchange,
        Verdict::Fresh => {
            let uid = Some(request.kube_system_uid.as_str()).filter(|uid| !uid.is_empty());
            let elsewhere = match uid {
                Some(uid) => write.cluster_by_kubernetes(cluster.organization, uid).await?,
                None => None,
            };
            judge_place(&cluster, &request.kube_system_uid, elsewhere.as_ref(), super::is_connected(state, &cluster))?;
            let overlap_ends = now_ms.saturating_add(millis(state.config.timings.credential_overlap));
            let mut exchange = Exchange::new();
            // All of them: what an earlier agent had ends, even what this one did not ask for.
            for purpose in Purpose::ALL {
                write.retire_credentials(id, purpose, overlap_ends).await?;
            }
            for purpose in purposes {
                exchange.insert(purpose, credentials::make(state, &mut write, id, purpose, now_ms).await?);
            }
            write.use_join_token(token.id, &request.nonce, &exchange, now_ms).await?;
            write.note_join(id, uid, &request.versions).await?;
            let actor =
                Actor { organization_id: cluster.organization, name: format!("cluster:{id}"), remote_address: remote_address.to_owned() };
            let purposes: Vec<&str> = exchange.keys().map(|purpose| purpose.as_str()).collect();
            let details = json!({"token": token.id.to_string(), "purposes": purposes, "kubeSystemUid": uid});
            audit::record(&mut write, now_ms, &actor, "cluster.join", &id.to_string(), details).await?;
            write.commit().await?;
            if let Some(control) = exchange.get(&Purpose::Control) {
                state.cells.control_replaced(id, *control, overlap_ends);
            }
            tracing::info!(cluster = %id, token = %token.id, "a join token was exchanged");
            exchange
        }
    };
    Ok(answer(state, id, &exchange))
}

fn answer(state: &AppState, cluster: ClusterId, exchange: &Exchange) -> v1::JoinResponse {
    let docker_config_json = exchange
        .get(&Purpose::Pull)
        .map(|pull| docker_config(&state.config.registry_host, cluster, &credentials::secret(state, Purpose::Pull, *pull)))
        .unwrap_or_default();
    v1::JoinResponse {
        cluster_id: cluster.to_string(),
        credentials: exchange.iter().map(|(purpose, id)| credentials::message(state, *purpose, *id)).collect(),
        docker_config_json,
    }
}

/// What a Secret of type `kubernetes.io/dockerconfigjson` holds.
fn docker_config(registry_host: &str, cluster: ClusterId, pull: &Secret) -> String {
    let auth = STANDARD.encode(format!("{cluster}:{}", pull.expose()));
    json!({"auths": {registry_host: {"username": cluster.to_string(), "password": pull.expose(), "auth": auth}}}).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rlm_core::ids::{CredentialId, JoinTokenId, OrganizationId};

    use super::*;

    fn token() -> JoinToken {
        JoinToken {
            id: JoinTokenId::generate(),
            cluster: ClusterId::generate(),
            created_at: 0,
            created_by: String::new(),
            expires_at: 3_600_000,
            used_at: None,
            used_nonce: None,
            exchange: None,
            revoked_at: None,
            superseded_at: None,
        }
    }

    fn used(nonce: &str) -> JoinToken {
        let exchange = Exchange::from([(Purpose::Control, CredentialId::generate())]);
        JoinToken { used_at: Some(1), used_nonce: Some(nonce.to_owned()), exchange: Some(exchange), ..token() }
    }

    fn code(token: &JoinToken, nonce: &str, now: i64) -> Option<Code> {
        judge(token, nonce, now).err().map(|error| error.code)
    }

    #[test]
    fn each_state_has_its_answer() {
        assert_eq!(judge(&token(), "a", 10).unwrap(), Verdict::Fresh);
        assert_eq!(code(&token(), "a", 3_600_000), Some(Code::TokenExpired));
        assert_eq!(code(&used("a"), "b", 10), Some(Code::TokenUsed));
        assert_eq!(code(&used("a"), "b", 4_000_000), Some(Code::TokenUsed));
        assert_eq!(code(&used("a"), "a", 3_599_999), None);
        assert_eq!(code(&used("a"), "a", 3_600_000), Some(Code::TokenExpired));
        assert_eq!(code(&JoinToken { superseded_at: Some(5), ..token() }, "a", 10), Some(Code::TokenSuperseded));
        assert_eq!(code(&JoinToken { revoked_at: Some(5), ..token() }, "a", 10), Some(Code::TokenRevoked));
        assert_eq!(code(&JoinToken { revoked_at: Some(5), ..used("a") }, "a", 10), Some(Code::TokenRevoked));
    }

    proptest! {
        #[test]
        fn credentials_are_given_to_one_agent_only(first in "[a-z]{16}", second in "[a-z]{16}", now in 0_i64..10_000_000) {
            prop_assume!(first != second);
            prop_assert!(judge(&used(&first), &second, now).is_err());
            if let Ok(Verdict::Again(exchange)) = judge(&used(&first), &first, now) {
                prop_assert!(now < 3_600_000 && !exchange.is_empty());
            }
        }
    }

    #[test]
    fn a_token_is_for_its_own_cluster() {
        let mut cluster = super::super::new_row(OrganizationId::generate(), "lab", "user", 0);
        let other = (ClusterId::generate(), "prod".to_owned());
        let code = |cluster: &ClusterRow, uid: &str, elsewhere, connected| {
            judge_place(cluster, uid, elsewhere, connected).err().map(|error| error.code)
        };
        assert_eq!(code(&cluster, "u1", None, false), None);
        assert_eq!(code(&cluster, "u1", Some(&other), false), Some(Code::TokenOtherCluster));
        let itself = (cluster.id, String::new());
        assert_eq!(code(&cluster, "u1", Some(&itself), true), None);
        cluster.kube_system_uid = Some("u0".to_owned());
        assert_eq!(code(&cluster, "u1", None, true), Some(Code::TokenOtherCluster));
        assert_eq!(code(&cluster, "u1", None, false), None, "a cluster that was made anew keeps its registration");
        assert_eq!(code(&cluster, "", Some(&other), true), None, "no Kubernetes, nothing to compare");
    }

    #[test]
    fn what_is_asked_for_is_checked_all_at_once() {
        let request = |nonce: &str, purposes: &[&str]| Request {
            nonce: nonce.to_owned(),
            kube_system_uid: String::new(),
            versions: Versions::default(),
            purposes: purposes.iter().map(|&text| text.to_owned()).collect(),
        };
        assert_eq!(check(&request("0123456789abcdef", &["control", "pull", "control"])).unwrap(), vec![Purpose::Control, Purpose::Pull]);
        assert_eq!(check(&request("short", &["root"])).unwrap_err().details.len(), 2);
        assert_eq!(check(&request("0123456789abcdef", &["pull"])).unwrap_err().details.len(), 1);
    }

    #[test]
    fn docker_reads_the_pull_secret() {
        let cluster = ClusterId::generate();
        let pull = Secret::from_bytes(SecretKind::PullCredential, &[1; 32]);
        let config: serde_json::Value = serde_json::from_str(&docker_config("registry.example", cluster, &pull)).unwrap();
        let auth = STANDARD.decode(config["auths"]["registry.example"]["auth"].as_str().unwrap()).unwrap();
        assert_eq!(String::from_utf8(auth).unwrap(), format!("{cluster}:{}", pull.expose()));
    }
}
