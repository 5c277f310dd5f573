// silu(gate) * up.
//   gate_up [rows, 2 * width] f32 -> out [rows, width] f32
//   rounded (bf16 or null): out as the input of a product (input_index)
// Grid (ceil(width / 1024), rows), 256 threads of four numbers each. Twin: cpu_kernels::reference::silu_mul,
// equal bits.
__device__ __forceinline__ float silu_mul(float gate, float up) { return gate / (1.0f + exp_f32(-gate)) * up; }

extern "C" __global__ void __launch_bounds__(256)
    swiglu(const float* gate_up, float* out, bf16* rounded, u32 width, u32 panels) {
  const u32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (i >= width) return;
  const float* row = gate_up + (u64)blockIdx.y * 2 * width;
  const u64 to = (u64)blockIdx.y * width + i;
  if (width % 4 == 0) {
    const uint4 gate = *(const uint4*)(row + i), up = *(const uint4*)(row + width + i);
    const float a = silu_mul(__uint_as_float(gate.x), __uint_as_float(up.x));
    const float b = silu_mul(__uint_as_float(gate.y), __uint_as_float(up.y));
    const float c = silu_mul(__uint_as_float(gate.z), __uint_as_float(up.z));
    const float d = silu_mul(__uint_as_float(gate.w), __uint_as_float(up.w));
    *(uint4*)(out + to) = make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
    if (rounded) write_input(rounded, blockIdx.y, i, width, panels, a, b, c, d);
    return;
  }
  for (u32 j = 0; j < 4 && i + j < width; ++j) {
    const float x = silu_mul(row[i + j], row[width + i + j]);
    out[to + j] = x;
    if (rounded) rounded[input_index(blockIdx.y, i + j, width, panels)] = narrow(x);
  }
}
