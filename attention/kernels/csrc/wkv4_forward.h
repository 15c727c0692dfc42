// The forward scan of a block of channels, tile by tile; formulas in wkv4.cpp.
#pragma once

#include "wkv4_sums.h"

namespace {

template <int LANES>
struct Forward {
  Channels<LANES> channels;
  Rows<const float> k, v;
  Rows<float> y;
  Rows<float> saved;  // 1 / D over the tile's exponent, or log D in an uneven tile; none where no gradient is wanted
  Rows<const bool> mask;
  Sums<LANES, 2> sums = {};  // numerator and denominator
  Buffer<LANES> k_buffer = {}, v_buffer = {}, y_buffer = {}, saved_buffer = {};

  void tile(int64_t begin, int64_t end, Tile out) {
    alignas(64) int exponents[LANES];
    alignas(64) uint32_t bias[LANES];
    const bool even = choose_exponents(begin, end, exponents);
    for (int c = 0; c < LANES; c++) bias[c] = 127u - static_cast<uint32_t>(exponents[c]);
    bool fresh = even;  // at the first visible row only: to masked ones before it older, smaller sums are all there is
    for (int64_t t = begin; t < end; t++) {
      if (hidden(t)) {
        masked_row(t);
        sums.gap++;
        continue;
      }
      if (sums.gap || fresh) {
        sums.settle(channels);
        if (even) sums.rescale(exponents);
        fresh = false;
      }
      if (even) {
        even_row(t, bias);
      } else {
        uneven_row(t);
      }
    }
    if (out.even) {
      std::copy_n(exponents, channels.count, out.exponents);
      *out.even = even;
    }
  }

  bool hidden(int64_t t) const { return mask.first && !*mask[t]; }

  // Exponents for all rows of a tile; whether they serve.
  bool choose_exponents(int64_t begin, int64_t end, int* exponents) {
    Range<LANES> keys;
    std::copy_n(sums.exponent, LANES, exponents);
    for (int64_t t = begin; t < end; t++) {
      if (hidden(t)) continue;
      prefetch<LANES, 0>(v, t);
      if (!y_buffer.past_caches) {
        prefetch<LANES, 1>(y, t);
        if (saved.first) prefetch<LANES, 1>(saved, t);
      }
      keys.add(k_buffer.read(k[t], channels.count));
    }
    if (!keys.any) return false;
    sums.settle(channels);
    alignas(64) int tops[LANES];
#pragma omp simd
    for (int c = 0; c < LANES; c++) tops[c] = sums.top(c);
    return keys.choose(channels, tops, exponents);
  }

  void masked_row(int64_t t) {
    float* out = y_buffer.target(y[t], channels.count);
#pragma omp simd
    for (int c = 0; c < LANES; c++) {  // both sums have the same decay to come: it cancels
      const float num = sums.x[0][c], den = sums.x[1][c];
      out[c] = den == 0 ? 0.f : num / den;
    }
    y_buffer.write(y[t], channels.count);
  }

  void even_row(int64_t t, const uint32_t* __restrict bias) {
    const float* __restrict key = k_buffer.read(k[t], channels.count);
    const float* __restrict value = v_buffer.read(v[t], channels.count);
    float* __restrict out = y_buffer.target(y[t], channels.count);
    float* __restrict inverse = saved.first ? saved_buffer.target(saved[t], channels.count) : saved_buffer.values;
#pragma omp simd
    for (int c = 0; c < LANES; c++) {
      const float weight = exp_scaled(key[c], bias[c]), own = weight * channels.bonus[c];
      const float num = sums.x[0][c], den = sums.x[1][c];
      inverse[c] = 1.f / (den + own);
      out[c] = (num + own * value[c]) * inverse[c];
      sums.x[0][c] = channels.decay[c] * num + weight * value[c];
      sums.x[1][c] = channels.decay[c] * den + weight;
    }
    y_buffer.write(y[t], channels.count);
    if (saved.first) saved_buffer.write(saved[t], channels.count);
  }

  void uneven_row(int64_t t) {
    const float* key = k_buffer.read(k[t], channels.count);
    const float* value = v_buffer.read(v[t], channels.count);
    for (int c = 0; c < LANES; c++) {
      const Split weight = split_exp(key[c]);
      const float own = weight.fraction * channels.bonus_fraction[c];
      const int own_exponent = weight.exponent + channels.bonus_exponent[c];
      const int largest = std::max(sums.top(c), weight.fraction == 0 ? kEmpty : own_exponent);
      const float own_scaled = scaled(own, own_exponent - largest);
      const float den = scaled(sums.x[1][c], sums.exponent[c] - largest) + own_scaled;
      const float num = scaled(sums.x[0][c], sums.exponent[c] - largest) + own_scaled * value[c];
      y_buffer.values[c] = den == 0 ? 0.f : num / den;
      saved_buffer.values[c] = den == 0 ? kFarthest : std::log(den) + largest * kLn2High + largest * kLn2Low;
      add_uneven(sums, channels, c, weight, value[c]);
    }
    std::copy_n(y_buffer.values, channels.count, y[t]);
    if (saved.first) std::copy_n(saved_buffer.values, channels.count, saved[t]);
  }

  void write_past_caches() { y_buffer.past_caches = saved_buffer.past_caches = true; }

  // The sums as callers see them: num e^max and den e^max with a whole number max, den near 1.
  void start(const float* num, const float* den, const float* max) {
    for (int c = 0; c < channels.count; c++) {
      const Split scale = split_exp(max[c]);
      sums.x[0][c] = num[c] * scale.fraction;
      sums.x[1][c] = den[c] * scale.fraction;
      sums.exponent[c] = scale.exponent;
    }
  }

  void finish(float* num, float* den, float* max) {
    sums.settle(channels);
    for (int c = 0; c < channels.count; c++) {
      const int top = sums.top(c);
      max[c] = top <= kEmpty ? kNever : static_cast<float>(std::nearbyint(top * M_LN2));
      const float factor = top <= kEmpty ? 0.f : static_cast<float>(std::exp(top * M_LN2 - max[c]));
      num[c] = scaled(sums.x[0][c], sums.exponent[c] - top) * factor;
      den[c] = scaled(sums.x[1][c], sums.exponent[c] - top) * factor;
    }
  }
};

}  // namespace
