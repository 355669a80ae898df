//! What a run did and how long its parts took. Bounded memory: durations fall into about 400 buckets of 4 % width.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rlm_core::evaluation::{MetricSeries, RunMetrics};

/// What is timed or counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Series {
    Predict,
    PredictEndpoint,
    GroupSize,
    Step,
    StepEndpoint,
    Reset,
}

impl Series {
    const ALL: [Self; 6] = [Self::Predict, Self::PredictEndpoint, Self::GroupSize, Self::Step, Self::StepEndpoint, Self::Reset];

    /// Operation, component, metric, unit.
    const fn names(self) -> [&'static str; 4] {
        match self {
            Self::Predict => ["model.predict", "model", "rpc.total", "ms"],
            Self::PredictEndpoint => ["model.predict", "model", "endpoint.total", "ms"],
            Self::GroupSize => ["model.predict", "model", "group.size", "rows"],
            Self::Step => ["env.step", "env", "rpc.total", "ms"],
            Self::StepEndpoint => ["env.step", "env", "endpoint.total", "ms"],
            Self::Reset => ["env.reset", "env", "rpc.total", "ms"],
        }
    }
}

/// Counts of values from 1e-4 on; each bucket is 4 % wider than the last.
#[derive(Debug, Clone)]
struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: f64,
}

const LOWEST: f64 = 1e-4;
const GROWTH: f64 = 1.04;
const BUCKETS: usize = 640;

impl Histogram {
    fn new() -> Self {
        Self { buckets: vec![0; BUCKETS], count: 0, sum: 0.0 }
    }

    fn add(&mut self, value: f64) {
        let position = ((value.max(LOWEST) / LOWEST).ln() / GROWTH.ln()).floor();
        let position = (position as usize).min(BUCKETS - 1);
        if let Some(bucket) = self.buckets.get_mut(position) {
            *bucket += 1;
        }
        self.count += 1;
        self.sum += value;
    }

    /// Middle of the bucket in which the quantile lies.
    fn quantile(&self, quantile: f64) -> f64 {
        let target = (quantile * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (position, bucket) in self.buckets.iter().enumerate() {
            seen += bucket;
            if seen >= target {
                return LOWEST * GROWTH.powf(position as f64 + 0.5);
            }
        }
        0.0
    }
}

/// Shared by all parts of a run.
#[derive(Debug)]
pub struct Metrics {
    started: Mutex<Option<Instant>>,
    series: Mutex<Vec<Histogram>>,
    steps: AtomicU64,
    episodes: AtomicU64,
    /// Lanes with a row.
    active: AtomicUsize,
    /// Lanes whose environment is in a step.
    stepping: AtomicUsize,
    /// Usual time of a step request, nanoseconds.
    step_nanos: AtomicU64,
    /// Usual time of a forward, nanoseconds.
    forward_nanos: AtomicU64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            started: Mutex::new(None),
            series: Mutex::new(Series::ALL.iter().map(|_| Histogram::new()).collect()),
            steps: AtomicU64::new(0),
            episodes: AtomicU64::new(0),
            active: AtomicUsize::new(0),
            stepping: AtomicUsize::new(0),
            step_nanos: AtomicU64::new(0),
            forward_nanos: AtomicU64::new(0),
        }
    }
}

impl Metrics {
    /// The first episode begins: the active clock runs from here.
    pub fn begin(&self) {
        self.started.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
    }

    pub fn time(&self, series: Series, value: Duration) {
        self.add(series, value.as_secs_f64() * 1e3);
    }

    pub fn add(&self, series: Series, value: f64) {
        let mut all = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(histogram) = Series::ALL.iter().position(|known| *known == series).and_then(|position| all.get_mut(position)) {
            histogram.add(value);
        }
    }

    pub fn count_steps(&self, steps: u64) {
        self.steps.fetch_add(steps, Ordering::Relaxed);
    }

    pub fn count_episode(&self) {
        self.episodes.fetch_add(1, Ordering::Relaxed);
    }

    pub fn lane_began(&self) {
        self.active.fetch_add(1, Ordering::Relaxed);
    }

    pub fn lane_ended(&self) {
        self.active.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn steps_began(&self, lanes: usize) {
        self.stepping.fetch_add(lanes, Ordering::Relaxed);
    }

    pub fn steps_ended(&self, lanes: usize) {
        self.stepping.fetch_sub(lanes, Ordering::Relaxed);
    }

    #[must_use]
    pub fn stepping(&self) -> usize {
        self.stepping.load(Ordering::Relaxed)
    }

    pub fn usual_step(&self, value: Duration) {
        self.step_nanos.store(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub fn usual_forward(&self, value: Duration) {
        self.forward_nanos.store(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    #[must_use]
    pub fn step(&self) -> Duration {
        Duration::from_nanos(self.step_nanos.load(Ordering::Relaxed))
    }

    #[must_use]
    pub fn forward(&self) -> Duration {
        Duration::from_nanos(self.forward_nanos.load(Ordering::Relaxed))
    }

    /// Finished episodes, steps, lanes with a row.
    #[must_use]
    pub fn progress(&self) -> (u64, u64, u32) {
        let active = u32::try_from(self.active.load(Ordering::Relaxed)).unwrap_or(u32::MAX);
        (self.episodes.load(Ordering::Relaxed), self.steps.load(Ordering::Relaxed), active)
    }

    #[must_use]
    pub fn report(&self) -> RunMetrics {
        let active = self.started.lock().unwrap_or_else(PoisonError::into_inner).map_or(Duration::ZERO, |started| started.elapsed());
        let (episodes, env_steps, _) = self.progress();
        let per_second = |count: u64| if active.is_zero() { 0.0 } else { count as f64 / active.as_secs_f64() };
        let all = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        let series = Series::ALL
            .iter()
            .zip(all.iter())
            .filter(|(_, histogram)| histogram.count > 0)
            .map(|(series, histogram)| {
                let [op, component, metric, unit] = series.names().map(str::to_owned);
                MetricSeries {
                    op,
                    component,
                    metric,
                    unit,
                    count: histogram.count,
                    avg: histogram.sum / histogram.count as f64,
                    p50: histogram.quantile(0.5),
                    p95: histogram.quantile(0.95),
                    p99: histogram.quantile(0.99),
                }
            })
            .collect();
        RunMetrics {
            active_ms: u64::try_from(active.as_millis()).unwrap_or(u64::MAX),
            episodes,
            env_steps,
            env_steps_per_second: per_second(env_steps),
            episodes_per_second: per_second(episodes),
            series,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_four_percent() {
        let metrics = Metrics::default();
        for millis in 1..=1000 {
            metrics.time(Series::Step, Duration::from_millis(millis));
        }
        let report = metrics.report();
        let step = &report.series[0];
        for (quantile, expected) in [(step.p50, 500.0), (step.p95, 950.0), (step.p99, 990.0)] {
            assert!((quantile / expected - 1.0).abs() < 0.04, "{quantile} {expected}");
        }
        assert_eq!((step.count, step.op.as_str(), step.unit.as_str()), (1000, "env.step", "ms"));
        assert!((step.avg - 500.5).abs() < 1e-6);
    }
}
