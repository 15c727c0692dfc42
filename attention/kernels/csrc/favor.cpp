// FAVOR+ with positive features, phi(x)_r = exp(w_r.x' - |x'|^2 / 2) with x' = x E^(-1/4) (Choromanski et al. 2021,
// lemma 1); with the rows [W, -W] the hyperbolic features.
//
// Key features are relative to the largest exponent of each feature over the visible keys, top_r; a query's are
// exp(w_r.q' + top_r) over the largest of them. |q'|^2 / 2 and that largest one are factors of a row, which cancel.
// Then z_r >= 1 for every r and every denominator is at least 1, whatever the norms.
#include <torch/library.h>
#include <cfloat>
#include <cmath>
#include "kernelized_causal.h"

namespace {

using namespace lra;

class Positive {
 public:
  using Sizes = Shape;

  Positive(const Shape& shape, const at::Tensor& projection)
      : s(shape), half(0.5f / std::sqrt(static_cast<float>(shape.width))) {
    const float scale = std::pow(static_cast<float>(s.width), -0.25f), *from = projection.const_data_ptr<float>();
    rows = arena.take(s.features * s.x_lead);
    columns = arena.take(s.width * s.f_lead);
    std::memset(rows, 0, s.features * s.x_lead * sizeof(float));
    std::memset(columns, 0, s.width * s.f_lead * sizeof(float));
    for (int64_t r = 0; r < s.features; ++r) {
      for (int64_t c = 0; c < s.width; ++c) rows[r * s.x_lead + c] = scale * from[r * s.width + c];
    }
    transpose(s.features, s.width, rows, s.x_lead, columns, s.f_lead);
  }

  // The stabiliser before any key; in the padding so large that features are zero.
  void start(float* top) const {
    for (int64_t r = 0; r < s.f_lead; ++r) top[r] = r < s.features ? -FLT_MAX : INFINITY;
  }

  // Key features (T, F) and, raised by these keys, the stabiliser of the state.
  void advance(int64_t count, const float* x, float* phi, State state) const {
    float norms[TILE];
    exponents(count, x, phi, norms);
    for (int64_t c = 0; c < s.f_cols; c += W) {
      Vec most = vec(state.top + c);
      for (int64_t i = 0; i < count; ++i) most = larger(vec(phi + i * s.f_lead + c) - norms[i], most);
      raise(state, c, most);
    }
    finish_keys(count, phi, norms, state.top);
  }

  void keys(int64_t count, const float* x, float* phi, const float* top) const {
    float norms[TILE];
    exponents(count, x, phi, norms);
    finish_keys(count, phi, norms, top);
  }

  void queries(int64_t count, const float* x, float* phi, const float* top) const {
    const Vec never = splat(-INFINITY);
    matmul(count, s.f_cols, s.width, x, s.x_lead, columns, s.f_lead, phi, s.f_lead);
    const int64_t cols = s.f_cols, lead = s.f_lead;
    for (int64_t i = 0; i < count; ++i, phi += lead) {
      Vec most = never;
      for (int64_t c = 0; c < cols; c += W) {
        const Vec bias = vec(top + c), exponent = vec(phi + c) + (bias > FLT_MAX ? never : bias);
        vec(phi + c) = exponent;
        most = larger(exponent, most);
      }
      const Vec peak = splat(largest(most));
      for (int64_t c = 0; c < cols; c += W) vec(phi + c) = exp(vec(phi + c) - peak);
    }
  }

  // What the gradient of the exponents is, given that of the features.
  Vec chain(Vec phi, Vec grad) const { return phi * grad; }

  // grad_x (T, E) from the gradient of the exponents.
  void grad_queries(int64_t count, const float* grad, float* grad_x) const {
    matmul(count, s.x_lead, s.features, grad, s.f_lead, rows, s.x_lead, grad_x, s.x_lead);
  }

  void grad_keys(int64_t count, const float* x, const float* grad, float* grad_x) const {
    grad_queries(count, grad, grad_x);
    for (int64_t i = 0; i < count; ++i) {
      Vec total{};
      for (int64_t c = 0; c < s.f_cols; c += W) total += vec(grad + i * s.f_lead + c);
      const float radial = 2 * half * sum(total);
      for (int64_t c = 0; c < s.x_lead; c += W) vec(grad_x + i * s.x_lead + c) -= radial * vec(x + i * s.x_lead + c);
    }
  }

  // The gradient of a state relative to the stabiliser `after` becomes that of the state relative to grad.top.
  void before(State grad, const float* after) const {
    for (int64_t r = 0; r < s.features; ++r) {
      if (!(after[r] > grad.top[r])) continue;
      const float decay = std::exp(grad.top[r] - after[r]);
      grad.total[r] *= decay;
      for (int64_t j = 0; j < s.v_cols; j += W) vec(grad.sums + r * s.v_cols + j) *= decay;
    }
  }

  // into = into + from, relative to the larger of their stabilisers.
  void merge(State into, State from) const {
    for (int64_t c = 0; c < s.f_cols; c += W) {
      const Vec most = larger(vec(into.top + c), vec(from.top + c));
      raise(into, c, most);
      raise(from, c, most);
    }
    add_state(s, into, from);
  }

 private:
  // phi = w.x', norms = |x'|^2 / 2
  void exponents(int64_t count, const float* x, float* phi, float* norms) const {
    matmul(count, s.f_cols, s.width, x, s.x_lead, columns, s.f_lead, phi, s.f_lead);
    for (int64_t i = 0; i < count; ++i) {
      Vec square{};
      for (int64_t c = 0; c < s.x_lead; c += W) square += vec(x + i * s.x_lead + c) * vec(x + i * s.x_lead + c);
      norms[i] = half * sum(square);
    }
  }

  void finish_keys(int64_t count, float* phi, const float* norms, const float* top) const {
    const int64_t cols = s.f_cols, lead = s.f_lead;
    for (int64_t i = 0; i < count; ++i, phi += lead) {
      for (int64_t c = 0; c < cols; c += W) vec(phi + c) = exp(vec(phi + c) - norms[i] - vec(top + c));
    }
  }

  // The stabiliser of W features from c becomes `top`, and their rows of the state shrink by what that adds.
  void raise(State state, int64_t c, Vec top) const {
    const Vec before = vec(state.top + c), decay = exp(before - top);
    vec(state.top + c) = top;
    for (int64_t r = c; r < std::min(c + W, s.features); ++r) {
      if (!(top[r - c] > before[r - c])) continue;
      state.total[r] *= decay[r - c];
      for (int64_t j = 0; j < s.v_cols; j += W) vec(state.sums + r * s.v_cols + j) *= decay[r - c];
    }
  }

  const Shape s;
  const float half;  // |x'|^2 / 2 = half |x|^2
  Arena arena;
  float *rows, *columns;  // (F, E) and (E, F) of w E^(-1/4)
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> favor_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& projection,
    const std::optional<at::Tensor>& mask) {
  const auto map = [&](const Shape& s) { return Positive(s, projection); };
  return run_forward(Shape(q, v, projection.size(0)), q, k, v, mask, map);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> favor_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& projection, const std::optional<at::Tensor>& mask, const at::Tensor& inverse,
    const at::Tensor& states) {
  const auto map = [&](const Shape& s) { return Positive(s, projection); };
  return run_backward(Shape(q, v, projection.size(0)), grad, q, k, v, mask, inverse, states, map);
}

Causal favor_causal_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& projection,
    const std::optional<at::Tensor>& mask) {
  const auto map = [&](const Shape& s) { return Positive(s, projection); };
  return run_causal_forward(Shape(q, v, projection.size(0)), q, k, v, mask, map);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> favor_causal_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& projection, const std::optional<at::Tensor>& mask, const at::Tensor& inverse,
    const at::Tensor& states, const at::Tensor& split) {
  const auto map = [&](const Shape& s) { return Positive(s, projection); };
  return run_causal_backward(Shape(q, v, projection.size(0)), grad, q, k, v, mask, inverse, states, split, map);
}

}  // namespace

TORCH_LIBRARY(lra_favor, m) {
  m.def("forward(Tensor q, Tensor k, Tensor v, Tensor projection, Tensor? mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor projection, Tensor? mask, Tensor inverse, "
      "Tensor states) -> (Tensor, Tensor, Tensor)");
  m.def(
      "causal_forward(Tensor q, Tensor k, Tensor v, Tensor projection, Tensor? mask) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "causal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor projection, Tensor? mask, Tensor inverse, "
      "Tensor states, Tensor split) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lra_favor, CPU, m) {
  m.impl("forward", favor_forward);
  m.impl("backward", favor_backward);
  m.impl("causal_forward", favor_causal_forward);
  m.impl("causal_backward", favor_causal_backward);
}
