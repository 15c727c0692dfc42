// Linear attention with phi(x) = elu(x) + 1 = exp(min(x, 0)) + max(x, 0) (Katharopoulos et al. 2020, equation 7).
//
// Features are as many as q and k are wide and need no stabiliser. phi'(x) = min(phi(x), 1).
#include <torch/library.h>
#include "kernelized.h"

namespace {

using namespace lra;

class EluPlusOne {
 public:
  explicit EluPlusOne(const Shape& shape) : s(shape) {}

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

  void grad_queries(int64_t count, const float*, const float* phi, float* grad, float* grad_x) const {
    const int64_t cols = s.x_lead, lead = s.f_lead;
    for (int64_t i = 0; i < count; ++i, phi += lead, grad += lead, grad_x += cols) {
      for (int64_t c = 0; c < cols; c += W) vec(grad_x + c) = smaller(vec(phi + c), splat(1)) * vec(grad + c);
    }
  }

  void grad_keys(int64_t count, const float* x, const float* phi, float* grad, float* grad_x) const {
    grad_queries(count, x, phi, grad, grad_x);
  }

  void merge(State into, State from) const { add_state(s, into, from); }

 private:
  const Shape s;
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask) {
  return run_forward(Shape(q, v, q.size(3)), q, k, v, mask, [](const Shape& s) { return EluPlusOne(s); });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, const at::Tensor& out, const at::Tensor& inverse,
    const at::Tensor& states) {
  const auto map = [](const Shape& s) { return EluPlusOne(s); };
  return run_backward(Shape(q, v, q.size(3)), grad, q, k, v, mask, out, inverse, states, map);
}

}  // namespace

TORCH_LIBRARY(lra_linear, m) {
  m.def("forward(Tensor q, Tensor k, Tensor v, Tensor? mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor inverse, "
      "Tensor states) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lra_linear, CPU, m) {
  m.impl("forward", linear_forward);
  m.impl("backward", linear_backward);
}
