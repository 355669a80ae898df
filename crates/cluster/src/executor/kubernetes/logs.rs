//! What pods have printed, read from the API server while they are there.

use std::time::Duration;

use futures::AsyncReadExt as _;
use kube::api::LogParams;

use super::Cluster;
use crate::controller::run::classify::CONTAINER;

const DEADLINE: Duration = Duration::from_secs(5);
/// Lines of a failure.
const LAST_LINES: i64 = 30;
const LAST_BYTES: usize = 16 << 10;

/// The end of a pod's output, at most `bytes`; what can't be read is no reason to fail.
pub async fn tail(cluster: &Cluster, pod: &str, lines: i64, bytes: usize) -> Option<String> {
    let parameters = LogParams { container: Some(CONTAINER.to_owned()), tail_lines: Some(lines), ..LogParams::default() };
    let read = async {
        let mut output = cluster.pods.log_stream(pod, &parameters).await?;
        let (mut end, mut chunk) = (Vec::new(), vec![0; 16 << 10]);
        loop {
            match output.read(&mut chunk).await {
                Ok(0) => return Ok(end),
                Ok(read) => keep_end(&mut end, &chunk[..read], bytes),
                Err(error) => {
                    tracing::debug!(pod, %error, "a pod's output breaks off");
                    return Ok(end);
                }
            }
        }
    };
    match tokio::time::timeout(DEADLINE, read).await {
        Ok(Ok(end)) => Some(String::from_utf8_lossy(&end).into_owned()),
        Ok(Err(error)) => {
            let error: kube::Error = error;
            tracing::debug!(pod, %error, "a pod's output can't be read");
            None
        }
        Err(_) => None,
    }
}

/// Appends, and drops what is before the last `bytes`. (The API server's `limitBytes` drops the end.)
fn keep_end(end: &mut Vec<u8>, more: &[u8], bytes: usize) {
    end.extend_from_slice(more);
    end.drain(..end.len().saturating_sub(bytes));
}

/// The last lines of a pod's output, for a failure.
pub async fn last_lines(cluster: &Cluster, pod: Option<&str>) -> Vec<String> {
    let Some(pod) = pod else { return Vec::new() };
    let text = tail(cluster, pod, LAST_LINES, LAST_BYTES).await.unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_what_is_kept() {
        let mut end = Vec::new();
        for more in ["progress ", "progress ", "Trace", "back"] {
            keep_end(&mut end, more.as_bytes(), 9);
        }
        assert_eq!(end, b"Traceback");
    }
}
