// Looks up rows of the embedding table and widens them to f32.
//   table [vocab, hidden] bf16, or in tiles of 128 rows that are packed in panels (gemm_panels.cu), if the table is
//   also the vocabulary's projection; token_ids [rows] -> out [rows, hidden] f32
// Grid (rows), 256 threads. Ids are below vocab: the batch was checked. Twin: cpu `Backend::embed`, equal
// bits.
extern "C" __global__ void __launch_bounds__(256)
    embedding(const bf16* table, const u32* token_ids, float* out, u32 hidden, u32 is_tiled) {
  constexpr u32 TILE = 128;
  const u64 row = blockIdx.x;
  const u32 id = token_ids[row];
  const u32 first = is_tiled ? id / TILE * TILE : id;
  const bf16* from = table + (u64)first * hidden;
  for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) {
    out[row * hidden + i] = widen(from[is_tiled ? panel_index(id % TILE, i, TILE / 8) : i]);
  }
}
