//! What `examples/misbehaving/envs.py:Counter` must answer to `policies.py:Follower`, worked out a second time here: no score
//! is true because two runs agree, but because it is what the environment says.

/// 64 well-mixed bits (splitmix64).
#[must_use]
pub const fn mix(seed: u64, trial: u64) -> u64 {
    let mut value = seed
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(trial.wrapping_mul(0xD1B5_4A32_D192_ED03))
        .wrapping_add(0x632B_E59B_D9B4_E019);
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The outcome of an episode in which every hint is believed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    pub reward: f64,
    pub steps: u64,
    pub success: bool,
}

#[must_use]
pub fn follower(seed: u64, trial: u64) -> Outcome {
    let code = mix(seed, trial);
    let steps = 3 + (code >> 56) % 5;
    let (mut reward, mut right) = (0.0, 0);
    for step in 0..steps {
        let byte = (code >> (8 * step)) & 0xFF;
        let lies = byte & 6 == 0;
        if !lies {
            right += 1;
            reward += f64::from(u32::try_from(byte >> 4).unwrap_or(0) + 1) / 16.0;
        }
    }
    Outcome { reward, steps, success: right * 2 > steps }
}

/// Whether a row of an export (`seed`, `trialIndex`, `reward`, ...) is scored as it must be.
pub fn check_follower(row: &serde_json::Value) -> anyhow::Result<()> {
    let number = |key: &str| row[key].as_u64().unwrap_or(u64::MAX);
    let expected = follower(number("seed"), number("trialIndex"));
    let same = row["outcome"] == "scored"
        && row["reward"].as_f64() == Some(expected.reward)
        && row["steps"].as_u64() == Some(expected.steps)
        && row["success"].as_bool() == Some(expected.success)
        && row["terminated"] == true
        && row["truncated"] == false;
    anyhow::ensure!(same, "wrong score: {row} instead of {expected:?}");
    Ok(())
}
