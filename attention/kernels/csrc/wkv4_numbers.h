// Floating-point numbers with an exponent of their own: fp32 fractions times powers of two that fp32 cannot hold.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kEmpty = -(1 << 24);    // exponent of a sum that holds nothing
constexpr float kFarthest = 1 << 20;  // keys (in nats) beyond are taken for this; -this and less is no weight at all

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

}  // namespace
