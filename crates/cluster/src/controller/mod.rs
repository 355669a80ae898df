//! The cluster controller: makes the pods that `RLMeshRun`s ask for, and says in their status what became of them.
//!
//! It speaks to the Kubernetes API alone, keeps no state of its own, and acts on watch events; a timer wakes it only where a
//! deadline falls due. Several may run: the holder of a Lease watches and writes, the others wait.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures::{Stream, StreamExt as _, TryStreamExt as _, future, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;
use kube::api::Api;
use kube::runtime::controller::{self, Action, applier};
use kube::runtime::reflector::{self, ObjectRef};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use rand::RngExt as _;
use rlm_process::{Admin, LogFormat};
use tokio_util::sync::CancellationToken;

use lease::{Elector, Timing};
use pods::PodIndex;
use run::apply::{WriteError, Writes};
use run::gather::{Stores, gather};
use run::pod::LABEL_RUN;
use settings::Settings;
use writes::{KubeWrites, WRITE_DEADLINE};

use crate::crd::run::RLMeshRun;

pub mod lease;
pub mod pods;
pub mod run;
pub mod settings;
pub mod writes;

/// Runs that are worked on at the same time.
const CONCURRENCY: u16 = 32;
/// Changes of one run within this time are answered together.
const DEBOUNCE: Duration = Duration::from_millis(20);

/// Flags of `rlmesh-cluster-controller run`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Configuration file (YAML)
    #[arg(long)]
    pub config: PathBuf,
    /// Where /livez, /readyz and /metrics are served, host:port
    #[arg(long)]
    pub admin: Option<SocketAddr>,
    /// Namespace of the Lease: that of the controller
    #[arg(long, env = "POD_NAMESPACE")]
    pub lease_namespace: String,
    /// Name of the Lease
    #[arg(long, default_value = "rlmesh-cluster-controller")]
    pub lease_name: String,
    /// How long the Lease lasts without renewal, seconds
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(3..=300))]
    pub lease_seconds: u64,
    /// Name of this replica, different from the others'
    #[arg(long, env = "POD_NAME")]
    pub identity: String,
    /// How log lines look: text or json
    #[arg(long, default_value = "text")]
    pub log_format: LogFormat,
}

/// Counts of this replica.
#[derive(Clone, Default)]
pub struct Metrics {
    leader: Gauge,
    reconciles: Counter,
    failures: Counter,
}

impl Metrics {
    fn register(&self, admin: &Admin) {
        let metrics = self.clone();
        admin.register(|registry| {
            registry.register("rlmesh_controller_leader", "1 while this replica holds the lease", metrics.leader);
            registry.register("rlmesh_controller_reconciles", "Runs looked at", metrics.reconciles);
            registry.register("rlmesh_controller_reconcile_failures", "Looks at a run that are repeated", metrics.failures);
        });
    }
}

/// Campaigns, leads while it has the lease, campaigns again; until `stop`.
pub async fn run(options: Options, settings: Settings, admin: Admin, stop: CancellationToken) -> anyhow::Result<()> {
    let Options { config: _, admin: _, lease_namespace, lease_name, lease_seconds, identity, log_format: _ } = options;
    let client = Client::try_default().await.context("how to reach the Kubernetes API is not known")?;
    let metrics = Metrics::default();
    metrics.register(&admin);
    let timing = Timing { lasts: Duration::from_secs(lease_seconds) };
    let elector = Elector::new(Api::namespaced(client.clone(), &lease_namespace), lease_name, identity, timing);
    let settings = Arc::new(settings);
    // One that waits for the lease is ready: it does what it is there for.
    admin.set_ready();
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => break,
            () = elector.campaign() => {}
        }
        tracing::info!("leading");
        metrics.leader.set(1);
        let leading = stop.child_token();
        let writes = Arc::new(KubeWrites::new(&client, &settings.namespace, elector.leadership.clone()));
        let mut work = std::pin::pin!(lead(&client, Arc::clone(&settings), writes, metrics.clone(), leading.clone()));
        tokio::select! {
            () = &mut work => {}
            () = elector.keep() => {
                tracing::warn!("the lease is lost; another controller goes on");
                leading.cancel();
                // What is being written ends by its own deadline. Watches that never listed anything would not end at all.
                if tokio::time::timeout(2 * WRITE_DEADLINE, work).await.is_err() {
                    tracing::warn!("what was being done is left as it is; every write may be repeated");
                }
            }
        }
        metrics.leader.set(0);
    }
    elector.release().await;
    Ok(())
}

struct Context {
    settings: Arc<Settings>,
    stores: Stores,
    writes: Arc<dyn Writes>,
    metrics: Metrics,
}

/// Watches and reconciles until `stop`; what is being written then is written to its end.
pub async fn lead(client: &Client, settings: Arc<Settings>, writes: Arc<dyn Writes>, metrics: Metrics, stop: CancellationToken) {
    let namespace = settings.namespace.clone();
    let runs: Api<RLMeshRun> = Api::namespaced(client.clone(), &namespace);
    let policies: Api<NetworkPolicy> = Api::namespaced(client.clone(), &namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let ours = watcher::Config::default().labels(LABEL_RUN);

    let (run_store, run_writer) = reflector::store();
    let run_events = watcher(runs, watcher::Config::default())
        .default_backoff()
        .modify(|run: &mut RLMeshRun| run.managed_fields_mut().clear())
        .reflect(run_writer)
        .touched_objects()
        .map_ok(|run| vec![run.name_any()]);
    let (policy_store, policy_writer) = reflector::store();
    let policy_events = watcher(policies, ours.clone())
        .default_backoff()
        .modify(|policy: &mut NetworkPolicy| policy.managed_fields_mut().clear())
        .reflect(policy_writer)
        .touched_objects()
        .map_ok(|policy| vec![policy.name_any()]);
    let index = PodIndex::default();
    let mut pod_writer = index.writer();
    let pod_events = watcher(pods.clone(), ours).default_backoff().map_ok(move |event| pod_writer.take(event));

    let events = stream::select_all([refs(run_events, &namespace), refs(policy_events, &namespace), refs(pod_events, &namespace)]);
    let stores = Stores { runs: run_store.clone(), policies: policy_store, pods: index, api: pods };
    let context = Arc::new(Context { settings, stores, writes, metrics });
    let config = controller::Config::default().concurrency(CONCURRENCY).debounce(DEBOUNCE);
    applier(
        |run, context| Box::pin(one(run, context)),
        |run, error, context| {
            context.metrics.failures.inc();
            tracing::warn!(run = %run.name_any(), "{error}; it is repeated");
            Action::requeue(Duration::from_millis(rand::rng().random_range(1_000..5_000)))
        },
        context,
        run_store,
        events.take_until(stop.cancelled_owned()),
        config,
    )
    // Failures are handled above; a run that went meanwhile is none.
    .for_each(|_| future::ready(()))
    .await;
}

/// The runs that a watch's events concern. A watch that fails is started again by its back-off; it is logged and no more.
fn refs<E: std::fmt::Display>(
    events: impl Stream<Item = Result<Vec<String>, E>> + Send + 'static,
    namespace: &str,
) -> stream::BoxStream<'static, Result<ObjectRef<RLMeshRun>, std::convert::Infallible>> {
    let namespace = namespace.to_owned();
    events
        .filter_map(|event| {
            future::ready(match event {
                Ok(names) => Some(names),
                Err(error) => {
                    tracing::warn!("a watch was interrupted and starts again: {error}");
                    None
                }
            })
        })
        .flat_map(move |names| {
            let namespace = namespace.clone();
            stream::iter(names.into_iter().map(move |name| Ok(ObjectRef::new(&name).within(&namespace))))
        })
        .boxed()
}

async fn one(run: Arc<RLMeshRun>, context: Arc<Context>) -> Result<Action, WriteError> {
    context.stores.ready().await?;
    context.metrics.reconciles.inc();
    let observed = gather(run, &context.stores).await?;
    let now = Timestamp::now();
    let again = run::reconcile(&observed, &context.settings, context.writes.as_ref(), now).await?;
    Ok(again.map_or_else(Action::await_change, |at| {
        Action::requeue(Duration::try_from(at.duration_since(now)).unwrap_or_default().max(Duration::from_millis(1)))
    }))
}
