//! A second implementation of rejection sampling, from contract B5 alone, with a switch for each common
//! mistake. Without a fault it must commit what the crate commits, so that each mutant differs only by its
//! fault.

use speculation::noise::{Noise, Purpose};
use speculation::{Draft, SequenceSpec, TokenId};

use super::laws::{DRAFT, Rules, TARGET, probabilities};

/// The fault of a mutant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Mutant {
    /// No fault.
    None,
    /// The recovered token is drawn with the drafted token's noise.
    ReusedResidualNoise,
    /// Acceptance uses the noise of the drafted token's own draw.
    ReusedAcceptNoise,
    /// The recovered token is drawn from P instead of max(P - q, 0).
    TargetInsteadOfResidual,
    /// max(P - q, 0) is sampled with a uniform as if it summed to 1.
    UnnormalisedResidual,
    /// The draft drops a drawn token, and ends, if the token looks unlikely.
    StopThatDependsOnTheDraw,
    /// The target draws with noise keyed by position in the step instead of absolute position.
    NoiseByOffset,
}

impl Rules for Mutant {
    fn propose(&self, spec: &SequenceSpec, ids: &[TokenId], k: usize) -> Draft {
        let noise = Noise { seed: spec.seed, choice: spec.choice };
        let mut draft = Draft::default();
        let mut context = ids.to_vec();
        for _ in 0..k {
            let position = context.len() as u32;
            let law = probabilities(&DRAFT.row(&context), spec);
            let largest = law.iter().fold(0.0, |a: f64, &b| a.max(b));
            let weights: Vec<f32> = law.iter().map(|p| (p / largest) as f32).collect();
            let drawn = argmax(&weights.iter().map(|&w| f64::from(w)).collect::<Vec<_>>(), |v| {
                noise.gumbel(position, v, Purpose::Draft)
            });
            if *self == Self::StopThatDependsOnTheDraw && law[drawn as usize] < 0.25 {
                break;
            }
            let shipped = (0..).zip(weights).filter(|&(_, w)| w > 0.0).collect();
            draft.token_ids.push(drawn);
            draft.q.push(shipped);
            context.push(drawn);
        }
        draft
    }

    fn verify(&self, spec: &SequenceSpec, ids: &[TokenId], draft: &Draft) -> Vec<TokenId> {
        let mut context = ids.to_vec();
        for (i, &drafted) in draft.token_ids.iter().enumerate() {
            let law = probabilities(&TARGET.row(&context), spec);
            let total: f64 = draft.q[i].iter().map(|&(_, w)| f64::from(w)).sum();
            let mut q = vec![0.0; law.len()];
            draft.q[i].iter().for_each(|&(id, w)| q[id as usize] = f64::from(w) / total);
            let committed = self.judge(spec, context.len() as u32, drafted, (&law, &q));
            context.push(committed);
            if committed != drafted {
                return context.split_off(ids.len());
            }
        }
        let noise = Noise { seed: spec.seed, choice: spec.choice };
        let position = if *self == Self::NoiseByOffset { 0 } else { context.len() as u32 };
        let law = probabilities(&TARGET.row(&context), spec);
        context.push(argmax(&law, |v| noise.gumbel(position, v, Purpose::Draw)));
        context.split_off(ids.len())
    }
}

impl Mutant {
    fn judge(
        &self,
        spec: &SequenceSpec,
        position: u32,
        drafted: TokenId,
        (p, q): (&[f64], &[f64]),
    ) -> TokenId {
        let noise = Noise { seed: spec.seed, choice: spec.choice };
        let uniform = match self {
            Self::ReusedAcceptNoise => noise.uniform(position, drafted, Purpose::Draft),
            _ => noise.uniform(position, 0, Purpose::Accept),
        };
        if uniform * q[drafted as usize] < p[drafted as usize] {
            return drafted;
        }
        let residual: Vec<f64> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
        match self {
            Self::ReusedResidualNoise => argmax(&residual, |v| noise.gumbel(position, v, Purpose::Draft)),
            Self::TargetInsteadOfResidual => argmax(p, |v| noise.gumbel(position, v, Purpose::Residual)),
            Self::UnnormalisedResidual => walk(&residual, noise.uniform(position, 0, Purpose::Residual)),
            _ => argmax(&residual, |v| noise.gumbel(position, v, Purpose::Residual)),
        }
    }
}

fn argmax(weights: &[f64], gumbel: impl Fn(TokenId) -> f64) -> TokenId {
    let scores = (0..).zip(weights).filter(|(_, w)| **w > 0.0).map(|(v, w)| (v, w.ln() + gumbel(v)));
    scores.max_by(|a, b| a.1.total_cmp(&b.1)).expect("some token has weight").0
}

/// The first token at which the running sum exceeds `uniform`, or the last token.
fn walk(weights: &[f64], uniform: f64) -> TokenId {
    let mut running = 0.0;
    let passed = weights.iter().position(|weight| {
        running += weight;
        uniform < running
    });
    passed.unwrap_or(weights.len() - 1) as TokenId
}
