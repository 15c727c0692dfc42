// Linear attention with phi(x) = elu(x) + 1 = exp(min(x, 0)) + max(x, 0) (Katharopoulos et al. 2020, equation 7).
//
// Features are as many as q and k are wide. phi'(x) = min(phi(x), 1).
//
// Where all keys of a head are negative, their features are relative to the largest, e^top with top = min(max k, 0), and
// a query's likewise to its own largest: both are factors of a row, which cancel. Ordinary inputs have top = 0.
#include <torch/library.h>
#include <cfloat>
#include <cmath>
#include "kernelized_causal.h"

namespace {

using namespace lra;

template <class S>
class EluPlusOne {
 public:
  using Sizes = S;

  explicit EluPlusOne(const S& shape) : s(shape) {}

  // The stabiliser before any key; one number serves all features.
  void start(float* top) const { top[0] = -FLT_MAX; }

  void queries(int64_t count, const float* x, float* phi, const float*) const {
    if (features<true, false>(count, x, phi) >= FAR) return;
    for (int64_t i = 0; i < count; ++i) {
      const float* row = x + i * s.x_lead;
      features<false, true>(1, row, phi + i * s.f_lead, std::min(most(1, row), 0.0f));
    }
  }

  // Key features (T, F) and, raised by these keys, the stabiliser of the state.
  void advance(int64_t count, const float* x, float* phi, State state) const {
    if (state.top[0] < 0) raise(state, std::max(state.top[0], std::min(most(count, x), 0.0f)));
    keys(count, x, phi, state.top);
  }

  void keys(int64_t count, const float* x, float* phi, const float* top) const {
    if (top[0] < 0) {
      features<false, true>(count, x, phi, top[0]);
    } else {
      features<false, false>(count, x, phi);
    }
  }

  Vec chain(Vec phi, Vec grad) const { return smaller(phi, splat(1)) * grad; }

  void grad_queries(int64_t count, const float* grad, float* grad_x) const {
    for (int64_t i = 0; i < count; ++i, grad += s.f_lead, grad_x += s.x_lead) {
      std::memcpy(grad_x, grad, s.x_lead * sizeof(float));
    }
  }

  void grad_keys(int64_t count, const float*, const float* grad, float* grad_x) const {
    grad_queries(count, grad, grad_x);
  }

  // The gradient of a state relative to the stabiliser `after` becomes that of the state relative to grad.top.
  void before(State grad, const float* after) const {
    if (after[0] > grad.top[0]) shrink(grad, std::exp(grad.top[0] - after[0]));
  }

  // into = into + from, relative to the larger of their stabilisers.
  void merge(State into, State from) const {
    const float top = std::max(into.top[0], from.top[0]);
    raise(into, top);
    raise(from, top);
    add_state(s, into, from);
  }

 private:
  static constexpr float FAR = -8;  // queries further below zero than this are scaled

  // phi = the features, e^-shift times those of x that are at most `shift` if Shifted. If Bounded, a lower bound of
  // the largest numbers of all rows.
  template <bool Bounded, bool Shifted>
  float features(int64_t count, const float* x, float* phi, float shift = 0) const {
    const int64_t cols = s.x_lead, lead = s.f_lead;
    const Vec zero{};
    Vec lowest = splat(FLT_MAX);
    for (int64_t i = 0; i < count; ++i, x += cols, phi += lead) {
      Vec peak = splat(-FLT_MAX);
      for (int64_t c = 0; c < cols; c += W) {
        const Vec from = vec(x + c);
        vec(phi + c) = exp(smaller(zero, Shifted ? from - shift : from)) + larger(zero, from);  // in this order NaN stays NaN
        if (Bounded) peak = larger(from, peak);
      }
      if (Bounded) lowest = smaller(lowest, peak);
      // phi(0) = 1: the padding must not reach a denominator
      for (int64_t c = s.features; c < cols; ++c) phi[c] = 0;
    }
    return -largest(-lowest);
  }

  // The largest number of x (T, E) without its padding.
  float most(int64_t count, const float* x) const {
    const int64_t whole = s.features / W * W;
    Vec peak = splat(-FLT_MAX);
    float rest = -FLT_MAX;
    for (int64_t i = 0; i < count; ++i, x += s.x_lead) {
      for (int64_t c = 0; c < whole; c += W) peak = larger(vec(x + c), peak);
      for (int64_t c = whole; c < s.features; ++c) rest = std::max(rest, x[c]);
    }
    return std::max(largest(peak), rest);
  }

  void raise(State state, float top) const {
    if (top > state.top[0]) shrink(state, std::exp(state.top[0] - top));
    state.top[0] = top;
  }

  void shrink(State state, float factor) const {
    for (int64_t r = 0; r < s.features; ++r) state.total[r] *= factor;
    for (int64_t i = 0; i < s.features * s.v_cols; ++i) state.sums[i] *= factor;
  }

  const S s;
};

// Calls run(shape) with a shape whose sizes the compiler knows, if they are common ones.
template <class Run>
auto with_sizes(const at::Tensor& q, const at::Tensor& v, const Run& run) {
  const int64_t width = q.size(3);
  if (const Square<32> s(q, v, width); s.fits()) return run(s);
  if (const Square<64> s(q, v, width); s.fits()) return run(s);
  return run(Shape(q, v, width));
}

template <class S>
EluPlusOne<S> make_map(const S& s) {
  return EluPlusOne<S>(s);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask) {
  return with_sizes(q, v, [&](const auto& s) {
    return run_forward(s, q, k, v, mask, [](const auto& sizes) { return make_map(sizes); });
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, const at::Tensor& inverse, const at::Tensor& states) {
  return with_sizes(q, v, [&](const auto& s) {
    return run_backward(s, grad, q, k, v, mask, inverse, states, [](const auto& sizes) { return make_map(sizes); });
  });
}

Causal linear_causal_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask) {
  return run_causal_forward(Shape(q, v, q.size(3)), q, k, v, mask, make_map<Shape>);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_causal_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, const at::Tensor& inverse, const at::Tensor& states,
    const at::Tensor& split) {
  return run_causal_backward(Shape(q, v, q.size(3)), grad, q, k, v, mask, inverse, states, split, make_map<Shape>);
}

}  // namespace

TORCH_LIBRARY(lra_linear, m) {
  m.def("forward(Tensor q, Tensor k, Tensor v, Tensor? mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor inverse, Tensor states) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("causal_forward(Tensor q, Tensor k, Tensor v, Tensor? mask) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "causal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor inverse, Tensor states, "
      "Tensor split) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lra_linear, CPU, m) {
  m.impl("forward", linear_forward);
  m.impl("backward", linear_backward);
  m.impl("causal_forward", linear_causal_forward);
  m.impl("causal_backward", linear_causal_backward);
}
