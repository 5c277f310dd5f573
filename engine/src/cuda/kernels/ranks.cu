// Combines the parts of tensor-parallel ranks: the rest of the contract's tree, and rows placed side by side.
// Kernels read each part in place through one pointer per rank; pointers past the last rank are null and are
// not dereferenced. Twins: collective::shared_memory, equal bits.

// sum[i] = the tree of docs/contract.md C2 over parts [ranks][len] f32; ranks 1, 2, 4 or 8. Nothing is added
// for absent ranks, not even zeros. Grid (ceil(len / 256)), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    sum_ranks(const float* p0, const float* p1, const float* p2, const float* p3, const float* p4, const float* p5,
              const float* p6, const float* p7, float* sum, u64 len, u32 ranks) {
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= len) return;
  float total = p0[i];
  if (ranks >= 2) total = total + p1[i];
  if (ranks >= 4) total = total + (p2[i] + p3[i]);
  if (ranks == 8) total = total + ((p4[i] + p5[i]) + (p6[i] + p7[i]));
  sum[i] = total;
}

// Concatenates the ranks' columns: part r [rows, first(r + 1) - first(r)] f32 with first(r) = floor(r * width
// / ranks) -> out [rows, width] f32. Grid (ceil(width / 256), rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    concat_ranks(const float* p0, const float* p1, const float* p2, const float* p3, const float* p4, const float* p5,
                 const float* p6, const float* p7, float* out, u32 width, u32 ranks) {
  const u32 column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const float* part = p0;
  u32 first = 0;
  u32 end = width / ranks;
#define OF_RANK(R, P)                                  \
  if (ranks > R && column >= end) {                    \
    part = P;                                          \
    first = end;                                       \
    end = (u32)((u64)(R + 1) * width / ranks);         \
  }
  OF_RANK(1, p1)
  OF_RANK(2, p2)
  OF_RANK(3, p3)
  OF_RANK(4, p4)
  OF_RANK(5, p5)
  OF_RANK(6, p6)
  OF_RANK(7, p7)
#undef OF_RANK
  const u64 row = blockIdx.y;
  out[row * width + column] = part[row * (end - first) + (column - first)];
}
