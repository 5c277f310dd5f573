// Looks up rows of the embedding table and widens them to f32.
//   table [vocab, hidden] bf16, token_ids [rows] -> out [rows, hidden] f32
// Grid (rows), 256 threads. Ids are below vocab: the batch was checked. Twin: cpu `Backend::embed`, equal
// bits.
extern "C" __global__ void __launch_bounds__(256)
    embedding(const bf16* table, const u32* token_ids, float* out, u32 hidden) {
  const u64 row = blockIdx.x;
  const bf16* from = table + (u64)token_ids[row] * hidden;
  for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) out[row * hidden + i] = widen(from[i]);
}
