// Vectors, exponential and small matrix products that the attention kernels are made of.
//
// Matrices are row-major float with a leading dimension; all column counts of results are multiples of W, and buffers
// are padded to that. Nothing here allocates or starts threads.
#pragma once

#include <ATen/core/Tensor.h>
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

inline float sum(Vec x) {
  float total = 0;
  for (int i = 0; i < W; ++i) total += x[i];
  return total;
}

inline float largest(Vec x) {
  float most = x[0];
  for (int i = 1; i < W; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// e^x for x <= 88, within 2 units in the last place; 0 below the normal numbers, NaN for NaN.
//
// x = n ln 2 + r, and e^r = 1 + r + r^2 p(r) with p the Chebyshev interpolant on |r| <= ln(2) / 2.
inline Vec exp(Vec x) {
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
    bool add) {
  const int64_t step = Transposed ? 1 : lda;
  int64_t i = 0;
  for (; i + ROWS <= rows; i += ROWS) {
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
    int64_t ldc, bool add = false) {
  int64_t j = 0;
  for (; j + PANEL * W <= cols; j += PANEL * W) {
    panel<PANEL, Transposed>(rows, depth, a, lda, b + j, ldb, c + j, ldc, add);
  }
  for (; j < cols; j += W) panel<1, Transposed>(rows, depth, a, lda, b + j, ldb, c + j, ldc, add);
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
  int64_t batch = 0, head = 0, position = 0, width = 0;
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
    batch *= size, head *= size, position *= size;
  }

  char* row(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * position; }

  // `factor` times the row, then zeros up to `padded`.
  void load(const char* from, float* to, int64_t padded, float factor = 1) const {
    if (type == at::kFloat) {
      copy_in(reinterpret_cast<const float*>(from), to, factor);
    } else if (type == at::kBFloat16) {
      copy_in(reinterpret_cast<const at::BFloat16*>(from), to, factor);
    } else {
      copy_in(reinterpret_cast<const at::Half*>(from), to, factor);
    }
    for (int64_t i = width; i < padded; ++i) to[i] = 0;
  }

  // The row is `factor` times `from`.
  void store(const float* from, char* to, float factor = 1) const {
    if (type == at::kFloat) {
      copy_out(from, reinterpret_cast<float*>(to), factor);
    } else if (type == at::kBFloat16) {
      copy_out(from, reinterpret_cast<at::BFloat16*>(to), factor);
    } else {
      copy_out(from, reinterpret_cast<at::Half*>(to), factor);
    }
  }

 private:
  // W at a time by loops of a fixed length: rows are too short for the compiler's own prologues
  template <typename T>
  void copy_in(const T* __restrict from, float* __restrict to, float factor) const {
    const int64_t whole = width / W * W, count = width;
    for (int64_t i = 0; i < whole; i += W) {
      for (int j = 0; j < W; ++j) to[i + j] = factor * static_cast<float>(from[i + j]);
    }
    for (int64_t i = whole; i < count; ++i) to[i] = factor * static_cast<float>(from[i]);
  }

  template <typename T>
  void copy_out(const float* __restrict from, T* __restrict to, float factor) const {
    const int64_t whole = width / W * W, count = width;
    for (int64_t i = 0; i < whole; i += W) {
      for (int j = 0; j < W; ++j) to[i + j] = static_cast<T>(factor * from[i + j]);
    }
    for (int64_t i = whole; i < count; ++i) to[i] = static_cast<T>(factor * from[i]);
  }
};

}  // namespace lra
