//! The random numbers of the bootstrap: xoshiro256++ seeded through SplitMix64.
//!
//! Written out from the published definition (D. Blackman, S. Vigna, Scrambled linear pseudorandom number generators, ACM
//! Transactions on Mathematical Software 47, 2021; reference code at prng.di.unimi.it), so that no update of a library
//! changes an interval that was published. Must never be used where a secret is drawn.

/// SplitMix64: spreads one number over a state.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// xoshiro256++.
#[derive(Debug, Clone)]
pub struct Xoshiro256([u64; 4]);

impl Xoshiro256 {
    #[must_use]
    pub const fn seeded(seed: u64) -> Self {
        let mut mix = SplitMix64::new(seed);
        Self([mix.next_u64(), mix.next_u64(), mix.next_u64(), mix.next_u64()])
    }

    pub const fn next_u64(&mut self) -> u64 {
        let [s0, s1, s2, s3] = self.0;
        let result = s0.wrapping_add(s3).rotate_left(23).wrapping_add(s0);
        let s2 = s2 ^ s0;
        let s3 = s3 ^ s1;
        self.0 = [s0 ^ s3, s1 ^ s2, s2 ^ (s1 << 17), s3.rotate_left(45)];
        result
    }

    /// A number below `limit`: the high word of the product. Off from uniform by less than `limit / 2^64`.
    #[expect(clippy::cast_possible_truncation, reason = "the shifted product is below `limit`, a usize")]
    pub const fn below(&mut self, limit: usize) -> usize {
        ((self.next_u64() as u128 * limit as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_mix_gives_the_published_sequence() {
        // First five outputs for the seed 1234567, as Rosetta Code lists them for the reference code.
        let mut mix = SplitMix64::new(1_234_567);
        let drawn: Vec<u64> = (0..5).map(|_| mix.next_u64()).collect();
        assert_eq!(
            drawn,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821
            ]
        );
    }

    #[test]
    fn xoshiro_gives_the_sequence_of_the_reference_code() {
        // State 1, 2, 3, 4: outputs of the C reference code, as the tests of the crate rand_xoshiro list them.
        let mut generator = Xoshiro256([1, 2, 3, 4]);
        let drawn: Vec<u64> = (0..10).map(|_| generator.next_u64()).collect();
        assert_eq!(
            drawn,
            [
                41_943_041,
                58_720_359,
                3_588_806_011_781_223,
                3_591_011_842_654_386,
                9_228_616_714_210_784_205,
                9_973_669_472_204_895_162,
                14_011_001_112_246_962_877,
                12_406_186_145_184_390_807,
                15_849_039_046_786_891_736,
                10_450_023_813_501_588_000
            ]
        );
    }

    #[test]
    fn below_stays_below_and_reaches_every_value() {
        let mut generator = Xoshiro256::seeded(1);
        let mut counts = [0_u32; 7];
        for _ in 0..7_000 {
            counts[generator.below(7)] += 1;
        }
        assert!(counts.iter().all(|&count| (850..1150).contains(&count)), "{counts:?}");
    }
}
