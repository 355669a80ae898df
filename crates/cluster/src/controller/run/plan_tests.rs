use std::sync::Mutex;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Container;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::controller::run::apply::{WriteError, Writes};
use crate::controller::run::{pod, reconcile};
use crate::crd::run::{ActiveBinding, RunPhase, RunStatus};

fn fixture() -> (RLMeshRun, Settings) {
    let document: Value = serde_yaml_ng::from_str(include_str!("plan_fixture.yaml")).unwrap();
    (serde_json::from_value(document["run"].clone()).unwrap(), serde_json::from_value(document["settings"].clone()).unwrap())
}

fn two_pods(index: u32) -> ActiveBinding {
    ActiveBinding { index, pods: 2, lanes_per_pod: 2 }
}

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn look(run: &RLMeshRun, pods: &[Pod], settings: &Settings) -> Plan {
    plan(&Observed { run: Arc::new(run.clone()), pods: pods.iter().cloned().map(Arc::new).collect(), policy: None }, settings, now())
}

fn created(plan: &Plan) -> Vec<String> {
    plan.create.iter().map(|(_, pod)| pod.metadata.name.clone().unwrap().replace("run-01j0000000000000000000000a-", "")).collect()
}

fn named<'a>(plan: &'a Plan, name: &str) -> &'a Pod {
    &plan.create.iter().find(|(attempt, _)| attempt.role.to_string() == name).unwrap().1
}

fn container(pod: &Pod) -> &Container {
    &pod.spec.as_ref().unwrap().containers[0]
}

fn variable(pod: &Pod, name: &str) -> Option<String> {
    container(pod).env.as_ref().unwrap().iter().find(|variable| variable.name == name)?.value.clone()
}

#[test]
fn a_new_run_gets_its_policy_and_its_pods() {
    let (run, settings) = fixture();
    let plan = look(&run, &[], &settings);
    assert_eq!(created(&plan), ["model-0-1", "env-0-0-1", "env-0-1-1", "runner-1"]);
    assert!(plan.delete.is_empty() && plan.look_again.is_none());
    assert!(plan.components.iter().all(|component| component.reason == Some(Reason::Creating)));
    let policy = serde_json::to_value(plan.policy.unwrap()).unwrap();
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress"]));
    assert_eq!(policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["rlmesh.dev/component"], "runner");
    assert_eq!(policy["spec"]["ingress"][0]["ports"], json!([{"port": 50051, "protocol": "TCP"}]));
    assert_eq!(policy["metadata"]["ownerReferences"][0]["uid"], "11111111-1111-1111-1111-111111111111");
}

#[test]
fn every_pod_is_restricted_and_owned() {
    let (run, settings) = fixture();
    for (attempt, pod) in look(&run, &[], &settings).create {
        let document = serde_json::to_value(&pod).unwrap();
        let (spec, main) = (&document["spec"], &document["spec"]["containers"][0]);
        assert_eq!(spec["restartPolicy"], "Never");
        assert_eq!(spec["automountServiceAccountToken"], false);
        assert_eq!(spec["terminationGracePeriodSeconds"], 15);
        assert_eq!(
            spec["securityContext"],
            json!({"runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532, "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}})
        );
        assert_eq!(main["securityContext"]["allowPrivilegeEscalation"], false);
        assert_eq!(main["securityContext"]["capabilities"], json!({"drop": ["ALL"]}));
        assert_eq!(spec["nodeSelector"], json!({"pool": "evaluations"}));
        assert_eq!(spec["priorityClassName"], "low");
        assert_eq!(spec["imagePullSecrets"], json!([{"name": "rlmesh-registry"}]));
        let tolerated: Vec<_> =
            spec["tolerations"].as_array().unwrap().iter().map(|one| (&one["key"], &one["tolerationSeconds"])).collect();
        assert!(tolerated.contains(&(&json!("node.kubernetes.io/unreachable"), &json!(30))), "{tolerated:?}");
        assert!(tolerated.contains(&(&json!("node.kubernetes.io/not-ready"), &json!(30))));
        assert!(tolerated.contains(&(&json!("gpu"), &Value::Null)));
        let labels = &document["metadata"]["labels"];
        assert_eq!(labels["rlmesh.dev/run"], "run_01j0000000000000000000000a", "the owner's labels can't take it over");
        assert_eq!(labels["rlmesh.dev/evaluation"], "eval_01j0000000000000000000000b");
        assert_eq!(labels["rlmesh.dev/component"], attempt.role.kind());
        assert_eq!(labels["team"], "robots");
        let owner = &document["metadata"]["ownerReferences"][0];
        assert_eq!((&owner["kind"], &owner["controller"], &owner["blockOwnerDeletion"]), (&json!("RLMeshRun"), &json!(true), &Value::Null));
        let mounts: Vec<_> = main["volumeMounts"].as_array().unwrap().iter().map(|mount| mount["mountPath"].as_str().unwrap()).collect();
        assert!(mounts.contains(&"/tmp"), "{mounts:?}");
    }
}

#[test]
fn the_model_is_started_as_on_a_local_cell() {
    let (run, settings) = fixture();
    let plan = look(&run, &[], &settings);
    let model = named(&plan, "model-0");
    assert_eq!(container(model).command.as_deref().unwrap(), ["python3", "-m", "rlmesh.serve", "policies:PushLeft"]);
    assert_eq!(variable(model, "RLMESH_ADDRESS").as_deref(), Some("0.0.0.0:50051"));
    assert_eq!(variable(model, "RLMESH_MAKE_KWARGS").as_deref(), Some(r#"{"scale":1.0,"weights":"/artifacts/weights"}"#), "1.0 stays 1.0");
    assert_eq!(variable(model, "NVIDIA_VISIBLE_DEVICES"), None);
    for name in ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"] {
        assert_eq!(variable(model, name).as_deref(), Some("http://10.96.0.30:3128"), "{name}");
    }
    assert!(variable(model, "no_proxy").is_some() && variable(model, "NO_PROXY").is_some());
    let document = serde_json::to_value(model).unwrap();
    let main = &document["spec"]["containers"][0];
    assert_eq!(main["resources"], json!({"limits": {"memory": "4Gi", "nvidia.com/gpu": "1"}, "requests": {"cpu": "2", "memory": "4Gi"}}));
    assert_eq!(main["startupProbe"]["grpc"]["port"], 50051);
    assert_eq!(main["startupProbe"]["failureThreshold"], 120);
    let secret = main["env"].as_array().unwrap().iter().find(|variable| variable["name"] == "HF_TOKEN").unwrap();
    assert_eq!(secret["valueFrom"]["secretKeyRef"], json!({"name": "hf", "key": "token"}));
    let mount = main["volumeMounts"].as_array().unwrap().iter().find(|mount| mount["mountPath"] == "/artifacts/weights").unwrap();
    assert_eq!((&mount["subPath"], &mount["readOnly"]), (&json!("sha256-1"), &json!(true)));
    let shm = document["spec"]["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == "shm").unwrap();
    assert_eq!(shm["emptyDir"], json!({"medium": "Memory", "sizeLimit": "1Gi"}));
    // The owner's zone, the product and the cache's node hold together.
    let term = &document["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let expressions: Vec<_> = term[0]["matchExpressions"].as_array().unwrap().iter().map(|one| one["key"].as_str().unwrap()).collect();
    assert_eq!((term.as_array().unwrap().len(), expressions), (1, vec!["zone", "nvidia.com/gpu.product"]));
    assert_eq!(term[0]["matchFields"][0]["values"], json!(["node-a"]));
}

#[test]
fn variables_reach_the_container_as_they_were_written_but_for_who_sees_which_gpu() {
    let (mut run, settings) = fixture();
    let model = run.spec.model.as_mut().unwrap();
    model.params = r#"{"prompt":"$$x^2$$ $(HOME)"}"#.to_owned();
    model.program.env.insert("NVIDIA_VISIBLE_DEVICES".to_owned(), "all".to_owned());
    model.program.secret_env.insert("NVIDIA_VISIBLE_DEVICES".to_owned(), "hf/token".to_owned());
    let plan = look(&run, &[], &settings);
    let model = named(&plan, "model-0");
    // Kubernetes makes one dollar of two, and replaces nothing behind two.
    let expected = r#"{"prompt":"$$$$x^2$$$$ $$(HOME)","weights":"/artifacts/weights"}"#;
    assert_eq!(variable(model, "RLMESH_MAKE_KWARGS").as_deref(), Some(expected));
    assert!(container(model).env.as_ref().unwrap().iter().all(|variable| variable.name != "NVIDIA_VISIBLE_DEVICES"));
}

#[test]
fn nodes_by_name_are_taken_beside_the_label_or_alone() {
    let (mut run, settings) = fixture();
    let terms = |run: &RLMeshRun| {
        let plan = look(run, &[], &settings);
        let document = serde_json::to_value(named(&plan, "model-0")).unwrap();
        let affinity = &document["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        let keys = |term: &Value| {
            let all = ["matchExpressions", "matchFields"].map(|kind| term[kind].as_array().cloned().unwrap_or_default());
            all.concat().iter().map(|one| format!("{}={}", one["key"].as_str().unwrap(), one["values"][0].as_str().unwrap())).collect()
        };
        affinity["nodeSelectorTerms"].as_array().unwrap().iter().map(keys).collect::<Vec<Vec<String>>>()
    };
    let labelled = terms(&run).swap_remove(0);
    run.spec.model.as_mut().unwrap().program.resources.gpu_nodes = vec!["node-b".to_owned()];
    let both = terms(&run);
    assert_eq!((both.len(), &both[0]), (2, &labelled));
    assert!(both[1].contains(&"metadata.name=node-b".to_owned()) && both[1][0] == labelled[0], "{both:?}");
    run.spec.model.as_mut().unwrap().program.resources.gpu_product = None;
    assert_eq!(terms(&run), both[1..]);
}

#[test]
fn environments_get_their_binding_and_may_share_the_models_gpu() {
    let (mut run, settings) = fixture();
    run.spec.active_bindings = [1, 0].map(two_pods).to_vec();
    let plan = look(&run, &[], &settings);
    assert_eq!(created(&plan), ["model-0-1", "env-1-0-1", "env-1-1-1", "env-0-0-1", "env-0-1-1", "runner-1"]);
    let environment = named(&plan, "env-0-1");
    assert_eq!(container(environment).command.as_deref().unwrap(), ["python3", "-m", "rlmesh.serve", "--env", "envs:CartPole"]);
    assert_eq!(variable(environment, "RLMESH_MAKE_KWARGS").as_deref(), Some(r#"{"gravity":9.0}"#));
    assert_eq!(variable(named(&plan, "env-1-0"), "RLMESH_MAKE_KWARGS").as_deref(), Some("{}"));
    assert_eq!(variable(environment, "RLMESH_NUM_ENVS").as_deref(), Some("2"));
    assert_eq!(variable(environment, "OMP_NUM_THREADS").as_deref(), Some("1"));
    assert_eq!(variable(environment, "PYTHONPATH").as_deref(), Some("/srv/envs"));
    assert_eq!(variable(environment, "NVIDIA_VISIBLE_DEVICES").as_deref(), Some("all"));
    let document = serde_json::to_value(environment).unwrap();
    let probe = &document["spec"]["containers"][0]["startupProbe"];
    assert_eq!((&probe["tcpSocket"]["port"], &probe["grpc"], &probe["failureThreshold"]), (&json!(50051), &Value::Null, &json!(600)));
    let beside = &document["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0];
    assert_eq!(beside["labelSelector"]["matchLabels"]["rlmesh.dev/component"], "model");
    let taint = json!({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"});
    assert!(document["spec"]["tolerations"].as_array().unwrap().contains(&taint));
    run.spec.environments.as_mut().unwrap().share_model_gpu = false;
    let plan = look(&run, &[], &settings);
    assert_eq!(variable(named(&plan, "env-0-0"), "NVIDIA_VISIBLE_DEVICES").as_deref(), Some("void"));
}

#[test]
fn only_the_runner_has_a_token() {
    let (run, settings) = fixture();
    let plan = look(&run, &[], &settings);
    for (attempt, pod) in &plan.create {
        let tokens = pod.spec.as_ref().unwrap().volumes.iter().flatten().filter(|volume| volume.projected.is_some()).count();
        assert_eq!(tokens, usize::from(attempt.role == Role::Runner), "{}", attempt.role);
    }
    let document = serde_json::to_value(named(&plan, "runner")).unwrap();
    let token = document["spec"]["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == "token").unwrap();
    assert_eq!(token["projected"]["sources"][0]["serviceAccountToken"]["audience"], "rlmesh-agent");
    let command = container(named(&plan, "runner")).command.clone().unwrap().join(" ");
    let expected = format!("--agent tcp://10.96.0.20:7443 --agent-key {} --run run_01j0000000000000000000000a", "0a".repeat(32));
    assert!(command.contains(&expected), "{command}");
}

#[test]
fn openshift_picks_its_own_ids() {
    let (run, mut settings) = fixture();
    settings.pod_security = None;
    let pod = serde_json::to_value(named(&look(&run, &[], &settings), "model-0")).unwrap();
    assert_eq!(pod["spec"]["securityContext"], json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}}));
}

#[test]
fn what_is_not_allowed_here_says_so_and_gets_no_pod() {
    type Change = fn(&mut RLMeshRun, &mut Settings);
    let table: [(Change, Reason, ComponentPhase, &str); 6] = [
        (|_, settings| settings.allowed_images = vec!["other/*".to_owned()], Reason::NotAllowed, ComponentPhase::Failed, "allowedImages"),
        (|_, settings| settings.allowed_secrets.clear(), Reason::NotAllowed, ComponentPhase::Failed, "allowedSecrets"),
        (|_, settings| settings.cache_claim = None, Reason::NotAllowed, ComponentPhase::Failed, "artifact cache"),
        (|run, _| run.status = None, Reason::ArtifactsNotReady, ComponentPhase::Pending, "weights"),
        (
            |run, _| {
                let volume = crate::crd::run::Volume { claim: "data".to_owned(), sub_path: String::new() };
                run.spec.model.as_mut().unwrap().artifacts[0].volume = Some(volume);
            },
            Reason::NotAllowed,
            ComponentPhase::Failed,
            "allowedVolumes",
        ),
        (
            |run, _| run.spec.model.as_mut().unwrap().params = "[]".to_owned(),
            Reason::InvalidDefinition,
            ComponentPhase::Failed,
            "no JSON object",
        ),
    ];
    for (change, reason, phase, word) in table {
        let (mut run, mut settings) = fixture();
        change(&mut run, &mut settings);
        let plan = look(&run, &[], &settings);
        let model = &plan.components[0];
        assert_eq!((model.reason, model.phase), (Some(reason), phase), "{word}");
        assert!(model.message.as_deref().unwrap().contains(word), "{model:?}");
        assert!(!created(&plan).contains(&"model-0-1".to_owned()));
    }
}

#[test]
fn a_describe_is_one_pod() {
    let (mut run, settings) = fixture();
    run.spec.mode = crate::crd::run::Mode::Describe;
    run.spec.model = None;
    let plan = look(&run, &[], &settings);
    assert_eq!(created(&plan), ["describe-1"]);
    let command = container(&plan.create[0].1).command.clone().unwrap();
    assert_eq!(command, ["python3", "-m", "rlmesh._describe", "--env", "envs:CartPole", "--out", "/dev/stdout"]);
    run.spec.environments.as_mut().unwrap().program.entrypoint = None;
    assert_eq!(look(&run, &[], &settings).components[0].reason, Some(Reason::InvalidDefinition));
}

#[test]
fn a_restart_does_not_wait_for_the_pod_of_a_lost_node() {
    let (mut run, settings) = fixture();
    let mut model = named(&look(&run, &[], &settings), "model-0").clone();
    model.metadata.uid = Some("m".to_owned());
    model.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    let before = look(&run, std::slice::from_ref(&model), &settings);
    assert_eq!(before.components[0].reason, Some(Reason::PodDeleted));
    assert!(!created(&before).contains(&"model-0-2".to_owned()), "the agent decides");
    run.spec.restarts.insert("model-0".to_owned(), 2);
    let plan = look(&run, &[model], &settings);
    assert!(created(&plan).contains(&"model-0-2".to_owned()));
    assert!(plan.delete.is_empty(), "it goes already");
}

#[test]
fn what_is_being_deleted_is_left_alone() {
    let (mut run, settings) = fixture();
    run.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    assert_eq!(look(&run, &[], &settings), Plan::default());
}

// ---- the cluster in memory

#[derive(Default)]
struct Cluster {
    pods: BTreeMap<String, Pod>,
    policy: Option<NetworkPolicy>,
    status: Option<RunStatus>,
    /// How often each name was made, ever.
    made: BTreeMap<String, u32>,
    /// Writes until the controller "dies".
    left: usize,
    writes: usize,
}

struct Fake(Mutex<Cluster>);

impl Fake {
    fn write<T>(&self, act: impl FnOnce(&mut Cluster) -> T) -> Result<T, WriteError> {
        let mut cluster = self.0.lock().unwrap();
        if cluster.left == 0 {
            return Err(WriteError::Unavailable("killed".to_owned()));
        }
        cluster.left -= 1;
        cluster.writes += 1;
        Ok(act(&mut cluster))
    }
}

#[async_trait]
impl Writes for Fake {
    async fn apply_policy(&self, policy: &NetworkPolicy) -> Result<(), WriteError> {
        self.write(|cluster| cluster.policy = Some(policy.clone()))
    }

    async fn create_pod(&self, pod: &Pod) -> Result<(), WriteError> {
        self.write(|cluster| {
            let name = pod.metadata.name.clone().unwrap();
            if !cluster.pods.contains_key(&name) {
                *cluster.made.entry(name.clone()).or_default() += 1;
                let mut pod = pod.clone();
                pod.metadata.uid = Some(format!("uid-of-{name}"));
                cluster.pods.insert(name, pod);
            }
        })
    }

    async fn delete_pod(&self, deletion: &Deletion) -> Result<(), WriteError> {
        self.write(|cluster| {
            assert_eq!(cluster.pods[&deletion.name].metadata.uid.as_ref(), Some(&deletion.uid));
            cluster.pods.remove(&deletion.name);
        })
    }

    async fn apply_status(&self, _run: &str, status: &RunStatus) -> Result<(), WriteError> {
        self.write(|cluster| cluster.status = Some(status.clone()))
    }
}

/// Reconciles against the fake until the controller dies (after `writes`) or nothing is left to do. Returns whether it died.
fn drive(run: &mut RLMeshRun, settings: &Settings, fake: &Fake, writes: usize) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    fake.0.lock().unwrap().left = writes;
    for _ in 0..20 {
        let (observed, before) = {
            let cluster = fake.0.lock().unwrap();
            if let Some(status) = &cluster.status {
                let artifacts = run.status.take().map(|status| status.artifacts).unwrap_or_default();
                run.status = Some(RunStatus { artifacts, ..status.clone() });
            }
            let pods = cluster.pods.values().cloned().map(Arc::new).collect();
            (Observed { run: Arc::new(run.clone()), pods, policy: cluster.policy.clone().map(Arc::new) }, cluster.writes)
        };
        if runtime.block_on(reconcile(&observed, settings, fake, now())).is_err() {
            return true;
        }
        if fake.0.lock().unwrap().writes == before {
            return false;
        }
    }
    panic!("it does not come to rest: {:#?}", run.status);
}

/// What users, kubelets and the agent do.
#[derive(Debug, Clone)]
enum Happening {
    Killed(usize),
    Restart(u8),
    Release(u8),
    Bindings(Vec<u32>),
    Serves(u8),
    Ends(u8, i32),
    DeletedByHand(u8),
    Cancel,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (0_usize..6).prop_map(Happening::Killed),
        2 => any::<u8>().prop_map(Happening::Restart),
        2 => any::<u8>().prop_map(Happening::Release),
        2 => proptest::sample::subsequence(vec![0_u32, 1], 0..=2).prop_map(Happening::Bindings),
        3 => any::<u8>().prop_map(Happening::Serves),
        2 => (any::<u8>(), 0_i32..2).prop_map(|(which, code)| Happening::Ends(which, code)),
        1 => any::<u8>().prop_map(Happening::DeletedByHand),
        1 => Just(Happening::Cancel),
    ]
}

fn pick<T: Clone>(items: &[T], which: u8) -> Option<T> {
    (!items.is_empty()).then(|| items[usize::from(which) % items.len()].clone())
}

fn container_state(ready: bool, state: Value) -> k8s_openapi::api::core::v1::PodStatus {
    serde_json::from_value(json!({"podIP": "10.0.0.1", "containerStatuses": [
        {"name": "main", "image": "i", "imageID": "i", "ready": ready, "restartCount": 0, "state": state}]}))
    .unwrap()
}

fn happen(happening: &Happening, run: &mut RLMeshRun, settings: &Settings, fake: &Fake) {
    let components: Vec<String> = wanted(run).iter().map(|attempt| attempt.role.to_string()).collect();
    let pods: Vec<String> = fake.0.lock().unwrap().pods.keys().cloned().collect();
    let set_status = |name: String, status| {
        if let Some(pod) = fake.0.lock().unwrap().pods.get_mut(&name) {
            pod.status = Some(status);
        }
    };
    match happening {
        Happening::Killed(writes) => drop(drive(run, settings, fake, *writes)),
        Happening::Restart(which) => {
            if let Some(name) = pick(&components, *which) {
                *run.spec.restarts.entry(name).or_insert(1) += 1;
            }
        }
        Happening::Release(which) => {
            if let Some(name) = pick(&components, *which) {
                let attempt = run.spec.restarts.get(&name).copied().unwrap_or(1);
                run.spec.released_attempts.insert(name, attempt);
            }
        }
        Happening::Bindings(active) => {
            for binding in active.iter().filter(|binding| !run.spec.active_bindings.iter().any(|active| active.index == **binding)) {
                for pod in 0..2 {
                    *run.spec.restarts.entry(format!("env-{binding}-{pod}")).or_insert(1) += 1;
                }
            }
            run.spec.active_bindings = active.iter().copied().map(two_pods).collect();
        }
        Happening::Serves(which) => {
            if let Some(name) = pick(&pods, *which) {
                set_status(name, container_state(true, json!({"running": {}})));
            }
        }
        Happening::Ends(which, code) => {
            if let Some(name) = pick(&pods, *which) {
                set_status(name, container_state(false, json!({"terminated": {"exitCode": code, "reason": "Error"}})));
            }
        }
        // One that the status does not name yet may be made again, and should.
        Happening::DeletedByHand(which) => {
            let mut cluster = fake.0.lock().unwrap();
            let known: Vec<String> =
                cluster.status.iter().flat_map(|status| &status.components).filter_map(|component| component.pod.clone()).collect();
            if let Some(name) = pick(&known, *which) {
                cluster.pods.remove(&name);
            }
        }
        Happening::Cancel => run.spec.cancel = true,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Whatever happened and wherever the controller died: it comes to rest with each wanted attempt's one pod, no pod was
    /// ever made twice, and none is left that nothing asks for.
    #[test]
    fn it_converges_from_anywhere(happenings in proptest::collection::vec(happening(), 0..24)) {
        let (mut run, settings) = fixture();
        let fake = Fake(Mutex::default());
        for happening in &happenings {
            happen(happening, &mut run, &settings, &fake);
        }
        prop_assert!(!drive(&mut run, &settings, &fake, usize::MAX));
        let cluster = fake.0.lock().unwrap();
        for (name, times) in &cluster.made {
            prop_assert_eq!(*times, 1, "{} was made {} times", name, times);
        }
        let run_name = run.metadata.name.clone().unwrap();
        let status = cluster.status.clone().unwrap();
        let over = |attempt: Attempt| {
            status.components.iter().any(|component| component.name == attempt.role.to_string() && component.attempt == attempt.number && component.phase.over())
        };
        let wanted = wanted(&run);
        for &attempt in &wanted {
            prop_assert!(over(attempt) || cluster.pods.contains_key(&attempt.pod_name(&run_name)), "{:?} has no pod", attempt);
        }
        for name in cluster.pods.keys() {
            let attempt = Attempt::of_pod(&run_name, name).unwrap();
            let kept = over(attempt) && !released(&run, attempt) && !run.spec.cancel;
            prop_assert!((wanted.contains(&attempt) && !over(attempt)) || kept, "{} is left", name);
        }
        if run.spec.cancel {
            prop_assert_eq!(status.phase, Some(RunPhase::Cancelled));
            prop_assert!(cluster.pods.is_empty());
        }
    }
}

#[test]
fn dying_after_each_single_write_changes_nothing_of_the_result() {
    let undisturbed = |steps: &[usize]| {
        let (mut run, settings) = fixture();
        let fake = Fake(Mutex::default());
        for &writes in steps {
            drive(&mut run, &settings, &fake, writes);
        }
        assert!(!drive(&mut run, &settings, &fake, usize::MAX));
        let cluster = fake.0.into_inner().unwrap();
        (cluster.pods, cluster.policy, cluster.status, cluster.made)
    };
    let expected = undisturbed(&[]);
    assert_eq!(expected.0.len(), 4);
    for writes in 0..8 {
        assert_eq!(undisturbed(&[writes]), expected, "after {writes}");
    }
    assert_eq!(undisturbed(&[1; 12]), expected, "after every one");
}

#[test]
fn a_pod_that_ended_stays_until_its_logs_are_kept_elsewhere() {
    let (mut run, settings) = fixture();
    let fake = Fake(Mutex::default());
    drive(&mut run, &settings, &fake, usize::MAX);
    let model = "run-01j0000000000000000000000a-model-0-1".to_owned();
    fake.0.lock().unwrap().pods.get_mut(&model).unwrap().status =
        Some(container_state(false, json!({"terminated": {"exitCode": 3, "reason": "Error"}})));
    drive(&mut run, &settings, &fake, usize::MAX);
    let first = |fake: &Fake| fake.0.lock().unwrap().status.clone().unwrap().components[0].clone();
    assert_eq!((first(&fake).phase, first(&fake).exit_code), (ComponentPhase::Failed, Some(3)));
    run.spec.restarts.insert("model-0".to_owned(), 2);
    drive(&mut run, &settings, &fake, usize::MAX);
    assert_eq!(first(&fake).attempt, 2);
    assert!(fake.0.lock().unwrap().pods.contains_key(&model), "its logs are not kept yet");
    run.spec.released_attempts.insert("model-0".to_owned(), 1);
    drive(&mut run, &settings, &fake, usize::MAX);
    assert!(!fake.0.lock().unwrap().pods.contains_key(&model));
}

#[test]
fn the_status_sums_up_and_keeps_its_times() {
    let (mut run, settings) = fixture();
    let fake = Fake(Mutex::default());
    drive(&mut run, &settings, &fake, usize::MAX);
    let status = run.status.clone().unwrap();
    assert_eq!((status.phase, status.pods_ready.as_deref()), (Some(RunPhase::Starting), Some("0/4")));
    assert_eq!(status.observed_generation, Some(3));
    let names: Vec<String> = fake.0.lock().unwrap().pods.keys().cloned().collect();
    for name in names {
        fake.0.lock().unwrap().pods.get_mut(&name).unwrap().status = Some(container_state(true, json!({"running": {}})));
    }
    drive(&mut run, &settings, &fake, usize::MAX);
    let status = run.status.clone().unwrap();
    assert_eq!((status.phase, status.pods_ready.as_deref()), (Some(RunPhase::Running), Some("4/4")));
    assert!(status.conditions.iter().all(|condition| condition.status == crate::crd::ConditionStatus::True), "{:?}", status.conditions);
    let later = now().saturating_add(SignedDuration::from_secs(60)).unwrap();
    let observed = {
        let cluster = fake.0.lock().unwrap();
        let pods = cluster.pods.values().cloned().map(Arc::new).collect();
        Observed { run: Arc::new(run.clone()), pods, policy: cluster.policy.clone().map(Arc::new) }
    };
    let before = fake.0.lock().unwrap().writes;
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(reconcile(&observed, &settings, &fake, later)).unwrap();
    assert_eq!(fake.0.lock().unwrap().writes, before, "time alone writes nothing");
    assert_eq!(pod::run_id("run-1"), "run_1");
}
