use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::*;
use crate::crd::run::ComponentPhase;

fn component(phase: ComponentPhase, reason: Reason, message: &str) -> Component {
    Component {
        name: "env-0-0".to_owned(),
        attempt: 1,
        pod: None,
        address: None,
        node: None,
        phase,
        since: Time(Timestamp::from_second(1_800_000_000).unwrap()),
        ready_at: None,
        reason: Some(reason),
        exit_code: None,
        message: Some(message.to_owned()),
        image_id: None,
    }
}

fn pending(reason: Reason, message: &str) -> Component {
    component(ComponentPhase::Pending, reason, message)
}

const ENV: Role = Role::Environment { binding: 0, pod: 0 };

#[test]
fn a_wait_has_its_cause_the_clusters_words_and_what_to_do() {
    let table = [
        (Reason::Unschedulable, "0/2 nodes are available: 2 Insufficient cpu.", "unschedulable", "2 Insufficient cpu; ask for less"),
        (Reason::Unschedulable, "0/2 nodes are available: 2 node(s) had untolerated taint {a: b}.", "unschedulable", "runs.tolerations"),
        (Reason::QuotaExceeded, "create pod p: exceeded quota: q", "quota", "exceeded quota: q; it is tried again"),
        (Reason::ImagePullFailed, "dial tcp 10.0.0.1:443: connect: connection refused", "imagePull", "does not answer"),
        (Reason::ImagePullFailed, "unexpected status: 401 Unauthorized", "imagePull", "runs.imagePullSecrets"),
        (Reason::ImagePullFailed, "r/x:1: not found", "imagePull", "push it"),
        (Reason::ImagePullFailed, "no match for platform in manifest: not found", "imagePull", "linux/amd64"),
        (Reason::SecretMissing, "secret \"hf\" not found", "secretMissing", "once the Secret is there"),
    ];
    for (reason, words, cause, expected) in table {
        let waits = waits("env-0-0", Some(&pending(reason, words)), false, None).unwrap();
        assert_eq!((waits.cause, waits.since_ms), (cause, Some(1_800_000_000_000)), "{words}");
        assert!(waits.message.starts_with("env-0-0: ") && waits.message.contains(expected), "{}", waits.message);
    }
    assert_eq!(waits("env-0-0", Some(&pending(Reason::ContainerCreating, "x")), true, None), None, "its own start is no wait");
}

#[test]
fn a_controller_that_says_nothing_and_an_api_server_that_can_not_be_asked_are_waited_for() {
    assert_eq!(waits("model-0", None, false, None), None);
    assert_eq!(waits("model-0", None, true, None).unwrap().cause, "controllerAway");
    let waits = waits("model-0", None, false, Some("connection refused")).unwrap();
    assert!(waits.cause == "apiUnavailable" && waits.message.contains("connection refused"), "{waits:?}");
}

#[test]
fn who_waited_in_vain_is_errored_for_what_it_waited_for_and_not_blamed() {
    let patience = Duration::from_secs(6);
    let taints = pending(Reason::Unschedulable, "0/2 nodes are available: 2 Insufficient cpu.");
    let known = waits("env-0-0", Some(&taints), false, None);
    let failure = out_of_patience(pod_role(ENV), Some(&taints), known.as_ref(), patience);
    assert_eq!(failure.code, FailureCode::Unschedulable);
    assert!(failure.message.contains("2 Insufficient cpu") && failure.message.contains("waited 6 s"), "{}", failure.message);
    for component in [None, Some(&pending(Reason::ContainerCreating, "volumes")), Some(&pending(Reason::ApiUnavailable, "503"))] {
        assert_eq!(out_of_patience(pod_role(ENV), component, None, patience).code, FailureCode::QueueTimeout, "{component:?}");
    }
}
