use serde_json::{Value, json};

use super::*;

const NOW: i64 = 1_800_000_000;

fn at(seconds: i64) -> String {
    Timestamp::from_second(NOW + seconds).unwrap().to_string()
}

fn now() -> Timestamp {
    Timestamp::from_second(NOW).unwrap()
}

fn pod(status: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n1", "containers": []}, "status": status}))
        .unwrap()
}

fn container(state: Value, ready: bool) -> Value {
    json!([{"name": "main", "image": "i", "imageID": "i@sha256:1", "ready": ready, "restartCount": 0, "state": state}])
}

fn model() -> Attempt {
    Attempt { role: Role::Model { replica: 0 }, number: 1 }
}

fn look(status: Value, served: bool) -> Seen {
    see(model(), &pod(status), served, SignedDuration::from_secs(600), now())
}

#[test]
fn each_state_of_a_pod_has_its_phase_and_reason() {
    use ComponentPhase::{Failed, Pending, Ready, Starting, Succeeded};
    let scheduled = json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(-60)}]);
    let running = json!({"running": {"startedAt": at(-5)}});
    let waits_because = |reason: &str, message: &str| json!({"phase": "Pending", "conditions": scheduled, "containerStatuses": container(json!({"waiting": {"reason": reason, "message": message}}), false)});
    let waits = |reason: &str| waits_because(reason, "said");
    let ended = |reason: &str, code: i32, lasted: i64| {
        json!({"phase": "Failed", "containerStatuses": container(json!({"terminated": {
            "reason": reason, "exitCode": code, "startedAt": at(-lasted), "finishedAt": at(0)}}), false)})
    };
    let disrupted =
        |reason: &str| json!({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "said"}]});
    let table: Vec<(&str, Value, bool, ComponentPhase, Option<Reason>)> = vec![
        ("new", json!({}), false, Pending, Some(Reason::Creating)),
        (
            "no node fits",
            json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}]}),
            false,
            Pending,
            Some(Reason::Unschedulable),
        ),
        ("prepared", waits("ContainerCreating"), false, Pending, Some(Reason::ContainerCreating)),
        ("not pulled", waits("ErrImagePull"), false, Pending, Some(Reason::ImagePullFailed)),
        ("not pulled again", waits("ImagePullBackOff"), false, Pending, Some(Reason::ImagePullFailed)),
        ("bad name", waits("InvalidImageName"), false, Failed, Some(Reason::InvalidImageName)),
        ("no secret", waits_because("CreateContainerConfigError", r#"secret "hf" not found"#), false, Pending, Some(Reason::SecretMissing)),
        (
            "no key",
            waits_because("CreateContainerConfigError", "couldn't find key token in Secret runs/hf"),
            false,
            Pending,
            Some(Reason::SecretMissing),
        ),
        (
            "a user by name",
            waits_because("CreateContainerConfigError", "container has runAsNonRoot and image has non-numeric user (app)"),
            false,
            Failed,
            Some(Reason::CannotStart),
        ),
        ("no program", waits("RunContainerError"), false, Failed, Some(Reason::CannotStart)),
        ("starts", json!({"phase": "Running", "containerStatuses": container(running.clone(), false)}), false, Starting, None),
        (
            "serves",
            json!({"phase": "Running", "podIP": "10.0.0.9", "containerStatuses": container(running.clone(), true)}),
            false,
            Ready,
            None,
        ),
        ("busy", json!({"phase": "Running", "podIP": "10.0.0.9", "containerStatuses": container(running, false)}), true, Ready, None),
        ("out of memory", ended("OOMKilled", 137, 9), true, Failed, Some(Reason::OutOfMemory)),
        ("crashed", ended("Error", 1, 9), true, Failed, Some(Reason::Exited)),
        ("killed", ended("Error", 137, 9), true, Failed, Some(Reason::Killed)),
        ("too slow", ended("Error", 137, 601), false, Failed, Some(Reason::StartTimeout)),
        ("slow, but it had served", ended("Error", 137, 601), true, Failed, Some(Reason::Killed)),
        ("wrong architecture", ended("StartError", 128, 0), false, Failed, Some(Reason::CannotStart)),
        ("done", ended("Completed", 0, 9), true, Succeeded, None),
        (
            "evicted by its node",
            json!({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}),
            false,
            Failed,
            Some(Reason::Evicted),
        ),
        ("refused by its node", json!({"phase": "Failed", "reason": "UnexpectedAdmissionError"}), false, Failed, Some(Reason::Evicted)),
        ("preempted", disrupted("PreemptionByScheduler"), true, Failed, Some(Reason::Evicted)),
        ("node unreachable", disrupted("DeletionByTaintManager"), true, Failed, Some(Reason::NodeLost)),
        ("node silent", json!({"reason": "NodeLost"}), true, Failed, Some(Reason::NodeLost)),
    ];
    for (what, status, served, phase, reason) in table {
        let seen = look(status, served).component;
        assert_eq!((seen.phase, seen.reason), (phase, reason), "{what}: {seen:?}");
    }
}

#[test]
fn what_is_seen_says_where_and_why() {
    let scheduler = "0/2 nodes are available: 2 Insufficient cpu.";
    let seen = look(json!({"conditions": [{"type": "PodScheduled", "status": "False", "message": scheduler}]}), false).component;
    assert_eq!(seen.message.as_deref(), Some(scheduler), "the scheduler's own words");
    let serving = |ip: &str| look(json!({"podIP": ip, "containerStatuses": container(json!({"running": {}}), true)}), false).component;
    assert_eq!(serving("10.0.0.9").address.as_deref(), Some("tcp://10.0.0.9:50051"));
    assert_eq!(serving("fd00::9").address.as_deref(), Some("tcp://[fd00::9]:50051"));
    assert_eq!(serving("10.0.0.9").image_id.as_deref(), Some("i@sha256:1"));
    assert_eq!(serving("10.0.0.9").node.as_deref(), Some("n1"));
}

#[test]
fn a_pull_has_as_long_as_starting_may_take() {
    let status = |since: i64| {
        json!({"conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(-since)}],
            "containerStatuses": container(json!({"waiting": {"reason": "ImagePullBackOff"}}), false)})
    };
    let early = look(status(10), false);
    assert_eq!(early.deadline, Some(Timestamp::from_second(NOW + 590).unwrap()));
    let late = look(status(600), false);
    assert_eq!((late.component.phase, late.deadline), (ComponentPhase::Failed, None));
}

#[test]
fn a_deleted_pod_is_over_at_once_and_keeps_its_exit_code() {
    let mut pod = pod(json!({"containerStatuses": container(json!({"terminated": {"exitCode": 143}}), false)}));
    pod.metadata.deletion_timestamp = Some(Time(now()));
    let seen = see(model(), &pod, true, SignedDuration::from_secs(1), now()).component;
    assert_eq!((seen.phase, seen.reason, seen.exit_code), (ComponentPhase::Failed, Some(Reason::PodDeleted), Some(143)));
}

#[test]
fn reasons_end_in_the_one_taxonomy() {
    let environment = Role::Environment { binding: 0, pod: 0 };
    let table = [
        (Role::Runner, Reason::Exited, true, Some(FailureCode::RunnerLost)),
        (environment, Reason::Exited, true, Some(FailureCode::EnvironmentCrashed)),
        (environment, Reason::Exited, false, Some(FailureCode::EnvironmentStartFailed)),
        (environment, Reason::StartTimeout, false, Some(FailureCode::EnvironmentStartTimeout)),
        (model().role, Reason::Exited, true, Some(FailureCode::ModelCrashed)),
        (model().role, Reason::NodeLost, true, Some(FailureCode::PodLost)),
        (model().role, Reason::OutOfMemory, true, Some(FailureCode::OutOfMemory)),
        (model().role, Reason::ContainerCreating, false, None),
    ];
    for (role, reason, served, code) in table {
        assert_eq!(failure_code(role, reason, served), code, "{role} {reason:?}");
    }
}
