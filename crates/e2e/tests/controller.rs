//! The controller against a real Kubernetes: with the rights of the chart and no others, killed on the way, and alone in
//! what it makes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use rlm_cluster::crd::run::{Component, ComponentPhase, RLMeshRun, Reason, RunPhase};
use rlm_e2e::bed::lab;
use rlm_e2e::bed::shared::{Shared, shared};
use rlm_e2e::bed::space::{PULL_SECRET, Space, pod, with_space};
use rlm_e2e::processes::{Process, tail};
use rlm_e2e::{Signal, Tools, wait_for};
use serde_json::{Value, json};

const RUN: &str = "run-01j0000000000000000000000a";
const LIMIT: Duration = Duration::from_secs(120);
const ACCOUNT: &str = "rlmesh-cluster-controller";

/// A namespace with the chart's definitions, an account with the chart's rights, and room for a controller.
struct Lab<'a> {
    space: Space<'a>,
    shared: &'a Shared,
    tools: Tools,
    folder: tempfile::TempDir,
    kubeconfig: PathBuf,
}

impl<'a> Lab<'a> {
    async fn new(shared: &'a Shared, space: Space<'a>) -> anyhow::Result<Self> {
        let tools = rlm_e2e::tools().context("the programs are there, since there is a bed")?;
        let folder = tempfile::tempdir()?;
        lab::define(&space, &tools).await?;
        let kubeconfig = lab::account(&space, &tools, "controller", "admin", folder.path()).await?;
        lab::settings(shared, &space, folder.path())?;
        Ok(Self { space, shared, tools, folder, kubeconfig })
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.log"))
    }

    fn controller(&self, name: &str) -> anyhow::Result<Process> {
        lab::controller(&self.space, &self.tools, name, self.folder.path())
    }

    fn runs(&self) -> Api<RLMeshRun> {
        Api::namespaced(self.space.client.clone(), &self.space.name)
    }

    fn request(&self) -> anyhow::Result<Value> {
        Ok(json!({
            "apiVersion": "rlmesh.dev/v1beta1",
            "kind": "RLMeshRun",
            "metadata": {"name": RUN, "namespace": self.space.name},
            "spec": {
                "evaluationID": "eval_01j0000000000000000000000b",
                "generation": 1,
                "mode": "evaluate",
                "agent": {"address": "10.96.0.250:7443", "certificateSha256": "0".repeat(64)},
                "model": {"image": self.shared.image("user/quickstart-model")?, "entrypoint": "policies:Balancer"},
                "environments": {"image": self.shared.image("user/quickstart-env")?, "entrypoint": "envs:CartPole"},
                "bindings": [{"index": 0}],
                "activeBindings": [{"index": 0, "pods": 1, "lanesPerPod": 2}],
            },
        }))
    }

    async fn create(&self) -> anyhow::Result<()> {
        self.runs().create(&PostParams::default(), &serde_json::from_value(self.request()?)?).await?;
        Ok(())
    }

    async fn patch(&self, spec: Value) -> anyhow::Result<()> {
        self.runs().patch(RUN, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await?;
        Ok(())
    }

    async fn component(&self, name: &str, attempt: u32, what: &str, is: impl Fn(&Component) -> bool) -> anyhow::Result<Component> {
        wait_for(&format!("{name} (attempt {attempt}) to be {what}"), LIMIT, async || {
            let status = self.runs().get(RUN).await?.status.unwrap_or_default();
            let found = status.components.into_iter().find(|one| one.name == name && one.attempt == attempt);
            Ok(found.filter(&is))
        })
        .await
    }

    /// Whether the API server would let an account create this of a pod.
    async fn may_create(&self, account: &str, subresource: &str) -> anyhow::Result<bool> {
        let attributes = json!({"namespace": self.space.name, "verb": "create", "resource": "pods", "subresource": subresource});
        let spec = json!({"user": format!("system:serviceaccount:{}:{account}", self.space.name), "resourceAttributes": attributes});
        let asked: SubjectAccessReview = serde_json::from_value(json!({"spec": spec}))?;
        let reviews: Api<SubjectAccessReview> = Api::all(self.space.client.clone());
        Ok(reviews.create(&PostParams::default(), &asked).await?.status.context("no answer")?.allowed)
    }

    async fn pods(&self) -> anyhow::Result<Vec<String>> {
        let pods: Api<Pod> = Api::namespaced(self.space.client.clone(), &self.space.name);
        let listed = pods.list(&ListParams::default().labels("rlmesh.dev/run")).await?;
        let mut names: Vec<String> = listed.into_iter().filter_map(|pod| pod.metadata.name).collect();
        names.sort();
        Ok(names)
    }
}

/// Runs a test with a namespace and an account of its own.
async fn in_lab(name: &str, test: impl AsyncFnOnce(&Lab<'_>) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let Some(shared) = shared().await? else { return Ok(()) };
    let _calm = shared.calm().await;
    with_space(&shared.bed, name, async |space| {
        let lab = Lab::new(shared, space).await?;
        let ended = test(&lab).await;
        ended.with_context(|| format!("the controllers' logs end:\n{}\n{}", tail(&lab.log("one"), 40), tail(&lab.log("two"), 20)))
    })
    .await
}

#[tokio::test]
async fn the_schema_refuses_what_can_not_be() -> anyhow::Result<()> {
    in_lab("schema", async |lab| {
        let with = |pointer: &str, value: Value| -> anyhow::Result<RLMeshRun> {
            let mut request = lab.request()?;
            *request.pointer_mut(pointer).with_context(|| pointer.to_owned())? = value;
            Ok(serde_json::from_value(request)?)
        };
        for (pointer, value, expected) in [
            ("/metadata/name", json!("other"), "the name is the run's id"),
            ("/spec/evaluationID", json!("x"), "spec.evaluationID"),
            ("/spec/activeBindings/0/index", json!(7), "must be listed in bindings"),
            ("/spec/activeBindings/0/pods", json!(0), "spec.activeBindings[0].pods"),
        ] {
            let refused = lab.runs().create(&PostParams::default(), &with(pointer, value)?).await;
            let said = refused.err().map(|error| error.to_string()).unwrap_or_default();
            ensure!(said.contains(expected), "{pointer}: {said}");
        }
        lab.create().await?;
        lab.patch(json!({"generation": 2, "restarts": {"env-0-0": 2}})).await?;
        for (spec, expected) in [
            (json!({"generation": 1}), "generation only grows"),
            (json!({"restarts": {"env-0-0": 1}}), "restarts only grow"),
            (json!({"model": {"entrypoint": "policies:Other"}}), "model can't be changed"),
        ] {
            let said = lab.patch(spec.clone()).await.err().map(|error| format!("{error:#}")).unwrap_or_default();
            ensure!(said.contains(expected), "{spec}: {said}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_run_gets_its_pods_once_whoever_dies_and_leaves_none_behind() -> anyhow::Result<()> {
    in_lab("controller", async |lab| {
        let one = lab.controller("one")?;
        lab.create().await?;
        let ready = |component: &Component| component.phase == ComponentPhase::Ready;
        lab.component("model-0", 1, "ready", ready).await?;
        let environment = lab.component("env-0-0", 1, "ready", ready).await?;
        let address = environment.address.context("a server without an address")?;
        ensure!(environment.image_id.is_some_and(|id| id.contains("sha256:")), "the image's digest is not known");
        let expected = [format!("{RUN}-env-0-0-1"), format!("{RUN}-model-0-1"), format!("{RUN}-runner-1")];
        ensure!(lab.pods().await? == expected, "{:?}", lab.pods().await?);

        // Walls: nobody but the run's own runner reaches its servers.
        let policies: Api<NetworkPolicy> = Api::namespaced(lab.space.client.clone(), &lab.space.name);
        ensure!(policies.get_opt(RUN).await?.is_some(), "there is no policy");
        let image = lab.shared.image("user/quickstart-env")?;
        lab.space.run(pod("stranger", image, &["sleep", "3600"], json!({}))).await?;
        let host = address.trim_start_matches("tcp://").split(':').next().unwrap_or_default().to_owned();
        wait_for("the wall", LIMIT, async || Ok((lab.space.connect("stranger", &host, 50051).await? == "refused").then_some(()))).await?;

        // Another one waits; the first dies without a word, and a pod meanwhile.
        let two = lab.controller("two")?;
        one.signal(Signal::KILL)?;
        lab.space.pods().delete(&format!("{RUN}-env-0-0-1"), &DeleteParams::default()).await?;
        let lost = lab.component("env-0-0", 1, "failed", |component| component.phase == ComponentPhase::Failed).await?;
        ensure!(lost.reason == Some(Reason::PodDeleted), "{lost:?}");
        // A restart is the agent's to ask for.
        lab.patch(json!({"restarts": {"env-0-0": 2}})).await?;
        lab.component("env-0-0", 2, "ready", ready).await?;
        lab.patch(json!({"cancel": true})).await?;
        wait_for("the pods to go", LIMIT, async || Ok(lab.pods().await?.is_empty().then_some(()))).await?;
        let phase = lab.runs().get(RUN).await?.status.and_then(|status| status.phase);
        ensure!(phase == Some(RunPhase::Cancelled), "{phase:?}");
        lab.runs().delete(RUN, &DeleteParams::default()).await?;
        wait_for("the policy to go with its run", LIMIT, async || Ok(policies.get_opt(RUN).await?.is_none().then_some(()))).await?;
        two.signal(Signal::TERM)
    })
    .await
}

fn refused<T: std::fmt::Debug>(what: &str, result: kube::Result<T>) -> anyhow::Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(()),
        other => Err(anyhow::anyhow!("{what}: {other:?}")),
    }
}

#[tokio::test]
async fn the_account_may_do_what_the_chart_says_and_nothing_else() -> anyhow::Result<()> {
    in_lab("rights", async |lab| {
        let account = rlm_e2e::bed::client(&lab.kubeconfig).await?;
        let name = &lab.space.name;
        let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(account.clone(), name);
        let runs: Api<RLMeshRun> = Api::namespaced(account.clone(), name);
        let elsewhere: Api<Pod> = Api::namespaced(account.clone(), "kube-system");
        lab.create().await?;
        ensure!(runs.get_opt(RUN).await?.is_some(), "it can't read a run");
        refused("read a Secret", secrets.get(PULL_SECRET).await)?;
        refused("list Secrets", secrets.list(&ListParams::default()).await)?;
        refused("delete a run", runs.delete(RUN, &DeleteParams::default()).await.map(drop))?;
        let change = Patch::Merge(json!({"spec": {"cancel": true}}));
        refused("change a run", runs.patch(RUN, &PatchParams::default(), &change).await)?;
        refused("list pods elsewhere", elsewhere.list(&ListParams::default()).await)?;
        ensure!(!lab.may_create(ACCOUNT, "exec").await?, "it can run commands in pods");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_agents_account_may_do_what_the_chart_says_and_nothing_else() -> anyhow::Result<()> {
    in_lab("agent-rights", async |lab| {
        let kubeconfig = lab::account(&lab.space, &lab.tools, "agent", "admin", lab.folder.path()).await?;
        let account = rlm_e2e::bed::client(&kubeconfig).await?;
        let name = &lab.space.name;
        let runs: Api<RLMeshRun> = Api::namespaced(account.clone(), name);
        let pods: Api<Pod> = Api::namespaced(account.clone(), name);
        let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(account.clone(), name);
        let policies: Api<NetworkPolicy> = Api::namespaced(account.clone(), name);
        let elsewhere: Api<Pod> = Api::namespaced(account.clone(), "kube-system");
        lab.create().await?;
        pods.list(&ListParams::default()).await.context("it can't list the pods of runs")?;
        let image = lab.shared.image("user/quickstart-env")?;
        let wanted = serde_json::from_value(pod("mine", image, &[], json!({})))?;
        refused("make a pod", pods.create(&PostParams::default(), &wanted).await)?;
        refused("delete a pod", pods.delete("mine", &DeleteParams::default()).await)?;
        refused("read a Secret", secrets.get(PULL_SECRET).await)?;
        refused("list Secrets", secrets.list(&ListParams::default()).await)?;
        refused("delete a policy", policies.delete(RUN, &DeleteParams::default()).await)?;
        let status = Patch::Merge(json!({"status": {"phase": "Finished"}}));
        refused("say how a run goes", runs.patch_status(RUN, &PatchParams::default(), &status).await)?;
        refused("list pods elsewhere", elsewhere.list(&ListParams::default()).await)?;
        for subresource in ["exec", "portforward"] {
            ensure!(!lab.may_create("rlmesh-cluster-agent", subresource).await?, "it has pods/{subresource}");
        }
        runs.delete(RUN, &DeleteParams::default()).await.context("it can't delete a run")?;
        Ok(())
    })
    .await
}
