// One vector of fp32 lanes, and the exponentials on it that the selective scan needs.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(sizeof(float) * kLanes)));
typedef int32_t Bits __attribute__((vector_size(sizeof(float) * kLanes)));

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

// A whole vector is apart, as a size known to the compiler is one instruction and any other a call.
inline Vec load(const float* from, int64_t lanes) {
  Vec v = {};
  if (lanes == kLanes)
    std::memcpy(&v, from, sizeof(Vec));
  else
    std::memcpy(&v, from, sizeof(float) * lanes);
  return v;
}

inline void store(float* to, const Vec& v, int64_t lanes) {
  if (lanes == kLanes)
    std::memcpy(to, &v, sizeof(Vec));
  else
    std::memcpy(to, &v, sizeof(float) * lanes);
}

inline float sum(const Vec& v) {
  const float* lane = reinterpret_cast<const float*>(&v);
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < kLanes; i++) total += lane[i];
  return total;
}

// 2^x to 1e-7, exactly 1 at 0; x beyond [-126, 127] counts as the bound. NaN stays NaN.
inline Vec exp2(Vec x) {
  x = x < -126.f ? Vec{} - 126.f : x;
  x = x > 127.f ? Vec{} + 127.f : x;
  // adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits
  const Vec shifted = x + 0x1.8p23f;
  const Vec f = x - (shifted - 0x1.8p23f);
  Vec p = f * 1.3264727247e-3f + 9.6715126881e-3f;  // minimax on [-1/2, 1/2]
  p = p * f + 5.5507337436e-2f;
  p = p * f + 2.4022242085e-1f;
  p = p * f + 6.9314697760e-1f;
  p = p * f + 1.f;
  return (Vec)((Bits)p + ((Bits)shifted << 23));
}

inline Vec sigmoid(Vec x) { return 1.f / (1.f + exp2(-kLog2E * x)); }

// log(1 + e^x) with full relative precision where it is small, 0 below the range of fp32; slope = its derivative.
inline Vec softplus(Vec x, Vec& slope) {
  Vec e = exp2(-kLog2E * (x < 0.f ? -x : x));
  e = x < -87.f ? Vec{} : e;
  const Vec s = e / (2.f + e), q = s * s;  // log(1 + e) = 2 atanh(s), s <= 1/3
  Vec p = q * (1.f / 15) + 1.f / 13;
  p = p * q + 1.f / 11;
  p = p * q + 1.f / 9;
  p = p * q + 1.f / 7;
  p = p * q + 1.f / 5;
  p = p * q + 1.f / 3;
  p = p * q + 1.f;
  slope = (x < 0.f ? e : Vec{} + 1.f) / (1.f + e);
  return (x < 0.f ? Vec{} : x) + 2.f * s * p;
}

}  // namespace
