// silu(gate) * up.
//   gate_up [rows, 2 * width] f32 -> out [rows, width] f32
// Grid (ceil(width / 256), rows), 256 threads. Twin: cpu::reference::silu_mul, equal bits.
extern "C" __global__ void __launch_bounds__(256) swiglu(const float* gate_up, float* out, u32 width) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const float* row = gate_up + (u64)blockIdx.y * 2 * width;
  const float gate = row[i];
  out[(u64)blockIdx.y * width + i] = gate / (1.0f + exp_f32(-gate)) * row[width + i];
}
