//! Known answers of the sampling contract: the published Philox vectors, and frozen noise and draws from a
//! second implementation (vectors/twin.py). Changing them changes the contract.

use speculation::acceptance::{RawRows, verify};
use speculation::logits::TokenCounts;
use speculation::noise::{Noise, Purpose, philox4x32_10};
use speculation::{Draft, SamplingParams, SequenceSpec, TokenId};

#[test]
fn published_philox_vectors() {
    // Random123, kat_vectors, philox4x32 10: zeros, ones, and digits of pi.
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    let pi_key = [0xa409_3822, 0x299f_31d0];
    let max = u32::MAX;
    let rows = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([max; 4], [max; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (pi, pi_key, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
    ];
    for (counter, key, expected) in rows {
        assert_eq!(philox4x32_10(counter, key), expected);
    }
}

#[test]
fn frozen_noise() {
    let mut rows = 0;
    for line in data_lines(include_str!("../vectors/noise.txt")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |i: usize| fields[i].parse::<u32>().unwrap();
        let noise = Noise { seed: fields[0].parse().unwrap(), choice: number(1) };
        let purpose = [Purpose::Draw, Purpose::Accept, Purpose::Residual, Purpose::Draft][number(4) as usize];
        let (position, token) = (number(2), number(3));
        let bits = |i: usize| f64::from_bits(u64::from_str_radix(fields[i], 16).unwrap());
        assert_eq!(noise.uniform(position, token, purpose), bits(5), "U of {line}");
        assert_eq!(noise.gumbel(position, token, purpose), bits(6), "G of {line}");
        rows += 1;
    }
    assert_eq!(rows, 48);
}

/// A draw that noise from f32 uniforms, which ends at 16.64, could not produce: token 0 has 19.3 at this
/// position.
#[test]
fn frozen_draw_of_a_rare_token() {
    let position = 19_351_156;
    let noise = Noise { seed: 1, choice: 0 };
    assert_eq!(noise.gumbel(position, 0, Purpose::Draw).to_bits(), 0x4033_55e8_0202_ec7b);
    let spec = SequenceSpec { seed: 1, max_len: u32::MAX, ..SequenceSpec::default() };
    let mut row = [-18.5, 0.0];
    let verification =
        verify(&spec, &mut TokenCounts::new(0), position, &Draft::default(), RawRows::new(&mut row, 2))
            .unwrap();
    assert_eq!(verification.token_ids, [0]);
}

const PROMPT: [TokenId; 3] = [1, 2, 3];
const VOCAB_SIZE: usize = 64;

#[test]
fn frozen_draws() {
    let mut cases = 0;
    for line in data_lines(include_str!("../vectors/draws.txt")) {
        let (name, ids) = line.split_once(' ').unwrap();
        let expected: Vec<TokenId> = ids.split(' ').map(|id| id.parse().unwrap()).collect();
        assert_eq!(generate(&spec_of(name), expected.len()), expected, "{name}");
        cases += 1;
    }
    assert_eq!(cases, 13);
}

/// The cases of vectors/twin.py.
fn spec_of(name: &str) -> SequenceSpec {
    let mut spec = SequenceSpec { seed: 7, prompt_len: 3, max_len: 1_000, ..SequenceSpec::default() };
    let plain = SamplingParams::default();
    spec.sampling = match name {
        "plain" | "second-choice" => plain,
        "greedy" => SamplingParams { temperature: 0.0, ..plain },
        "cool" => SamplingParams { temperature: 0.7, ..plain },
        "hot" => SamplingParams { temperature: 3.0, ..plain },
        "top-k" => SamplingParams { top_k: 5, temperature: 2.0, ..plain },
        "top-p" => SamplingParams { top_p: 0.8, temperature: 2.0, ..plain },
        "min-p" => SamplingParams { min_p: 0.05, temperature: 2.0, ..plain },
        "all-filters" => SamplingParams { min_p: 0.01, top_k: 12, top_p: 0.9, temperature: 4.0, ..plain },
        "bias" => SamplingParams { logit_bias: vec![(5, 6.5), (9, -100.0), (63, 3.25)], ..plain },
        "repetition" => SamplingParams { repetition_penalty: 1.3, temperature: 0.0, ..plain },
        "frequency-and-presence" => SamplingParams { frequency_penalty: 0.7, presence_penalty: 1.1, ..plain },
        "everything" => SamplingParams {
            repetition_penalty: 1.1,
            frequency_penalty: 0.3,
            presence_penalty: 0.4,
            logit_bias: vec![(5, 2.5)],
            min_p: 0.001,
            top_k: 30,
            top_p: 0.95,
            temperature: 1.5,
            min_tokens: 0,
            ..plain
        },
        _ => panic!("draws.txt has a case {name} that this test does not know"),
    };
    if name == "hot" {
        spec.seed = u64::MAX;
    }
    spec.choice = u32::from(name == "second-choice");
    spec
}

fn generate(spec: &SequenceSpec, num_draws: usize) -> Vec<TokenId> {
    let mut ids = PROMPT.to_vec();
    let mut counts = TokenCounts::new(spec.prompt_len);
    PROMPT.iter().for_each(|&id| counts.push(id));
    for _ in 0..num_draws {
        let start = ids.len() as u32;
        let mut row = toy_logits(&ids);
        let verification =
            verify(spec, &mut counts, start, &Draft::default(), RawRows::new(&mut row, VOCAB_SIZE)).unwrap();
        assert_eq!((verification.num_accepted, verification.token_ids.len()), (0, 1));
        counts.push(verification.token_ids[0]);
        ids.push(verification.token_ids[0]);
    }
    ids.split_off(PROMPT.len())
}

fn toy_logits(ids: &[TokenId]) -> Vec<f32> {
    let last = ids[ids.len() - 1] as usize;
    let logit = |v: usize| ((v * 37 + last * 29 + ids.len() * 53) % 97) as f32 / 8.0 - 6.0;
    (0..VOCAB_SIZE).map(logit).collect()
}

fn data_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with('#'))
}
