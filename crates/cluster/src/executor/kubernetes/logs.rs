//! What pods have printed, read from the API server while they are there.

use std::time::Duration;

use kube::api::LogParams;

use super::Cluster;
use crate::controller::run::classify::CONTAINER;

const DEADLINE: Duration = Duration::from_secs(5);
/// Lines of a failure.
const LAST_LINES: i64 = 30;
const LAST_BYTES: i64 = 64 << 10;

/// The end of a pod's output; what can't be read is no reason to fail.
pub async fn tail(cluster: &Cluster, pod: &str, lines: i64, bytes: i64) -> Option<String> {
    let parameters =
        LogParams { container: Some(CONTAINER.to_owned()), tail_lines: Some(lines), limit_bytes: Some(bytes), ..LogParams::default() };
    match tokio::time::timeout(DEADLINE, cluster.pods.logs(pod, &parameters)).await {
        Ok(Ok(text)) => Some(text),
        Ok(Err(error)) => {
            tracing::debug!(pod, %error, "a pod's output can't be read");
            None
        }
        Err(_) => None,
    }
}

/// The last lines of a pod's output, for a failure.
pub async fn last_lines(cluster: &Cluster, pod: Option<&str>) -> Vec<String> {
    let Some(pod) = pod else { return Vec::new() };
    let text = tail(cluster, pod, LAST_LINES, LAST_BYTES).await.unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}
