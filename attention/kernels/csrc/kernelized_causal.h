// The causal form of kernelized.h: position i sees the visible keys j <= i.
//
// A tile of queries sees the state of the tiles before it and, by weights that are zero above the diagonal, the keys of
// its own:
//
//   num = phi(q) S + A V,  A_ij = phi(q_i).phi(k_j) for j <= i
//   dphi(q) = do S^T + delta z + B phi(k),  B_ij = do_i.v_j + delta_i for j <= i
//   dphi(k) = V dS^T + dz + B^T phi(q),  dv = phi(k) dS + A^T do
//
// with dS and dz those of the state after the tile, summed over later tiles. Where a key so raises the stabiliser that
// an earlier query of its tile loses its digits, the tile is done again one position at a time.
//
// The states before all tiles are kept for the backward pass. Sequences run in parallel, tiles one after another.
//
// Shapes as in kernelized.h; n visible keys in a tile.
#pragma once

#include <ATen/ops/zeros.h>
#include <cfloat>
#include <cmath>
#include "kernelized.h"

namespace lra {

using Causal = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline int64_t tiles_of(const Shape& s) { return (s.length + TILE - 1) / TILE; }

// What the causal passes over one sequence share: a tile of queries and one of keys.
template <class Map>
struct CausalTask {
  const typename Map::Sizes& s;
  const Map& map;
  const Tensors& t;
  Task<Map> queries, keys;
  const bool* mask;
  float *inverse, *weights, *slopes, *turned, *delta;

  CausalTask(const typename Map::Sizes& shape, const Map& feature_map, const Tensors& tensors, int64_t sequence)
      : s(shape),
        map(feature_map),
        t(tensors),
        queries(shape, feature_map, sequence * shape.spans),
        keys(shape, feature_map, sequence * shape.spans),
        mask(t.mask_of(queries.b, shape)),
        inverse(t.inverse + sequence * shape.length) {
    weights = queries.arena.take(TILE * TILE);
    slopes = queries.arena.take(TILE * TILE);
    turned = queries.arena.take(std::max(s.features, s.values) * TILE);
    delta = queries.arena.take(TILE);
  }

  // Features of the tile; `state` becomes relative to the stabiliser that counts these keys in.
  void load(const Selection& all, const Selection& seen, State state) const {
    load_keys(seen, state);
    queries.gather(t.q, all, s.width, queries.x, s.x_lead);
    map.queries(all.count, queries.x, queries.phi, state.top);
  }

  void load_keys(const Selection& seen, State state) const {
    keys.gather(t.k, seen, s.width, keys.x, s.x_lead);
    keys.gather(t.v, seen, s.values, keys.values, s.v_cols);
    map.advance(seen.count, keys.x, keys.phi, state);
  }

  void add_keys(const Selection& seen, State state) const {
    keys.accumulate(seen.count, state);
    keys.accumulate_total(seen.count, state);
  }

  // to (T, n) = a b^T, zero where key j is later than query i; a (T, depth), b (n, depth)
  void scores(
      const Selection& all, const Selection& seen, int64_t depth, const float* a, int64_t lda, const float* b,
      int64_t ldb, float* to) const {
    transpose(seen.count, depth, b, ldb, turned, TILE);
    const int64_t cols = round_up(seen.count);
    matmul(all.count, cols, depth, a, lda, turned, TILE, to, TILE);
    for (int64_t i = 0, visible = 0; i < all.count; ++i) {
      visible = seen.until(all.index[i], visible);
      for (int64_t j = visible; j < cols; ++j) to[i * TILE + j] = 0;
    }
  }

  void feature_scores(const Selection& all, const Selection& seen) const {
    scores(all, seen, s.features, queries.phi, s.f_lead, keys.phi, s.f_lead, weights);
  }

  // Outputs of `count` positions and the state after them; false, with nothing written, if a query lost its digits.
  bool forward(int64_t first, int64_t count, State state, bool started) const {
    const auto all = Selection::within(nullptr, first, count), seen = Selection::within(mask, first, count);
    load(all, seen, state);
    feature_scores(all, seen);
    for (int64_t i = 0, visible = 0; i < count; ++i) {
      visible = seen.until(first + i, visible);
      float den = queries.denominator(i, state);
      for (int64_t j = 0; j < visible; ++j) den += weights[i * TILE + j];
      if (count > 1 && (started || visible) && den < LOST) return false;
      inverse[first + i] = den == 0 ? 0 : 1 / den;
    }
    queries.read(count, state);
    matmul(
        count, s.v_cols, seen.count, weights, TILE, keys.values, s.v_cols, queries.out, s.v_cols, true);
    queries.scatter(queries.out, s.v_cols, t.out, all, s.values, inverse);
    add_keys(seen, state);
    return true;
  }

  // Gradients of `count` positions. `state` and its stabiliser are those before them and are used up; `grad`, that of
  // the state after them, becomes that of the state before them.
  void backward(int64_t first, int64_t count, State state, State grad) const {
    const auto all = Selection::within(nullptr, first, count), seen = Selection::within(mask, first, count);
    std::memcpy(grad.top, state.top, s.f_lead * sizeof(float));
    load(all, seen, state);
    feature_scores(all, seen);
    queries.gather(t.grad_out, all, s.values, queries.values, s.v_cols, inverse);
    scores(all, seen, s.values, queries.values, s.v_cols, keys.values, s.v_cols, slopes);
    grad_queries(all, seen, state);
    grad_keys(all, seen, grad);
    queries.accumulate(count, grad);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = 0; c < s.f_cols; c += W) vec(grad.total + c) += delta[i] * vec(queries.phi + i * s.f_lead + c);
    }
    map.before(grad, state.top);
  }

  // And delta, and B in the place of do V^T.
  void grad_queries(const Selection& all, const Selection& seen, State state) const {
    queries.turn(state);
    queries.grad_features(all.count);
    for (int64_t i = 0, visible = 0; i < all.count; ++i) {
      visible = seen.until(all.index[i], visible);
      float *phi = queries.phi + i * s.f_lead, *to = queries.grad + i * s.f_lead, *slope = slopes + i * TILE;
      Vec dot{};
      for (int64_t c = 0; c < s.f_cols; c += W) dot += vec(phi + c) * vec(to + c);
      float product = sum(dot);
      for (int64_t j = 0; j < visible; ++j) product += weights[i * TILE + j] * slope[j];
      delta[i] = -inverse[all.index[i]] * product;
      for (int64_t j = 0; j < visible; ++j) slope[j] += delta[i];
      for (int64_t c = 0; c < s.f_cols; c += W) vec(to + c) += delta[i] * vec(state.total + c);
    }
    matmul(
        all.count, s.f_cols, seen.count, slopes, TILE, keys.phi, s.f_lead, queries.grad, s.f_lead, true);
    for (int64_t i = 0; i < all.count; ++i) {
      float *phi = queries.phi + i * s.f_lead, *to = queries.grad + i * s.f_lead;
      for (int64_t c = 0; c < s.f_cols; c += W) vec(to + c) = map.chain(vec(phi + c), vec(to + c));
    }
    map.grad_queries(all.count, queries.grad, queries.out);
    queries.scatter(queries.out, s.x_lead, t.grad_q, all, s.width);
  }

  void grad_keys(const Selection& all, const Selection& seen, State grad) const {
    keys.read(seen.count, grad);
    matmul<true>(
        seen.count, s.v_cols, all.count, weights, TILE, queries.values, s.v_cols, keys.out, s.v_cols, true);
    keys.scatter(keys.out, s.v_cols, t.grad_v, seen, s.values);
    keys.turn(grad);
    keys.grad_features(seen.count);
    matmul<true>(
        seen.count, s.f_cols, all.count, slopes, TILE, queries.phi, s.f_lead, keys.grad, s.f_lead, true);
    keys.chain_keys(seen.count, grad.total);
    map.grad_keys(seen.count, keys.x, keys.grad, keys.out);
    keys.scatter(keys.out, s.x_lead, t.grad_k, seen, s.width);
  }

  // A tile that ran one position at a time: their states first, then back through them.
  void backward_split(int64_t first, int64_t count, const float* before, State grad) const {
    Arena arena;
    float* states = arena.take(count * s.state_size);
    std::memcpy(states, before, s.state_size * sizeof(float));
    for (int64_t i = 0; i + 1 < count; ++i) {
      float* next = states + (i + 1) * s.state_size;
      std::memcpy(next, next - s.state_size, s.state_size * sizeof(float));
      const auto seen = Selection::within(mask, first + i, 1);
      load_keys(seen, State(next, s));
      add_keys(seen, State(next, s));
    }
    for (int64_t i = count - 1; i >= 0; --i) backward(first + i, 1, State(states + i * s.state_size, s), grad);
  }

  // A denominator above the root of the smallest number cannot have missed what vanished below that number.
  static constexpr float LOST = 1.0842022e-19f;
};

// out, 1 / den, the states before all tiles (N, tiles, state_size), and which tiles went by single positions.
template <class S, class MakeMap>
Causal run_causal_forward(
    const S& s, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
    const MakeMap& make) {
  Tensors t;
  const at::Tensor out = at::empty_like(v);
  const at::Tensor inverse = at::empty({s.batch, s.heads, s.length}, v.options().dtype(at::kFloat));
  const int64_t tiles = tiles_of(s), size = s.state_size;
  const at::Tensor states = at::empty({s.sequences, tiles, size}, inverse.options());
  const at::Tensor split = at::zeros({s.sequences, tiles}, inverse.options().dtype(at::kBool));
  t.q = Rows(q), t.k = Rows(k), t.v = Rows(v), t.out = Rows(out);
  t.mask = mask ? mask->const_data_ptr<bool>() : nullptr;
  t.inverse = inverse.data_ptr<float>();
  float* records = states.data_ptr<float>();
  bool* singly = split.data_ptr<bool>();
  const auto map = make(s);
  at::parallel_for(0, s.sequences, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const CausalTask task(s, map, t, n);
      Arena arena;
      State state(arena.take(size), s);
      state.clear(s);
      map.start(state.top);
      bool started = false;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = tile * TILE, count = std::min(TILE, s.length - first);
        float* record = records + (n * tiles + tile) * size;
        std::memcpy(record, state.sums, size * sizeof(float));
        if (!task.forward(first, count, state, started)) {
          singly[n * tiles + tile] = true;
          std::memcpy(state.sums, record, size * sizeof(float));
          for (int64_t i = 0; i < count; ++i) task.forward(first + i, 1, state, started);
        }
        started = started || Selection::within(task.mask, first, count).count;
      }
    }
  });
  return {out, inverse, states, split};
}

// Gradients of q, k and v.
template <class S, class MakeMap>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_causal_backward(
    const S& s, const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, const at::Tensor& inverse, const at::Tensor& states,
    const at::Tensor& split, const MakeMap& make) {
  Tensors t;
  const auto room = [&](const at::Tensor& x) { return mask ? at::zeros_like(x) : at::empty_like(x); };
  const at::Tensor grad_q = at::empty_like(q), grad_k = room(k), grad_v = room(v);
  t.q = Rows(q), t.k = Rows(k), t.v = Rows(v), t.grad_out = Rows(grad);
  t.grad_q = Rows(grad_q), t.grad_k = Rows(grad_k), t.grad_v = Rows(grad_v);
  t.mask = mask ? mask->const_data_ptr<bool>() : nullptr;
  t.inverse = inverse.data_ptr<float>();
  const float* records = states.const_data_ptr<float>();
  const bool* singly = split.const_data_ptr<bool>();
  const int64_t tiles = tiles_of(s), size = s.state_size;
  const auto map = make(s);
  at::parallel_for(0, s.sequences, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const CausalTask task(s, map, t, n);
      Arena arena;
      State state(arena.take(size), s), grads(arena.take(size), s);
      grads.clear(s);
      for (int64_t tile = tiles - 1; tile >= 0; --tile) {
        const int64_t first = tile * TILE, count = std::min(TILE, s.length - first);
        const float* record = records + (n * tiles + tile) * size;
        if (singly[n * tiles + tile]) {
          task.backward_split(first, count, record, grads);
        } else {
          std::memcpy(state.sums, record, size * sizeof(float));
          task.backward(first, count, state, grads);
        }
      }
    }
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace lra
