// Vectors, exponential and small matrix products that the attention kernels are made of.
//
// Matrices are row-major float with a leading dimension; all column counts of results are multiples of W, and buffers
// are padded to that. Nothing here allocates or starts threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace lra {

#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 12;  // 24 of 32 registers accumulate
#elif defined(__AVX__)
constexpr int W = 8, ROWS = 6;  // 12 of 16
#else
constexpr int W = 4, ROWS = 8;  // 16 of NEON's 32
#endif
constexpr int PANEL = 2;  // vectors of a block's width

typedef float Vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline Vec& vec(float* p) { return *reinterpret_cast<Vec*>(p); }
inline const Vec& vec(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec splat(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline Vec smaller(Vec a, Vec b) { return a < b ? a : b; }

__attribute__((always_inline)) inline float sum(Vec x) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad parts[W / 4];
  std::memcpy(parts, &x, sizeof(x));
  for (int i = 1; i < W / 4; ++i) parts[0] += parts[i];
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

inline float largest(Vec x) {
  float most = x[0];
  for (int i = 1; i < W; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// e^x for x <= 88, within 2 units in the last place; 0 below the normal numbers, NaN for NaN.
//
// x = n ln 2 + r, and e^r = 1 + r + r^2 p(r) with p the Chebyshev interpolant on |r| <= ln(2) / 2.
__attribute__((always_inline)) inline Vec exp(Vec x) {
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are n
  const Vec low = splat(-87.3f);
  Vec bounded = x < low ? low : x;
  Vec shifted = bounded * 1.44269504f + round;
  Vec n = shifted - round;
  Vec r = bounded - n * 0.693359375f;  // ln 2 in two parts, the first so short that its product is exact
  r = r + n * 2.12194440e-4f;
  Vec p = splat(0.00139263f);
  p = p * r + 0.00836323f;
  p = p * r + 0.04166655f;
  p = p * r + 0.16666577f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  Vec scaled = (Vec)((IntVec)p + ((IntVec)shifted << 23));
  return x < low ? Vec{} : scaled;
}

inline int64_t round_up(int64_t n, int64_t unit = W) { return (n + unit - 1) / unit * unit; }

// Rows of memory that are wanted soon. They are asked for bit by bit between the blocks of a product, so that the
// memory works while the product is computed; asked for all at once they would fill the queues and be waited for.
class Ahead {
 public:
  explicit Ahead(int64_t rows) : end_(rows) {}

  void clear() { streams_ = 0, row_ = 0; }

  // `bytes` of each of the rows first, first + stride, ...; they need not exist.
  void read(const char* first, int64_t stride, int64_t bytes) { list_[streams_++] = {first, stride, bytes, false}; }
  void write(const char* first, int64_t stride, int64_t bytes) { list_[streams_++] = {first, stride, bytes, true}; }

  // Asks for a few rows of every stream.
  void step() {
    for (const int64_t stop = std::min(row_ + 3, end_); row_ < stop; ++row_) {
      for (int i = 0; i < streams_; ++i) ask(list_[i]);
    }
  }

 private:
  struct Stream {
    const char* first;
    int64_t stride, bytes;
    bool written;
  };

  void ask(const Stream& stream) const {
    const char* row = stream.first + row_ * stream.stride;
    for (int64_t i = 0; i < stream.bytes; i += 64) {
      if (stream.written) {
        __builtin_prefetch(row + i, 1);
      } else {
        __builtin_prefetch(row + i, 0, 2);  // to the second level: the first is full of this tile
      }
    }
  }

  int streams_ = 0;
  int64_t row_ = 0, end_;
  Stream list_[4];
};

// C (R x N vectors) = or += A B with everything accumulated in registers; A(i, k) is a[i lda + k], or a[k lda + i] if
// Transposed.
template <int R, int N, bool Transposed>
inline void block(
    int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  Vec acc[R][N] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) right[j] = vec(b + k * ldb + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      float left = Transposed ? a[k * lda + i] : a[i * lda + k];
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) acc[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
      Vec& to = vec(c + i * ldc + j * W);
      to = add ? to + acc[i][j] : acc[i][j];
    }
  }
}

// The last rows, fewer than a full block.
template <int R, int N, bool Transposed, typename... Args>
inline void edge(int64_t rows, Args... args) {
  if (rows == R) return block<R, N, Transposed>(args...);
  if constexpr (R > 1) edge<R - 1, N, Transposed>(rows, args...);
}

template <int N, bool Transposed>
inline void panel(
    int64_t rows, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
    bool add, Ahead* ahead) {
  const int64_t step = Transposed ? 1 : lda;
  int64_t i = 0;
  for (; i + ROWS <= rows; i += ROWS) {
    if (ahead != nullptr) ahead->step();
    block<ROWS, N, Transposed>(depth, a + i * step, lda, b, ldb, c + i * ldc, ldc, add);
  }
  if constexpr (ROWS > 1) {
    edge<ROWS - 1, N, Transposed>(rows - i, depth, a + i * step, lda, b, ldb, c + i * ldc, ldc, add);
  }
}

// C (rows x cols) = or += A (rows x depth) B (depth x cols), A stored as its transpose (depth x rows) if Transposed.
template <bool Transposed = false>
inline void matmul(
    int64_t rows, int64_t cols, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
    int64_t ldc, bool add = false, Ahead* ahead = nullptr) {
  int64_t j = 0;
  for (; j + PANEL * W <= cols; j += PANEL * W) {
    panel<PANEL, Transposed>(rows, depth, a, lda, b + j, ldb, c + j, ldc, add, ahead);
  }
  for (; j < cols; j += W) panel<1, Transposed>(rows, depth, a, lda, b + j, ldb, c + j, ldc, add, ahead);
}

// b (cols x rows) = the transpose of a (rows x cols).
inline void transpose(int64_t rows, int64_t cols, const float* a, int64_t lda, float* b, int64_t ldb) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) b[j * ldb + i] = a[i * lda + j];
  }
}

// Rows of a (B, H, L, width) tensor of fp32, bf16 or fp16, read and written as fp32; the last dimension is contiguous.
struct Rows {
  char* data = nullptr;
  int64_t batch = 0, head = 0, position = 0, width = 0, row_bytes = 0;
  at::ScalarType type = at::kFloat;

  Rows() = default;
  explicit Rows(const at::Tensor& x)
      : data(static_cast<char*>(x.data_ptr())),
        batch(x.stride(0)),
        head(x.stride(1)),
        position(x.stride(2)),
        width(x.size(3)),
        type(x.scalar_type()) {
    const int64_t size = x.element_size();
    batch *= size, head *= size, position *= size, row_bytes = width * size;
  }

  char* row(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * position; }

  // Calls body(T{}) with the type of the elements.
  template <class Body>
  void typed(const Body& body) const {
    if (type == at::kFloat) {
      body(float{});
    } else if (type == at::kBFloat16) {
      body(at::BFloat16{});
    } else {
      body(at::Half{});
    }
  }
};

// to = factor * from; W at a time by loops of a fixed length: rows are too short for the compiler's own prologues
template <typename From, typename To>
__attribute__((always_inline)) inline void scale_row(
    const From* __restrict from, To* __restrict to, int64_t width, float factor) {
  const int64_t whole = width / W * W;
  for (int64_t i = 0; i < whole; i += W) {
    for (int j = 0; j < W; ++j) to[i + j] = static_cast<To>(factor * static_cast<float>(from[i + j]));
  }
  for (int64_t i = whole; i < width; ++i) to[i] = static_cast<To>(factor * static_cast<float>(from[i]));
}

}  // namespace lra
