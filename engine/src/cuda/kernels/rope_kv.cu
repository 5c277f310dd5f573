// Per head: q/k norm where the model has it, rotary turn, and the keys' and values' way into paged KV.
//   qkv [rows, (heads + 2 kv_heads) * head_dim] f32: query heads are changed in place, keys and values only read
//   q_norm, k_norm [head_dim] f32 or null; cos, sin [max_len, head_dim / 2] f32; positions [rows]
//   slots [rows]: block * 16 + offset -> kv [blocks][layers][kv_heads][K: 16 x head_dim | V: head_dim x 16] bf16
// Grid (rows, heads + 2 kv_heads), one warp. head_dim even, at most 256. Twins, equal bits: cpu `Backend::norm_heads`,
// `rotate`, `write_kv` (whose layout is another). Slots of a pass differ, so no two warps write one place.
extern "C" __global__ void __launch_bounds__(32)
    rope_kv(float* qkv, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
            const u32* positions, const u32* slots, bf16* kv, u32 heads, u32 kv_heads, u32 head_dim, u32 layer,
            u32 layers, float eps) {
  const u32 lane = threadIdx.x;
  const u64 row = blockIdx.x;
  const u32 head = blockIdx.y;
  const u32 half = head_dim / 2;
  float* x = qkv + (row * (heads + 2 * kv_heads) + head) * head_dim;

  const bool is_query = head < heads;
  const bool is_value = head >= heads + kv_heads;
  const float* norm = is_query ? q_norm : k_norm;
  float scale = 1.0f;
  const bool normed = !is_value && norm != nullptr;
  if (normed) {
    // The CPU's order: element k into lane k mod 16, then by halves. Lanes 16.. repeat the work of 0..15.
    float sum = 0.0f;
    for (u32 i = lane % 16; i < head_dim; i += 16) sum = fmaf(x[i], x[i], sum);
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    scale = 1.0f / sqrtf(sum / (float)head_dim + eps);
  }

  const u64 slot = slots[row];
  const u32 kv_head = is_value ? head - heads - kv_heads : head - heads;
  bf16* place = kv + (((slot / 16) * layers + layer) * kv_heads + (is_query ? 0 : kv_head)) * (u64)(32 * head_dim);
  const u32 offset = (u32)(slot % 16);
  if (is_value) {
    bf16* values = place + 16 * head_dim;
    for (u32 i = lane; i < head_dim; i += WARP) values[i * 16 + offset] = narrow(x[i]);
    return;
  }

  const u64 angle = (u64)positions[row] * half;
  for (u32 i = lane; i < half; i += WARP) {
    float a = x[i];
    float b = x[i + half];
    if (normed) {
      a = a * scale * norm[i];
      b = b * scale * norm[i + half];
    }
    const float c = cos[angle + i];
    const float s = sin[angle + i];
    const float turned_a = a * c - b * s;
    const float turned_b = b * c + a * s;
    if (is_query) {
      x[i] = turned_a;
      x[i + half] = turned_b;
    } else {
      place[offset * head_dim + i] = narrow(turned_a);
      place[offset * head_dim + i + half] = narrow(turned_b);
    }
  }
}
