// The bidirectional forward scan of a block of channels; formulas in wkv4.cpp.
//
// A sweep from the last tile to the first notes the sums of what comes after each tile. A sweep from the first to the
// last then forms them anew row by row within a tile, meets them with the sums of what came before, and divides.
#pragma once

#include <vector>

#include "wkv4_sums.h"

namespace {

template <int LANES, int TILE>
struct Both {
  using Pair = Sums<LANES, 2>;  // numerator and denominator
  Channels<LANES> channels;
  Rows<const float> k, v;
  Rows<float> y;
  Rows<float> saved;  // as in Forward
  Rows<const bool> mask;
  std::vector<Pair> after_tiles;
  Pair before = {}, after = {};
  Pair after_rows[TILE] = {};
  bool even = false;
  alignas(64) int exponents[LANES] = {};
  alignas(64) uint32_t bias[LANES] = {};
  Buffer<LANES> k_buffer = {}, v_buffer = {}, y_buffer = {}, saved_buffer = {};

  bool hidden(int64_t t) const { return mask.first && !*mask[t]; }

  // First sweep, from the last tile to the first.
  void note(int64_t begin, int64_t end) {
    after_tiles[begin / TILE] = after;
    choose_exponents(begin, end, {&after});
    scan_back(begin, end, false);
  }

  // Second sweep, from the first tile to the last.
  void tile(int64_t begin, int64_t end, Tile out) {
    after = after_tiles[begin / TILE];
    choose_exponents(begin, end, {&before, &after});
    scan_back(begin, end, true);
    bool aligned = false;
    for (int64_t t = begin; t < end; t++) {
      const Pair& later = after_rows[t - begin];
      if (hidden(t)) {
        masked_row(t, later);
        before.gap++;
        continue;
      }
      align(before, aligned);
      if (even) {
        even_row(t, later);
      } else {
        uneven_row(t, later);
      }
    }
    if (out.even) {
      std::copy_n(exponents, channels.count, out.exponents);
      *out.even = even;
    }
  }

  // Exponents for all rows of a tile which these sums meet, and whether they serve. The sums may yet have to decay.
  void choose_exponents(int64_t begin, int64_t end, std::initializer_list<const Pair*> met) {
    Range<LANES> keys;
    for (int64_t t = begin; t < end; t++) {
      if (hidden(t)) continue;
      prefetch<LANES, 0>(v, t);
      keys.add(k_buffer.read(k[t], channels.count));
    }
    even = false;
    if (!keys.any) return;
    alignas(64) int tops[LANES];
    std::fill_n(tops, LANES, kEmpty);
    for (const Pair* sums : met) {
      Pair settled = *sums;
      settled.settle(channels);
#pragma omp simd
      for (int c = 0; c < LANES; c++) tops[c] = std::max(tops[c], settled.top(c));
    }
    even = keys.choose(channels, tops, exponents);
    for (int c = 0; c < LANES; c++) bias[c] = 127u - static_cast<uint32_t>(exponents[c]);
  }

  // Brings sums up to date for a visible row; a tile's first one finds them with exponents from elsewhere.
  void align(Pair& sums, bool& aligned) const {
    if (aligned && !sums.gap) return;
    sums.settle(channels);
    if (even) sums.rescale(exponents);
    aligned = true;
  }

  // Adds the rows of a tile to `after`, from the last to the first; what each row finds goes to `after_rows`.
  void scan_back(int64_t begin, int64_t end, bool keep) {
    bool aligned = false;
    for (int64_t t = end - 1; t >= begin; t--) {
      const bool visible = !hidden(t);
      if (visible) align(after, aligned);
      if (keep) after_rows[t - begin] = after;
      if (visible) {
        add(after, t);
      } else {
        after.gap++;
      }
    }
  }

  void add(Pair& sums, int64_t t) {
    const float* __restrict key = k_buffer.read(k[t], channels.count);
    const float* __restrict value = v_buffer.read(v[t], channels.count);
    if (even) {
#pragma omp simd
      for (int c = 0; c < LANES; c++) {
        const float weight = exp_scaled(key[c], bias[c]);
        sums.x[0][c] = channels.decay[c] * sums.x[0][c] + weight * value[c];
        sums.x[1][c] = channels.decay[c] * sums.x[1][c] + weight;
      }
    } else {
      for (int c = 0; c < LANES; c++) add_uneven(sums, channels, c, split_exp(key[c]), value[c]);
    }
  }

  // A query of its own weight zero: only by how much one side is farther away than the other does not cancel.
  void masked_row(int64_t t, const Pair& later) {
    const int64_t near = std::min(before.gap, later.gap);
    const float to_before = static_cast<float>(before.gap - near), to_after = static_cast<float>(later.gap - near);
    float* out = y_buffer.target(y[t], channels.count);
#pragma omp simd
    for (int c = 0; c < LANES; c++) {
      // a side that holds nothing is not the near one
      const Split left = split_exp(later.x[1][c] == 0 ? 0.f : to_before * channels.w[c]);
      const Split right = split_exp(before.x[1][c] == 0 ? 0.f : to_after * channels.w[c]);
      const float left_den = before.x[1][c] * left.fraction, right_den = later.x[1][c] * right.fraction;
      const int left_exponent = before.exponent[c] + left.exponent, right_exponent = later.exponent[c] + right.exponent;
      const int largest = std::max(left_den == 0 ? kEmpty : exponent_of(left_den) + left_exponent,
                                   right_den == 0 ? kEmpty : exponent_of(right_den) + right_exponent);
      const float den = scaled(left_den, left_exponent - largest) + scaled(right_den, right_exponent - largest);
      const float num = scaled(before.x[0][c] * left.fraction, left_exponent - largest) +
                        scaled(later.x[0][c] * right.fraction, right_exponent - largest);
      out[c] = den == 0 ? 0.f : num / den;
    }
    y_buffer.write(y[t], channels.count);
  }

  void even_row(int64_t t, const Pair& later) {
    const float* __restrict key = k_buffer.read(k[t], channels.count);
    const float* __restrict value = v_buffer.read(v[t], channels.count);
    float* __restrict out = y_buffer.target(y[t], channels.count);
    float* __restrict inverse = saved.first ? saved_buffer.target(saved[t], channels.count) : saved_buffer.values;
#pragma omp simd
    for (int c = 0; c < LANES; c++) {
      const float weight = exp_scaled(key[c], bias[c]), own = weight * channels.bonus[c];
      const float num = before.x[0][c], den = before.x[1][c];
      inverse[c] = 1.f / (den + later.x[1][c] + own);
      out[c] = (num + later.x[0][c] + own * value[c]) * inverse[c];
      before.x[0][c] = channels.decay[c] * num + weight * value[c];
      before.x[1][c] = channels.decay[c] * den + weight;
    }
    y_buffer.write(y[t], channels.count);
    if (saved.first) saved_buffer.write(saved[t], channels.count);
  }

  void uneven_row(int64_t t, const Pair& later) {
    const float* key = k_buffer.read(k[t], channels.count);
    const float* value = v_buffer.read(v[t], channels.count);
    for (int c = 0; c < LANES; c++) {
      const Split weight = split_exp(key[c]);
      const float own = weight.fraction * channels.bonus_fraction[c];
      const int own_exponent = weight.exponent + channels.bonus_exponent[c];
      const int largest = std::max({before.top(c), later.top(c), weight.fraction == 0 ? kEmpty : own_exponent});
      float sums[2];
      for (int j = 0; j < 2; j++) {
        sums[j] = scaled(before.x[j][c], before.exponent[c] - largest) +
                  scaled(later.x[j][c], later.exponent[c] - largest) +
                  scaled(own, own_exponent - largest) * (j == 0 ? value[c] : 1.f);
      }
      y_buffer.values[c] = sums[1] == 0 ? 0.f : sums[0] / sums[1];
      saved_buffer.values[c] = sums[1] == 0 ? kFarthest : std::log(sums[1]) + largest * kLn2High + largest * kLn2Low;
      add_uneven(before, channels, c, weight, value[c]);
    }
    std::copy_n(y_buffer.values, channels.count, y[t]);
    if (saved.first) std::copy_n(saved_buffer.values, channels.count, saved[t]);
  }
};

}  // namespace
