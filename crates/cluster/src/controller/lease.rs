//! Which of several controllers may write: the holder of a Lease. Knows nothing of runs.
//!
//! Clocks of two machines are never compared: a lease is free when its record has not changed for as long as it says it
//! lasts, on the watcher's own clock. Taking and renewing are conditional on the record that was read.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use tokio::sync::watch;
use tokio::time::Instant;

/// How long a lease lasts without renewal. Renewed every third of it; given up for lost after two thirds.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    pub lasts: Duration,
}

impl Timing {
    fn every(self) -> Duration {
        self.lasts / 3
    }

    fn lost_after(self) -> Duration {
        self.lasts * 2 / 3
    }
}

/// Whether this process may write now. Clones agree.
#[derive(Clone)]
pub struct Leadership(Arc<watch::Sender<Option<Instant>>>);

impl Default for Leadership {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Leadership {
    #[must_use]
    pub fn held(&self) -> bool {
        self.0.borrow().is_some_and(|until| Instant::now() < until)
    }

    fn set(&self, until: Option<Instant>) {
        self.0.send_replace(until);
    }
}

pub struct Elector {
    api: Api<Lease>,
    name: String,
    identity: String,
    timing: Timing,
    pub leadership: Leadership,
}

impl Elector {
    #[must_use]
    pub fn new(api: Api<Lease>, name: String, identity: String, timing: Timing) -> Self {
        Self { api, name, identity, timing, leadership: Leadership::default() }
    }

    /// Returns once this process holds the lease.
    pub async fn campaign(&self) {
        let mut seen: Option<(LeaseSpec, Instant)> = None;
        let mut complained = false;
        loop {
            match self.attempt(&mut seen).await {
                Ok(true) => return,
                Ok(false) => complained = false,
                Err(error) if complained => tracing::debug!("the lease: {error:#}"),
                Err(error) => {
                    tracing::warn!("the lease {} can't be taken yet: {error:#}", self.name);
                    complained = true;
                }
            }
            tokio::time::sleep(self.timing.every()).await;
        }
    }

    async fn attempt(&self, seen: &mut Option<(LeaseSpec, Instant)>) -> anyhow::Result<bool> {
        let asked = Instant::now();
        let Some(lease) = self.call("read the lease", self.api.get_opt(&self.name)).await? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.record(None)) };
            self.call("make the lease", self.api.create(&PostParams::default(), &lease)).await?;
            self.leadership.set(Some(asked + self.timing.lost_after()));
            return Ok(true);
        };
        let record = lease.spec.clone().unwrap_or_default();
        let free = record.holder_identity.as_deref().is_none_or(|holder| holder.is_empty() || holder == self.identity);
        match seen {
            Some((known, since)) if *known == record => {
                let lasts = record
                    .lease_duration_seconds
                    .and_then(|seconds| u64::try_from(seconds).ok())
                    .map_or(self.timing.lasts, Duration::from_secs);
                if !free && since.elapsed() < lasts {
                    return Ok(false);
                }
            }
            _ if !free => {
                *seen = Some((record, Instant::now()));
                return Ok(false);
            }
            _ => {}
        }
        self.take(lease, asked).await
    }

    async fn take(&self, lease: Lease, asked: Instant) -> anyhow::Result<bool> {
        let next = Lease { spec: Some(self.record(lease.spec.as_ref())), ..lease };
        // The resource version makes this fail when somebody else was faster.
        self.call("take the lease", self.api.replace(&self.name, &PostParams::default(), &next)).await?;
        self.leadership.set(Some(asked + self.timing.lost_after()));
        Ok(true)
    }

    /// Renews the lease; returns when it is lost.
    pub async fn keep(&self) {
        let mut until = Instant::now() + self.timing.lost_after();
        loop {
            tokio::time::sleep(self.timing.every()).await;
            if Instant::now() >= until {
                break;
            }
            let asked = Instant::now();
            match self.renew(asked).await {
                Ok(true) => until = asked + self.timing.lost_after(),
                Ok(false) => break,
                Err(error) => tracing::warn!("the lease {} was not renewed: {error:#}", self.name),
            }
        }
        self.leadership.set(None);
    }

    async fn renew(&self, asked: Instant) -> anyhow::Result<bool> {
        let lease = self.call("read the lease", self.api.get(&self.name)).await?;
        if lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()) != Some(&self.identity) {
            return Ok(false);
        }
        self.take(lease, asked).await
    }

    /// Gives the lease back, so that the next one need not wait.
    pub async fn release(&self) {
        if self.leadership.0.send_replace(None).is_none() {
            return;
        }
        let released = async {
            let mut lease = self.call("read the lease", self.api.get(&self.name)).await?;
            if let Some(spec) = lease.spec.as_mut().filter(|spec| spec.holder_identity.as_deref() == Some(&self.identity)) {
                spec.holder_identity = None;
                self.call("give the lease back", self.api.replace(&self.name, &PostParams::default(), &lease)).await?;
            }
            anyhow::Ok(())
        };
        if let Err(error) = released.await {
            tracing::info!("the lease {} was not given back and runs out: {error:#}", self.name);
        }
    }

    fn record(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let held = before.filter(|before| before.holder_identity.as_deref() == Some(&self.identity));
        let transitions = before.and_then(|before| before.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.timing.lasts.as_secs().max(1)).unwrap_or(i32::MAX)),
            acquire_time: held.map_or_else(|| Some(now.clone()), |held| held.acquire_time.clone()),
            renew_time: Some(now),
            lease_transitions: Some(if held.is_some() || before.is_none() { transitions } else { transitions + 1 }),
            ..LeaseSpec::default()
        }
    }

    async fn call<T>(&self, what: &str, call: impl Future<Output = kube::Result<T>>) -> anyhow::Result<T> {
        let limit = self.timing.every();
        match tokio::time::timeout(limit, call).await {
            Ok(answer) => answer.with_context(|| format!("{what} {}", self.name)),
            Err(_) => anyhow::bail!("{what} {}: no answer within {} s", self.name, limit.as_secs_f64()),
        }
    }
}
