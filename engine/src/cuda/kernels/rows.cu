// Elementwise operations on rows. Twins, equal bits: cpu `Backend::add`, `take_logit_rows`, `finish_sum`,
// half::bf16::from_f32.

// sum[i] += x[i] for i < len. Grid (ceil(len / 256)), 256 threads.
extern "C" __global__ void __launch_bounds__(256) add(float* sum, const float* x, u64 len) {
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < len) sum[i] = sum[i] + x[i];
}

// Rounds the input of a product to bf16. Grid (ceil(len / 256)), 256 threads.
extern "C" __global__ void __launch_bounds__(256) to_bf16(const float* x, bf16* out, u64 len) {
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < len) out[i] = narrow(x[i]);
}

// The same as panels. x [rows, width], width a multiple of 64 -> out [width / 64][panels] of panel_index.
// Grid (ceil(width / 1024), rows), 256 threads of four numbers each.
extern "C" __global__ void __launch_bounds__(256) to_panels(const float* x, bf16* out, u32 width, u32 panels) {
  const u32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (i >= width) return;
  const uint4 numbers = load_16(x + (u64)blockIdx.y * width + i);
  write_input(out, blockIdx.y, i, width, panels, __uint_as_float(numbers.x), __uint_as_float(numbers.y),
              __uint_as_float(numbers.z), __uint_as_float(numbers.w));
}

// x [*, width], which [rows] -> out [rows, width]. Grid (rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256) take_rows(const float* x, const u32* which, float* out, u32 width) {
  const u64 from = (u64)which[blockIdx.x] * width;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[(u64)blockIdx.x * width + i] = x[from + i];
}

// Epilogue of the sum over all ranks: sum [rows, width] times scales [width] or null, plus bias [width] or
// null. Grid (rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    finish_sum(float* sum, const float* scales, const float* bias, u32 width) {
  float* row = sum + (u64)blockIdx.x * width;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    float x = row[i];
    if (scales) x = x * scales[i];
    if (bias) x = x + bias[i];
    row[i] = x;
  }
}
