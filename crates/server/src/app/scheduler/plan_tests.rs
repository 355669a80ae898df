use proptest::prelude::*;

use super::*;

fn needs(image: bool, process: bool) -> Arc<Needs> {
    let part = |name: &str| Part { name: name.to_owned(), image, process, ..Part::default() };
    Arc::new(Needs {
        parts: vec![part("model 'm'"), part("environment 'e'")],
        first_generation: 0,
        queue_timeout_ms: 1000,
        reassign_after_ms: 1000,
    })
}

fn waiter(organization: OrganizationId, submitter: &str, created_at: i64) -> Waiter {
    Waiter {
        id: RunId::generate(),
        organization,
        pinned: None,
        priority: 0,
        submitter: submitter.to_owned(),
        created_at,
        queued_at: created_at,
        needs: needs(false, true),
    }
}

fn cell(organization: OrganizationId) -> Candidate {
    Candidate {
        id: ClusterId::generate(),
        organization,
        name: "lab".to_owned(),
        archived: false,
        connected: true,
        draining: false,
        executor: Some(Executor::Process),
        placed: 0,
        room: 50,
        gpus: Vec::new(),
    }
}

fn one(waiter: &Waiter, clusters: &[Candidate], now_ms: i64) -> Verdict {
    plan(std::slice::from_ref(waiter), clusters.to_vec(), HashMap::new(), now_ms).remove(0).1
}

fn cause(verdict: &Verdict) -> &str {
    match verdict {
        Verdict::Wait { cause, .. } => cause,
        Verdict::Fail(failure) => failure.code.as_str(),
        Verdict::Place(_) => "place",
    }
}

#[test]
fn each_obstacle_has_its_cause() {
    let organization = OrganizationId::generate();
    let run = waiter(organization, "a", 0);
    let gpu_run = Waiter {
        needs: Arc::new(Needs {
            parts: vec![Part {
                name: "model 'm'".to_owned(),
                process: true,
                gpus: 2,
                gpu_product: Some("H100".to_owned()),
                ..Part::default()
            }],
            queue_timeout_ms: 1000,
            ..Needs::default()
        }),
        ..run.clone()
    };
    let base = cell(organization);
    assert_eq!(one(&run, std::slice::from_ref(&base), 0), Verdict::Place(base.id));
    for (run, cluster, expected) in [
        (&run, Candidate { connected: false, ..base.clone() }, "clusterDisconnected"),
        (&run, Candidate { draining: true, ..base.clone() }, "clusterDraining"),
        (&run, Candidate { executor: None, ..base.clone() }, "noCluster"),
        (&run, Candidate { placed: MOST_PER_CLUSTER, ..base.clone() }, "capacity"),
        (&run, Candidate { room: 0, ..base.clone() }, "capacity"),
        (&run, Candidate { organization: OrganizationId::generate(), ..base.clone() }, "noCluster"),
        (&run, Candidate { executor: Some(Executor::Kubernetes), ..base.clone() }, "not_runnable_here"),
        (&gpu_run, base.clone(), "gpu"),
        (&gpu_run, Candidate { gpus: vec![Gpus { product: "NVIDIA H100".to_owned(), count: 1 }], ..base.clone() }, "gpu"),
        (&gpu_run, Candidate { gpus: vec![Gpus { product: "NVIDIA A100".to_owned(), count: 8 }], ..base.clone() }, "gpu"),
        (&gpu_run, Candidate { gpus: vec![Gpus { product: "nvidia h100 80GB".to_owned(), count: 2 }], ..base.clone() }, "place"),
    ] {
        assert_eq!(cause(&one(run, std::slice::from_ref(&cluster), 0)), expected, "{cluster:?}");
    }
    assert_eq!(cause(&one(&run, &[], 0)), "noCluster");
    let other = Candidate { gpus: vec![Gpus { product: "NVIDIA A100".to_owned(), count: 8 }], ..base };
    let Verdict::Wait { message, .. } = one(&gpu_run, &[other], 0) else { panic!("it does not wait") };
    assert_eq!(
        message,
        "no machine of cluster lab has the GPUs: model 'm' needs 2 GPUs (H100); there are at most, on one machine: 8 NVIDIA A100"
    );
}

#[test]
fn the_wrong_kind_fails_only_when_nothing_else_could_come() {
    let organization = OrganizationId::generate();
    let run = waiter(organization, "a", 0);
    let kubernetes = Candidate { executor: Some(Executor::Kubernetes), ..cell(organization) };
    let pending = Candidate { executor: None, ..cell(organization) };
    let away = Candidate { connected: false, ..cell(organization) };
    assert_eq!(cause(&one(&run, &[kubernetes.clone(), pending.clone()], 0)), "noCluster");
    assert_eq!(cause(&one(&run, &[kubernetes.clone(), away], 0)), "clusterDisconnected");
    let pinned = Waiter { pinned: Some(kubernetes.id), ..run };
    let verdict = one(&pinned, &[kubernetes, pending], 0);
    let Verdict::Fail(failure) = verdict else { panic!("{verdict:?}") };
    assert_eq!(failure.message, "cluster lab runs images, so it needs `image` for model 'm' and environment 'e'");
}

#[test]
fn a_run_bound_to_an_archived_cluster_fails() {
    let organization = OrganizationId::generate();
    let archived = Candidate { archived: true, ..cell(organization) };
    let pinned = Waiter { pinned: Some(archived.id), ..waiter(organization, "a", 0) };
    assert_eq!(cause(&one(&pinned, &[archived], 0)), "not_runnable_here");
    assert_eq!(cause(&one(&pinned, &[], 0)), "not_runnable_here");
}

#[test]
fn waiting_ends_with_the_queue_timeout_and_says_why() {
    let organization = OrganizationId::generate();
    let run = waiter(organization, "a", 5);
    let away = Candidate { connected: false, ..cell(organization) };
    assert_eq!(cause(&one(&run, std::slice::from_ref(&away), 1004)), "clusterDisconnected");
    let Verdict::Fail(failure) = one(&run, &[away], 1005) else { panic!("no failure") };
    assert_eq!(failure.code, FailureCode::QueueTimeout);
    assert!(failure.message.contains("cluster lab is disconnected"), "{}", failure.message);
    assert_eq!(cause(&one(&run, &[cell(organization)], 1_000_000)), "place", "a run that fits is placed however long it waited");
}

#[test]
fn submitters_take_turns_and_priority_comes_first() {
    let organization = OrganizationId::generate();
    let mut waiters: Vec<Waiter> = (0..4).map(|at| waiter(organization, "many", at)).collect();
    waiters.push(waiter(organization, "few", 10));
    waiters.push(Waiter { priority: 1, ..waiter(organization, "many", 20) });
    let order: Vec<RunId> = plan(&waiters, vec![cell(organization)], HashMap::new(), 0).into_iter().map(|(id, _)| id).collect();
    // `many` has one from its urgent run when the others' turn comes.
    assert_eq!(order, [5, 4, 0, 1, 2, 3].map(|place: usize| waiters[place].id));
}

#[test]
fn an_idle_cluster_comes_before_a_busy_one() {
    let organization = OrganizationId::generate();
    let busy = Candidate { placed: 3, ..cell(organization) };
    let idle = cell(organization);
    assert_eq!(one(&waiter(organization, "a", 0), &[busy, idle.clone()], 0), Verdict::Place(idle.id));
}

#[test]
fn leases_end_only_for_their_reasons() {
    let lease = Lease { pinned: false, cancel_requested: false, archived: false, disconnected_at: None, reassign_after_ms: 100 };
    assert_eq!(reclaim(lease, 1000), Reclaim::Keep);
    assert_eq!(reclaim(Lease { disconnected_at: Some(950), ..lease }, 1000), Reclaim::Keep);
    assert_eq!(reclaim(Lease { disconnected_at: Some(900), ..lease }, 1000), Reclaim::GiveUp);
    assert_eq!(reclaim(Lease { disconnected_at: Some(0), pinned: true, ..lease }, 1000), Reclaim::Keep);
    assert_eq!(reclaim(Lease { archived: true, pinned: true, ..lease }, 1000), Reclaim::Fail);
    assert_eq!(reclaim(Lease { archived: true, ..lease }, 1000), Reclaim::GiveUp);
    assert_eq!(reclaim(Lease { cancel_requested: true, disconnected_at: Some(950), ..lease }, 1000), Reclaim::TellCancel);
    assert_eq!(reclaim(Lease { cancel_requested: true, disconnected_at: Some(900), pinned: true, ..lease }, 1000), Reclaim::Cancel);
    assert_eq!(reclaim(Lease { cancel_requested: true, archived: true, ..lease }, 1000), Reclaim::Cancel);
}

proptest! {
    #[test]
    fn no_cluster_gets_more_than_it_may_and_each_run_one_verdict(
        placed in proptest::collection::vec((0_u64..70, 0_u64..60, any::<bool>(), any::<bool>()), 0..4),
        runs in proptest::collection::vec((0_u8..3, -1_i64..2, 0_i64..100), 0..80),
    ) {
        let organization = OrganizationId::generate();
        let clusters: Vec<Candidate> = placed
            .iter()
            .map(|&(placed, room, connected, draining)| Candidate { placed, room, connected, draining, ..cell(organization) })
            .collect();
        let waiters: Vec<Waiter> = runs
            .iter()
            .map(|&(submitter, priority, created_at)| Waiter { priority, ..waiter(organization, &submitter.to_string(), created_at) })
            .collect();
        let verdicts = plan(&waiters, clusters.clone(), HashMap::new(), 0);
        prop_assert_eq!(verdicts.len(), waiters.len());
        for cluster in &clusters {
            let got = verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Place(cluster.id)).count() as u64;
            prop_assert!(got <= cluster.room && (got == 0 || cluster.placed + got <= MOST_PER_CLUSTER));
            prop_assert!(got == 0 || (cluster.connected && !cluster.draining));
        }
    }
}
