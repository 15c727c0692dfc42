// The backward pass of a block of channels, from the last tile to the first; formulas in wkv4.cpp.
#pragma once

#include "wkv4_sums.h"

namespace {

// A pass that is `again` adds to the gradients that the one in the other direction left, and to it the rows' own terms
// count nothing.
template <int LANES>
struct Backward {
  Channels<LANES> channels;
  Rows<const float> k, v, y, grad_y, saved;
  Rows<const bool> mask;
  Rows<float> grad_k, grad_v;
  bool again = false;
  Sums<LANES, 4> sums = {};  // R, Q and their derivatives by w
  alignas(64) float tile_w[LANES] = {}, tile_u[LANES] = {};  // what a tile adds to the sums over all rows
  alignas(64) double grad_w[LANES] = {}, grad_u[LANES] = {};
  Buffer<LANES> k_buffer = {}, v_buffer = {}, y_buffer = {}, grad_buffer = {}, saved_buffer = {};
  Buffer<LANES> grad_k_buffer = {}, grad_v_buffer = {};

  void tile(int64_t begin, int64_t end, Tile in) {
    alignas(64) int exponents[LANES] = {};
    alignas(64) uint32_t bias[LANES];
    // weights and what they meet have opposite exponents, so that their products need none
    for (int c = 0; c < channels.count; c++) exponents[c] = -in.exponents[c];
    for (int c = 0; c < LANES; c++) bias[c] = 127u + static_cast<uint32_t>(exponents[c]);
    bool fresh = *in.even;  // not before the gap: what has yet to decay over it need not fit the tile's exponents
    for (int64_t t = end - 1; t >= begin; t--) {
      if (mask.first && !*mask[t]) {
        std::fill_n(grad_k[t], channels.count, 0.f);
        std::fill_n(grad_v[t], channels.count, 0.f);
        sums.gap++;
        continue;
      }
      if (sums.gap || fresh) {
        sums.settle(channels);
        if (*in.even) sums.rescale(exponents);
        fresh = false;
      }
      if (*in.even) {
        again ? even_row<true>(t, bias) : even_row<false>(t, bias);
      } else {
        uneven_row(t);
      }
    }
    for (int c = 0; c < LANES; c++) {
      grad_w[c] += tile_w[c];
      grad_u[c] += tile_u[c];
      tile_w[c] = tile_u[c] = 0.f;
    }
  }

  [[gnu::always_inline]] void fetch(int64_t t) const {
    prefetch<LANES, 0>(k, t);
    prefetch<LANES, 0>(v, t);
    prefetch<LANES, 0>(y, t);
    prefetch<LANES, 0>(grad_y, t);
    prefetch<LANES, 0>(saved, t);
    if (grad_k_buffer.past_caches) return;
    prefetch<LANES, 1>(grad_k, t);
    prefetch<LANES, 1>(grad_v, t);
  }

  // inlined by force: gcc vectorises no copy of it that stands alone
  template <bool AGAIN>
  [[gnu::always_inline]] void even_row(int64_t t, const uint32_t* __restrict bias) {
    const int count = channels.count;
    fetch(std::max<int64_t>(t - kAhead, 0));
    const float* __restrict key = k_buffer.read(k[t], count);
    const float* __restrict value = v_buffer.read(v[t], count);
    const float* __restrict out = y_buffer.read(y[t], count);
    const float* __restrict grad = grad_buffer.read(grad_y[t], count);
    const float* __restrict inverse = saved_buffer.read(saved[t], count);
    float* __restrict to_k = grad_k_buffer.target(grad_k[t], count);
    float* __restrict to_v = grad_v_buffer.target(grad_v[t], count);
    if (AGAIN) grad_k_buffer.read(grad_k[t], count), grad_v_buffer.read(grad_v[t], count);
#pragma omp simd
    for (int c = 0; c < LANES; c++) {
      const float weight = exp_scaled(key[c], bias[c]), bonus = channels.bonus[c];
      const float r = grad[c] * inverse[c], q = r * out[c];
      const float past_r = sums.x[0][c], past_q = sums.x[1][c], dr = sums.x[2][c], dq = sums.x[3][c];
      if constexpr (AGAIN) {
        to_v[c] += weight * past_r;
        to_k[c] += weight * (value[c] * past_r - past_q);
      } else {
        to_v[c] = weight * (past_r + bonus * r);
        to_k[c] = value[c] * to_v[c] - weight * (past_q + bonus * q);
        tile_u[c] += weight * bonus * (r * value[c] - q);
      }
      tile_w[c] += weight * (value[c] * dr - dq);
      const float decayed_r = channels.decay[c] * past_r, decayed_q = channels.decay[c] * past_q;
      sums.x[0][c] = decayed_r + r;
      sums.x[1][c] = decayed_q + q;
      sums.x[2][c] = channels.decay[c] * dr + decayed_r;
      sums.x[3][c] = channels.decay[c] * dq + decayed_q;
    }
    grad_k_buffer.write(grad_k[t], count);
    grad_v_buffer.write(grad_v[t], count);
  }

  void uneven_row(int64_t t) {
    const float* key = k_buffer.read(k[t], channels.count);
    const float* value = v_buffer.read(v[t], channels.count);
    const float* out = y_buffer.read(y[t], channels.count);
    const float* grad = grad_buffer.read(grad_y[t], channels.count);
    const float* log_den = saved_buffer.read(saved[t], channels.count);
    for (int c = 0; c < channels.count; c++) {
      const Split weight = split_exp(key[c]), inverse = split_exp(-log_den[c]);
      const float own = again ? 0.f : grad[c] * scaled(weight.fraction * inverse.fraction * channels.bonus_fraction[c],
                                                       weight.exponent + inverse.exponent + channels.bonus_exponent[c]);
      const int exponent = sums.exponent[c], shift = weight.exponent + exponent;
      float* x[4] = {&sums.x[0][c], &sums.x[1][c], &sums.x[2][c], &sums.x[3][c]};
      const float old_v = again ? static_cast<float>(grad_v[t][c]) : 0.f;
      const float old_k = again ? static_cast<float>(grad_k[t][c]) : 0.f;
      const float to_k = scaled(weight.fraction * (value[c] * *x[0] - *x[1]), shift);
      grad_v[t][c] = old_v + own + scaled(weight.fraction * *x[0], shift);
      grad_k[t][c] = old_k + own * (value[c] - out[c]) + to_k;
      tile_u[c] += own * (value[c] - out[c]);
      tile_w[c] += scaled(weight.fraction * (value[c] * *x[2] - *x[3]), shift);

      const float r = grad[c] * inverse.fraction, q = r * out[c], largest = std::max(std::abs(r), std::abs(q));
      const int past = sums.top(c) + channels.decay_exponent[c];
      const int next = std::max({past, largest == 0 ? kEmpty : exponent_of(largest) + inverse.exponent, kEmpty});
      *x[2] += *x[0];
      *x[3] += *x[1];
      for (float* sum : x) {
        *sum = scaled(*sum * channels.decay_fraction[c], exponent + channels.decay_exponent[c] - next);
      }
      *x[0] += scaled(r, inverse.exponent - next);
      *x[1] += scaled(q, inverse.exponent - next);
      sums.exponent[c] = next;
    }
  }

  void write_past_caches() { grad_k_buffer.past_caches = grad_v_buffer.past_caches = true; }

  // The end state is one more query after the last row.
  void start(const float* grad_num, const float* grad_den, const float* end_max) {
    for (int c = 0; c < channels.count; c++) {
      if (end_max[c] == kNever) continue;
      const Split scale = split_exp(-end_max[c]);
      sums.x[0][c] = grad_num[c] * scale.fraction;
      sums.x[1][c] = -grad_den[c] * scale.fraction;
      sums.exponent[c] = scale.exponent;
    }
  }

  // The first state is one more key, at distance 1 before the first row.
  void finish(const float* num, const float* den, const float* max, float* grad_num, float* grad_den) {
    sums.settle(channels);
    for (int c = 0; c < channels.count; c++) {
      const Split weight = split_exp(max[c]);
      const int shift = sums.exponent[c] + weight.exponent;
      grad_num[c] = scaled(weight.fraction * sums.x[0][c], shift);
      grad_den[c] = -scaled(weight.fraction * sums.x[1][c], shift);
      grad_w[c] += scaled(weight.fraction * (num[c] * sums.x[2][c] - den[c] * sums.x[3][c]), shift);
    }
  }
};

}  // namespace
