//! Quantiles and tails of the normal and Student's t distributions.
//!
//! A thin layer over `statrs` that keeps to where its series converge. Must never be called with degrees of freedom below 1.

use std::f64::consts::SQRT_2;

use statrs::distribution::{Continuous, ContinuousCDF, StudentsT};
use statrs::function::erf::{erfc, erfc_inv};

/// From here on Student's t is computed through the normal distribution: the continued fraction behind the exact form
/// is cut off at 140 terms, which no longer suffice for many degrees of freedom.
const MANY_DEGREES: f64 = 500.0;

/// The point with probability `tail` above it under the standard normal distribution.
#[must_use]
pub fn normal_upper_quantile(tail: f64) -> f64 {
    SQRT_2 * erfc_inv(2.0 * tail)
}

/// Probability of a standard normal value at least as far from zero as `z`.
#[must_use]
pub fn normal_two_sided(z: f64) -> f64 {
    erfc(z.abs() / SQRT_2)
}

/// The point with probability `tail` above it under Student's t distribution with these degrees of freedom.
#[must_use]
pub fn student_upper_quantile(tail: f64, degrees: f64) -> f64 {
    let z = normal_upper_quantile(tail);
    let start = wallace_inverse(z, degrees);
    if degrees >= MANY_DEGREES {
        // The transform is nearly the identity, so the error of each step is a small share of the one before.
        return (0..6).fold(start, |t, _| t + z - hill(t, degrees));
    }
    let Ok(student) = StudentsT::new(0.0, 1.0, degrees) else { return f64::INFINITY };
    // Bracket and bisect the tail, with Newton's steps where they stay inside the bracket.
    let mut low = 0.0;
    let mut high = start.max(1.0);
    while student.cdf(-high) > tail && high < f64::MAX / 4.0 {
        low = high;
        high *= 2.0;
    }
    let mut t = start.clamp(low, high);
    for _ in 0..200 {
        let excess = student.cdf(-t) - tail;
        if excess > 0.0 {
            low = t
        } else {
            high = t
        }
        let newton = t + excess / student.pdf(t);
        let next = if newton > low && newton < high { newton } else { f64::midpoint(low, high) };
        if (next - t).abs() <= 1e-14 * t.abs() {
            return next;
        }
        t = next;
    }
    t
}

/// Probability of a value at least as far from zero as `t` under Student's t distribution.
#[must_use]
pub fn student_two_sided(t: f64, degrees: f64) -> f64 {
    if degrees >= MANY_DEGREES {
        return normal_two_sided(hill(t.abs(), degrees));
    }
    StudentsT::new(0.0, 1.0, degrees).map_or(1.0, |student| (2.0 * student.cdf(-t.abs())).min(1.0))
}

/// The normal value with the same tail as `t`; beyond 500 degrees exact to some ten digits (G. W. Hill, Algorithm 395:
/// Student's t-distribution, Communications of the ACM 13, 1970, 617-619).
fn hill(t: f64, degrees: f64) -> f64 {
    let a = degrees - 0.5;
    let b = 48.0 * a * a;
    let y = a * (t * t / degrees).ln_1p();
    let correction = (((-0.4 * y - 3.3) * y - 24.0) * y - 85.5) / (0.8 * y * y + 100.0 + b);
    ((correction + y + 3.0) / b + 1.0) * y.sqrt()
}

/// A first guess of the quantile: the inverse of Wallace's transform (D. L. Wallace, Bounds on normal approximations to
/// Student's and the chi-square distributions, Annals of Mathematical Statistics 30, 1959, 1121-1130).
fn wallace_inverse(z: f64, degrees: f64) -> f64 {
    let w = z * (8.0 * degrees + 3.0) / (8.0 * degrees + 1.0);
    (degrees * (w * w / degrees).exp_m1()).sqrt()
}
