"""Makes reference.json: what SciPy and statsmodels say of the cases that tests/stats_reference.rs checks.

    python3 -m venv venv && venv/bin/pip install scipy statsmodels
    venv/bin/python reference.py > reference.json

The bootstrap has two references: the same resampling written a second time here (equal to the last digits), and
scipy.stats.bootstrap with another generator and 100,000 resamples (equal within the noise of resampling).
"""

import json
import math

import numpy
import scipy
import statsmodels
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

MASK = (1 << 64) - 1
RESAMPLES = 10_000
SEED = 0x00524C4D65736801
LEVELS = [0.8, 0.9, 0.95, 0.99]


def wilson():
    cases = []
    for total in [1, 2, 7, 20, 29, 148, 263, 1000, 1_000_000]:
        for successes in sorted({0, 1, total // 3, total // 2, total - 1, total}):
            for level in LEVELS:
                lower, upper = proportion_confint(successes, total, alpha=1 - level, method="wilson")
                cases.append({"successes": successes, "total": total, "level": level, "lower": lower, "upper": upper})
    return cases


def newcombe():
    cases = []
    for first in [(56, 70), (9, 10), (6, 7), (5, 56), (10, 10), (400, 1000), (500_000, 1_000_000)]:
        for second in [(48, 80), (3, 10), (2, 7), (1, 29), (0, 20), (350, 1000), (499_000, 1_000_000)]:
            for level in LEVELS:
                lower, upper = confint_proportions_2indep(
                    first[0], first[1], second[0], second[1], method="newcomb", compare="diff", alpha=1 - level
                )
                cases.append({"first": first, "second": second, "level": level, "lower": lower, "upper": upper})
    return cases


def exact_mcnemar():
    cases = []
    pairs = [(0, 1), (1, 1), (0, 5), (0, 6), (1, 7), (6, 16), (2, 12), (10, 10), (121, 59), (30, 55), (480, 520), (4000, 4300)]
    pairs += [(499_000, 501_000), (0, 900)]
    for b, c in pairs:
        p = mcnemar([[0, b], [c, 0]], exact=True).pvalue
        binomial = stats.binomtest(min(b, c), b + c, 0.5).pvalue
        assert math.isclose(p, binomial, rel_tol=1e-6), (b, c, p, binomial)
        probability = stats.binom.pmf(b, b + c, 0.5)
        mid = 1 - probability / 2 if b == c else p - probability
        cases.append({"onlyBaseline": b, "onlyCandidate": c, "p": min(p, 1.0), "midP": mid})
    return cases


def quantiles():
    cases = []
    for degrees in [1, 2, 3, 5, 10, 28, 29, 100, 400, 499, 500, 501, 1000, 2000, 10_000, 1_000_000]:
        for tail in [0.25, 0.1, 0.05, 0.025, 0.005, 0.0005]:
            t = stats.t.isf(tail, degrees)
            cases.append({"degrees": degrees, "tail": tail, "t": t, "twoSided": 2 * stats.t.sf(t, degrees)})
        for t in [0.0, 0.3, 6.0]:
            cases.append({"degrees": degrees, "tail": None, "t": t, "twoSided": 2 * stats.t.sf(t, degrees)})
    return cases


def normal():
    return [{"tail": tail, "z": stats.norm.isf(tail)} for tail in [0.25, 0.2, 0.1, 0.05, 0.025, 0.005, 0.0005, 1e-6]]


def made(count):
    """The same values that the Rust test makes: no file of thousands of numbers."""
    return [((index * 7919) % 10_007) / 100.0 - 49.0 for index in range(count)]


def student():
    generator = numpy.random.default_rng(7)
    samples = [
        [1.0, 2.0],
        [0.0, 0.0, 1.0],
        [-1.5, 2.25, 0.5, 3.0, 1.0],
        [round(value, 3) for value in generator.normal(2.0, 5.0, 29)],
        [1e9 + 1.0, 1e9 + 2.0, 1e9 + 4.0],
        [1e-9, 3e-9, -2e-9, 5e-9],
        [1e200, 3e200, 2e200],
    ]
    cases = []
    for values in samples:
        for level in LEVELS:
            cases.append(student_case(values, level, {"values": values}))
    for count in [2_001, 20_000]:
        cases.append(student_case(made(count), 0.95, {"made": count}))
    return cases


def student_case(values, level, case):
    scale = 2.0 ** math.floor(math.log2(max(abs(value) for value in values)))
    scaled = numpy.array(values) / scale
    test = stats.ttest_1samp(scaled, 0.0)
    interval = test.confidence_interval(level)
    return case | {
        "level": level,
        "mean": scaled.mean() * scale,
        "deviation": scaled.std(ddof=1) * scale,
        "lower": interval.low * scale,
        "upper": interval.high * scale,
        "p": test.pvalue,
    }


def splitmix(seed):
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def xoshiro(seed):
    mix = splitmix(seed)
    s = [next(mix) for _ in range(4)]

    def rotate(value, by):
        return ((value << by) | (value >> (64 - by))) & MASK

    while True:
        yield (rotate((s[0] + s[3]) & MASK, 23) + s[0]) & MASK
        shifted = (s[1] << 17) & MASK
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = rotate(s[3], 45)


def bootstrap():
    generator = numpy.random.default_rng(11)
    samples = [
        [round(value, 2) for value in generator.normal(0.4, 1.0, 30)],
        [round(value, 2) for value in generator.exponential(3.0, 60)],
        [float(value) for value in generator.integers(-2, 4, 120)],
        [0.0] * 90 + [1.0] * 10,
        [round(value, 1) for value in generator.normal(-30.0, 80.0, 100)],
    ]
    cases = []
    for values in samples:
        ascending = sorted(values)
        count = len(ascending)
        draw = xoshiro(SEED)
        means = []
        for _ in range(RESAMPLES):
            total = 0.0
            for _ in range(count):
                total += ascending[(next(draw) * count) >> 64]
            means.append(total / count)
        at_most = sum(mean <= 0.0 for mean in means)
        at_least = sum(mean >= 0.0 for mean in means)
        lower, upper = numpy.quantile(means, [0.025, 0.975])
        other = stats.bootstrap(
            (numpy.array(values),), numpy.mean, n_resamples=100_000, method="percentile", batch=1_000, rng=numpy.random.default_rng(3)
        ).confidence_interval
        cases.append(
            {
                "values": values,
                "lower": lower,
                "upper": upper,
                "p": min(1.0, 2 * (min(at_most, at_least) + 1) / (RESAMPLES + 1)),
                "scipyLower": other.low,
                "scipyUpper": other.high,
            }
        )
    return cases


def holm():
    cases = []
    for values in [[0.01, 0.04, 0.03, 0.005], [0.5], [0.2, 0.2, 0.2], [0.0, 1.0, 0.9, 0.001], [0.04, 0.011, 0.013, 0.6, 0.02, 0.011]]:
        cases.append({"p": values, "adjusted": list(multipletests(values, method="holm")[1])})
    return cases


def power_of_exact_mcnemar(pairs, discordant, difference, alpha):
    """Chance that the exact test rejects, over all outcomes, if these shares are true."""
    share = (discordant + difference) / 2 / discordant
    power = 0.0
    counts = numpy.arange(pairs + 1)
    for count, chance in zip(counts, stats.binom.pmf(counts, pairs, discordant)):
        if chance < 1e-12:
            continue
        outcomes = numpy.arange(count + 1)
        p = numpy.minimum(1.0, 2 * stats.binom.cdf(numpy.minimum(outcomes, count - outcomes), count, 0.5))
        power += chance * stats.binom.pmf(outcomes[p < alpha], count, share).sum()
    return power


def episodes():
    success = []
    for table in [(60, 10, 16, 14), (30, 20, 30, 20), (80, 4, 9, 7), (10, 100, 140, 250)]:
        pairs = sum(table)
        discordant = (table[1] + table[2]) / pairs
        difference = (table[2] - table[1]) / pairs
        z_alpha, z_beta = stats.norm.isf(0.025), stats.norm.isf(0.2)
        needed = math.ceil((z_alpha * math.sqrt(discordant) + z_beta * math.sqrt(discordant - difference**2)) ** 2 / difference**2)
        power = power_of_exact_mcnemar(needed, discordant, difference, 0.05)
        success.append({"table": table, "needed": needed, "power": power})
    mean = []
    for effect in [1.0, 0.5, 0.2, 0.05]:
        needed = TTestPower().solve_power(effect_size=effect, alpha=0.05, power=0.8, alternative="two-sided")
        mean.append({"effect": effect, "needed": float(numpy.squeeze(needed))})
    return {"success": success, "mean": mean}


if __name__ == "__main__":
    document = {
        "madeWith": {"scipy": scipy.__version__, "statsmodels": statsmodels.__version__, "numpy": numpy.__version__},
        "wilson": wilson(),
        "newcombe": newcombe(),
        "mcnemar": exact_mcnemar(),
        "normal": normal(),
        "student": quantiles(),
        "mean": student(),
        "bootstrap": bootstrap(),
        "holm": holm(),
        "episodes": episodes(),
    }

    def plain(value):
        return value.item() if isinstance(value, numpy.generic) else list(value)

    print("{")
    print(",\n".join(f"  {json.dumps(key)}: {json.dumps(value, default=plain)}" for key, value in document.items()))
    print("}")
