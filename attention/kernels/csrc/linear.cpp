// Linear attention with phi(x) = elu(x) + 1 = exp(min(x, 0)) + max(x, 0) (Katharopoulos et al. 2020, equation 7).
//
// Features are as many as q and k are wide and need no stabiliser. phi'(x) = min(phi(x), 1).
#include <torch/library.h>
#include "kernelized_causal.h"

namespace {

using namespace lra;

template <class S>
class EluPlusOne {
 public:
  using Sizes = S;
  static constexpr bool rescales = false;

  explicit EluPlusOne(const S& shape) : s(shape) {}

  void start(float*) const {}

  void queries(int64_t count, const float* x, float* phi, const float*) const {
    const int64_t cols = s.x_lead, lead = s.f_lead;
    for (int64_t i = 0; i < count; ++i, x += cols, phi += lead) {
      for (int64_t c = 0; c < cols; c += W) {
        const Vec from = vec(x + c);
        vec(phi + c) = exp(smaller(from, Vec{})) + larger(from, Vec{});
      }
      // phi(0) = 1: the padding must not reach a denominator
      for (int64_t c = s.features; c < cols; ++c) phi[c] = 0;
    }
  }

  void advance(int64_t count, const float* x, float* phi, State) const { queries(count, x, phi, nullptr); }

  void keys(int64_t count, const float* x, float* phi, const float*) const { queries(count, x, phi, nullptr); }

  Vec chain(Vec phi, Vec grad) const { return smaller(phi, splat(1)) * grad; }

  void grad_queries(int64_t count, const float* grad, float* grad_x) const {
    for (int64_t i = 0; i < count; ++i, grad += s.f_lead, grad_x += s.x_lead) {
      std::memcpy(grad_x, grad, s.x_lead * sizeof(float));
    }
  }

  void grad_keys(int64_t count, const float*, const float* grad, float* grad_x) const {
    grad_queries(count, grad, grad_x);
  }

  void before(State, const float*) const {}

  void merge(State into, State from) const { add_state(s, into, from); }

 private:
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
