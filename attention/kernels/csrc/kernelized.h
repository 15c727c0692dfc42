// Attention with a positive feature map, forward and backward, in tiles over the length.
//
//   out_i = num_i / den_i,  num_i = phi(q_i) S,  den_i = phi(q_i).z,  S = sum_j phi(k_j)^T v_j,  z = sum_j phi(k_j)
//
// with j over the visible keys, and j <= i if causal. With g the gradient of the output:
//
//   do_i = g_i / den_i,  delta_i = -g_i.out_i / den_i,  dS = sum_i phi(q_i)^T do_i,  dz = sum_i delta_i phi(q_i)
//   dphi(q_i) = do_i S^T + delta_i z,  dphi(k_j) = v_j dS^T + dz,  dv_j = phi(k_j) dS
//
// delta needs no output, g_i.out_i = phi(q_i).(do_i S^T) is a product with what dphi(q_i) needs anyway.
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
#include <initializer_list>
#include <tuple>
#include "kernelized_shapes.h"

namespace lra {

// One task's sequence and its tile buffers.
template <class Map>
struct Task {
  const typename Map::Sizes& s;
  const Map& map;
  int64_t b, h, first, last;
  Arena arena;
  mutable Ahead ahead{TILE};
  float *x, *values, *phi, *grad, *out, *turned;

  Task(const typename Map::Sizes& shape, const Map& feature_map, int64_t task) : s(shape), map(feature_map) {
    const int64_t sequence = task / s.spans, part = task % s.spans;
    b = sequence / s.heads, h = sequence % s.heads;
    first = part * s.span, last = std::min(s.length, first + s.span);
    x = arena.take(TILE * s.x_lead);
    values = arena.take(TILE * s.v_cols);
    phi = arena.take(TILE * s.f_lead);
    grad = arena.take(TILE * s.f_lead);
    out = arena.take(TILE * std::max(s.v_cols, s.x_lead));
    turned = arena.take(s.values * s.f_lead);
  }

  // What the next tile reads and writes.
  void expect(
      const Selection& rows, std::initializer_list<const Rows*> read,
      std::initializer_list<const Rows*> written) const {
    ahead.clear();
    if (!rows.count) return;
    const int64_t next = rows.index[0] + TILE;
    for (const Rows* x : read) ahead.read(x->row(b, h, next), x->position, x->row_bytes);
    for (const Rows* x : written) ahead.write(x->row(b, h, next), x->position, x->row_bytes);
  }

  // A width of q, k or v, as a constant where there is one.
  static int64_t known(int64_t width) { return Map::Sizes::fixed ? Map::Sizes::fixed : width; }

  // Rows of `from`, times their factor if there are any, zeros up to the width `lead`; the next tile's are asked for.
  void gather(
      const Rows& from, const Selection& rows, int64_t width, float* to, int64_t lead,
      const float* factors = nullptr) const {
    width = known(width), lead = known(lead);
    from.typed([&](auto zero) {
      for (int64_t i = 0; i < rows.count; ++i, to += lead) {
        const char* row = from.row(b, h, rows.index[i]);
        const float factor = factors == nullptr ? 1 : factors[rows.index[i]];
        scale_row(reinterpret_cast<const decltype(zero)*>(row), to, width, factor);
        for (int64_t c = width; c < lead; ++c) to[c] = 0;
      }
    });
  }

  void scatter(
      const float* from, int64_t lead, const Rows& to, const Selection& rows, int64_t width,
      const float* factors = nullptr) const {
    width = known(width), lead = known(lead);
    to.typed([&](auto zero) {
      for (int64_t i = 0; i < rows.count; ++i, from += lead) {
        char* row = to.row(b, h, rows.index[i]);
        const float factor = factors == nullptr ? 1 : factors[rows.index[i]];
        scale_row(from, reinterpret_cast<decltype(zero)*>(row), width, factor);
      }
    });
  }

  // S += phi^T values
  void accumulate(int64_t count, State state) const {
    matmul<true>(s.features, s.v_cols, count, phi, s.f_lead, values, s.v_cols, state.sums, s.v_cols, true, &ahead);
  }

  // z += the sum of phi
  void accumulate_total(int64_t count, State state) const {
    for (int64_t c = 0; c < s.f_cols; c += W) {
      Vec total = vec(state.total + c);
      for (int64_t i = 0; i < count; ++i) total += vec(phi + i * s.f_lead + c);
      vec(state.total + c) = total;
    }
  }

  // turned (V, F) = S^T
  void turn(State state) const {
    transpose(s.features, s.values, state.sums, s.v_cols, turned, s.f_lead);
    for (int64_t c = 0; c < s.values; ++c) {
      for (int64_t r = s.features; r < s.f_lead; ++r) turned[c * s.f_lead + r] = 0;
    }
  }

  // grad (T, F) = values S^T
  void grad_features(int64_t count) const {
    matmul(count, s.f_cols, s.values, values, s.v_cols, turned, s.f_lead, grad, s.f_lead, false, &ahead);
  }

  // out (T, V) = phi S
  void read(int64_t count, State state) const {
    matmul(count, s.v_cols, s.features, phi, s.f_lead, state.sums, s.v_cols, out, s.v_cols, false, &ahead);
  }

  float denominator(int64_t i, State state) const {
    Vec dot{};
    for (int64_t c = 0; c < s.f_cols; c += W) dot += vec(phi + i * s.f_lead + c) * vec(state.total + c);
    return sum(dot);
  }

  // grad = the gradient of what phi(q) is an elementwise function of, from do S^T; and dz += delta phi.
  void chain_queries(const Selection& rows, const float* inverse, const float* z, float* grad_z) const {
    for (int64_t i = 0; i < rows.count; ++i) {
      float *from = phi + i * s.f_lead, *to = grad + i * s.f_lead;
      Vec dot{};
      for (int64_t c = 0; c < s.f_cols; c += W) dot += vec(from + c) * vec(to + c);
      const float delta = -inverse[rows.index[i]] * sum(dot);
      for (int64_t c = 0; c < s.f_cols; c += W) {
        const Vec feature = vec(from + c);
        vec(grad_z + c) += delta * feature;
        vec(to + c) = map.chain(feature, vec(to + c) + delta * vec(z + c));
      }
    }
  }

  // The same for phi(k), from v dS^T.
  void chain_keys(int64_t count, const float* grad_z) const {
    for (int64_t i = 0; i < count; ++i) {
      float *from = phi + i * s.f_lead, *to = grad + i * s.f_lead;
      for (int64_t c = 0; c < s.f_cols; c += W) {
        vec(to + c) = map.chain(vec(from + c), vec(to + c) + vec(grad_z + c));
      }
    }
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
void each_task(const typename Map::Sizes& s, const Map& map, const Body& body) {
  at::parallel_for(0, s.sequences * s.spans, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      Task<Map> task(s, map, index);
      body(task, index);
    }
  });
}

// The states of a sequence's spans (N, spans, state_size), summed into the first.
template <class S, class Merge>
void merge_spans(const S& s, float* states, const Merge& merge) {
  at::parallel_for(0, s.sequences, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* first = states + n * s.spans * s.state_size;
      for (int64_t i = 1; i < s.spans; ++i) merge(State(first, s), State(first + i * s.state_size, s));
    }
  });
}

template <class S>
inline void add_state(const S& s, State into, State from) {
  for (int64_t i = 0; i < s.features * s.v_cols; ++i) into.sums[i] += from.sums[i];
  for (int64_t r = 0; r < s.features; ++r) into.total[r] += from.total[r];
}

// Output, 1 / den and, in the first span of `states`, every sequence's S, z and stabiliser.
template <class Map>
void forward(const typename Map::Sizes& s, const Map& map, const Tensors& t, float* states) {
  each_task(s, map, [&](Task<Map>& task, int64_t index) {
    State state(states + index * s.state_size, s);
    state.clear(s);
    map.start(state.top);
    for (int64_t position = task.first; position < task.last;) {
      Selection rows(t.mask_of(task.b, s), position, task.last);
      task.expect(rows, {&t.k, &t.v}, {});
      task.gather(t.k, rows, s.width, task.x, s.x_lead);
      task.gather(t.v, rows, s.values, task.values, s.v_cols);
      map.advance(rows.count, task.x, task.phi, state);
      task.accumulate(rows.count, state);
      task.accumulate_total(rows.count, state);
    }
  });
  merge_spans(s, states, [&](State into, State from) { map.merge(into, from); });
  each_task(s, map, [&](Task<Map>& task, int64_t index) {
    State state(states + index / s.spans * s.spans * s.state_size, s);
    float* inverse = t.inverse + (task.b * s.heads + task.h) * s.length;
    for (int64_t position = task.first; position < task.last;) {
      Selection rows(nullptr, position, task.last);
      task.expect(rows, {&t.q}, {&t.out});
      task.gather(t.q, rows, s.width, task.x, s.x_lead);
      map.queries(rows.count, task.x, task.phi, state.top);
      task.read(rows.count, state);
      for (int64_t i = 0; i < rows.count; ++i) {
        const float den = task.denominator(i, state);
        inverse[rows.index[i]] = den == 0 ? 0 : 1 / den;
      }
      task.scatter(task.out, s.v_cols, t.out, rows, s.values, inverse);
    }
  });
}

// Gradients of q, k and v; those of hidden k and v are left as they are. `grads` has room for (N, spans, state_size).
template <class Map>
void backward(const typename Map::Sizes& s, const Map& map, const Tensors& t, float* states, float* grads) {
  each_task(s, map, [&](Task<Map>& task, int64_t index) {
    State state(states + index / s.spans * s.state_size, s), grad(grads + index * s.state_size, s);
    grad.clear(s);
    task.turn(state);
    const float* inverse = t.inverse + (task.b * s.heads + task.h) * s.length;
    for (int64_t position = task.first; position < task.last;) {
      Selection rows(nullptr, position, task.last);
      task.expect(rows, {&t.q, &t.grad_out}, {&t.grad_q});
      task.gather(t.q, rows, s.width, task.x, s.x_lead);
      map.queries(rows.count, task.x, task.phi, state.top);
      task.gather(t.grad_out, rows, s.values, task.values, s.v_cols, inverse);
      task.accumulate(rows.count, grad);
      task.grad_features(rows.count);
      task.chain_queries(rows, inverse, state.total, grad.total);
      map.grad_queries(rows.count, task.grad, task.out);
      task.scatter(task.out, s.x_lead, t.grad_q, rows, s.width);
    }
  });
  merge_spans(s, grads, [&](State into, State from) { add_state(s, into, from); });
  each_task(s, map, [&](Task<Map>& task, int64_t index) {
    const int64_t sequence = index / s.spans;
    State state(states + sequence * s.state_size, s), grad(grads + sequence * s.spans * s.state_size, s);
    task.turn(grad);
    for (int64_t position = task.first; position < task.last;) {
      Selection rows(t.mask_of(task.b, s), position, task.last);
      task.expect(rows, {&t.k, &t.v}, {&t.grad_k, &t.grad_v});
      task.gather(t.k, rows, s.width, task.x, s.x_lead);
      task.gather(t.v, rows, s.values, task.values, s.v_cols);
      map.keys(rows.count, task.x, task.phi, state.top);
      task.read(rows.count, grad);
      task.scatter(task.out, s.v_cols, t.grad_v, rows, s.values);
      task.grad_features(rows.count);
      task.chain_keys(rows.count, grad.total);
      map.grad_keys(rows.count, task.x, task.grad, task.out);
      task.scatter(task.out, s.x_lead, t.grad_k, rows, s.width);
    }
  });
}

// What torch sees: the same three tensors for every map.
template <class S, class MakeMap>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_forward(
    const S& s, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, const MakeMap& make) {
  Tensors t;
  const at::Tensor out = at::empty_like(v);
  const at::Tensor inverse = at::empty({s.batch, s.heads, s.length}, v.options().dtype(at::kFloat));
  const at::Tensor states = at::empty({s.sequences, s.spans, s.state_size}, inverse.options());
  t.q = Rows(q), t.k = Rows(k), t.v = Rows(v), t.out = Rows(out);
  t.mask = mask ? mask->const_data_ptr<bool>() : nullptr;
  t.inverse = inverse.data_ptr<float>();
  forward(s, make(s), t, states.data_ptr<float>());
  return {out, inverse, s.spans == 1 ? states : states.select(1, 0).clone()};
}

template <class S, class MakeMap>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_backward(
    const S& s, const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, const at::Tensor& inverse, const at::Tensor& states, const MakeMap& make) {
  Tensors t;
  // gradients of hidden keys and values stay zero
  const auto room = [&](const at::Tensor& x) { return mask ? at::zeros_like(x) : at::empty_like(x); };
  const at::Tensor grad_q = at::empty_like(q), grad_k = room(k), grad_v = room(v);
  const at::Tensor grads = at::empty({s.sequences, s.spans, s.state_size}, inverse.options());
  t.q = Rows(q), t.k = Rows(k), t.v = Rows(v), t.grad_out = Rows(grad);
  t.grad_q = Rows(grad_q), t.grad_k = Rows(grad_k), t.grad_v = Rows(grad_v);
  t.mask = mask ? mask->const_data_ptr<bool>() : nullptr;
  t.inverse = inverse.data_ptr<float>();
  backward(s, make(s), t, states.data_ptr<float>(), grads.data_ptr<float>());
  return {grad_q, grad_k, grad_v};
}

}  // namespace lra
