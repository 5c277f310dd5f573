// The part of cuBLASLt that the engine calls, on the host, for the driver in `driver.hpp`, which is in the
// same library. It accepts what the documentation of version 13.0 specifies and refuses everything else:
// attributes of other sizes, shapes that do not match, algorithms that were found for another shape,
// addresses that are not on the device or not aligned as declared. Products are summed in order in f64, and
// only when the caller waits for the stream; the workspace is overwritten then, so that no caller can keep
// data there.

namespace blas {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, BF16 = 14 };

constexpr int COMPUTE_32F = 68;
constexpr size_t NEEDED_BYTES = 1u << 20;

// Column-major layout with leading dimension `ld`.
struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t ld;
  size_t number() const { return type == F32 ? 4 : 2; }
  size_t bytes() const { return ((cols - 1) * (uint64_t)ld + rows) * number(); }
};

struct Operation {
  int compute, scale;
  uint32_t transpose[2] = {0, 0};
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};
};

// Content of the opaque 64-byte algorithm that the heuristic returns.
struct Algorithm {
  uint64_t shape, workspace;
  uint32_t alignment[4];
  uint64_t unused[4];
};
static_assert(sizeof(Algorithm) == 64, "");

struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

static std::set<void*>& handles = *new std::set<void*>;

static uint64_t mix(uint64_t seed, uint64_t x) { return (seed ^ x) * 0x9e3779b97f4a7c15ull + (seed >> 29); }

static uint64_t shape_of(const Operation& o, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  uint64_t seed = mix(mix(mix(7, (uint64_t)o.compute), o.transpose[0]), o.transpose[1]);
  for (const Layout* l : {&a, &b, &c, &d}) seed = mix(mix(mix(mix(seed, (uint64_t)l->type), l->rows), l->cols), (uint64_t)l->ld);
  return seed;
}

static uint64_t height(const Layout& l, uint32_t transposed) { return transposed ? l.cols : l.rows; }
static uint64_t width(const Layout& l, uint32_t transposed) { return transposed ? l.rows : l.cols; }

static bool fits(const Operation& o, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const bool types = a.type == BF16 && b.type == BF16 && c.type == F32 && d.type == F32;
  const bool inner = width(a, o.transpose[0]) == height(b, o.transpose[1]);
  const bool outer = d.rows == height(a, o.transpose[0]) && d.cols == width(b, o.transpose[1]);
  const bool same = c.rows == d.rows && c.cols == d.cols;
  return o.compute == COMPUTE_32F && o.scale == F32 && types && inner && outer && same;
}

static double number_at(const void* data, const Layout& l, uint64_t row, uint64_t column, uint32_t transposed) {
  const uint64_t at = transposed ? row * (uint64_t)l.ld + column : column * (uint64_t)l.ld + row;
  if (l.type == F32) return ((const float*)data)[at];
  const uint32_t bits = (uint32_t)((const uint16_t*)data)[at] << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static bool is_valid_operand(const void* at, size_t bytes, uint32_t alignment) {
  return (uintptr_t)at % alignment == 0 && driver::on_device((uint64_t)(uintptr_t)at, bytes);
}

}  // namespace blas

extern "C" {

size_t cublasLtGetVersion() { return 130000; }

const char* cublasLtGetStatusString(int status) {
  switch (status) {
    case blas::SUCCESS: return "success";
    case blas::NOT_INITIALIZED: return "the library was not initialized";
    case blas::INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case blas::NOT_SUPPORTED: return "the requested functionality is not supported";
    default: return "a status that the host's library does not have";
  }
}

int cublasLtCreate(void** handle) {
  std::lock_guard<std::recursive_mutex> guard(driver::turn);
  if (!driver::current) return blas::NOT_INITIALIZED;
  blas::handles.insert(*handle = new int(0));
  return blas::SUCCESS;
}

int cublasLtDestroy(void* handle) {
  std::lock_guard<std::recursive_mutex> guard(driver::turn);
  if (!blas::handles.erase(handle)) return blas::INVALID_VALUE;
  delete (int*)handle;
  return blas::SUCCESS;
}

int cublasLtMatmulDescCreate(blas::Operation** made, int compute, int scale) {
  *made = new blas::Operation{compute, scale};
  return blas::SUCCESS;
}

int cublasLtMatmulDescDestroy(blas::Operation* operation) { return delete operation, blas::SUCCESS; }

int cublasLtMatmulDescSetAttribute(blas::Operation* operation, int attribute, const void* value, size_t bytes) {
  // TRANSA, TRANSB.
  if (attribute != 3 && attribute != 4) return blas::NOT_SUPPORTED;
  if (bytes != 4) return blas::INVALID_VALUE;
  uint32_t transpose;
  std::memcpy(&transpose, value, 4);
  if (transpose > 1) return blas::INVALID_VALUE;
  operation->transpose[attribute - 3] = transpose;
  return blas::SUCCESS;
}

int cublasLtMatrixLayoutCreate(blas::Layout** made, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  if (type != blas::F32 && type != blas::BF16) return blas::NOT_SUPPORTED;
  if (rows == 0 || cols == 0 || ld < (int64_t)rows) return blas::INVALID_VALUE;
  *made = new blas::Layout{type, rows, cols, ld};
  return blas::SUCCESS;
}

int cublasLtMatrixLayoutDestroy(blas::Layout* layout) { return delete layout, blas::SUCCESS; }

int cublasLtMatmulPreferenceCreate(blas::Preference** made) { return *made = new blas::Preference, blas::SUCCESS; }
int cublasLtMatmulPreferenceDestroy(blas::Preference* preference) { return delete preference, blas::SUCCESS; }

int cublasLtMatmulPreferenceSetAttribute(blas::Preference* preference, int attribute, const void* value, size_t bytes) {
  if (attribute == 1) {  // MAX_WORKSPACE_BYTES
    if (bytes != 8) return blas::INVALID_VALUE;
    std::memcpy(&preference->workspace, value, 8);
    return blas::SUCCESS;
  }
  // MIN_ALIGNMENT_{A, B, C, D}_BYTES
  if (attribute < 5 || attribute > 8) return blas::NOT_SUPPORTED;
  if (bytes != 4) return blas::INVALID_VALUE;
  std::memcpy(&preference->alignment[attribute - 5], value, 4);
  const uint32_t alignment = preference->alignment[attribute - 5];
  return alignment && (alignment & (alignment - 1)) == 0 ? blas::SUCCESS : blas::INVALID_VALUE;
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, blas::Operation* operation, blas::Layout* a, blas::Layout* b, blas::Layout* c,
                                   blas::Layout* d, blas::Preference* preference, int wanted, blas::Heuristic* found, int* count) {
  OUTRIDER_TURN;
  if (!blas::handles.count(handle)) return blas::NOT_INITIALIZED;
  if (wanted < 1) return blas::INVALID_VALUE;
  *count = 0;
  if (!blas::fits(*operation, *a, *b, *c, *d)) return blas::NOT_SUPPORTED;
  std::memset(found, 0, sizeof *found);
  found->algorithm.shape = blas::shape_of(*operation, *a, *b, *c, *d);
  found->algorithm.workspace = found->workspace = preference->workspace < blas::NEEDED_BYTES ? 0 : blas::NEEDED_BYTES;
  std::memcpy(found->algorithm.alignment, preference->alignment, 16);
  *count = 1;
  return blas::SUCCESS;
}

int cublasLtMatmul(void* handle, blas::Operation* operation, const float* alpha, const void* a, blas::Layout* a_layout, const void* b,
                   blas::Layout* b_layout, const float* beta, const void* c, blas::Layout* c_layout, void* d, blas::Layout* d_layout,
                   const blas::Algorithm* algorithm, void* workspace, size_t workspace_bytes, driver::Stream* stream) {
  OUTRIDER_TURN;
  if (!blas::handles.count(handle) || !driver::streams.count(stream)) return blas::NOT_INITIALIZED;
  if (stream->captured || *alpha != 1.0f || *beta != 0.0f || c != d) return blas::NOT_SUPPORTED;
  const blas::Operation o = *operation;
  const blas::Layout la = *a_layout, lb = *b_layout, ld = *d_layout;
  if (algorithm->shape != blas::shape_of(o, la, lb, *c_layout, ld)) return blas::INVALID_VALUE;
  const uint32_t* alignment = algorithm->alignment;
  const bool are_valid = blas::is_valid_operand(a, la.bytes(), alignment[0]) && blas::is_valid_operand(b, lb.bytes(), alignment[1]) &&
                        blas::is_valid_operand(d, ld.bytes(), alignment[2] > alignment[3] ? alignment[2] : alignment[3]);
  const size_t needed = algorithm->workspace;
  if (!are_valid || workspace_bytes < needed || !blas::is_valid_operand(workspace, workspace_bytes, 256)) return blas::INVALID_VALUE;
  driver::put(*stream, [=] {
    std::memset(workspace, driver::GARBAGE, needed);
    const uint64_t inner = blas::width(la, o.transpose[0]);
    for (uint64_t column = 0; column < ld.cols; ++column) {
      for (uint64_t row = 0; row < ld.rows; ++row) {
        double sum = 0.0;
        for (uint64_t i = 0; i < inner; ++i) {
          sum += blas::number_at(a, la, row, i, o.transpose[0]) * blas::number_at(b, lb, i, column, o.transpose[1]);
        }
        ((float*)d)[column * (uint64_t)ld.ld + row] = (float)sum;
      }
    }
  });
  return blas::SUCCESS;
}

}
