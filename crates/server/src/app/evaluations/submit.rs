//! Submitting and previewing. A request is checked as a whole before anything is stored; a repeat with the same client token
//! is the same evaluation.

use rlm_api::rest::EvaluationCreated;
use rlm_core::error::{Code, Error, Problem};
use rlm_core::evaluation::EvaluationSpec;
use rlm_core::ids::EvaluationId;
use rlm_core::request::{self, Checked, Preview};
use rlm_core::rows;
use rlm_core::run::EvaluationStatus;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::new_runs;
use crate::app::access::Caller;
use crate::app::audit;
use crate::app::definitions::Registry;
use crate::state::AppState;
use crate::store::evaluations::NewEvaluation;

/// An equal request within this time is worth a warning.
const EQUAL_WITHIN_MS: i64 = 60_000;
const LONGEST_TOKEN: usize = 200;

/// The answer to a submission.
#[derive(Debug)]
pub struct Created {
    pub answer: EvaluationCreated,
    /// False: the same client token had made it before.
    pub fresh: bool,
}

/// Checks and sizes a request; stores nothing.
pub async fn preview(state: &AppState, caller: &Caller, request: &Value) -> Result<(Preview, EvaluationSpec, Vec<String>), Error> {
    let checked = check(state, caller, request).await?;
    Ok((request::preview(&checked.spec), checked.spec, checked.warnings))
}

/// Makes an evaluation of `request`. `header_token` is the request's `Idempotency-Key`.
pub async fn create(state: &AppState, caller: &Caller, request: Value, header_token: Option<String>) -> Result<Created, Error> {
    let token = client_token(&request, header_token)?;
    let hash = request_hash(&request);
    if let Some(created) = repeated(state, caller, token.as_deref(), &hash).await? {
        return Ok(created);
    }
    let Checked { spec, warnings, .. } = check(state, caller, &request).await?;
    store(state, caller, Submission { request, spec, warnings, token, hash, action: "evaluation.create" }).await
}

/// A checked evaluation about to be stored.
pub(super) struct Submission {
    pub request: Value,
    pub spec: EvaluationSpec,
    pub warnings: Vec<String>,
    pub token: Option<String>,
    pub hash: String,
    pub action: &'static str,
}

pub(super) async fn store(state: &AppState, caller: &Caller, submission: Submission) -> Result<Created, Error> {
    let Submission { request, spec, mut warnings, token, hash, action } = submission;
    let now_ms = state.clock.now_ms();
    if let Some(equal) = state.store.equal_evaluation_since(caller.organization_id, &hash, now_ms - EQUAL_WITHIN_MS).await? {
        warnings
            .push(format!("an equal request was submitted within the last minute as {equal}; cancel one of them if that was not meant"));
    }
    let id = EvaluationId::generate();
    let segments = rows::segments(&spec);
    let rows_total = segments.last().map_or(0, rows::Segment::end);
    let runs = new_runs(&spec, &segments, id, caller, 0, now_ms);
    let mut write = state.store.write().await?;
    let new = NewEvaluation {
        id,
        organization: caller.organization_id,
        created_at: now_ms,
        created_by: caller.user_id.to_string(),
        client_token: token.clone(),
        request_hash: hash.clone(),
        request: &request,
        spec: &spec,
        warnings: &warnings,
        rows_total,
    };
    match write.insert_evaluation(&new).await {
        Ok(()) => {}
        Err(error) if error.is_unique_violation() => {
            // The same token came in twice at once.
            drop(write);
            let found = repeated(state, caller, token.as_deref(), &hash).await?;
            return found.ok_or_else(|| {
                Error::new(Code::Conflict, "the same evaluation is being submitted at this moment; send the request again")
            });
        }
        Err(error) => return Err(error.into()),
    }
    write.insert_segments(id, &segments).await?;
    write.insert_runs(&runs).await?;
    let details = json!({"name": spec.name, "rows": rows_total, "runs": runs.len(), "cluster": spec.cluster});
    audit::record(&mut write, now_ms, &caller.actor(), action, &id.to_string(), details).await?;
    write.commit().await?;
    state.events.publish(id);
    state.cells.wake();
    Ok(Created { answer: answer(state, id, EvaluationStatus::Queued, warnings), fresh: true })
}

pub(super) fn answer(state: &AppState, id: EvaluationId, status: EvaluationStatus, warnings: Vec<String>) -> EvaluationCreated {
    EvaluationCreated {
        id: id.to_string(),
        status,
        warnings,
        url: format!("{}/evaluations/{id}", state.config.public_url.trim_end_matches('/')),
    }
}

/// The evaluation that this client token made before.
pub(super) async fn repeated(state: &AppState, caller: &Caller, token: Option<&str>, hash: &str) -> Result<Option<Created>, Error> {
    let Some(token) = token else { return Ok(None) };
    let Some((id, stored)) = state.store.evaluation_by_client_token(caller.organization_id, token).await? else { return Ok(None) };
    if stored != hash {
        return Err(Error::new(
            Code::IdempotencyMismatch,
            format!(
                "the client token was used for another request, which made {id}; choose a new token, or send the request that belongs to it"
            ),
        ));
    }
    let head = state.store.evaluation(caller.organization_id, id).await?;
    let documents = state.store.evaluation_documents(id).await?;
    let (Some(head), Some(documents)) = (head, documents) else { return Ok(None) };
    Ok(Some(Created { answer: answer(state, id, head.status, documents.warnings), fresh: false }))
}

async fn check(state: &AppState, caller: &Caller, request: &Value) -> Result<Checked, Error> {
    let registry = Registry::load(state, caller, request).await?;
    let mut problems = registry.problems().to_vec();
    let mut checked = match request::check(request, &registry) {
        Ok(checked) => checked,
        Err(found) => {
            let known: Vec<String> = found.iter().map(|problem| problem.path.clone()).collect();
            problems.retain(|problem| !known.contains(&problem.path));
            return Err(refused(found.into_iter().chain(problems).collect()));
        }
    };
    if let Some(cluster) = checked.spec.cluster {
        let known = state.store.cluster_conditions(caller.organization_id).await?;
        if !known.iter().any(|known| known.id == cluster) {
            problems.push(Problem::new(
                "cluster",
                format!("there is no cluster {cluster} in this organization; `rlmesh clusters list` shows those there are"),
            ));
        }
    }
    if !problems.is_empty() {
        return Err(refused(problems));
    }
    checked.warnings.extend(registry.warnings().iter().cloned());
    Ok(checked)
}

/// The problems in the order of their paths, `tasks[2]` before `tasks[10]`.
fn refused(mut problems: Vec<Problem>) -> Error {
    fn parts(path: &str) -> impl Iterator<Item = (u64, &str)> {
        path.split(['[', ']', '.']).map(|part| (part.parse().unwrap_or(0), part))
    }
    problems.sort_by(|one, other| parts(&one.path).cmp(parts(&other.path)));
    Error::invalid(problems)
}

fn client_token(request: &Value, header: Option<String>) -> Result<Option<String>, Error> {
    let body = request.get("clientToken").and_then(Value::as_str).map(str::to_owned);
    let token = match (body, header) {
        (Some(body), Some(header)) if body != header => {
            return Err(Error::invalid(vec![Problem::new(
                "clientToken",
                "differs from the Idempotency-Key header; send one of them, or the same in both",
            )]));
        }
        (body, header) => body.or(header),
    };
    match token {
        Some(token) if token.is_empty() || token.len() > LONGEST_TOKEN || token.chars().any(char::is_control) => {
            Err(Error::invalid(vec![Problem::new(
                "clientToken",
                format!("must have 1 to {LONGEST_TOKEN} characters, none of them a control character"),
            )]))
        }
        token => Ok(token),
    }
}

/// SHA-256 of the request without its client token. Objects keep their keys sorted, so the text is canonical.
pub(super) fn request_hash(request: &Value) -> String {
    let mut request = request.clone();
    if let Some(fields) = request.as_object_mut() {
        fields.remove("clientToken");
    }
    hex::encode(Sha256::digest(request.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_ignores_the_token_and_the_order_of_keys() {
        let one: Value = serde_json::from_str(r#"{"clientToken": "a", "name": "x", "tags": {"b": "1", "a": "2"}}"#).unwrap();
        let other: Value = serde_json::from_str(r#"{"tags": {"a": "2", "b": "1"}, "name": "x"}"#).unwrap();
        assert_eq!(request_hash(&one), request_hash(&other));
        let third: Value = serde_json::from_str(r#"{"tags": {"a": "2", "b": "1"}, "name": "y"}"#).unwrap();
        assert_ne!(request_hash(&one), request_hash(&third));
    }

    #[test]
    fn tokens_come_from_body_or_header_but_not_two() {
        let request = json!({"clientToken": "a"});
        assert_eq!(client_token(&request, None).unwrap().as_deref(), Some("a"));
        assert_eq!(client_token(&json!({}), Some("b".into())).unwrap().as_deref(), Some("b"));
        assert!(client_token(&request, Some("b".into())).is_err());
        assert!(client_token(&json!({}), Some(String::new())).is_err());
        assert!(client_token(&json!({}), Some("x".repeat(201))).is_err());
    }
}
