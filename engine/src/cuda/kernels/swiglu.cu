// silu(gate) * up.
//   gate_up [rows, 2 * width] f32 -> out [rows, width] f32 or bf16
// Grid (ceil(width / 256), rows), 256 threads. Twin: cpu::reference::silu_mul, equal bits before the rounding.
__device__ __forceinline__ float silu_mul(const float* gate_up, u32 i, u32 width) {
  const float* row = gate_up + (u64)blockIdx.y * 2 * width;
  const float gate = row[i];
  return gate / (1.0f + exp_f32(-gate)) * row[width + i];
}

extern "C" __global__ void __launch_bounds__(256) swiglu_f32(const float* gate_up, float* out, u32 width) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < width) out[(u64)blockIdx.y * width + i] = silu_mul(gate_up, i, width);
}

extern "C" __global__ void __launch_bounds__(256) swiglu_bf16(const float* gate_up, bf16* out, u32 width) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < width) out[(u64)blockIdx.y * width + i] = narrow(silu_mul(gate_up, i, width));
}
