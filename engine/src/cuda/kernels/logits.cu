// The steps of docs/contract.md B1 that depend on the sequence, in place on rows of raw logits. Only ids that
// change are listed, each at most once per row. Twin: speculation::logits::process, equal bits.

// Edit of one logit of one row; written by `ops/logits.rs`.
struct LogitEdit {
  u32 row;
  u32 token_id;
  u32 flags;       // 1: excluded by min_tokens, 2: has a bias, 4: occurs before the position
  float bias;
  u32 in_output;   // occurrences in the output
  float repetition, frequency, presence;
};

// logits [rows, vocab] f32, edits [num_edits]. Grid (ceil(num_edits / 128)), 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    edit_logits(float* logits, const LogitEdit* edits, u32 num_edits, u32 vocab) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= num_edits) return;
  const LogitEdit edit = edits[i];
  float* place = logits + (u64)edit.row * vocab + edit.token_id;
  float logit = *place;
  if (edit.flags & 1) logit = NEG_INF;
  if (edit.flags & 2) logit = logit + edit.bias;
  if (edit.flags & 4) {
    logit = logit > 0.0f ? logit / edit.repetition : logit * edit.repetition;
    logit = logit - edit.frequency * (float)edit.in_output;
    if (edit.in_output > 0) logit = logit - edit.presence;
  }
  *place = logit;
}
