// Operations on the heads of a row [q heads | k heads | v heads]: norm, rotary embedding, write to paged KV.
//   qkv [rows, (heads + 2 kv_heads) * head_dim] f32; head_dim even, at most 256
// Twins, equal bits: cpu `Backend::norm_heads`, `rotate`, `write_kv` (which has another KV layout).

// RMS norm of each query and key head. q_norm, k_norm [head_dim]. Grid (rows, heads + kv_heads), one warp.
extern "C" __global__ void __launch_bounds__(32)
    norm_heads(float* qkv, const float* q_norm, const float* k_norm, u32 heads, u32 kv_heads, u32 head_dim,
               float q_eps, float k_eps) {
  const bool is_query = blockIdx.y < heads;
  const float* norm = is_query ? q_norm : k_norm;
  float* x = qkv + ((u64)blockIdx.x * (heads + 2 * kv_heads) + blockIdx.y) * head_dim;
  // The CPU's order: lane k mod 16 adds element k, then a butterfly. Lanes 16.. repeat the work of 0..15.
  float sum = 0.0f;
  for (u32 i = threadIdx.x % 16; i < head_dim; i += 16) sum = fmaf(x[i], x[i], sum);
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  const float scale = 1.0f / sqrtf(sum / (float)head_dim + (is_query ? q_eps : k_eps));
  // All lanes must have read x before this one overwrites it: shuffles do not order memory accesses.
  __syncthreads();
  for (u32 i = threadIdx.x; i < head_dim; i += WARP) x[i] = x[i] * scale * norm[i];
}

// Rotary embedding of every query and key head: rotates pairs (i, i + half) by the angles of the row's
// position. positions [rows]; angles [all positions][cos | sin of head_dim / 2]. Grid (rows, heads +
// kv_heads), one warp.
extern "C" __global__ void __launch_bounds__(32)
    rotate(float* qkv, const u32* positions, const float* angles, u32 heads, u32 kv_heads, u32 head_dim) {
  const u32 half = head_dim / 2;
  const float* cos = angles + (u64)positions[blockIdx.x] * head_dim;
  const float* sin = cos + half;
  float* x = qkv + ((u64)blockIdx.x * (heads + 2 * kv_heads) + blockIdx.y) * head_dim;
  for (u32 i = threadIdx.x; i < half; i += WARP) {
    const float a = x[i];
    const float b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

// Slot of a row whose keys and values are not stored.
#define NO_SLOT 0xffffffffu

// Writes keys and values, rounded to bf16. slots [rows]: block * 16 + offset, all different, or NO_SLOT
//   -> kv (kv.cuh); head_dim a multiple of 8. Grid (rows, kv_heads), one warp.
extern "C" __global__ void __launch_bounds__(32)
    write_kv(const float* qkv, const u32* slots, bf16* kv, u32 heads, u32 kv_heads, u32 head_dim, u32 layer,
             u32 layers) {
  const u64 slot = slots[blockIdx.x];
  if (slot == NO_SLOT) return;
  const u32 offset = (u32)(slot % 16);
  const float* row = qkv + (u64)blockIdx.x * (heads + 2 * kv_heads) * head_dim;
  const float* key = row + (heads + blockIdx.y) * head_dim;
  const float* value = key + kv_heads * head_dim;
  bf16* block = kv + kv_block(slot / 16, layer, layers, blockIdx.y, kv_heads, head_dim);
  for (u32 i = threadIdx.x; i < head_dim; i += WARP) {
    block[key_index(offset, i, head_dim)] = narrow(key[i]);
    block[value_index(offset, i, head_dim)] = narrow(value[i]);
  }
}

// Fused `rotate` and `write_kv`: rotates queries in place and keys on their way into KV. Keys in qkv stay
// unrotated: nothing reads them there. Rows without a slot stay as they are. Grid (rows, heads + kv_heads), one
// warp.
extern "C" __global__ void __launch_bounds__(32)
    rotate_and_write_kv(float* qkv, const u32* positions, const float* angles, const u32* slots, bf16* kv, u32 heads,
                        u32 kv_heads, u32 head_dim, u32 layer, u32 layers) {
  const u32 half = head_dim / 2;
  const float* cos = angles + (u64)positions[blockIdx.x] * head_dim;
  const float* sin = cos + half;
  float* x = qkv + ((u64)blockIdx.x * (heads + 2 * kv_heads) + blockIdx.y) * head_dim;
  const bool is_query = blockIdx.y < heads;
  const u64 slot = slots[blockIdx.x];
  if (slot == NO_SLOT) return;
  const u32 offset = (u32)(slot % 16);
  bf16* block = kv + kv_block(slot / 16, layer, layers, is_query ? 0 : blockIdx.y - heads, kv_heads, head_dim);
  for (u32 i = threadIdx.x; i < half; i += WARP) {
    const float a = x[i];
    const float b = x[i + half];
    const float low = a * cos[i] - b * sin[i];
    const float high = b * cos[i] + a * sin[i];
    if (is_query) {
      x[i] = low;
      x[i + half] = high;
    } else {
      block[key_index(offset, i, head_dim)] = narrow(low);
      block[key_index(offset, i + half, head_dim)] = narrow(high);
    }
  }
  if (is_query) return;
  const float* value = x + kv_heads * head_dim;
  for (u32 i = threadIdx.x; i < head_dim; i += WARP) block[value_index(offset, i, head_dim)] = narrow(value[i]);
}
