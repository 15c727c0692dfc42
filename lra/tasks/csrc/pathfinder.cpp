// Pathfinder images: the compiled twin of pathfinder_growth.py, which says what is done and why.
//
// All arithmetic is on integers and the tables come from pathfinder_sprites.py, so both give the same bytes.
// Coordinates are (y, x). Shapes: S height and width, C contour length, K ring pixels, P, Q and R sides of pictures.
//
// Nearly all time goes into pairs of long contours that fail: thousands of paddles an image. So a paddle is one row of
// 32 bytes at a time, the most claimed pixel around each pixel is kept up to date instead of being looked for, and
// where a first contour may start is found once for each direction.

#include "pathfinder_plane.h"

extern "C" {

// Mirrored by ctypes structures in pathfinder_native.py.
struct Tables {
  const uint8_t *lines, *areas, *surroundings;         // (O, P, P), (O, P, P), (O, R, R)
  const int8_t *ends, *forward, *pivots;               // (O, S, 2), (O, S, 2), (360, S, 2)
  const int32_t *footprint, *footprint_starts, *ring;  // (F, 2), (361,), (K, 2)
  const uint32_t* weights;                             // (O, K)
  const int8_t* neighbours;                            // (360, S, 2)
  const uint8_t* markers;                              // (Q, Q, Q, Q)
  int32_t directions, picture, surrounding, ring_count, marker;  // O, P, R, K, Q
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

using namespace pathfinder;

constexpr int kDegrees = 360;
constexpr int kWords = 6;  // of a row of up to 256 bits, with a word of ones on either side

using Contour = std::vector<Paddle>;

// A direction in which a paddle may follow, where it would end relative to the pivot, and how likely.
struct Turn {
  int32_t direction;
  Point end;
  uint32_t weight;
};

// What every image with one margin shares.
struct Choice {
  Choice(const Tables& tables)
      : t(tables), areas(t.areas, t.directions, t.picture), surroundings(t.surroundings, t.directions, t.surrounding),
        turns(t.directions), starts(kDegrees), known(kDegrees) {
    for (int d = 0; d < t.directions; ++d)
      for (int k = 0; k < t.ring_count; ++k)
        if (const uint32_t w = t.weights[d * t.ring_count + k]) turns[d].push_back({kDegrees + k, at(t.ring, k), w});
  }

  const Tables& t;
  Pictures areas, surroundings;
  std::vector<std::vector<Turn>> turns;    // of each direction
  std::vector<std::vector<Point>> starts;  // of a first long contour, by direction, where known
  std::vector<bool> known;
};

class Growth {
 public:
  Growth(const Parameters& parameters, const Tables* tables)
      : p(parameters), choices_(tables, tables + p.choices), claims_(p.size), around_(p.size), claims_before_(p.size),
        around_before_(p.size), canvas_(p.size * p.size), free_(p.size * kWords), room_(p.size * kWords) {}

  bool image(uint64_t seed, uint64_t index, Samples out) {
    random_ = Random(seed, index);
    const int label = random_.below(2);
    const int choice = random_.below(p.choices);
    c = &choices_[choice];
    t = &c->t;
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
    Paddle first, second;
    if (!first_start(first) || !start_beside(first.place, second)) return false;
    claims_.frame(p.padding, p.claimed);
    // the border within the margin of a pixel: straight sides, so a frame again
    around_.frame(p.padding + (t->surrounding - t->picture) / 2, p.claimed);
    contours_[0].assign(1, first);
    contours_[1].assign(1, second);
    Point pivots[2] = {first_pivot(first), first_pivot(second)};
    for (int step = 1; step < p.contour_length; ++step)
      for (int i = 0; i < 2; ++i)
        if (!extend(contours_[i], pivots[i])) return false;
    if (!four_ends()) return false;
    claim(contours_[1].back());
    return true;
  }

  bool four_ends() const {
    const Point ends[4] = {contours_[0].front().place, contours_[0].back().place, contours_[1].front().place,
                           contours_[1].back().place};
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < i; ++j)
        if (ends[i].y == ends[j].y && ends[i].x == ends[j].x) return false;
    return true;
  }

  bool distractor() {
    distractor_.clear();
    Paddle paddle;
    if (!distractor_start(paddle)) return false;
    claims_before_ = claims_;
    around_before_ = around_;
    distractor_.push_back(paddle);
    Point pivot = first_pivot(paddle);
    while (static_cast<int>(distractor_.size()) < p.distractor_length)
      if (!extend(distractor_, pivot)) {
        std::swap(claims_, claims_before_);
        std::swap(around_, around_before_);
        return false;
      }
    claim(distractor_.back());
    return true;
  }

  bool inside(Point a) const { return a.y >= 0 && a.y < p.size && a.x >= 0 && a.x < p.size; }

  // `from` and the step of a direction from there; from outside, that of the image's edge.
  Point move(const int8_t* steps, int direction, Point from) const {
    const int8_t* mine = steps + direction * p.size * 2;
    const int y = std::clamp(from.y, 0, p.size - 1), x = std::clamp(from.x, 0, p.size - 1);
    return {from.y + mine[2 * y], from.x + mine[2 * x + 1]};
  }

  Point first_pivot(const Paddle& paddle) const { return move(t->pivots, paddle.direction, paddle.place); }

  bool fits_frame(const Paddle& paddle) const {
    return inside(move(t->ends, paddle.direction, paddle.place)) && inside(first_pivot(paddle));
  }

  bool startable(int direction) const { return t->footprint_starts[direction] < t->footprint_starts[direction + 1]; }

  bool first_start(Paddle& paddle) {
    for (int trial = 0; trial <= p.paddle_retrials; ++trial) {
      const int direction = paddle.direction = random_.below(kDegrees);
      std::vector<Point>& starts = c->starts[direction];
      if (!c->known[direction] && startable(direction)) {
        claims_.frame(p.padding, p.claimed);
        find_free(2 * p.seed_distance);
        find_room(direction);
        for (int i = 0; i < p.size * p.size; ++i)
          if (room(i / p.size, i % p.size)) starts.push_back({i / p.size, i % p.size});
      }
      c->known[direction] = true;
      if (starts.empty()) return false;
      paddle.place = starts[random_.below(starts.size())];
      if (fits_frame(paddle)) return true;
    }
    return false;
  }

  bool start_beside(Point other, Paddle& paddle) {
    for (int trial = 0; trial <= p.paddle_retrials; ++trial) {
      paddle.direction = random_.below(kDegrees);
      paddle.place = move(t->neighbours, random_.below(kDegrees), other);
      if (fits_frame(paddle)) return true;
    }
    return false;
  }

  bool distractor_start(Paddle& paddle) {
    int free = -1;
    for (int trial = 0; trial <= p.paddle_retrials; ++trial) {
      paddle.direction = random_.below(kDegrees);
      if (!startable(paddle.direction)) return false;
      if (free < 0) free = find_free(1);
      if (free * p.crowded < p.size * p.size) return false;
      const int places = find_room(paddle.direction);
      if (!places) return false;
      paddle.place = nth_place(random_.below(places));
      if (fits_frame(paddle)) return true;
    }
    return false;
  }

  int words() const { return (p.size + 63) / 64; }

  // Bits from .. to - 1 of a word.
  static uint64_t span(int from, int to) {
    return from < to ? (~uint64_t{0} >> (64 - (to - from))) << from : 0;
  }

  // One bit a pixel that is free and not in the border; all beyond the image are. Returns how many in it are free.
  int find_free(int border) {
    int count = 0;
    for (int y = 0; y < p.size; ++y) {
      uint64_t* row = &free_[y * kWords];
      std::fill(row, row + kWords, ~uint64_t{0});
      const bool inner = y >= border && y < p.size - border;
      for (int w = 0; w < words(); ++w) {
        const int first = w * 64, bits = std::min(64, p.size - first);
        // beyond the image are zeros
        uint8_t taken[64];
        for (int i = 0; i < 64; ++i) taken[i] = claims_.row(y)[first + i] > p.free;
        const uint64_t free = ~pack(taken) & span(0, bits);
        count += __builtin_popcountll(free);
        const int from = std::clamp(border - first, 0, bits), to = std::clamp(p.size - border - first, 0, bits);
        row[w + 1] = (inner ? free & span(from, to) : 0) | ~span(0, bits);
      }
    }
    return count;
  }

  // Bit i is byte i, each 0 or 1.
  static uint64_t pack(const uint8_t bytes[64]) {
    uint64_t out = 0;
    for (int i = 0; i < 8; ++i) {
      uint64_t eight;
      std::memcpy(&eight, bytes + 8 * i, 8);
      out |= (eight * 0x0102040810204080ULL >> 56) << (8 * i);
    }
    return out;
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
    for (int y = 0; y < p.size; ++y)
      for (int w = 0; w < W; ++w) {
        room_[y * kWords + w] &= span(0, std::min(64, p.size - w * 64));
        count += __builtin_popcountll(room_[y * kWords + w]);
      }
    return count;
  }

  bool room(int y, int x) const { return room_[y * kWords + x / 64] >> x % 64 & 1; }

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
    const Point next = move(t->forward, last.direction, pivot);
    const std::vector<Turn>& turns = c->turns[last.direction];
    totals_.clear();
    uint32_t total = 0;
    for (const Turn& turn : turns) {
      const Point end = next + turn.end;
      if (inside(end)) total += (p.claimed - around_.row(end.y)[end.x]) * turn.weight;
      totals_.push_back(total);
    }
    if (total <= static_cast<uint32_t>(p.dead_end)) return false;
    for (int trial = 0; trial <= p.paddle_retrials; ++trial) {
      const uint32_t drawn = random_.below(total);
      const Turn& turn = turns[std::upper_bound(totals_.begin(), totals_.end(), drawn) - totals_.begin()];
      const Paddle paddle{turn.direction, next + turn.end};
      if (claims_.reaches(p.collision, c->areas, paddle)) continue;
      claim(last);
      contour.push_back(paddle);
      pivot = next;
      return true;
    }
    return false;
  }

  void claim(const Paddle& paddle) {
    claims_.raise(c->areas, paddle);
    around_.raise(c->surroundings, paddle);
  }

  void draw(const Contour& contour, int level) {
    for (const Paddle& paddle : contour)
      draw(t->lines + paddle.direction * t->picture * t->picture, t->picture, paddle.place, level);
  }

  void draw(const uint8_t* picture, int side, Point place, int level) {
    const Point corner{place.y - side / 2, place.x - side / 2};
    const int left = std::max(0, corner.x), right = std::min(p.size, corner.x + side);
    for (int y = std::max(0, corner.y); y < std::min(p.size, corner.y + side); ++y)
      for (int x = left; x < right; ++x) {
        int32_t& pixel = canvas_[y * p.size + x];
        pixel = std::max(pixel, picture[(y - corner.y) * side + x - corner.x] * level);
      }
  }

  void draw_marker(Point place) {
    const int picture = marker_class(place.y) * t->marker + marker_class(place.x);
    draw(t->markers + picture * t->marker * t->marker, t->marker, place, p.marker_level);
  }

  int marker_class(int place) const {
    const int reach = t->marker / 2, beyond = place - (p.size - reach);
    return beyond < 0 ? std::min(place, reach) : reach + 1 + beyond;
  }

  void record_paddles(int16_t* out) const {
    for (const Contour& contour : contours_)
      for (const Paddle& paddle : contour) {
        Point from = paddle.place, to = move(t->ends, paddle.direction, from);
        if (paddle.direction >= kDegrees) std::swap(from, to);
        for (int value : {from.y, from.x, to.y, to.x}) *out++ = static_cast<int16_t>(value);
      }
  }

  void stretch(uint8_t* out) const {
    const int32_t most = *std::max_element(canvas_.begin(), canvas_.end());
    for (size_t i = 0; i < canvas_.size(); ++i)
      out[i] = canvas_[i] ? static_cast<uint8_t>((2 * 255 * canvas_[i] + most) / (2 * most)) : 0;
  }

  const Parameters& p;
  std::vector<Choice> choices_;
  Choice* c = nullptr;
  const Tables* t = nullptr;
  Random random_{0, 0};
  Plane claims_, around_, claims_before_, around_before_;
  std::vector<int32_t> canvas_;        // (S, S)
  std::vector<uint64_t> free_, room_;  // (S, kWords)
  std::vector<uint32_t> totals_;       // (K,)
  Contour contours_[2], distractor_;
};

}  // namespace

extern "C" {

// Images first .. first + count - 1 of a seed. Returns how many were made: fewer than count where one finds no room.
int64_t lra_pathfinder(const Parameters* parameters, const Tables* tables, uint64_t seed, uint64_t first, int64_t count,
                       Samples out) {
  const int64_t pixels = static_cast<int64_t>(parameters->size) * parameters->size;
  const int64_t coordinates = 8 * parameters->contour_length;
  Growth growth(*parameters, tables);
  for (int64_t i = 0; i < count; ++i) {
    const Samples one{out.images + i * pixels,       out.labels + i,      out.choices + i,
                      out.paddles + i * coordinates, out.markers + i * 4, out.distractors + i};
    if (!growth.image(seed, first + i, one)) return i;
  }
  return count;
}
}
