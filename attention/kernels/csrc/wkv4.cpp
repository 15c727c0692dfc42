// WKV-4 on the CPU: a forward scan and a backward pass of one sweep each, vectorised over channels.
//
//   y_t = A_t / D_t,  A_t = sum_{i<t} e^{(t-1-i)w + k_i} v_i + e^{u + k_t} v_t,  D_t the same without v
//
// (Peng et al. 2023, eq. 14). With r = g / D, q = r y, R_i = sum_{t>i} e^{(t-1-i)w} r_t, Q_i likewise of q:
//
//   gv_i = e^{k_i} (R_i + e^u r_i)               gu = e^u sum_i e^{k_i} (r_i v_i - q_i)
//   gk_i = v_i gv_i - e^{k_i} (Q_i + e^u q_i)    gw = sum_i e^{k_i} (v_i dR_i/dw - dQ_i/dw)
//
// Sums are kept as x 2^exponent: changing the exponent is exact, so that no error piles up over a long sequence.
// Rows go in tiles. Where the keys of a tile and the sums before it lie close enough (nearly always), one exponent a
// channel serves the whole tile, and a row costs one exponential and no logarithm in either pass; otherwise every row
// of that tile takes exponents of its own. Either way all exponentials are of bounded arguments: nothing overflows.
//
// A masked row adds nothing: it only lengthens the gap by which the sums still have to decay. Its k, v and gradient
// are never read. Results of a channel do not depend on the number of threads.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

constexpr int kTile = 16;             // rows that share an exponent
constexpr int kGroup = 4;             // most channel blocks a thread takes through a tile together
constexpr int kDeepest = -80;         // lowest power of two a weight may have beside its tile's exponent
constexpr int kEmpty = -(1 << 24);    // exponent of a sum that holds nothing
constexpr float kFarthest = 1 << 20;  // keys (in nats) beyond are taken for this; -this and less is no weight at all
constexpr float kNever = -1e38f;      // an empty sum's exponent in the state that callers see
constexpr int64_t kGrain = 1 << 15;   // elements below which a second thread does not pay

constexpr float kLog2e = 1.44269504f;
constexpr float kLn2High = 0.693359375f;  // few bits: times an integer it is exact
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kRound = 12582912.f;  // 1.5 2^23: adding it leaves an integer in the low bits of a float

template <typename To, typename From>
inline To bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// 2^n for n in [-126, 127], 0 below.
inline float pow2(int n) { return n < -126 ? 0.f : bits<float>((n + 127) << 23); }

// x 2^n for any n; exact while the result is a normal number.
inline float scaled(float x, int n) {
  n = std::min(std::max(n, -252), 252);
  const int half = n >> 1;
  return x * pow2(half) * pow2(n - half);
}

// Exponent of |x|; kEmpty for 0.
inline int exponent_of(float x) { return x == 0 ? kEmpty : ((bits<int32_t>(x) >> 23) & 255) - 127; }

// e^r for |r| <= ln(2) / 2, relative error 3e-9 before rounding: a minimax polynomial of our own.
inline float exp_near_zero(float r) {
  float p = 0.00138145383f;
  p = p * r + 0.00836874545f;
  p = p * r + 0.041668389f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  return p * r * r + r + 1.f;
}

// e^x 2^-exponent where that is known to lie within the normal numbers; `bias` is 127 - exponent. NaN stays NaN.
inline float exp_scaled(float x, uint32_t bias) {
  const float shifted = x * kLog2e + kRound;
  const float n = shifted - kRound;
  return exp_near_zero((x - n * kLn2High) - n * kLn2Low) * bits<float>((bits<uint32_t>(shifted) + bias) << 23);
}

// e^x = fraction 2^exponent with a fraction near 1, for any x; 0 from -kFarthest on. NaN stays NaN.
struct Split {
  float fraction;
  int exponent;
};
inline Split split_exp(float x) {
  const float above = x < -kFarthest ? -kFarthest : x;
  const float n = std::nearbyint((above < kFarthest ? above : kFarthest) * kLog2e);
  const float fraction = exp_near_zero((above - n * kLn2High) - n * kLn2Low);
  return {x <= -kFarthest ? 0.f : fraction, static_cast<int>(n)};
}

// A (batch, row, channel) tensor as one scan sees it: row 0 is where the scan starts.
template <typename T>
struct Rows {
  T* first;
  int64_t stride;
  T* operator[](int64_t row) const { return first + row * stride; }
};

template <typename T>
Rows<T> rows(const at::Tensor& x, int64_t batch, int64_t channel, bool reverse) {
  using Value = std::remove_const_t<T>;
  const int64_t length = x.size(1), stride = x.size(2);
  T* base = static_cast<T*>(x.data_ptr<Value>()) + batch * length * stride + channel;
  return reverse ? Rows<T>{base + (length - 1) * stride, -stride} : Rows<T>{base, stride};
}

// Up to LANES channels of a row as fp32: in place where they are that already, otherwise in a buffer.
template <typename T, int LANES>
struct Buffer {
  alignas(64) float values[LANES] = {};

  static bool in_place(int count) { return std::is_same_v<T, float> && count == LANES; }

  const float* read(const T* from, int count) {
    if constexpr (std::is_same_v<T, float>) {
      if (count == LANES) return from;
    }
    if (count == LANES) {
#pragma omp simd
      for (int c = 0; c < LANES; c++) values[c] = static_cast<float>(from[c]);
    } else {
      for (int c = 0; c < count; c++) values[c] = static_cast<float>(from[c]);
    }
    return values;
  }

  float* target(T* to, int count) {
    if constexpr (std::is_same_v<T, float>) {
      if (count == LANES) return to;
    }
    return values;
  }

  void write(T* to, int count) const {
    if (in_place(count)) return;
    if (count == LANES) {
#pragma omp simd
      for (int c = 0; c < LANES; c++) to[c] = static_cast<T>(values[c]);
    } else {
      for (int c = 0; c < count; c++) to[c] = static_cast<T>(values[c]);
    }
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

// How a tile was computed: `exponents` are its channels', and without `even` the rows took their own.
struct Tile {
  int* exponents;
  uint8_t* even;
};

template <typename T, int LANES>
struct Forward {
  Channels<LANES> channels;
  Rows<const T> k, v;
  Rows<T> y;
  Rows<float> saved;  // 1 / D over the tile's exponent, or log D in an uneven tile; none where no gradient is wanted
  Rows<const bool> mask;
  Sums<LANES, 2> sums = {};  // numerator and denominator
  Buffer<T, LANES> k_buffer = {}, v_buffer = {}, y_buffer = {};
  Buffer<float, LANES> saved_buffer = {};

  void tile(int64_t begin, int64_t end, Tile out) {
    alignas(64) int exponents[LANES];
    alignas(64) uint32_t bias[LANES];
    const bool even = choose_exponents(begin, end, exponents);
    for (int c = 0; c < LANES; c++) bias[c] = 127u - static_cast<uint32_t>(exponents[c]);
    if (even) sums.rescale(exponents);
    for (int64_t t = begin; t < end; t++) {
      if (hidden(t)) {
        masked_row(t);
        sums.gap++;
        continue;
      }
      if (sums.gap) {
        sums.settle(channels);
        if (even) sums.rescale(exponents);
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

  // Largest exponent of each channel's denominators in this tile, about; whether it keeps all weights in reach.
  bool choose_exponents(int64_t begin, int64_t end, int* exponents) {
    alignas(64) float low[LANES], high[LANES];
    std::fill_n(low, LANES, kFarthest);
    std::fill_n(high, LANES, -kFarthest);
    std::copy_n(sums.exponent, LANES, exponents);
    bool any = false;
    for (int64_t t = begin; t < end; t++) {
      if (hidden(t)) continue;
      any = true;
      const float* key = k_buffer.read(k[t], channels.count);
#pragma omp simd
      for (int c = 0; c < LANES; c++) {  // a NaN is passed over here and shows in its row
        low[c] = key[c] < low[c] ? key[c] : low[c];
        high[c] = key[c] > high[c] ? key[c] : high[c];
      }
    }
    if (!any) return false;
    sums.settle(channels);
    int deepest = 0;
#pragma omp simd reduction(min : deepest)
    for (int c = 0; c < LANES; c++) {
      const int most = static_cast<int>(std::nearbyint(std::min(high[c], kFarthest) * kLog2e));
      const int least = static_cast<int>(std::nearbyint(std::max(low[c], -kFarthest) * kLog2e));
      const int bonus = channels.bonus_exponent[c];
      exponents[c] = std::max(most + std::max(bonus, 0), sums.top(c));
      deepest = std::min(deepest, least + std::min(bonus, 0) - exponents[c]);
    }
    return deepest >= kDeepest;
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
      const int past = sums.top(c), now = weight.fraction == 0 ? kEmpty : weight.exponent;
      const int largest = std::max(past, weight.fraction == 0 ? kEmpty : own_exponent);
      const float own_scaled = scaled(own, own_exponent - largest);
      const float den = scaled(sums.x[1][c], sums.exponent[c] - largest) + own_scaled;
      const float num = scaled(sums.x[0][c], sums.exponent[c] - largest) + own_scaled * value[c];
      y_buffer.values[c] = den == 0 ? 0.f : num / den;
      saved_buffer.values[c] = den == 0 ? kFarthest : std::log(den) + largest * kLn2High + largest * kLn2Low;
      const int next = std::max({past + channels.decay_exponent[c], now, kEmpty});
      const int shift = sums.exponent[c] + channels.decay_exponent[c] - next;
      const float added = scaled(weight.fraction, weight.exponent - next);
      sums.x[0][c] = scaled(sums.x[0][c] * channels.decay_fraction[c], shift) + added * value[c];
      sums.x[1][c] = scaled(sums.x[1][c] * channels.decay_fraction[c], shift) + added;
      sums.exponent[c] = next;
    }
    for (int c = 0; c < channels.count; c++) y[t][c] = static_cast<T>(y_buffer.values[c]);
    if (saved.first) std::copy_n(saved_buffer.values, channels.count, saved[t]);
  }

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

template <typename T, int LANES>
struct Backward {
  Channels<LANES> channels;
  Rows<const T> k, v, y, grad_y;
  Rows<const float> saved;
  Rows<const bool> mask;
  Rows<T> grad_k, grad_v;
  Sums<LANES, 4> sums = {};  // R, Q and their derivatives by w
  alignas(64) float tile_w[LANES] = {}, tile_u[LANES] = {};  // what a tile adds to the sums over all rows
  alignas(64) double grad_w[LANES] = {}, grad_u[LANES] = {};
  Buffer<T, LANES> k_buffer = {}, v_buffer = {}, y_buffer = {}, grad_buffer = {}, grad_k_buffer = {}, grad_v_buffer = {};
  Buffer<float, LANES> saved_buffer = {};

  void tile(int64_t begin, int64_t end, Tile in) {
    alignas(64) int exponents[LANES] = {};
    alignas(64) uint32_t bias[LANES];
    // weights and what they meet have opposite exponents, so that their products need none
    for (int c = 0; c < channels.count; c++) exponents[c] = -in.exponents[c];
    for (int c = 0; c < LANES; c++) bias[c] = 127u + static_cast<uint32_t>(exponents[c]);
    if (*in.even) {
      sums.settle(channels);
      sums.rescale(exponents);
    }
    for (int64_t t = end - 1; t >= begin; t--) {
      if (mask.first && !*mask[t]) {
        std::fill_n(grad_k[t], channels.count, static_cast<T>(0.f));
        std::fill_n(grad_v[t], channels.count, static_cast<T>(0.f));
        sums.gap++;
        continue;
      }
      if (sums.gap) {
        sums.settle(channels);
        if (*in.even) sums.rescale(exponents);
      }
      if (*in.even) {
        even_row(t, bias);
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

  void even_row(int64_t t, const uint32_t* __restrict bias) {
    const int count = channels.count;
    const float* __restrict key = k_buffer.read(k[t], count);
    const float* __restrict value = v_buffer.read(v[t], count);
    const float* __restrict out = y_buffer.read(y[t], count);
    const float* __restrict grad = grad_buffer.read(grad_y[t], count);
    const float* __restrict inverse = saved_buffer.read(saved[t], count);
    float* __restrict to_k = grad_k_buffer.target(grad_k[t], count);
    float* __restrict to_v = grad_v_buffer.target(grad_v[t], count);
#pragma omp simd
    for (int c = 0; c < LANES; c++) {
      const float weight = exp_scaled(key[c], bias[c]), bonus = channels.bonus[c];
      const float r = grad[c] * inverse[c], q = r * out[c];
      const float past_r = sums.x[0][c], past_q = sums.x[1][c], dr = sums.x[2][c], dq = sums.x[3][c];
      to_v[c] = weight * (past_r + bonus * r);
      to_k[c] = value[c] * to_v[c] - weight * (past_q + bonus * q);
      tile_u[c] += weight * bonus * (r * value[c] - q);
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
      const float own = grad[c] * scaled(weight.fraction * inverse.fraction * channels.bonus_fraction[c],
                                         weight.exponent + inverse.exponent + channels.bonus_exponent[c]);
      const int exponent = sums.exponent[c], shift = weight.exponent + exponent;
      float* x[4] = {&sums.x[0][c], &sums.x[1][c], &sums.x[2][c], &sums.x[3][c]};
      grad_v[t][c] = static_cast<T>(own + scaled(weight.fraction * *x[0], shift));
      grad_k[t][c] = static_cast<T>(own * (value[c] - out[c]) + scaled(weight.fraction * (value[c] * *x[0] - *x[1]), shift));
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

using Optional = std::optional<at::Tensor>;

// Tensors that both passes take. k, v: (B, L, C); w, u: (C); mask: (B, L); state: three (B, C).
struct Inputs {
  const at::Tensor &w, &u, &k, &v;
  const Optional &mask, &num, &den, &max;
  bool reverse;

  int64_t batch() const { return k.size(0); }
  int64_t length() const { return k.size(1); }
  int64_t width() const { return k.size(2); }
  int64_t tiles() const { return (length() + kTile - 1) / kTile; }

  Rows<const bool> mask_rows(int64_t b) const {
    if (!mask) return {nullptr, 0};
    const bool* base = mask->data_ptr<bool>() + b * length();
    return reverse ? Rows<const bool>{base + length() - 1, -1} : Rows<const bool>{base, 1};
  }
};

// How tiles were computed: exponents (B, tiles, C) int32, even (B, tiles, blocks) uint8.
struct Tiles {
  const at::Tensor &exponents, &even;

  Tile operator()(int64_t b, int64_t tile, int64_t block, int lanes) const {
    if (!even.numel()) return {nullptr, nullptr};
    return {exponents.data_ptr<int>() + (b * exponents.size(1) + tile) * exponents.size(2) + block * lanes,
            even.data_ptr<uint8_t>() + (b * even.size(1) + tile) * even.size(2) + block};
  }
};

int lanes_for(int64_t width) { return width % 64 == 0 || width > 128 ? 64 : 32; }

// Calls run(batch, first block, last block) in parallel. Blocks of a group go through a tile one after the other, so
// that memory is read in whole rows; a group is as large as an even load of the threads allows.
template <typename Run>
void over_groups(const Inputs& in, int lanes, const Run& run) {
  const int64_t blocks = (in.width() + lanes - 1) / lanes, threads = at::get_num_threads();
  int64_t best = 1, best_load = std::numeric_limits<int64_t>::max();
  for (int64_t size = 1; size <= std::min<int64_t>(blocks, kGroup); size++) {
    const int64_t tasks = in.batch() * ((blocks + size - 1) / size);
    const int64_t load = (tasks + threads - 1) / threads * size;
    if (load <= best_load) best = size, best_load = load;
  }
  const int64_t groups = (blocks + best - 1) / best;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, in.length() * lanes * best));
  at::parallel_for(0, in.batch() * groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      const int64_t first = task % groups * best;
      run(task / groups, first, std::min(first + best, blocks));
    }
  });
}

template <int LANES>
Channels<LANES> channels_at(const Inputs& in, int64_t channel) {
  const int count = static_cast<int>(std::min<int64_t>(LANES, in.width() - channel));
  return {in.w.data_ptr<float>() + channel, in.u.data_ptr<float>() + channel, count};
}

template <typename T, int LANES>
void run_forward(const Inputs& in, const at::Tensor& y, const at::Tensor& saved, const Tiles& tiles,
                 const at::Tensor& num, const at::Tensor& den, const at::Tensor& max) {
  over_groups(in, LANES, [&](int64_t b, int64_t first, int64_t last) {
    std::vector<Forward<T, LANES>> blocks;
    for (int64_t block = first; block < last; block++) {
      const int64_t channel = block * LANES, at = b * in.width() + channel;
      blocks.push_back({channels_at<LANES>(in, channel), rows<const T>(in.k, b, channel, in.reverse),
                        rows<const T>(in.v, b, channel, in.reverse), rows<T>(y, b, channel, in.reverse),
                        saved.numel() ? rows<float>(saved, b, channel, in.reverse) : Rows<float>{nullptr, 0},
                        in.mask_rows(b)});
      if (in.num) {
        blocks.back().start(in.num->data_ptr<float>() + at, in.den->data_ptr<float>() + at,
                            in.max->data_ptr<float>() + at);
      }
    }
    for (int64_t tile = 0; tile < in.tiles(); tile++) {
      const int64_t begin = tile * kTile, end = std::min(begin + kTile, in.length());
      for (int64_t block = first; block < last; block++) {
        blocks[block - first].tile(begin, end, tiles(b, tile, block, LANES));
      }
    }
    for (int64_t block = first; block < last; block++) {
      const int64_t at = b * in.width() + block * LANES;
      blocks[block - first].finish(num.data_ptr<float>() + at, den.data_ptr<float>() + at,
                                   max.data_ptr<float>() + at);
    }
  });
}

// What the backward pass reads and writes beyond its inputs.
struct Gradients {
  const at::Tensor &y, &saved, &end_max, &grad_y, &grad_end_num, &grad_end_den;
  const at::Tensor &w, &u, &k, &v, &num, &den;  // w, u: (B, C) in fp64, to be summed over B
};

template <typename T, int LANES>
void run_backward(const Inputs& in, const Tiles& tiles, const Gradients& grad) {
  over_groups(in, LANES, [&](int64_t b, int64_t first, int64_t last) {
    std::vector<Backward<T, LANES>> blocks;
    for (int64_t block = first; block < last; block++) {
      const int64_t channel = block * LANES, at = b * in.width() + channel;
      const auto read = [&](const at::Tensor& x) { return rows<const T>(x, b, channel, in.reverse); };
      blocks.push_back({channels_at<LANES>(in, channel), read(in.k), read(in.v), read(grad.y), read(grad.grad_y),
                        rows<const float>(grad.saved, b, channel, in.reverse), in.mask_rows(b),
                        rows<T>(grad.k, b, channel, in.reverse), rows<T>(grad.v, b, channel, in.reverse)});
      blocks.back().start(grad.grad_end_num.data_ptr<float>() + at, grad.grad_end_den.data_ptr<float>() + at,
                          grad.end_max.data_ptr<float>() + at);
    }
    for (int64_t tile = in.tiles() - 1; tile >= 0; tile--) {
      const int64_t begin = tile * kTile, end = std::min(begin + kTile, in.length());
      for (int64_t block = first; block < last; block++) {
        blocks[block - first].tile(begin, end, tiles(b, tile, block, LANES));
      }
    }
    for (int64_t block = first; block < last; block++) {
      const int64_t at = b * in.width() + block * LANES;
      Backward<T, LANES>& done = blocks[block - first];
      if (in.num) {
        done.finish(in.num->data_ptr<float>() + at, in.den->data_ptr<float>() + at, in.max->data_ptr<float>() + at,
                    grad.num.data_ptr<float>() + at, grad.den.data_ptr<float>() + at);
      }
      std::copy_n(done.grad_w, done.channels.count, grad.w.data_ptr<double>() + at);
      std::copy_n(done.grad_u, done.channels.count, grad.u.data_ptr<double>() + at);
    }
  });
}

// Calls run.template operator()<T, LANES>() for the dtype and width of k.
template <typename Run>
void for_type(const Inputs& in, const Run& run) {
  const auto for_lanes = [&](auto zero) {
    using T = decltype(zero);
    if (lanes_for(in.width()) == 64) {
      run(zero, std::integral_constant<int, 64>());
    } else {
      run(T(zero), std::integral_constant<int, 32>());
    }
  };
  switch (in.k.scalar_type()) {
    case at::kFloat: return for_lanes(0.f);
    case at::kBFloat16: return for_lanes(at::BFloat16(0.f));
    case at::kHalf: return for_lanes(at::Half(0.f));
    default: TORCH_CHECK_VALUE(false, "wkv4 takes fp32, bf16 or fp16, got ", in.k.scalar_type());
  }
}

using Forwards = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Forwards forward(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
                 const Optional& mask, const Optional& num, const Optional& den, const Optional& max, bool reverse,
                 bool save) {
  const Inputs in{w, u, k, v, mask, num, den, max, reverse};
  const auto wide = k.options().dtype(at::kFloat);
  const int64_t lanes = lanes_for(in.width()), blocks = (in.width() + lanes - 1) / lanes;
  const at::Tensor y = at::empty(k.sizes(), k.options());
  const at::Tensor saved = save ? at::empty(k.sizes(), wide) : at::empty({0}, wide);
  const int64_t tiles = save ? in.tiles() : 0;
  const at::Tensor exponents = at::empty({in.batch(), tiles, in.width()}, k.options().dtype(at::kInt));
  const at::Tensor even = at::empty({in.batch(), tiles, blocks}, k.options().dtype(at::kByte));
  const at::Tensor end_num = at::empty({in.batch(), in.width()}, wide), end_den = at::empty_like(end_num),
                   end_max = at::empty_like(end_num);
  for_type(in, [&](auto zero, auto width) {
    run_forward<decltype(zero), decltype(width)::value>(in, y, saved, {exponents, even}, end_num, end_den, end_max);
  });
  return {y, end_num, end_den, end_max, saved, exponents, even};
}

using Backwards = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Backwards backward(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
                   const Optional& mask, const Optional& num, const Optional& den, const Optional& max, bool reverse,
                   const at::Tensor& y, const at::Tensor& end_max, const at::Tensor& saved,
                   const at::Tensor& exponents, const at::Tensor& even, const at::Tensor& grad_y,
                   const at::Tensor& grad_end_num, const at::Tensor& grad_end_den) {
  const Inputs in{w, u, k, v, mask, num, den, max, reverse};
  const auto wide = w.options();
  const at::Tensor grad_k = at::empty(k.sizes(), k.options()), grad_v = at::empty(k.sizes(), k.options());
  const at::Tensor grad_w = at::empty({in.batch(), in.width()}, wide.dtype(at::kDouble)),
                   grad_u = at::empty_like(grad_w);
  const at::Tensor grad_num = at::zeros({in.batch(), in.width()}, wide), grad_den = at::zeros_like(grad_num);
  const Gradients grad{y,      saved,  end_max, grad_y, grad_end_num, grad_end_den,
                       grad_w, grad_u, grad_k,  grad_v, grad_num,     grad_den};
  for_type(in, [&](auto zero, auto width) {
    run_backward<decltype(zero), decltype(width)::value>(in, {exponents, even}, grad);
  });
  return {grad_w, grad_u, grad_k, grad_v, grad_num, grad_den};
}

}  // namespace

TORCH_LIBRARY(lra_wkv4, m) {
  m.def(
      "forward(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? mask, Tensor? num, Tensor? den, Tensor? max, "
      "bool reverse, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? mask, Tensor? num, Tensor? den, Tensor? max, "
      "bool reverse, Tensor y, Tensor end_max, Tensor saved, Tensor exponents, Tensor even, Tensor grad_y, "
      "Tensor grad_end_num, Tensor grad_end_den) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lra_wkv4, CPU, m) {
  m.impl("forward", &forward);
  m.impl("backward", &backward);
}
