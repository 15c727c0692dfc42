// What both passes of WKV-4 run on: rows of a tensor, parameters of a block of channels, decaying sums.
#pragma once

#include <ATen/core/Tensor.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#include <type_traits>

#include "wkv4_numbers.h"

namespace {

constexpr int kDeepest = -80;         // lowest power of two a weight may have beside its tile's exponent
constexpr int kAhead = 6;             // rows between asking for memory and using it
constexpr float kNever = -1e38f;      // an empty sum's exponent in the state that callers see

// A (batch, row, channel) tensor as one scan sees it: row 0 is where the scan starts.
template <typename T>
struct Rows {
  T* first;
  int64_t stride;
  T* operator[](int64_t row) const { return first + row * stride; }
  Rows reversed(int64_t last) const { return {first + last * stride, -stride}; }
};

// Asks for a row's cache lines before they are needed: with many streams at once the hardware does not keep up.
// Inlined by force: gcc drops calls of a function that does nothing but this.
template <int LANES, int WRITE, typename T>
[[gnu::always_inline]] inline void prefetch(Rows<T> rows, int64_t row) {
  for (int c = 0; c < LANES; c += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(rows[row] + c, WRITE);
}

template <typename T>
Rows<T> rows(const at::Tensor& x, int64_t batch, int64_t channel, bool reverse) {
  using Value = std::remove_const_t<T>;
  const int64_t length = x.size(1), stride = x.size(2);
  const Rows<T> all{static_cast<T*>(x.data_ptr<Value>()) + batch * length * stride + channel, stride};
  return reverse ? all.reversed(length - 1) : all;
}

// Writes past the caches, where the machine and the alignment allow it: no line is read only to be overwritten.
template <int LANES>
inline void write_past_caches(float* to, const float* from) {
#ifdef __AVX__
  if (reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    for (int c = 0; c < LANES; c += 8) _mm256_stream_ps(to + c, _mm256_load_ps(from + c));
    return;
  }
#endif
  std::copy_n(from, LANES, to);
}

// Makes such writes visible to other threads.
inline void finish_writes() {
#ifdef __AVX__
  _mm_sfence();
#endif
}

// Up to LANES channels of a row: in place where there are so many, otherwise in a buffer.
template <int LANES>
struct Buffer {
  alignas(64) float values[LANES] = {};
  bool past_caches = false;

  bool in_place(int count) const { return count == LANES && !past_caches; }

  const float* read(const float* from, int count) {
    if (count == LANES) return from;
    std::copy_n(from, count, values);
    return values;
  }

  float* target(float* to, int count) { return in_place(count) ? to : values; }

  void write(float* to, int count) const {
    if (in_place(count)) return;
    if (count == LANES) return write_past_caches<LANES>(to, values);
    std::copy_n(values, count, to);
  }
};

// What a block of channels keeps from row to row: w, e^w and e^u.
template <int LANES>
struct Channels {
  alignas(64) float w[LANES] = {}, decay[LANES] = {}, bonus[LANES] = {};
  alignas(64) float decay_fraction[LANES] = {}, bonus_fraction[LANES] = {};
  alignas(64) int decay_exponent[LANES] = {}, bonus_exponent[LANES] = {};
  int count = LANES;

  Channels(const float* w_from, const float* u_from, int channels) : count(channels) {
    for (int c = 0; c < LANES; c++) {
      w[c] = c < count ? w_from[c] : 0.f;
      const Split step = split_exp(w[c]), own = split_exp(c < count ? u_from[c] : 0.f);
      decay_fraction[c] = step.fraction, decay_exponent[c] = step.exponent;
      bonus_fraction[c] = own.fraction, bonus_exponent[c] = own.exponent;
      decay[c] = scaled(step.fraction, step.exponent);
      bonus[c] = scaled(own.fraction, own.exponent);
    }
  }
};

// N sums a channel that share an exponent; they have yet to decay by `gap` steps.
template <int LANES, int N>
struct Sums {
  alignas(64) float x[N][LANES] = {};
  alignas(64) int exponent[LANES] = {};
  int64_t gap = 0;

  void rescale(const int* to) {
#pragma omp simd
    for (int c = 0; c < LANES; c++) {
      for (int j = 0; j < N; j++) x[j][c] = scaled(x[j][c], exponent[c] - to[c]);
      exponent[c] = to[c];
    }
  }

  // Exponent of channel c as a whole; kEmpty where it holds nothing.
  int top(int c) const {
    // of numerator and denominator the latter decides: it has one sign and no factor v
    float largest = N == 2 ? x[1][c] : 0.f;
    for (int j = 0; N == 4 && j < N; j++) largest = std::max(largest, std::abs(x[j][c]));
    return largest == 0 ? kEmpty : exponent_of(largest) + exponent[c];
  }

  void settle(const Channels<LANES>& channels) {
    if (gap == 0) return;
    const float steps = static_cast<float>(gap);
#pragma omp simd
    for (int c = 0; c < LANES; c++) {
      const Split decay = split_exp(steps * channels.w[c]);
      // the last two of four sums are the derivatives by w of the first two
      if constexpr (N == 4) {
        x[2][c] += steps * x[0][c];
        x[3][c] += steps * x[1][c];
      }
      for (int j = 0; j < N; j++) x[j][c] *= decay.fraction;
      exponent[c] = std::max(exponent[c] + decay.exponent, kEmpty);
    }
    gap = 0;
  }
};

// One step of a scan in channel c, with exponents of its own.
template <int LANES>
void add_uneven(Sums<LANES, 2>& sums, const Channels<LANES>& channels, int c, Split weight, float value) {
  const int past = sums.top(c), now = weight.fraction == 0 ? kEmpty : weight.exponent;
  const int next = std::max({past + channels.decay_exponent[c], now, kEmpty});
  const int shift = sums.exponent[c] + channels.decay_exponent[c] - next;
  const float added = scaled(weight.fraction, weight.exponent - next);
  sums.x[0][c] = scaled(sums.x[0][c] * channels.decay_fraction[c], shift) + added * value;
  sums.x[1][c] = scaled(sums.x[1][c] * channels.decay_fraction[c], shift) + added;
  sums.exponent[c] = next;
}

// Smallest and largest key of a tile's visible rows.
template <int LANES>
struct Range {
  alignas(64) float low[LANES], high[LANES];
  bool any = false;

  Range() {
    std::fill_n(low, LANES, kFarthest);
    std::fill_n(high, LANES, -kFarthest);
  }

  void add(const float* key) {
    any = true;
#pragma omp simd
    for (int c = 0; c < LANES; c++) {  // a NaN is passed over here and shows in its row
      low[c] = key[c] < low[c] ? key[c] : low[c];
      high[c] = key[c] > high[c] ? key[c] : high[c];
    }
  }

  // Largest exponent of each channel's denominators, about, where sums with the exponents `tops` come on top of these
  // keys; whether it keeps all weights in reach.
  bool choose(const Channels<LANES>& channels, const int* tops, int* exponents) const {
    int deepest = 0;
#pragma omp simd reduction(min : deepest)
    for (int c = 0; c < LANES; c++) {
      const int most = static_cast<int>(std::nearbyint(std::min(high[c], kFarthest) * kLog2e));
      // a key without any weight is for uneven rows
      const int least = low[c] > -kFarthest ? static_cast<int>(std::nearbyint(low[c] * kLog2e)) : kEmpty;
      const int bonus = channels.bonus_exponent[c];
      exponents[c] = std::max(most + std::max(bonus, 0), tops[c]);
      deepest = std::min(deepest, least + std::min(bonus, 0) - exponents[c]);
    }
    return deepest >= kDeepest;
  }
};

// How a tile was computed: `exponents` are its channels', and without `even` the rows took their own.
struct Tile {
  int* exponents;
  uint8_t* even;
};

}  // namespace
