// WKV-7 on the CPU: the recurrence step by step with one head's state in the first-level cache.
//
// Shapes: B batch, L sequence length, H heads, K key width, V value width.
//
//   u = S a,  S <- S diag(w) + u b^T + v k^T,  y = S r          S (V, K), w = e^logw
//
// The gradient D of the loss by S runs backwards through the same steps:
//
//   D += gy r^T,   gr = S^T gy,   gu = D b,   gv = D k,   gb = D^T u,   gk = D^T v
//   gw = sum over V of D * S_before,   ga = S_before^T gu,   D <- D diag(w) + gu a^T
//
// The states are not kept: every 16th is, and the backward repeats 16 steps at a time from there.
// The forward holds S as (K, V): all it does is along V, and no sum runs across a vector. The backward holds
// (V, K): five of its sums run over V and only two over K.

#include <ATen/Parallel.h>
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kKept = 16;  // steps from one kept state to the next

struct Sizes {
  int64_t batch, length, heads, keys, values;
  int64_t chunks() const { return (length + kKept - 1) / kKept; }
  int64_t token(int64_t head, int64_t t) const { return (head / heads * length + t) * heads + head % heads; }
};

Sizes sizes(const at::Tensor& r, const at::Tensor& v) {
  return {r.size(0), r.size(1), r.size(2), r.size(3), v.size(3)};
}

template <typename T>
struct Inputs {
  const T *r, *w, *k, *v, *a, *b;
};

template <typename T>
Inputs<T> inputs(const at::Tensor& r, const at::Tensor& w, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& a, const at::Tensor& b) {
  return {r.const_data_ptr<T>(), w.const_data_ptr<T>(), k.const_data_ptr<T>(),
          v.const_data_ptr<T>(), a.const_data_ptr<T>(), b.const_data_ptr<T>()};
}

template <typename T>
void transpose(const T* from, T* to, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
}

// One head. Width is V where the compiler may know it, or 0. `used` (u of every step) and `kept` are null in inference.
template <typename T, int64_t Width>
void forward_head(const Sizes& n, const Inputs<T>& in, const T* start, int64_t head, T* y, T* end, T* used, T* kept) {
  const int64_t K = n.keys, V = Width ? Width : n.values;
  std::vector<T> state(K * V), sums(2 * V);
  T *const s = state.data(), *const u = sums.data(), *const out = u + V;
  transpose(start + head * V * K, s, V, K);
  for (int64_t t = 0; t < n.length; ++t) {
    if (kept && t % kKept == 0) std::copy(s, s + K * V, kept + (head * n.chunks() + t / kKept) * K * V);
    const int64_t token = n.token(head, t);
    const T *r = in.r + token * K, *w = in.w + token * K, *k = in.k + token * K, *a = in.a + token * K,
            *b = in.b + token * K, *v = in.v + token * V;
    T seen[Width ? Width : 1], read[Width ? Width : 1], value[Width ? Width : 1];
    T *const su = Width ? seen : u, *const sy = Width ? read : out;
    const T* const sv = Width ? value : v;
    if (Width) std::copy(v, v + V, value);
    for (int64_t j = 0; j < V; ++j) su[j] = sy[j] = 0;
    for (int64_t i = 0; i < K; ++i) {
      const T* row = s + i * V;
#pragma omp simd
      for (int64_t j = 0; j < V; ++j) su[j] += a[i] * row[j];
    }
    for (int64_t i = 0; i < K; ++i) {
      T* row = s + i * V;
#pragma omp simd
      for (int64_t j = 0; j < V; ++j) {
        row[j] = row[j] * w[i] + su[j] * b[i] + sv[j] * k[i];
        sy[j] += r[i] * row[j];
      }
    }
    std::copy(sy, sy + V, y + token * V);
    if (used) std::copy(su, su + V, used + token * V);
  }
  transpose(s, end + head * V * K, K, V);
}

template <typename T>
struct Gradients {
  T *r, *w, *k, *v, *a, *b, *state;
};

// The kKept states from a kept one on, each (V, K), the kept one first.
template <typename T, int64_t Width>
void replay(const Sizes& n, const Inputs<T>& in, const T* used, const T* kept, int64_t head, int64_t first,
            int64_t last, T* states) {
  const int64_t K = Width ? Width : n.keys, V = n.values;
  transpose(kept, states, K, V);
  for (int64_t t = first; t < last; ++t) {
    const int64_t token = n.token(head, t);
    const T *w = in.w + token * K, *k = in.k + token * K, *b = in.b + token * K;
    const T* before = states + (t - first) * V * K;
    T* after = states + (t - first + 1) * V * K;
    for (int64_t j = 0; j < V; ++j) {
      const T u = used[token * V + j], v = in.v[token * V + j];
#pragma omp simd
      for (int64_t i = 0; i < K; ++i) after[j * K + i] = before[j * K + i] * w[i] + u * b[i] + v * k[i];
    }
  }
}

// Width is K where the compiler may know it, or 0. `gradient` is D (V, K).
template <typename T, int64_t Width>
void backward_step(const Sizes& n, const Inputs<T>& in, const T* used, const T* gy, int64_t token, const T* before,
                   const T* after, T* gradient, const Gradients<T>& out) {
  const int64_t K = Width ? Width : n.keys, V = n.values;
  const T *r = in.r + token * K, *w = in.w + token * K, *k = in.k + token * K, *a = in.a + token * K,
          *b = in.b + token * K;
  T sums[Width ? 5 * Width : 1];
  std::vector<T> heap(Width ? 0 : 5 * K);
  T* const gr = Width ? sums : heap.data();
  T *const gw = gr + K, *const gk = gw + K, *const ga = gk + K, *const gb = ga + K;
  std::fill(gr, gr + 5 * K, T(0));
  for (int64_t j = 0; j < V; ++j) {
    T* const d = gradient + j * K;
    const T *s0 = before + j * K, *s1 = after + j * K;
    const T g = gy[token * V + j], v = in.v[token * V + j], u = used[token * V + j];
    T gu = 0, gv = 0;
#pragma omp simd reduction(+ : gu, gv)
    for (int64_t i = 0; i < K; ++i) {
      d[i] += g * r[i];
      gu += d[i] * b[i];
      gv += d[i] * k[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < K; ++i) {
      gr[i] += g * s1[i];
      gb[i] += u * d[i];
      gk[i] += v * d[i];
      gw[i] += d[i] * s0[i];
      ga[i] += gu * s0[i];
      d[i] = d[i] * w[i] + gu * a[i];
    }
    out.v[token * V + j] = gv;
  }
  const int64_t at = token * K;
  for (int64_t i = 0; i < K; ++i) {
    out.r[at + i] = gr[i];
    out.w[at + i] = gw[i] * w[i];  // by logw
    out.k[at + i] = gk[i];
    out.a[at + i] = ga[i];
    out.b[at + i] = gb[i];
  }
}

template <typename T, int64_t Width>
void backward_head(const Sizes& n, const Inputs<T>& in, const T* used, const T* kept, const T* gy, const T* gend,
                   int64_t head, const Gradients<T>& out) {
  const int64_t size = n.keys * n.values;
  std::vector<T> states((kKept + 1) * size), gradient(gend + head * size, gend + (head + 1) * size);
  for (int64_t chunk = n.chunks() - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * kKept, last = std::min(first + kKept, n.length);
    replay<T, Width>(n, in, used, kept + (head * n.chunks() + chunk) * size, head, first, last, states.data());
    for (int64_t t = last - 1; t >= first; --t) {
      const T* before = states.data() + (t - first) * size;
      backward_step<T, Width>(n, in, used, gy, n.token(head, t), before, before + size, gradient.data(), out);
    }
  }
  std::copy(gradient.begin(), gradient.end(), out.state + head * size);
}

// Calls `run` with the width as a constant where it is a common one.
template <typename F>
void with_width(int64_t width, const F& run) {
  switch (width) {
    case 16: return run(std::integral_constant<int64_t, 16>());
    case 32: return run(std::integral_constant<int64_t, 32>());
    case 64: return run(std::integral_constant<int64_t, 64>());
    default: return run(std::integral_constant<int64_t, 0>());
  }
}

using at::Tensor;

// All contiguous and of one dtype; w is e^logw. -> y, end state, u of every step, kept states (both empty unless save).
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v,
                                                   const Tensor& a, const Tensor& b, const Tensor& start, bool save) {
  const Sizes n = sizes(r, v);
  Tensor y = at::empty_like(v), end = at::empty_like(start);
  Tensor used = at::empty(save ? v.sizes() : at::IntArrayRef{0}, v.options());
  Tensor kept = at::empty({save ? n.batch * n.heads * n.chunks() * n.keys * n.values : 0}, v.options());
  AT_DISPATCH_FLOATING_TYPES(r.scalar_type(), "wkv7_forward", [&] {
    const auto in = inputs<scalar_t>(r, w, k, v, a, b);
    const scalar_t* from = start.const_data_ptr<scalar_t>();
    scalar_t *py = y.data_ptr<scalar_t>(), *pend = end.data_ptr<scalar_t>();
    scalar_t *pused = save ? used.data_ptr<scalar_t>() : nullptr, *pkept = save ? kept.data_ptr<scalar_t>() : nullptr;
    with_width(n.values, [&](auto width) {
      at::parallel_for(0, n.batch * n.heads, 1, [&](int64_t begin, int64_t stop) {
        for (int64_t head = begin; head < stop; ++head)
          forward_head<scalar_t, decltype(width)::value>(n, in, from, head, py, pend, pused, pkept);
      });
    });
  });
  return {y, end, used, kept};
}

// -> gradients by r, logw, k, v, a, b and the start state
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
    const Tensor& used, const Tensor& kept, const Tensor& gy, const Tensor& gend) {
  const Sizes n = sizes(r, v);
  Tensor gr = at::empty_like(r), gw = at::empty_like(r), gk = at::empty_like(r), gv = at::empty_like(v);
  Tensor ga = at::empty_like(r), gb = at::empty_like(r), gstart = at::empty_like(gend);
  AT_DISPATCH_FLOATING_TYPES(r.scalar_type(), "wkv7_backward", [&] {
    using T = scalar_t;
    const auto in = inputs<T>(r, w, k, v, a, b);
    const Gradients<T> out{gr.data_ptr<T>(), gw.data_ptr<T>(), gk.data_ptr<T>(),    gv.data_ptr<T>(),
                           ga.data_ptr<T>(), gb.data_ptr<T>(), gstart.data_ptr<T>()};
    const T *pused = used.const_data_ptr<T>(), *pkept = kept.const_data_ptr<T>();
    const T *pgy = gy.const_data_ptr<T>(), *pgend = gend.const_data_ptr<T>();
    with_width(n.keys, [&](auto width) {
      at::parallel_for(0, n.batch * n.heads, 1, [&](int64_t begin, int64_t stop) {
        for (int64_t head = begin; head < stop; ++head)
          backward_head<T, decltype(width)::value>(n, in, pused, pkept, pgy, pgend, head, out);
      });
    });
  });
  return {gr, gw, gk, gv, ga, gb, gstart};
}

}  // namespace

TORCH_LIBRARY(lra_wkv7, m) {
  m.def(
      "forward(Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, Tensor state, bool save)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, Tensor used, Tensor kept, Tensor gy,"
      " Tensor gend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lra_wkv7, CPU, m) {
  m.impl("forward", forward);
  m.impl("backward", backward);
}
