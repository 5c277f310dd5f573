"""A second implementation of contract B1 to B4 in plain Python, which shares no code with the crate.

`python3 twin.py noise` prints noise.txt and `python3 twin.py draws` prints draws.txt, the frozen vectors that
tests/sampling/vectors.rs compares the crate with. Python's floats are IEEE 754 doubles, and Python never fuses a
product and a sum, so equal steps give equal bits. The code is written for readability, not for speed.
"""

import math
import struct
import sys

MASK = 0xFFFFFFFF


def philox(counter, key):
    """Philox-4x32 with ten rounds."""
    a, b, c, d = counter
    k, l = key
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ k, y & MASK, (x >> 32) ^ d ^ l, x & MASK
        k, l = (k + 0x9E3779B9) & MASK, (l + 0xBB67AE85) & MASK
    return a, b, c, d


def uniform(seed, choice, position, token, purpose):
    """(m + 0.5) * 2^-52 with m the top 52 of 64 bits."""
    words = philox((position, token >> 1, choice, purpose), (seed & MASK, seed >> 32))
    low, high = words[2:] if token & 1 else words[:2]
    return (((low | high << 32) >> 12) + 0.5) * 2.0**-52


def bits(x):
    """The 64 bits of a double."""
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def from_bits(b):
    """The double with these 64 bits."""
    return struct.unpack("<d", struct.pack("<Q", b))[0]


LN_2_HIGH, LN_2_LOW = from_bits(0x3FE62E42FE000000), from_bits(0x3E1F473DE6AF278F)


def ln(x):
    """ln of a normal positive number: x = 2^e m, ln m = 2 atanh((m - 1) / (m + 1))."""
    m, e = math.frexp(x)
    if m < math.sqrt(0.5):
        m, e = 2 * m, e - 1
    f = m - 1.0
    s = f / (2.0 + f)
    s2 = s * s
    series = 0.0
    for n in range(10, 0, -1):
        series = series * s2 + 2.0 / (2 * n + 1)
    r = series * s2
    half = 0.5 * f * f
    return e * LN_2_HIGH - ((half - (s * (half + r) + e * LN_2_LOW)) - f)


def exp(x):
    """exp of a number whose result is normal: x = k ln 2 + r, then the series."""
    k = float(round(x * 1.4426950408889634))
    r = (x - k * LN_2_HIGH) - k * LN_2_LOW
    series = 0.0
    for n in range(13, 1, -1):
        series = series * r + 1.0 / math.factorial(n)
    return math.ldexp(1.0 + (r + (r * r) * series), int(k))


def gumbel(*place):
    """-ln(-ln U)."""
    return -ln(-ln(uniform(*place)))


PLACES = [
    (0, 0, 0, 0),
    (0, 0, 0, 1),
    (0, 0, 1, 0),
    (0, 1, 0, 0),
    (1, 0, 0, 0),
    (1 << 32, 0, 0, 0),
    (2**64 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),
    (2**64 - 1, 0, 20000, 151935),
    (42, 0, 17, 4094),
    (42, 0, 17, 4095),
    (42, 2, 17, 4095),
    (0x0123456789ABCDEF, 3, 8191, 31999),
]


def f32(x):
    """Rounds a double to f32. One operation on f32 values, done in double and rounded, is the f32 operation."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def apply_penalties(z, ids, prompt_len, case):
    """Contract B1: bias, then repetition, frequency and presence penalty, each operation rounded to f32."""
    for token, bias in case["logit_bias"]:
        z[token] = f32(z[token] + f32(bias))
    repetition, frequency, presence = (f32(case[name]) for name in ("repetition", "frequency", "presence"))
    output = ids[prompt_len:]
    for token in sorted(set(ids)):
        z[token] = f32(z[token] / repetition) if z[token] > 0 else f32(z[token] * repetition)
        z[token] = f32(z[token] - f32(frequency * output.count(token)))
        if token in output:
            z[token] = f32(z[token] - presence)
    return z


def apply_filters(z, case):
    """Contract B2: the (token, x) that pass min-p, then top-k, then top-p."""
    temperature, min_p, top_p = f32(case["temperature"]), f32(case["min_p"]), f32(case["top_p"])
    tokens = [(v, zv / temperature) for v, zv in enumerate(z)]
    highest = max(x for _, x in tokens)
    if min_p > 0:
        tokens = [(v, x) for v, x in tokens if x >= highest + ln(min_p)]
    tokens.sort(key=lambda token: (-token[1], token[0]))
    if case["top_k"] > 0:
        tokens = tokens[: case["top_k"]]
    if top_p < 1:
        total = 0.0
        for _, x in tokens:
            total += exp(x - highest)
        cumulative, count = 0.0, 0
        while cumulative < top_p * total:
            cumulative += exp(tokens[count][1] - highest)
            count += 1
        tokens = tokens[: max(count, 1)]
    return tokens


def draw(z, position, case):
    """Contract B4: the coupled draw; the lowest id wins a tie."""
    if case["temperature"] < 1e-5:
        return min(range(len(z)), key=lambda v: (-z[v], v))
    noise = lambda v: gumbel(case["seed"], case["choice"], position, v, 0)
    return min(apply_filters(z, case), key=lambda token: (-(token[1] + noise(token[0])), token[0]))[0]


VOCAB_SIZE = 64
PROMPT = [1, 2, 3]
NUM_DRAWS = 24


def toy_logits(ids):
    """A model whose logits are exact in f32: multiples of 1/8 that depend on the last id and on the position."""
    return [((v * 37 + ids[-1] * 29 + len(ids) * 53) % 97) / 8 - 6 for v in range(VOCAB_SIZE)]


PLAIN = {
    "seed": 7, "choice": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "repetition": 1.0, "frequency": 0.0, "presence": 0.0, "logit_bias": [],
}  # fmt: skip
CASES = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.7},
    "hot": {"temperature": 3.0, "seed": 2**64 - 1},
    "second-choice": {"choice": 1},
    "top-k": {"top_k": 5, "temperature": 2.0},
    "top-p": {"top_p": 0.8, "temperature": 2.0},
    "min-p": {"min_p": 0.05, "temperature": 2.0},
    "all-filters": {"min_p": 0.01, "top_k": 12, "top_p": 0.9, "temperature": 4.0},
    "bias": {"logit_bias": [(5, 6.5), (9, -100.0), (63, 3.25)]},
    "repetition": {"repetition": 1.3, "temperature": 0.0},
    "frequency-and-presence": {"frequency": 0.7, "presence": 1.1},
    "everything": {
        "repetition": 1.1, "frequency": 0.3, "presence": 0.4, "logit_bias": [(5, 2.5)],
        "min_p": 0.001, "top_k": 30, "top_p": 0.95, "temperature": 1.5,
    },  # fmt: skip
}


def generate(case):
    """Ids drawn one at a time after the prompt."""
    ids = list(PROMPT)
    for _ in range(NUM_DRAWS):
        ids.append(draw(apply_penalties(toy_logits(ids), ids, len(PROMPT), case), len(ids), case))
    return ids[len(PROMPT) :]


def main(file_name):
    """Prints one of the two files."""
    if file_name == "noise":
        print("# seed choice position token purpose | bits of U | bits of G | G")
        for seed, choice, position, token in PLACES:
            for purpose in range(4):
                place = (seed, choice, position, token, purpose)
                u, g = uniform(*place), gumbel(*place)
                print(*place, f"{bits(u):016x} {bits(g):016x} {g!r}")
    if file_name == "draws":
        print("# case | ids drawn after the prompt 1 2 3; cases and toy model are defined in twin.py")
        for name, case in CASES.items():
            print(name, *generate({**PLAIN, **case}))


if __name__ == "__main__":
    main(sys.argv[1])
