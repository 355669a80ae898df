//! Faults on a real Kubernetes, one installation for all: what becomes of the rows, and what a user reads meanwhile and
//! afterwards. Rows are those of the undisturbed run, byte for byte, or errored with the class and code of who is to blame.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use k8s_openapi::jiff::Timestamp;
use kube::api::DeleteParams;
use rlm_e2e::bed::faults::Link;
use rlm_e2e::bed::lab::Lab;
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::{pod, with_space};
use rlm_e2e::bed::{Component, Node, Place};
use rlm_e2e::processes::Process;
use rlm_e2e::{counter, wait_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(300);
/// Seeds of the rows of a fault that is the user's own; the one that misbehaves.
const SEEDS: [u64; 4] = [1, 2, 3, 4];
const BAD: u64 = 3;
/// Episodes of a run that is disturbed.
const EPISODES: u64 = 60;
/// Models that no node has pulled.
const UNSEEN: [&str; 2] = ["unseen-1", "unseen-2"];
const GPU: &str = "nvidia.com/gpu";
/// A variable that this cluster's rules allow in no pod.
const REFUSED: &str = "NOT_HERE";

type Images = BTreeMap<&'static str, String>;

fn model(images: &Images, tag: &str, more: Value) -> anyhow::Result<Value> {
    merged(json!({"id": "model", "image": images.get(tag).context("no such image")?, "params": {}}), more)
}

fn env(images: &Images, more: Value) -> anyhow::Result<Value> {
    merged(json!({"id": "env", "image": images.get("env").context("no such image")?, "params": {}}), more)
}

fn merged(mut one: Value, more: Value) -> anyhow::Result<Value> {
    let (fields, Value::Object(more)) = (one.as_object_mut().context("no object")?, more) else { anyhow::bail!("no object") };
    fields.extend(more);
    Ok(one)
}

/// What misbehaves in the episode with the bad seed.
fn misbehaves(mode: &str) -> Value {
    json!({"params": {"mode": mode, "at": 2, "seed": BAD}})
}

fn request(name: &str, model: Value, env: Value, limits: Value) -> Value {
    json!({
        "name": name,
        "models": [model],
        "environments": [env],
        "tasks": [{"env": "env", "taskId": "counter", "params": {}, "episodes": SEEDS.len(), "seeds": SEEDS, "workers": 1}],
        "limits": limits,
    })
}

/// A run that takes long enough for something to happen to it.
fn disturbed(name: &str, images: &Images, tag: &str) -> anyhow::Result<Value> {
    let slow = json!({"params": {"mode": "slow_step", "at": 2, "seconds": 0.25}});
    let mut request = request(name, model(images, tag, json!({}))?, env(images, slow)?, json!({}));
    request["tasks"][0] =
        json!({"env": "env", "taskId": "counter", "params": {}, "episodes": EPISODES, "seed": 1000, "trialIndexBase": 7, "workers": 1});
    Ok(request)
}

/// Which rows are errored.
#[derive(Clone, Copy, PartialEq)]
enum Rows {
    Bad,
    All,
}

/// A fault that is the user's own, or that ends by a limit of the user's.
struct Fault {
    name: &'static str,
    request: Value,
    /// Cause and words that are shown while it waits.
    waits: Option<(&'static str, &'static [&'static str])>,
    rows: Rows,
    blamed: (&'static str, &'static str),
    message: &'static [&'static str],
}

fn faults(images: &Images) -> anyhow::Result<Vec<Fault>> {
    let plain = || env(images, json!({}));
    let quick = json!({"startupTimeout": "12s"});
    let missing =
        json!({"image": format!("{}:no-such-tag", images["model"].split('@').next().unwrap_or_default()), "startupTimeout": "12s"});
    let once = json!({"environmentCrashRetries": 0, "progressTimeout": "8s", "maxErroredFraction": 1.0});
    let brief = json!({"queueTimeout": "15s", "maxErroredFraction": 1.0});
    let good = || model(images, "model", json!({}));
    let never = |name: &'static str, model, waits, blamed, message| -> anyhow::Result<Fault> {
        let limits = if name.contains("unschedulable") || name == "no GPU" { brief.clone() } else { once.clone() };
        Ok(Fault { name, request: request(name, model, plain()?, limits), waits, rows: Rows::All, blamed, message })
    };
    let once_bad = |name, model, env, blamed, message| Fault {
        name,
        request: request(name, model, env, once.clone()),
        waits: None,
        rows: Rows::Bad,
        blamed,
        message,
    };
    Ok(vec![
        never(
            "image missing",
            model(images, "model", missing)?,
            Some(("imagePull", &["no-such-tag", "not found", "push it"])),
            ("infrastructure", "image_pull_failed"),
            &["model-0: the image can't be pulled", "no-such-tag", "not found", "push it"],
        )?,
        never(
            "wrong architecture, by the image's index",
            model(images, "foreign", quick)?,
            Some(("imagePull", &["no match for platform", "linux/amd64"])),
            ("infrastructure", "image_pull_failed"),
            &["no match for platform", "linux/amd64"],
        )?,
        never(
            "wrong architecture, by its program",
            // The kubelet may try without the Secret at first, and again after a pause.
            model(images, "alien", json!({"startupTimeout": "60s"}))?,
            None,
            ("user", "invalid_entrypoint"),
            &["exec format error", "architecture"],
        )?,
        never(
            "unschedulable, cpu",
            model(images, "model", json!({"resources": {"cpu": "64"}}))?,
            Some(("unschedulable", &["0/2 nodes are available", "2 Insufficient cpu", "ask for less"])),
            ("infrastructure", "unschedulable"),
            &["0/2 nodes are available", "2 Insufficient cpu", "ask for less", "waited 15 s"],
        )?,
        never(
            "unschedulable, GPU",
            model(images, "model", json!({"resources": {"gpu": 1}}))?,
            Some(("unschedulable", &["0/2 nodes are available", "Insufficient nvidia.com/gpu", "ask for less"])),
            ("infrastructure", "unschedulable"),
            &["0/2 nodes are available", "Insufficient nvidia.com/gpu", "waited 15 s"],
        )?,
        never(
            "no GPU",
            model(images, "model", json!({"resources": {"gpu": 2}}))?,
            Some(("gpu", &["no machine of cluster bed has the GPUs", "2 GPU"])),
            ("infrastructure", "queue_timeout"),
            &["within 15 s", "no machine of cluster bed has the GPUs"],
        )?,
        never(
            "admission refused",
            model(images, "model", json!({"env": {REFUSED: "1"}}))?,
            None,
            ("infrastructure", "unschedulable"),
            &["denied request: runs may not set NOT_HERE", "a cluster admin knows"],
        )?,
        once_bad(
            "out of memory",
            good()?,
            env(images, merged(misbehaves("memory"), json!({"resources": {"memory": "192Mi"}}))?)?,
            ("infrastructure", "out_of_memory"),
            &["env-0-0", "memory limit (192Mi)", "resources.memory"],
        ),
        once_bad(
            "environment crash",
            good()?,
            env(images, misbehaves("exit"))?,
            ("environment", "environment_crashed"),
            &["env-0-0 exited with status 3"],
        ),
        once_bad(
            "model crash",
            model(images, "model", misbehaves("exit"))?,
            plain()?,
            ("model", "model_crashed"),
            &["model-0 exited with status 3"],
        ),
        once_bad("hang", good()?, env(images, misbehaves("hang"))?, ("environment", "environment_hung"), &["no progress"]),
        once_bad(
            "volume full, the pod's own",
            good()?,
            env(images, misbehaves("shm"))?,
            ("environment", "environment_error"),
            &["No space left on device"],
        ),
    ])
}

/// An evaluation that is watched to its end.
struct Watched {
    id: String,
    /// Everything that it was seen to wait for, as REST says it and as `rlmesh eval get` prints it.
    seen: Vec<(Value, String)>,
    ended: Option<Value>,
    began: Timestamp,
    took: Duration,
}

impl Watched {
    async fn submit(lab: &Lab<'_>, request: &Value) -> anyhow::Result<Self> {
        let began = Timestamp::now();
        Ok(Self { id: lab.submit(request).await?, seen: Vec::new(), ended: None, began, took: Duration::ZERO })
    }

    async fn look(&mut self, lab: &Lab<'_>) -> anyhow::Result<()> {
        let detail = lab.evaluation(&self.id).await?;
        let waiting = &detail["waiting"];
        let known = |seen: &(Value, String)| (&seen.0["cause"], &seen.0["message"]) == (&waiting["cause"], &waiting["message"]);
        if !waiting.is_null() && !self.seen.iter().any(known) {
            // The command line may already see what comes next.
            let printed = if plain_start(waiting) { String::new() } else { lab.rlmesh(&["eval", "get", &self.id]).await? };
            self.seen.push((waiting.clone(), printed));
        }
        if ["completed", "failed", "cancelled"].iter().any(|over| detail["status"] == *over) {
            self.took = Duration::try_from(Timestamp::now().duration_since(self.began)).unwrap_or_default();
            self.ended = Some(detail);
        }
        Ok(())
    }

    /// Whether it was seen to wait for this, in these words, on both ways, and since when.
    fn waited(&self, cause: &str, words: &[&str]) -> anyhow::Result<()> {
        let says = |text: &str| words.iter().all(|word| text.contains(word));
        let found = self.seen.iter().find(|(waiting, printed)| {
            waiting["cause"] == cause && says(waiting["message"].as_str().unwrap_or_default()) && says(printed) && printed.contains(cause)
        });
        let (waiting, printed) = found.with_context(|| format!("it was not seen to wait for {cause} ({words:?}) but {:#?}", self.seen))?;
        let since: Timestamp = waiting["since"].as_str().context("no time")?.parse()?;
        let slack = k8s_openapi::jiff::SignedDuration::from_secs(2);
        ensure!(since >= self.began - slack && since <= Timestamp::now() + slack, "since {since}: {waiting}");
        ensure!(printed.contains("since "), "{printed}");
        Ok(())
    }
}

fn plain_start(waiting: &Value) -> bool {
    ["modelStarting", "environmentStarting", "capacity"].iter().any(|cause| waiting["cause"] == *cause)
}

async fn watch_all(lab: &Lab<'_>, watched: &mut [Watched], limit: Duration) -> anyhow::Result<()> {
    let started = Instant::now();
    while watched.iter().any(|one| one.ended.is_none()) && started.elapsed() < limit {
        for one in watched.iter_mut().filter(|one| one.ended.is_none()) {
            one.look(lab).await?;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

/// What is wrong with an ended evaluation.
async fn check(lab: &Lab<'_>, fault: &Fault, watched: &Watched) -> anyhow::Result<String> {
    let ended = watched.ended.as_ref().with_context(|| format!("it does not end; it was seen to wait for {:#?}", watched.seen))?;
    if let Some((cause, words)) = fault.waits {
        watched.waited(cause, words)?;
    }
    let rows = lab.rows(&watched.id).await?;
    ensure!(rows.len() == SEEDS.len(), "{} rows", rows.len());
    let mut said = String::new();
    for row in &rows {
        if fault.rows == Rows::Bad && row["seed"] != BAD {
            counter::check_follower(row)?;
            continue;
        }
        let failure = &row["failure"];
        ensure!(row["outcome"] == "errored" && row["reward"].is_null() && row["success"].is_null(), "it is scored: {row}");
        ensure!(failure["class"] == fault.blamed.0 && failure["code"] == fault.blamed.1, "blamed otherwise: {failure:#}");
        said = failure["message"].as_str().unwrap_or_default().to_owned();
        ensure!(fault.message.iter().all(|word| said.contains(word)), "the message lacks one of {:?}: {failure:#}", fault.message);
    }
    // What a user asks first says the same.
    let printed = lab.rlmesh(&["eval", "get", &watched.id]).await?;
    ensure!(printed.contains(&said) && printed.contains(fault.blamed.1), "{printed}");
    Ok(format!("{} {}/{}: {said}", ended["status"], fault.blamed.0, fault.blamed.1))
}

/// Pods with the variable are refused, by a rule of the cluster's own.
async fn refuse_variable(lab: &Lab<'_>) -> anyhow::Result<()> {
    let name = format!("no-variable-{}", lab.space.name);
    lab.apply(&json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]},
            "validations": [{
                "expression": format!("object.spec.containers.all(one, !has(one.env) || one.env.all(variable, variable.name != '{REFUSED}'))"),
                "message": format!("runs may not set {REFUSED}"),
            }],
        },
    }))
    .await?;
    lab.apply(&json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name},
        "spec": {
            "policyName": name, "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": lab.space.name}}},
        },
    }))
    .await
}

async fn allow_variable(lab: &Lab<'_>) -> anyhow::Result<()> {
    let name = format!("no-variable-{}", lab.space.name);
    for kind in ["validatingadmissionpolicybinding", "validatingadmissionpolicy"] {
        lab.space.bed.kubectl(&["delete", kind, &name, "--ignore-not-found"]).await?;
    }
    Ok(())
}

/// One node says that it has a GPU, which a pod of somebody else's holds. None: it has none any more.
async fn one_gpu(lab: &Lab<'_>, image: Option<&str>) -> anyhow::Result<()> {
    let bed = lab.space.bed;
    let count = image.map(|_| "1");
    let patch = json!({"status": {"capacity": {GPU: count}, "allocatable": {GPU: count}}}).to_string();
    bed.kubectl(&["patch", "node", Node::One.name(), "--subresource=status", "--type=merge", "--patch", &patch]).await?;
    let Some(image) = image else { return Ok(()) };
    let mut holder = pod("gpu-holder", image, &["sleep", "3600"], json!({}));
    *holder.pointer_mut("/spec/containers/0").context("no container")? =
        merged(holder["spec"]["containers"][0].clone(), json!({"resources": {"limits": {GPU: 1}}}))?;
    lab.space.run(holder).await.map(drop)
}

/// The installation's processes, and what was found so far.
struct Run<'a> {
    lab: Lab<'a>,
    images: Images,
    server: Process,
    agent: Process,
    controller: Process,
    expected: Vec<String>,
    problems: Vec<String>,
    began: Instant,
}

impl Run<'_> {
    fn note(&mut self, name: &str, found: anyhow::Result<String>) {
        match found {
            Ok(said) => eprintln!("{:6.1} s  {name}: {said}", self.began.elapsed().as_secs_f64()),
            Err(error) => {
                eprintln!("{:6.1} s  {name}: WRONG: {error:#}", self.began.elapsed().as_secs_f64());
                self.problems.push(format!("{name}: {error:#}"));
            }
        }
    }

    async fn begin(&self, name: &str, tag: &str) -> anyhow::Result<Watched> {
        Watched::submit(&self.lab, &disturbed(name, &self.images, tag)?).await
    }

    /// Waits until the evaluation has so many outcomes.
    async fn reaches(&self, watched: &Watched, rows: u64) -> anyhow::Result<()> {
        let has = |detail: &Value| detail["progress"]["completedEpisodes"].as_u64() >= Some(rows);
        let detail = self.lab.until(&watched.id, "under way", LIMIT, has).await?;
        ensure!(detail["status"] == "running", "it is over before anything happened to it: {}", detail["status"]);
        Ok(())
    }

    /// Whether the rows are those of the undisturbed run.
    async fn same(&self, watched: &Watched) -> anyhow::Result<String> {
        let ended = self.lab.ended(&watched.id, LIMIT).await?;
        ensure!(ended["status"] == "completed", "{}: {}", ended["status"], ended["failures"]);
        let rows = self.lab.export(&watched.id).await?;
        let other = rows.iter().zip(&self.expected).find(|(row, expected)| row != expected);
        ensure!(other.is_none() && rows.len() == self.expected.len(), "{} rows, not those of the undisturbed run: {other:?}", rows.len());
        Ok(format!("{} rows, those of the undisturbed run", rows.len()))
    }

    /// Waits until it is seen to wait for this; what it says.
    async fn see(&self, watched: &mut Watched, cause: &str, words: &[&str]) -> anyhow::Result<String> {
        let started = Instant::now();
        while watched.waited(cause, words).is_err() && started.elapsed() < Duration::from_secs(45) {
            watched.look(&self.lab).await?;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        watched.waited(cause, words)?;
        let last = watched.seen.last().map(|(waiting, _)| waiting["message"].to_string()).unwrap_or_default();
        Ok(format!("waits for {cause}: {last}"))
    }

    async fn pod(&self, watched: &Watched, component: &str) -> anyhow::Result<String> {
        let pods = self.lab.pods(&watched.id, component).await?;
        pods.last().cloned().with_context(|| format!("there is no {component} pod"))
    }

    /// Waits until another pod of this component is there than `old`.
    async fn replaced(&self, watched: &Watched, component: &str, old: &str) -> anyhow::Result<()> {
        wait_for(&format!("another {component} pod than {old}"), LIMIT, async || {
            let pods = self.lab.pods(&watched.id, component).await?;
            Ok(pods.last().is_some_and(|newest| newest != old).then_some(()))
        })
        .await
    }
}

#[tokio::test]
async fn faults_have_the_right_outcome_and_message() -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let _alone = shared.alone().await;
    with_space(&shared.bed, "faults", async |space| {
        let images = shared.bed.publish_faulty(&rlm_e2e::tools().context("no programs")?.root, &UNSEEN).await?;
        let lab = Lab::new(shared, space).await?;
        refuse_variable(&lab).await?;
        one_gpu(&lab, Some(shared.image("user/quickstart-env")?)).await?;
        let (server, began) = (lab.start_server()?, Instant::now());
        lab.register().await?;
        let (agent, controller) = (lab.start_agent()?, lab.start_controller()?);
        lab.connected().await?;
        let mut run = Run { lab, images, server, agent, controller, expected: Vec::new(), problems: Vec::new(), began };
        let went = scenario(&mut run, shared).await;
        allow_variable(&run.lab).await?;
        one_gpu(&run.lab, None).await?;
        went.and_then(|()| {
            ensure!(run.problems.is_empty(), "{} faults:\n\n{}", run.problems.len(), run.problems.join("\n\n"));
            Ok(())
        })
        .with_context(|| run.lab.logs())
    })
    .await
}

async fn scenario(run: &mut Run<'_>, shared: &Shared) -> anyhow::Result<()> {
    own_faults(run).await?;
    let went = waits_and_goes_on(run, shared).await;
    shared.bed.registry_refuses(false)?;
    run.note("waits", went);
    let went = ended_by_others(run, shared).await;
    run.note("ended by others", went);
    let went = control_plane_down(run).await;
    run.note("control plane down", went);
    let went = spool_full(run, shared).await;
    run.note("volume full, the agent's", went);
    let went = node_lost(run, shared).await;
    for node in Node::ALL {
        shared.bed.link(node, Link::Whole).await?;
        shared.bed.start_node(node).await?;
    }
    run.note("node lost", went);
    Ok(())
}

/// Faults that concern one evaluation each, all at the same time, beside one that nothing happens to.
async fn own_faults(run: &mut Run<'_>) -> anyhow::Result<()> {
    let faults = faults(&run.images)?;
    let mut watched = vec![run.begin("undisturbed", "model").await?];
    for fault in &faults {
        watched.push(Watched::submit(&run.lab, &fault.request).await?);
    }
    watch_all(&run.lab, &mut watched, LIMIT).await?;
    let undisturbed = watched.remove(0);
    run.expected = run.lab.export(&undisturbed.id).await?;
    let right = run.expected.len() == 60 && undisturbed.ended.is_some_and(|ended| ended["status"] == "completed");
    ensure!(right, "the undisturbed run is disturbed: {} rows", run.expected.len());
    for row in &run.expected {
        counter::check_follower(&serde_json::from_str(row)?)?;
    }
    for (fault, watched) in faults.iter().zip(&watched) {
        let found = check(&run.lab, fault, watched).await;
        run.note(&format!("{} ({:.0} s)", fault.name, watched.took.as_secs_f64()), found);
    }
    Ok(())
}

/// One evaluation comes upon a quota, a taint and a registry that refuses, and goes on when each is gone. Another one gives up
/// on a registry that is down.
async fn waits_and_goes_on(run: &mut Run<'_>, shared: &Shared) -> anyhow::Result<String> {
    let bed = &shared.bed;
    bed.registry_off().await?;
    let down = model(&run.images, UNSEEN[0], json!({"startupTimeout": "12s"}))?;
    let down = Fault {
        name: "registry down",
        request: request("registry down", down, env(&run.images, json!({}))?, json!({})),
        waits: Some(("imagePull", &["connection refused", "it is tried again"])),
        rows: Rows::All,
        blamed: ("infrastructure", "image_pull_failed"),
        message: &["model-0: the image can't be pulled within 12 s", "connection refused", "retry the rows"],
    };
    let mut off = [Watched::submit(&run.lab, &down.request).await?];
    watch_all(&run.lab, &mut off, LIMIT).await?;
    let found = check(&run.lab, &down, &off[0]).await;
    run.note(down.name, found);
    bed.registry_on().await?;
    bed.registry_refuses(true)?;

    let namespace = run.lab.space.name.clone();
    bed.kubectl(&["create", "quota", "no-pods", "--hard=pods=0", "--namespace", &namespace]).await?;
    let mut waiter = run.begin("waits", UNSEEN[1]).await?;
    let found = run.see(&mut waiter, "quota", &["exceeded quota: no-pods", "ResourceQuota"]).await;
    run.note("quota exceeded", found);
    for node in Node::ALL {
        bed.kubectl(&["taint", "node", node.name(), "bed=busy:NoSchedule", "--overwrite"]).await?;
    }
    bed.kubectl(&["delete", "quota", "no-pods", "--namespace", &namespace]).await?;
    let found = run.see(&mut waiter, "unschedulable", &["0/2 nodes are available", "untolerated taint", "runs.tolerations"]).await;
    for node in Node::ALL {
        bed.kubectl(&["taint", "node", node.name(), "bed-"]).await?;
    }
    run.note("unschedulable, taint", found);
    let found = run.see(&mut waiter, "imagePull", &["401", "runs.imagePullSecrets"]).await;
    run.note("pull refused", found);
    bed.registry_refuses(false)?;
    run.same(&waiter).await
}

/// A pod evicted; pods deleted by hand; agent, controller and apiserver killed: all while their runs go on.
async fn ended_by_others(run: &mut Run<'_>, shared: &Shared) -> anyhow::Result<String> {
    let evicted = run.begin("evicted", "model").await?;
    let deleted = run.begin("deleted", "model").await?;
    run.reaches(&evicted, 5).await?;
    let pod = run.pod(&evicted, "environment").await?;
    shared.bed.evict(&run.lab.space.name, &pod).await?;
    run.replaced(&evicted, "environment", &pod).await?;
    run.reaches(&deleted, 5).await?;
    for component in ["model", "runner"] {
        let pod = run.pod(&deleted, component).await?;
        run.lab.space.pods().delete(&pod, &DeleteParams::default()).await?;
        run.replaced(&deleted, component, &pod).await?;
    }
    let emptied = run.begin("emptied", "model").await?;
    run.reaches(&emptied, 5).await?;
    let pod = run.pod(&emptied, "environment").await?;
    let object = pod.split("-env-").next().context("no run")?;
    run.lab.space.bed.kubectl(&["delete", "rlmeshrun", object, "--namespace", &run.lab.space.name]).await?;
    run.replaced(&emptied, "environment", &pod).await?;
    let killed = run.begin("killed", "model").await?;
    run.reaches(&killed, 5).await?;
    run.agent.kill().await?;
    run.agent = run.lab.start_agent()?;
    run.controller.kill().await?;
    let mut without_controller = run.begin("without a controller", "model").await?;
    let found = run.see(&mut without_controller, "controllerAway", &["model-0", "is rlmesh-cluster-controller running?"]).await;
    run.note("controller away", found);
    shared.bed.kill(Component::ApiServer).await?;
    let mut without_api = run.begin("without an API server", "model").await?;
    let found = run.see(&mut without_api, "apiUnavailable", &["the Kubernetes API server can't be asked"]).await;
    shared.bed.restart_api_server().await?;
    run.note("apiserver away", found);
    run.controller = run.lab.start_controller()?;
    for (name, watched) in [
        ("pod evicted", &evicted),
        ("pods deleted by hand", &deleted),
        ("its RLMeshRun deleted by hand", &emptied),
        ("agent, controller, apiserver killed", &killed),
        ("begun without a controller", &without_controller),
        ("begun without an apiserver", &without_api),
    ] {
        let found = run.same(watched).await;
        run.note(name, found);
    }
    Ok("all of them over".to_owned())
}

/// The server is away until the run has ended without it.
async fn control_plane_down(run: &mut Run<'_>) -> anyhow::Result<String> {
    let watched = run.begin("control plane down", "model").await?;
    run.reaches(&watched, 3).await?;
    run.server.kill().await?;
    // The object goes once the run's end is in the spool.
    let labels = format!("rlmesh.dev/evaluation={}", watched.id);
    wait_for("the run to end without its control plane", LIMIT, async || {
        let listed = run.lab.space.pods().list(&kube::api::ListParams::default().labels(&labels)).await?;
        Ok(listed.items.is_empty().then_some(()))
    })
    .await?;
    run.server = run.lab.start_server()?;
    run.lab.serves().await?;
    run.same(&watched).await
}

/// The disk of the agent's state is full to the last byte while a run goes on. What the control plane has taken makes room for
/// what comes, so it goes on.
async fn spool_full(run: &mut Run<'_>, shared: &Shared) -> anyhow::Result<String> {
    let folder = run.lab.agent_state().display().to_string();
    let watched = run.begin("spool full", "model").await?;
    run.reaches(&watched, 3).await?;
    // The same files on a small disk. The journal is written back first: in one that is there already there is room for long.
    run.agent.kill().await?;
    let write_back =
        format!("python3 -c \"import sqlite3; sqlite3.connect('{folder}/spool.db').execute('PRAGMA wal_checkpoint(TRUNCATE)')\"");
    let small = format!("mount -t tmpfs -o size=24m,mode=0700 small '{folder}' && cp -a '{folder}.kept/.' '{folder}/'");
    shared.bed.shell(Place::Gateway, &format!("{write_back}\ncp -a '{folder}' '{folder}.kept'\n{small}")).await?;
    run.agent = run.lab.start_agent()?;
    let more = run.lab.evaluation(&watched.id).await?["progress"]["completedEpisodes"].as_u64().unwrap_or(0) + 2;
    run.reaches(&watched, more).await?;
    shared.bed.shell(Place::Gateway, &format!("dd if=/dev/zero of='{folder}/full' bs=4K 2>/dev/null || true")).await?;
    let found = run.same(&watched).await;
    shared.bed.shell(Place::Gateway, &format!("rm '{folder}/full'")).await?;
    found
}

/// A node goes, with what runs on it and without a word.
async fn node_lost(run: &mut Run<'_>, shared: &Shared) -> anyhow::Result<String> {
    let watched = run.begin("node lost", "model").await?;
    run.reaches(&watched, 3).await?;
    let pod = run.pod(&watched, "environment").await?;
    let spec = run.lab.space.pods().get(&pod).await?.spec.unwrap_or_default();
    let node = Node::ALL.into_iter().find(|node| spec.node_name.as_deref() == Some(node.name())).context("on no node")?;
    shared.bed.kill(Component::Kubelet(node)).await?;
    shared.bed.link(node, Link::Cut).await?;
    run.replaced(&watched, "environment", &pod).await?;
    run.same(&watched).await
}
