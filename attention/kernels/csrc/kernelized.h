// Attention with a positive feature map, forward and backward, in tiles over the length.
//
//   out_i = num_i / den_i,  num_i = phi(q_i) S,  den_i = phi(q_i).z,  S = sum_j phi(k_j)^T v_j,  z = sum_j phi(k_j)
//
// with j over the visible keys, and j <= i if causal. With g the gradient of the output:
//
//   do_i = g_i / den_i,  delta_i = -(g_i.out_i) / den_i,  dS = sum_i phi(q_i)^T do_i,  dz = sum_i delta_i phi(q_i)
//   dphi(q_i) = do_i S^T + delta_i z,  dphi(k_j) = v_j dS^T + dz,  dv_j = phi(k_j) dS
//
// A tile's features live in the cache and are computed again in the backward pass. Hidden keys are left out when a
// tile is gathered, so what they hold is never read. Work is split by shape alone, never by the number of threads,
// which makes results the same bit for bit on any number of them.
//
// Shapes: B, H, L, E width of q and k, V width of v, F features, T positions of a tile, N = B H sequences.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <cstdlib>
#include <memory>
#include <tuple>
#include "tile.h"

namespace lra {

constexpr int64_t TILE = 48;       // T: two tiles of 110 features fit a first-level cache of 48 KiB
constexpr int64_t MIN_SPAN = 480;  // positions that pay for a state of their own
constexpr int64_t TASKS = 64;      // enough for the cores of one machine

struct Shape {
  int64_t batch, heads, length, width, values, features;
  int64_t x_lead, v_cols, f_cols;  // padded to whole vectors
  int64_t v_lead;                  // a column of ones or of delta beside the values
  int64_t f_lead, state_size, sequences, span, spans;

  Shape(const at::Tensor& q, const at::Tensor& v, int64_t feature_count)
      : batch(q.size(0)),
        heads(q.size(1)),
        length(q.size(2)),
        width(q.size(3)),
        values(v.size(3)),
        features(feature_count),
        x_lead(round_up(width)),
        v_cols(round_up(values)),
        f_cols(round_up(features)),
        v_lead(round_up(values + 1)),
        // a multiple of 256 bytes would crowd a tile's column into few sets of the cache
        f_lead(f_cols % 64 ? f_cols : f_cols + W),
        state_size(features * v_cols + 2 * f_lead),
        sequences(batch * heads) {
    const int64_t wanted = (TASKS + sequences - 1) / sequences;
    span = round_up(std::max(MIN_SPAN, (length + wanted - 1) / wanted), TILE);
    spans = (length + span - 1) / span;
  }
};

// S (F, V), z (F) and the stabiliser of the features (F), side by side in memory; or dS and dz.
struct State {
  float *sums, *total, *top;

  State(float* memory, const Shape& s)
      : sums(memory), total(memory + s.features * s.v_cols), top(total + s.f_lead) {}

  void clear(const Shape& s) { std::memset(sums, 0, s.state_size * sizeof(float)); }
};

// Memory of one task, aligned to the cache line.
class Arena {
 public:
  float* take(int64_t count) {
    const size_t bytes = round_up(count * sizeof(float), 64);
    blocks_.emplace_back(static_cast<float*>(std::aligned_alloc(64, bytes)), &std::free);
    TORCH_CHECK_WITH(OutOfMemoryError, blocks_.back(), "attention: no memory for a tile");
    return blocks_.back().get();
  }

 private:
  std::vector<std::unique_ptr<float, void (*)(void*)>> blocks_;
};

// The positions of [position, end) that the mask shows, at most TILE; moves `position` behind the last one seen.
struct Selection {
  int64_t count = 0, index[TILE];

  Selection(const bool* mask, int64_t& position, int64_t end) {
    for (; position < end && count < TILE; ++position) {
      if (mask == nullptr || mask[position]) index[count++] = position;
    }
  }
};

// One task's sequence and its tile buffers.
template <class Map>
struct Task {
  const Shape& s;
  const Map& map;
  int64_t b, h, first, last;
  Arena arena;
  float *x, *values, *phi, *grad, *out, *turned;

  Task(const Shape& shape, const Map& feature_map, int64_t task) : s(shape), map(feature_map) {
    const int64_t sequence = task / s.spans, part = task % s.spans;
    b = sequence / s.heads, h = sequence % s.heads;
    first = part * s.span, last = std::min(s.length, first + s.span);
    x = arena.take(TILE * s.x_lead);
    values = arena.take(TILE * s.v_lead);
    phi = arena.take(TILE * s.f_lead);
    grad = arena.take(TILE * s.f_lead);
    out = arena.take(TILE * std::max(s.v_lead, s.x_lead));
    turned = arena.take((s.values + 1) * s.f_lead);
  }

  void gather(const Rows& from, const Selection& rows, float* to, int64_t lead) const {
    for (int64_t i = 0; i < rows.count; ++i) from.load(from.row(b, h, rows.index[i]), to + i * lead, lead);
  }

  void gather_values(const Rows& v, const Selection& rows) const {
    gather(v, rows, values, s.v_lead);
    for (int64_t i = 0; i < rows.count; ++i) values[i * s.v_lead + s.values] = 1;
  }

  // values = [do, delta] of the rows
  void gather_gradients(const Rows& g, const Rows& o, const float* inverse, const Selection& rows) const {
    gather(o, rows, out, s.v_lead);
    for (int64_t i = 0; i < rows.count; ++i) {
      float *to = values + i * s.v_lead, factor = inverse[rows.index[i]];
      g.load(g.row(b, h, rows.index[i]), to, s.v_lead, factor);
      Vec dot{};
      for (int64_t c = 0; c < s.v_cols; c += W) dot += vec(to + c) * vec(out + i * s.v_lead + c);
      to[s.values] = -sum(dot);
    }
  }

  void scatter(const float* from, int64_t lead, const Rows& to, const Selection& rows) const {
    for (int64_t i = 0; i < rows.count; ++i) to.store(from + i * lead, to.row(b, h, rows.index[i]));
  }

  // S += phi^T values and z += phi^T [their last column]
  void accumulate(int64_t count, const float* features, State state) const {
    matmul<true>(
        s.features, s.v_cols, count, features, s.f_lead, values, s.v_lead, state.sums, s.v_cols, true);
    for (int64_t c = 0; c < s.f_cols; c += W) {
      Vec total = vec(state.total + c);
      for (int64_t i = 0; i < count; ++i) {
        total += values[i * s.v_lead + s.values] * vec(features + i * s.f_lead + c);
      }
      vec(state.total + c) = total;
    }
  }

  // turned (V + 1, F) = [S^T; z^T]
  void turn(State state) const {
    transpose(s.features, s.values, state.sums, s.v_cols, turned, s.f_lead);
    std::memcpy(turned + s.values * s.f_lead, state.total, s.f_lead * sizeof(float));
    for (int64_t r = s.features; r < s.f_lead; ++r) {
      for (int64_t c = 0; c <= s.values; ++c) turned[c * s.f_lead + r] = 0;
    }
  }

  // grad (T, F) = values [S^T; z^T]
  void grad_features(int64_t count) const {
    matmul(count, s.f_cols, s.values + 1, values, s.v_lead, turned, s.f_lead, grad, s.f_lead);
  }

  // out (T, V) = phi S
  void read(int64_t count, State state) const {
    matmul(count, s.v_cols, s.features, phi, s.f_lead, state.sums, s.v_cols, out, s.v_lead);
  }

  float denominator(int64_t i, State state) const {
    Vec dot{};
    for (int64_t c = 0; c < s.f_cols; c += W) dot += vec(phi + i * s.f_lead + c) * vec(state.total + c);
    return sum(dot);
  }
};

// Tensors of a call; those that a pass does not use stay empty.
struct Tensors {
  Rows q, k, v, out, grad_out, grad_q, grad_k, grad_v;
  const bool* mask = nullptr;  // (B, L), true = visible
  float* inverse = nullptr;    // (B, H, L), 1 / den

  const bool* mask_of(int64_t b, const Shape& s) const { return mask == nullptr ? nullptr : mask + b * s.length; }
};

template <class Map, class Body>
void each_task(const Shape& s, const Map& map, const Body& body) {
  at::parallel_for(0, s.sequences * s.spans, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      Task<Map> task(s, map, index);
      body(task, index);
    }
  });
}

// The states of a sequence's spans (N, spans, state_size), summed into the first.
template <class Merge>
void merge_spans(const Shape& s, float* states, const Merge& merge) {
  at::parallel_for(0, s.sequences, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* first = states + n * s.spans * s.state_size;
      for (int64_t i = 1; i < s.spans; ++i) merge(State(first, s), State(first + i * s.state_size, s));
    }
  });
}

inline void add_state(const Shape& s, State into, State from) {
  for (int64_t i = 0; i < s.features * s.v_cols; ++i) into.sums[i] += from.sums[i];
  for (int64_t r = 0; r < s.features; ++r) into.total[r] += from.total[r];
}

// Output, 1 / den and, in the first span of `states`, every sequence's S, z and stabiliser.
template <class Map>
void forward(const Shape& s, const Map& map, const Tensors& t, float* states) {
  each_task(s, map, [&](Task<Map>& task, int64_t index) {
    State state(states + index * s.state_size, s);
    state.clear(s);
    map.start(state.top);
    for (int64_t position = task.first; position < task.last;) {
      Selection rows(t.mask_of(task.b, s), position, task.last);
      task.gather(t.k, rows, task.x, s.x_lead);
      task.gather_values(t.v, rows);
      map.advance(rows.count, task.x, task.phi, state);
      task.accumulate(rows.count, task.phi, state);
    }
  });
  merge_spans(s, states, [&](State into, State from) { map.merge(into, from); });
  each_task(s, map, [&](Task<Map>& task, int64_t index) {
    State state(states + index / s.spans * s.spans * s.state_size, s);
    float* inverse = t.inverse + (task.b * s.heads + task.h) * s.length;
    for (int64_t position = task.first; position < task.last;) {
      Selection rows(nullptr, position, task.last);
      task.gather(t.q, rows, task.x, s.x_lead);
      map.queries(rows.count, task.x, task.phi, state.top);
      task.read(rows.count, state);
      for (int64_t i = 0; i < rows.count; ++i) {
        const float den = task.denominator(i, state), factor = den == 0 ? 0 : 1 / den;
        inverse[rows.index[i]] = factor;
        t.out.store(task.out + i * s.v_lead, t.out.row(task.b, task.h, rows.index[i]), factor);
      }
    }
  });
}

// Gradients of q, k and v; those of hidden k and v are left as they are. `grads` has room for (N, spans, state_size).
template <class Map>
void backward(const Shape& s, const Map& map, const Tensors& t, float* states, float* grads) {
  each_task(s, map, [&](Task<Map>& task, int64_t index) {
    State state(states + index / s.spans * s.state_size, s), grad(grads + index * s.state_size, s);
    grad.clear(s);
    task.turn(state);
    const float* inverse = t.inverse + (task.b * s.heads + task.h) * s.length;
    for (int64_t position = task.first; position < task.last;) {
      Selection rows(nullptr, position, task.last);
      task.gather(t.q, rows, task.x, s.x_lead);
      map.queries(rows.count, task.x, task.phi, state.top);
      task.gather_gradients(t.grad_out, t.out, inverse, rows);
      task.accumulate(rows.count, task.phi, grad);
      task.grad_features(rows.count);
      map.grad_queries(rows.count, task.x, task.phi, task.grad, task.out);
      task.scatter(task.out, s.x_lead, t.grad_q, rows);
    }
  });
  merge_spans(s, grads, [&](State into, State from) { add_state(s, into, from); });
  each_task(s, map, [&](Task<Map>& task, int64_t index) {
    const int64_t sequence = index / s.spans;
    State state(states + sequence * s.state_size, s), grad(grads + sequence * s.spans * s.state_size, s);
    task.turn(grad);
    for (int64_t position = task.first; position < task.last;) {
      Selection rows(t.mask_of(task.b, s), position, task.last);
      task.gather(t.k, rows, task.x, s.x_lead);
      task.gather_values(t.v, rows);
      map.keys(rows.count, task.x, task.phi, state.top);
      matmul(
          rows.count, s.v_cols, s.features, task.phi, s.f_lead, grad.sums, s.v_cols, task.out, s.v_lead);
      task.scatter(task.out, s.v_lead, t.grad_v, rows);
      task.grad_features(rows.count);
      map.grad_keys(rows.count, task.x, task.phi, task.grad, task.out);
      task.scatter(task.out, s.x_lead, t.grad_k, rows);
    }
  });
}

// What torch sees: the same three tensors for every map.
template <class MakeMap>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_forward(
    const Shape& s, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, const MakeMap& make) {
  Tensors t;
  const at::Tensor out = at::empty_like(v), inverse = at::empty({s.batch, s.heads, s.length}, v.options().dtype(at::kFloat));
  at::Tensor states = at::empty({s.sequences, s.spans, s.state_size}, inverse.options());
  t.q = Rows(q), t.k = Rows(k), t.v = Rows(v), t.out = Rows(out);
  t.mask = mask ? mask->const_data_ptr<bool>() : nullptr;
  t.inverse = inverse.data_ptr<float>();
  forward(s, make(s), t, states.data_ptr<float>());
  return {out, inverse, s.spans == 1 ? states : states.select(1, 0).clone()};
}

template <class MakeMap>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_backward(
    const Shape& s, const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, const at::Tensor& out, const at::Tensor& inverse, const at::Tensor& states,
    const MakeMap& make) {
  Tensors t;
  // gradients of hidden keys and values stay zero
  const auto room = [&](const at::Tensor& x) { return mask ? at::zeros_like(x) : at::empty_like(x); };
  const at::Tensor grad_q = at::empty_like(q), grad_k = room(k), grad_v = room(v);
  const at::Tensor grads = at::empty({s.sequences, s.spans, s.state_size}, inverse.options());
  t.q = Rows(q), t.k = Rows(k), t.v = Rows(v), t.out = Rows(out), t.grad_out = Rows(grad);
  t.grad_q = Rows(grad_q), t.grad_k = Rows(grad_k), t.grad_v = Rows(grad_v);
  t.mask = mask ? mask->const_data_ptr<bool>() : nullptr;
  t.inverse = inverse.data_ptr<float>();
  backward(s, make(s), t, states.data_ptr<float>(), grads.data_ptr<float>());
  return {grad_q, grad_k, grad_v};
}

}  // namespace lra
