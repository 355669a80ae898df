use kube::Client;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::codegen::http;
use tonic::transport::Identity;

use super::*;
use crate::discovery::{ACCOUNT, ADDRESS, AGENT, AUDIENCE, CERTIFICATE, report};
use crate::runners::Runners;

fn gpu(product: &str) -> GpuKind {
    GpuKind { vendor: "nvidia".to_owned(), product: product.to_owned(), count: 2, memory_bytes: 1, driver: "550.1".to_owned() }
}

/// An API server that knows the tokens `good` (of discovery on node-1), `other` (of another account) and `unbound`.
fn api_server() -> Client {
    let service = tower::service_fn(|request: http::Request<kube::client::Body>| async move {
        let asked: Value = serde_json::from_slice(&request.into_body().collect_bytes().await.unwrap()).unwrap();
        assert_eq!(asked["spec"]["audiences"], json!([AUDIENCE]));
        let token = asked["spec"]["token"].as_str().unwrap();
        let account = if token == "other" { "default" } else { ACCOUNT };
        let node = if token == "unbound" { json!([]) } else { json!(["node-1"]) };
        let extra = json!({"authentication.kubernetes.io/pod-name": ["d"], "authentication.kubernetes.io/node-name": node});
        let status = match token {
            "stale" => json!({"authenticated": false}),
            _ => json!({
                "authenticated": true,
                "audiences": [AUDIENCE],
                "user": {"username": format!("system:serviceaccount:rlmesh-system:{account}"), "extra": extra},
            }),
        };
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "metadata": {}, "spec": {}, "status": status});
        Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::from(serde_json::to_vec(&review).unwrap())))
    });
    Client::new(service, "default")
}

struct Served {
    reports: Reports,
    folder: tempfile::TempDir,
    _stop: tokio_util::sync::DropGuard,
}

/// The agent's port, and a folder as a discovery pod has it.
async fn served() -> Served {
    let reports = Reports::new(TokenReviewer::of_discovery(api_server(), "rlmesh-system"));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let made = rcgen::generate_simple_self_signed([AGENT.to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(ADDRESS), listener.local_addr().unwrap().to_string()).unwrap();
    std::fs::write(folder.path().join(CERTIFICATE), made.cert.pem()).unwrap();
    let stop = CancellationToken::new();
    let identity = Identity::from_pem(made.cert.pem(), made.signing_key.serialize_pem());
    tokio::spawn(Runners::default().serve_tls(listener, identity, reports.clone(), stop.clone()));
    Served { reports, folder, _stop: stop.drop_guard() }
}

impl Served {
    async fn tell(&self, token: &str, gpus: &[GpuKind]) -> Result<(), String> {
        let file = self.folder.path().join("token");
        std::fs::write(&file, format!("{token}\n")).unwrap();
        report(self.folder.path(), &file, gpus).await.map_err(|error| format!("{error:#}"))
    }

    fn known(&self) -> ByNode {
        self.reports.with(|nodes| nodes.clone())
    }
}

#[tokio::test]
async fn a_report_counts_for_the_node_of_its_token() {
    let served = served().await;
    served.tell("good", &[gpu("NVIDIA L4")]).await.unwrap();
    assert_eq!(served.known(), ByNode::from([("node-1".to_owned(), vec![gpu("NVIDIA L4")])]));
    served.tell("good", &[]).await.unwrap();
    assert_eq!(served.known()["node-1"], []);
    assert_eq!(served.reports.of(&BTreeSet::from(["node-2".to_owned()])), ByNode::new());
    assert_eq!(served.known(), ByNode::new(), "a node that is gone is forgotten");
}

#[tokio::test]
async fn nobody_else_reports_anything() {
    let served = served().await;
    for (token, says) in [("other", "not one of a pod"), ("stale", "not one of a pod"), ("unbound", "which node")] {
        let refused = served.tell(token, &[gpu("NVIDIA L4")]).await.unwrap_err();
        assert!(refused.contains(says), "{token}: {refused}");
    }
    let wrong = |change: fn(&mut GpuKind)| {
        let mut gpu = gpu("NVIDIA L4");
        change(&mut gpu);
        vec![gpu]
    };
    for gpus in [
        vec![gpu("NVIDIA L4"); KINDS + 1],
        wrong(|gpu| gpu.vendor = "other".to_owned()),
        wrong(|gpu| gpu.count = 0),
        wrong(|gpu| gpu.count = u32::MAX),
        wrong(|gpu| gpu.product = "a\nb".to_owned()),
        wrong(|gpu| gpu.driver = "5".repeat(LONGEST + 1)),
    ] {
        assert!(served.tell("good", &gpus).await.unwrap_err().contains("no report of GPU discovery"));
    }
    assert_eq!(served.known(), ByNode::new());
}

#[tokio::test]
async fn discovery_speaks_to_the_holder_of_the_certificate_alone() {
    let served = served().await;
    let other = rcgen::generate_simple_self_signed([AGENT.to_owned()]).unwrap();
    std::fs::write(served.folder.path().join(CERTIFICATE), other.cert.pem()).unwrap();
    let refused = served.tell("good", &[]).await.unwrap_err();
    assert!(refused.contains("certificate"), "{refused}");
    std::fs::remove_file(served.folder.path().join(CERTIFICATE)).unwrap();
    assert!(served.tell("good", &[]).await.unwrap_err().contains("the agent writes it"));
    assert_eq!(served.known(), ByNode::new());
}
