// Sizes, states, buffers and tile positions of the attention kernels; formulas and shapes as in kernelized.h.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>
#include "tile.h"

namespace lra {

constexpr int64_t TILE = 48;       // T: two tiles of 110 features fit a first-level cache of 48 KiB
constexpr int64_t MIN_SPAN = 480;  // positions that pay for a state of their own
constexpr int64_t TASKS = 64;      // enough for the cores of one machine

// A multiple of 256 bytes would crowd a tile's column into few sets of the cache.
constexpr int64_t padded_lead(int64_t cols) { return cols % 64 ? cols : cols + W; }

struct Shape {
  static constexpr int64_t fixed = 0;
  int64_t batch, heads, length, width, values, features;
  int64_t x_lead, v_cols, f_cols;  // padded to whole vectors
  int64_t f_lead, state_size, sequences, span, spans;

  Shape(const at::Tensor& q, const at::Tensor& v, int64_t feature_count)
      : batch(q.size(0)),
        heads(q.size(1)),
        length(q.size(2)),
        width(q.size(3)),
        values(v.size(3)),
        features(feature_count),
        x_lead(round_up(width)),
        v_cols(round_up(values)),
        f_cols(round_up(features)),
        f_lead(padded_lead(f_cols)),
        state_size(features * v_cols + 2 * f_lead),
        sequences(batch * heads) {
    const int64_t wanted = (TASKS + sequences - 1) / std::max<int64_t>(sequences, 1);  // a batch may have no row
    span = round_up(std::max(MIN_SPAN, (length + wanted - 1) / wanted), TILE);
    spans = (length + span - 1) / span;
  }
};

// The sizes of heads whose q, k, v and features are N wide, known to the compiler.
template <int64_t N>
struct Square : Shape {
  using Shape::Shape;
  static constexpr int64_t fixed = N, width = N, values = N, features = N, x_lead = N, v_cols = N, f_cols = N;
  static constexpr int64_t f_lead = padded_lead(N), state_size = N * N + 2 * f_lead;
  static_assert(N % W == 0);

  bool fits() const { return Shape::width == N && Shape::values == N && Shape::features == N; }
};

// S (F, V), z (F) and the stabiliser of the features (F), side by side in memory; or dS and dz.
struct State {
  float *sums, *total, *top;

  template <class S>
  State(float* memory, const S& s)
      : sums(memory), total(memory + s.features * s.v_cols), top(total + s.f_lead) {}

  template <class S>
  void clear(const S& s) { std::memset(sums, 0, s.state_size * sizeof(float)); }
};

// Memory of one task, aligned to the cache line.
class Arena {
 public:
  float* take(int64_t count) {
    const size_t bytes = round_up(count * sizeof(float), 64);
    blocks_.emplace_back(static_cast<float*>(std::aligned_alloc(64, bytes)), &std::free);
    TORCH_CHECK_WITH(OutOfMemoryError, blocks_.back(), "attention: no memory for a tile");
    return blocks_.back().get();
  }

 private:
  std::vector<std::unique_ptr<float, void (*)(void*)>> blocks_;
};

// Positions that the mask shows, at most TILE of them.
struct Selection {
  int64_t count = 0, index[TILE];

  Selection() = default;

  // Of [position, end); moves `position` behind the last one seen.
  Selection(const bool* mask, int64_t& position, int64_t end) {
    for (; position < end && count < TILE; ++position) {
      if (mask == nullptr || mask[position]) index[count++] = position;
    }
  }

  // Of the `length` positions from `first`, at most TILE.
  static Selection within(const bool* mask, int64_t first, int64_t length) {
    return Selection(mask, first, first + length);
  }

  // How many are at `last` or before, given that at least `known` are.
  int64_t until(int64_t last, int64_t known) const {
    while (known < count && index[known] <= last) ++known;
    return known;
  }
};

}  // namespace lra
