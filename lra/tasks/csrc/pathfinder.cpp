// Pathfinder images: the compiled twin of pathfinder_growth.py, which says what is done and why.
//
// All arithmetic is on integers and the tables come from pathfinder_sprites.py, so both give the same bytes.
// Coordinates are (y, x). Shapes: S height and width, C contour length, K ring pixels, P and Q sides of pictures.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

// Mirrored by ctypes structures in pathfinder_generator.py.
struct Tables {
  const uint8_t *lines, *areas;                       // (O, P, P)
  const int32_t *ends, *forward, *pivots;             // (O, 2), (O, 2), (360, 2)
  const int32_t *footprint, *footprint_starts, *ring; // (F, 2), (361,), (K, 2)
  const uint32_t* weights;                            // (O, K)
  const int32_t *disc, *neighbours;                   // (N, 2), (360, 2)
  const uint8_t* markers;                             // (E, E, Q, Q), E = Q
  int32_t picture, ring_count, disc_count, marker;    // P, K, N, Q
};

struct Parameters {
  int32_t size, padding, seed_distance;
  int32_t contour_length, distractor_length, distractors, paddle_retrials, distractor_retrials;
  int32_t contour_level, distractor_level, marker_level;
  int32_t claimed, free, collision, dead_end, crowded, most_attempts, choices;
};

struct Samples {
  uint8_t *images, *labels, *choices;        // (n, S, S), (n,), (n,)
  int16_t *paddles, *markers, *distractors;  // (n, 2, C, 4), (n, 2, 2), (n,)
};
}

namespace {

constexpr int kDegrees = 360;
constexpr int kWords = 6;  // of a row of up to 256 bits, with a word of ones on either side

struct Point {
  int32_t y, x;
};

Point operator+(Point a, Point b) { return {a.y + b.y, a.x + b.x}; }

Point at(const int32_t* table, int i) { return {table[2 * i], table[2 * i + 1]}; }

struct Paddle {
  int32_t direction;
  Point place;
};

using Contour = std::vector<Paddle>;

uint64_t mix(uint64_t z) {
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

// The rows and columns of the image that a picture covers whose middle lies at a point.
struct Overlap {
  Overlap(int size, int side, Point middle)
      : corner{middle.y - side / 2, middle.x - side / 2},
        top(std::max(0, corner.y)), left(std::max(0, corner.x)),
        below(std::min(size, corner.y + side)), right(std::min(size, corner.x + side)) {}

  Point corner;
  int top, left, below, right;
};

class Growth {
 public:
  Growth(const Parameters& parameters)
      : p(parameters), claims_(p.size * p.size), before_(p.size * p.size), canvas_(p.size * p.size),
        free_(p.size * kWords), room_(p.size * kWords) {}

  bool image(const Tables* tables, uint64_t seed, uint64_t index, Samples out) {
    random_ = Random(seed, index);
    const int label = random_.below(2);
    const int choice = random_.below(p.choices);
    t = tables + choice;
    int attempts = 0;
    while (!two_contours())
      if (++attempts == p.most_attempts) return false;
    std::fill(canvas_.begin(), canvas_.end(), 0);
    for (const Contour& contour : contours_) draw(contour, p.contour_level);
    int placed = 0;
    for (int i = 0; i < p.distractors; ++i)
      for (int trial = 0; trial <= p.distractor_retrials; ++trial)
        if (distractor()) {
          draw(distractor_, p.distractor_level);
          ++placed;
          break;
        }
    record_paddles(out.paddles);
    const int first = random_.below(2), last = label ? first : 1 - first;
    const int16_t* start = out.paddles + first * p.contour_length * 4;
    const int16_t* end = out.paddles + (last + 1) * p.contour_length * 4 - 2;
    const Point marks[2] = {{start[0], start[1]}, {end[0], end[1]}};
    for (int i = 0; i < 2; ++i) {
      draw_marker(marks[i]);
      out.markers[2 * i] = static_cast<int16_t>(marks[i].y);
      out.markers[2 * i + 1] = static_cast<int16_t>(marks[i].x);
    }
    stretch(out.images);
    *out.labels = static_cast<uint8_t>(label);
    *out.choices = static_cast<uint8_t>(choice);
    *out.distractors = static_cast<int16_t>(placed);
    return true;
  }

 private:
  bool two_contours() {
    std::fill(claims_.begin(), claims_.end(), static_cast<uint8_t>(p.claimed));
    for (int y = p.padding; y < p.size - p.padding; ++y)
      std::memset(&claims_[y * p.size + p.padding], 0, p.size - 2 * p.padding);
    Point pivots[2];
    for (int i = 0; i < 2; ++i) {
      contours_[i].clear();
      Paddle paddle;
      if (!(i ? start_beside(contours_[0][0].place, paddle) : start(2 * p.seed_distance, 0, paddle))) return false;
      contours_[i].push_back(paddle);
      pivots[i] = first_pivot(paddle);
    }
    for (int step = 1; step < p.contour_length; ++step)
      for (int i = 0; i < 2; ++i)
        if (!extend(contours_[i], pivots[i])) return false;
    claim(contours_[1].back());
    return true;
  }

  bool distractor() {
    before_ = claims_;
    distractor_.clear();
    Paddle paddle;
    if (start(1, (p.size * p.size + p.crowded - 1) / p.crowded, paddle)) {
      distractor_.push_back(paddle);
      Point pivot = first_pivot(paddle);
      bool grows = true;
      while (grows && static_cast<int>(distractor_.size()) < p.distractor_length) grows = extend(distractor_, pivot);
      if (grows) {
        claim(distractor_.back());
        return true;
      }
    }
    claims_.swap(before_);
    return false;
  }

  bool inside(Point a) const { return a.y >= 0 && a.y < p.size && a.x >= 0 && a.x < p.size; }

  Point first_pivot(const Paddle& paddle) const { return paddle.place + at(t->pivots, paddle.direction); }

  bool fits_frame(const Paddle& paddle) const {
    return inside(paddle.place + at(t->ends, paddle.direction)) && inside(first_pivot(paddle));
  }

  bool start(int border, int fewest_free, Paddle& paddle) {
    for (int trial = 0; trial <= p.paddle_retrials; ++trial) {
      paddle.direction = random_.below(kDegrees);
      if (t->footprint_starts[paddle.direction] == t->footprint_starts[paddle.direction + 1]) return false;
      if (find_free(border) < fewest_free) return false;
      const int places = find_room(paddle.direction);
      if (!places) return false;
      paddle.place = nth_place(random_.below(places));
      if (fits_frame(paddle)) return true;
    }
    return false;
  }

  bool start_beside(Point other, Paddle& paddle) {
    for (int trial = 0; trial <= p.paddle_retrials; ++trial) {
      paddle.direction = random_.below(kDegrees);
      paddle.place = other + at(t->neighbours, random_.below(kDegrees));
      if (fits_frame(paddle)) return true;
    }
    return false;
  }

  // Bits from .. to - 1, which are fewer than 65 and not none.
  static uint64_t span(int from, int to) { return (~uint64_t{0} >> (64 - (to - from))) << from; }

  int words() const { return (p.size + 63) / 64; }

  // One bit a pixel that is free and not in the border; all beyond the image are. Returns how many in it are free.
  int find_free(int border) {
    int count = 0;
    for (int y = 0; y < p.size; ++y) {
      uint64_t* row = &free_[y * kWords];
      std::fill(row, row + kWords, ~uint64_t{0});
      const uint8_t* claims = &claims_[y * p.size];
      const bool inner_row = y >= border && y < p.size - border;
      for (int w = 0; w < words(); ++w) {
        const int first = w * 64, bits = std::min(64, p.size - first);
        uint64_t taken = 0;
        for (int i = 0; i < bits; ++i) taken |= static_cast<uint64_t>(claims[first + i] > p.free) << i;
        count += bits - __builtin_popcountll(taken);
        const int from = std::clamp(border - first, 0, bits), to = std::clamp(p.size - border - first, 0, bits);
        row[w + 1] = inner_row && from < to ? ~taken & span(from, to) | ~span(0, bits) : ~span(0, bits);
      }
    }
    return count;
  }

  // One bit a pixel from which a contour may start in a direction; returns how many.
  int find_room(int direction) {
    const int W = words();
    std::fill(room_.begin(), room_.end(), ~uint64_t{0});
    for (int f = t->footprint_starts[direction]; f < t->footprint_starts[direction + 1]; ++f) {
      const Point offset = at(t->footprint, f);
      // bit x of the result is bit x + offset.x, which may lie in the word before or after
      const int from = 64 + offset.x, word = from / 64, shift = from % 64;
      const int top = std::max(0, -offset.y), below = std::min(p.size, p.size - offset.y);
      for (int y = top; y < below; ++y) {
        const uint64_t* row = &free_[(y + offset.y) * kWords + word];
        uint64_t* room = &room_[y * kWords];
        for (int w = 0; w < W; ++w) room[w] &= shift ? row[w] >> shift | row[w + 1] << (64 - shift) : row[w];
      }
    }
    int count = 0;
    for (int y = 0; y < p.size; ++y) {
      if (p.size % 64) room_[y * kWords + W - 1] &= (uint64_t{1} << p.size % 64) - 1;
      for (int w = 0; w < W; ++w) count += __builtin_popcountll(room_[y * kWords + w]);
    }
    return count;
  }

  Point nth_place(int n) const {
    for (int y = 0;; ++y)
      for (int w = 0; w < words(); ++w) {
        uint64_t bits = room_[y * kWords + w];
        const int count = __builtin_popcountll(bits);
        if (n < count) {
          for (; n; --n) bits &= bits - 1;
          return {y, w * 64 + __builtin_ctzll(bits)};
        }
        n -= count;
      }
  }

  bool extend(Contour& contour, Point& pivot) {
    const Paddle last = contour.back();
    const Point next = pivot + at(t->forward, last.direction);
    const uint32_t* weights = t->weights + static_cast<int64_t>(last.direction) * t->ring_count;
    totals_.resize(t->ring_count);
    uint32_t total = 0;
    for (int k = 0; k < t->ring_count; ++k) {
      const Point point = next + at(t->ring, k);
      if (weights[k] && inside(point)) total += (p.claimed - most_claimed(point)) * weights[k];
      totals_[k] = total;
    }
    if (total <= static_cast<uint32_t>(p.dead_end)) return false;
    for (int trial = 0; trial <= p.paddle_retrials; ++trial) {
      const uint32_t drawn = random_.below(total);
      const int k = static_cast<int>(std::upper_bound(totals_.begin(), totals_.end(), drawn) - totals_.begin());
      const Paddle paddle{kDegrees + k, next + at(t->ring, k)};
      if (collides(paddle)) continue;
      claim(last);
      contour.push_back(paddle);
      pivot = next;
      return true;
    }
    return false;
  }

  uint32_t most_claimed(Point point) const {
    uint8_t most = 0;
    for (int i = 0; i < t->disc_count; ++i) {
      const Point near = point + at(t->disc, i);
      if (inside(near)) most = std::max(most, claims_[near.y * p.size + near.x]);
    }
    return most;
  }

  const uint8_t* area(const Paddle& paddle) const {
    return t->areas + static_cast<int64_t>(paddle.direction) * t->picture * t->picture;
  }

  bool collides(const Paddle& paddle) const {
    const Overlap o(p.size, t->picture, paddle.place);
    const uint8_t* picture = area(paddle);
    for (int y = o.top; y < o.below; ++y) {
      const uint8_t* mine = picture + (y - o.corner.y) * t->picture - o.corner.x;
      const uint8_t* claims = &claims_[y * p.size];
      int most = 0;
      for (int x = o.left; x < o.right; ++x) most = std::max(most, mine[x] + claims[x]);
      if (most >= p.collision) return true;
    }
    return false;
  }

  void claim(const Paddle& paddle) {
    const Overlap o(p.size, t->picture, paddle.place);
    const uint8_t* picture = area(paddle);
    for (int y = o.top; y < o.below; ++y) {
      const uint8_t* mine = picture + (y - o.corner.y) * t->picture - o.corner.x;
      uint8_t* claims = &claims_[y * p.size];
      for (int x = o.left; x < o.right; ++x) claims[x] = std::max(claims[x], mine[x]);
    }
  }

  void draw(const Contour& contour, int level) {
    for (const Paddle& paddle : contour)
      draw(t->lines + static_cast<int64_t>(paddle.direction) * t->picture * t->picture, t->picture, paddle.place, level);
  }

  void draw(const uint8_t* picture, int side, Point place, int level) {
    const Overlap o(p.size, side, place);
    for (int y = o.top; y < o.below; ++y) {
      const uint8_t* mine = picture + (y - o.corner.y) * side - o.corner.x;
      int32_t* pixels = &canvas_[y * p.size];
      for (int x = o.left; x < o.right; ++x) pixels[x] = std::max(pixels[x], mine[x] * level);
    }
  }

  void draw_marker(Point place) {
    const int64_t pictures = static_cast<int64_t>(marker_class(place.y)) * t->marker + marker_class(place.x);
    draw(t->markers + pictures * t->marker * t->marker, t->marker, place, p.marker_level);
  }

  int marker_class(int place) const {
    const int reach = t->marker / 2, beyond = place - (p.size - reach);
    return beyond < 0 ? std::min(place, reach) : reach + 1 + beyond;
  }

  void record_paddles(int16_t* out) const {
    for (const Contour& contour : contours_)
      for (const Paddle& paddle : contour) {
        Point from = paddle.place, to = from + at(t->ends, paddle.direction);
        if (paddle.direction >= kDegrees) std::swap(from, to);
        for (int value : {from.y, from.x, to.y, to.x}) *out++ = static_cast<int16_t>(value);
      }
  }

  void stretch(uint8_t* out) const {
    const int32_t most = *std::max_element(canvas_.begin(), canvas_.end());
    for (size_t i = 0; i < canvas_.size(); ++i) out[i] = static_cast<uint8_t>((2 * 255 * canvas_[i] + most) / (2 * most));
  }

  const Parameters& p;
  const Tables* t = nullptr;
  Random random_{0, 0};
  std::vector<uint8_t> claims_, before_;  // (S, S)
  std::vector<int32_t> canvas_;           // (S, S)
  std::vector<uint64_t> free_, room_;     // (S, kWords)
  std::vector<uint32_t> totals_;          // (K,)
  Contour contours_[2], distractor_;
};

}  // namespace

extern "C" {

// Images first .. first + count - 1 of a seed. Returns how many were made: fewer than count where one finds no room.
int64_t lra_pathfinder(const Parameters* parameters, const Tables* tables, uint64_t seed, uint64_t first, int64_t count,
                       Samples out) {
  const int64_t pixels = static_cast<int64_t>(parameters->size) * parameters->size;
  Growth growth(*parameters);
  for (int64_t i = 0; i < count; ++i) {
    const Samples one{out.images + i * pixels,         out.labels + i,      out.choices + i,
                      out.paddles + i * 8 * parameters->contour_length, out.markers + i * 4, out.distractors + i};
    if (!growth.image(tables, seed, first + i, one)) return i;
  }
  return count;
}
}
