// Random numbers, and planes of pixels on which pictures of paddles are put a row of 32 bytes at a time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace pathfinder {

constexpr int kRow = 32;   // bytes of a row of P or R pixels

struct Point {
  int32_t y, x;
};

inline Point operator+(Point a, Point b) { return {a.y + b.y, a.x + b.x}; }

inline Point at(const int32_t* table, int i) { return {table[2 * i], table[2 * i + 1]}; }

struct Paddle {
  int32_t direction;
  Point place;
};

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

class Random {
 public:
  Random(uint64_t seed, uint64_t index) : state_(mix(mix(seed) ^ index)) {}

  uint32_t below(uint64_t bound) {
    state_ += 0x9E3779B97F4A7C15ULL;
    return static_cast<uint32_t>((mix(state_) >> 32) * bound >> 32);
  }

 private:
  uint64_t state_;
};

// Pictures of all directions, their rows filled up with zeros to kRow bytes.
class Pictures {
 public:
  Pictures(const uint8_t* pictures, int directions, int side) : side_(side), rows_(directions * side * kRow) {
    for (int i = 0; i < directions * side; ++i) std::memcpy(&rows_[i * kRow], pictures + i * side, side);
  }

  int side() const { return side_; }
  const uint8_t* row(int direction, int y) const { return &rows_[(direction * side_ + y) * kRow]; }

 private:
  int side_;
  std::vector<uint8_t> rows_;
};

// Pixels of the image, and kRow more on both sides of a row, which are always 0: rows of pictures may stick out.
class Plane {
 public:
  explicit Plane(int size) : size_(size), stride_(size + 2 * kRow), pixels_(size * stride_) {}

  uint8_t* row(int y) { return &pixels_[y * stride_ + kRow]; }
  const uint8_t* row(int y) const { return &pixels_[y * stride_ + kRow]; }

  // All `value` but for a square that begins `inner` pixels from the edges, which is 0.
  void frame(int inner, int value) {
    for (int y = 0; y < size_; ++y) {
      std::memset(row(y), value, size_);
      if (y >= inner && y < size_ - inner) std::memset(row(y) + inner, 0, size_ - 2 * inner);
    }
  }

  void raise(const Pictures& pictures, const Paddle& paddle) {
    const Point corner = corner_of(pictures, paddle);
    const int top = std::max(0, corner.y), below = std::min(size_, corner.y + pictures.side());
    for (int y = top; y < below; ++y) {
      const uint8_t* mine = pictures.row(paddle.direction, y - corner.y);
      uint8_t* pixels = row(y) + corner.x;
      for (int x = 0; x < kRow; ++x) pixels[x] = std::max(pixels[x], mine[x]);
    }
    if (corner.x < 0)
      for (int y = top; y < below; ++y) std::memset(row(y) - kRow, 0, kRow);
    if (corner.x + pictures.side() > size_)
      for (int y = top; y < below; ++y) std::memset(row(y) + size_, 0, kRow);
  }

  // Whether a pixel of the picture and one of the image come to `limit` together.
  bool reaches(int limit, const Pictures& pictures, const Paddle& paddle) const {
    uint16_t most[kRow] = {};
    const Point corner = corner_of(pictures, paddle);
    const int top = std::max(0, corner.y), below = std::min(size_, corner.y + pictures.side());
    for (int y = top; y < below; ++y) {
      const uint8_t* mine = pictures.row(paddle.direction, y - corner.y);
      const uint8_t* pixels = row(y) + corner.x;
      for (int x = 0; x < kRow; ++x) most[x] = std::max<uint16_t>(most[x], mine[x] + pixels[x]);
    }
    return *std::max_element(most, most + kRow) >= limit;
  }

 private:
  static Point corner_of(const Pictures& pictures, const Paddle& paddle) {
    return {paddle.place.y - pictures.side() / 2, paddle.place.x - pictures.side() / 2};
  }

  int size_, stride_;
  std::vector<uint8_t> pixels_;
};

}  // namespace pathfinder
