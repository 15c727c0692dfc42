// Selective scan (Mamba, Gu and Dao 2023, algorithm 2) on the CPU, forward and backward, in fp32.
//
//     dt = softplus(delta + bias)     h_t = e^{dt_t A} h_{t-1} + dt_t u_t B_t     y_t = (C_t . h_t + D u_t) silu(z_t)
//
// Shapes: batch, L length, D channels, N states; u, delta, z, y (batch, L, D); A (D, N); B, C (batch, L, N);
// D, bias (D); h (batch, D, N). All fp32 and contiguous.
//
// A lane is a channel: channels lie side by side in memory and never meet in the forward pass. A task is a strip of
// channels of one row; it goes through the length in chunks, so that what a chunk needs stays in the first cache, and
// within a chunk through the states one by one, so that the state itself stays in a register. The forward pass keeps
// h at every chunk's start only; the backward pass goes through the chunks in reverse and runs each again from there.
//
// B and C are shared by all channels: each task sums their gradients over its own, and the tasks' sums are added in
// the order of the channels. No sum depends on the number of threads.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

#include "selective_scan_vector.h"

namespace {

constexpr int64_t kStrip = 32 / kLanes;  // vectors of channels a task
constexpr int64_t kSteps = 32;           // steps a chunk

struct Problem {
  const float *u, *delta, *A, *B, *C, *D, *z, *bias;  // z may be null
  int64_t batch, length, channels, states;

  int64_t chunks() const { return (length + kSteps - 1) / kSteps; }
  int64_t strips() const { return (channels + kStrip * kLanes - 1) / (kStrip * kLanes); }
  int64_t strip_size() const { return kStrip * states; }
};

// The channels of one row that a task works on, and the steps of one of its chunks.
struct Strip {
  int64_t row, first, blocks;

  Strip(const Problem& p, int64_t task) : row(task / p.strips()), first(task % p.strips() * kStrip * kLanes) {
    blocks = std::min(kStrip, (p.channels - first + kLanes - 1) / kLanes);
  }
};

// One vector of channels: where it starts and how many of its lanes exist.
struct Block {
  int64_t channel, lanes;

  Block(const Problem& p, const Strip& strip, int64_t j) : channel(strip.first + j * kLanes) {
    lanes = std::min(kLanes, p.channels - channel);
  }
};

// (batch, D, N) in memory <-> one vector a state; `rows` points at the block's first channel.
inline void gather(const float* rows, int64_t lanes, int64_t states, Vec* out, float scale = 1) {
  for (int64_t n = 0; n < states; n++) {
    out[n] = Vec{};
    for (int64_t i = 0; i < lanes; i++) out[n][i] = scale * rows[i * states + n];
  }
}

inline void scatter(const Vec* in, int64_t lanes, int64_t states, float* rows) {
  for (int64_t n = 0; n < states; n++)
    for (int64_t i = 0; i < lanes; i++) rows[i * states + n] = in[n][i];
}

// Calls f(n, count) for n = 0, 2, .. with count 2, and 1 for a last odd state; count is a compile-time constant.
template <class F>
inline void in_pairs(int64_t states, const F& f) {
  int64_t n = 0;
  for (; n + 2 <= states; n += 2) f(n, std::integral_constant<int, 2>());
  if (n < states) f(n, std::integral_constant<int, 1>());
}

// What a chunk reads of one block of channels: `in` = dt u, the factor of B.
struct Tile {
  Vec u[kSteps], dt[kSteps], slope[kSteps], in[kSteps], z[kSteps], gate[kSteps];

  void read(const Problem& p, const Block& block, int64_t at, int64_t steps) {
    const Vec bias = load(p.bias + block.channel, block.lanes);
    for (int64_t t = 0; t < steps; t++) {
      const int64_t offset = at + t * p.channels;
      u[t] = load(p.u + offset, block.lanes);
      dt[t] = softplus(load(p.delta + offset, block.lanes) + bias, slope[t]);
      in[t] = dt[t] * u[t];
      if (p.z) {
        z[t] = load(p.z + offset, block.lanes);
        gate[t] = sigmoid(z[t]);
      }
    }
  }
};

// y += C . h over a chunk for K neighbouring states, whose h is brought from the chunk's start to its end. More than one
// state at a time shares what is loaded for each step. `a` is A log2(e).
template <int K>
inline void scan(const Tile& x, const Vec* a, Vec* h, const float* B, const float* C, int64_t states, int64_t steps,
                 Vec* y) {
  Vec now[K], rate[K];
  std::copy(h, h + K, now);
  std::copy(a, a + K, rate);
  for (int64_t t = 0; t < steps; t++) {
    Vec out = y[t];
    for (int k = 0; k < K; k++) {
      now[k] = exp2(x.dt[t] * rate[k]) * now[k] + x.in[t] * B[t * states + k];
      out += now[k] * C[t * states + k];
    }
    y[t] = out;
  }
  std::copy(now, now + K, h);
}

void forward_strip(const Problem& p, const Strip& strip, const float* start, float* y, float* end, Vec* kept) {
  std::vector<Vec> A(p.strip_size()), h(p.strip_size());
  for (int64_t j = 0; j < strip.blocks; j++) {
    const Block block(p, strip, j);
    gather(p.A + block.channel * p.states, block.lanes, p.states, &A[j * p.states], kLog2E);
    gather(start + (strip.row * p.channels + block.channel) * p.states, block.lanes, p.states, &h[j * p.states]);
  }
  Tile x;
  Vec out[kSteps];
  for (int64_t chunk = 0; chunk < p.chunks(); chunk++) {
    const int64_t t0 = strip.row * p.length + chunk * kSteps, steps = std::min(kSteps, p.length - chunk * kSteps);
    if (kept) std::copy(h.begin(), h.end(), kept + chunk * p.strip_size());
    for (int64_t j = 0; j < strip.blocks; j++) {
      const Block block(p, strip, j);
      const int64_t at = t0 * p.channels + block.channel;
      x.read(p, block, at, steps);
      const Vec skip = load(p.D + block.channel, block.lanes);
      for (int64_t t = 0; t < steps; t++) out[t] = skip * x.u[t];
      in_pairs(p.states, [&](int64_t n, auto count) {
        const int64_t i = j * p.states + n, shared = t0 * p.states + n;
        scan<count>(x, &A[i], &h[i], p.B + shared, p.C + shared, p.states, steps, out);
      });
      for (int64_t t = 0; t < steps; t++)
        store(y + at + t * p.channels, p.z ? out[t] * x.z[t] * x.gate[t] : out[t], block.lanes);
    }
  }
  for (int64_t j = 0; j < strip.blocks; j++) {
    const Block block(p, strip, j);
    scatter(&h[j * p.states], block.lanes, p.states, end + (strip.row * p.channels + block.channel) * p.states);
  }
}

// Gradients as the tasks leave them: those of A, D and bias a row, those of B and C a strip of channels.
struct Gradients {
  float *u, *delta, *z, *start, *A, *D, *bias, *B, *C;
};

// What a chunk's backward pass sums for one block of channels; g = gradient of C . h + D u.
struct Sums {
  Vec g[kSteps], y[kSteps], in[kSteps], dt[kSteps];
};

// K neighbouring states over one chunk, there and back: from h at the chunk's start and gh, the gradient of h at its end
// from what comes later, to gh at its start. Adds to the gradients of A, B and C, and to `s`. With G_t the whole
// gradient of h_t:
//     gC_t = g_t h_t   gB_t = G_t dt_t u_t   g(dt u)_t = G_t B_t   g(dt A)_t = G_t e^{dt_t A} h_{t-1}
template <int K>
inline void scan_back(const Tile& x, Sums& s, const Vec* a, const Vec* start, Vec* gh, const float* B, const float* C,
                      int64_t states, int64_t steps, Vec* gA, Vec* gB, Vec* gC) {
  Vec decay[kSteps][K], past[kSteps][K], now[K], rate[K], total[K] = {};
  std::copy(start, start + K, now);
  std::copy(a, a + K, rate);
  for (int64_t t = 0; t < steps; t++) {
    Vec out = s.y[t];
    for (int k = 0; k < K; k++) {
      decay[t][k] = exp2(x.dt[t] * rate[k]);
      past[t][k] = decay[t][k] * now[k];
      now[k] = decay[t][k] * now[k] + x.in[t] * B[t * states + k];
      out += now[k] * C[t * states + k];
      gC[k * kSteps + t] += s.g[t] * now[k];
    }
    s.y[t] = out;
  }
  std::copy(gh, gh + K, now);
  for (int64_t t = steps - 1; t >= 0; t--) {
    Vec gin = s.in[t], gdt = s.dt[t];
    for (int k = 0; k < K; k++) {
      const Vec own = s.g[t] * C[t * states + k], G = now[k] + own, exponent = G * past[t][k];
      gB[k * kSteps + t] += G * x.in[t];
      gin += G * B[t * states + k];
      gdt += exponent * rate[k];
      total[k] += exponent * x.dt[t];
      // not decay * G: the next step should wait for one multiply-add only
      now[k] = decay[t][k] * now[k] + decay[t][k] * own;
    }
    s.in[t] = gin;
    s.dt[t] = gdt;
  }
  std::copy(now, now + K, gh);
  for (int k = 0; k < K; k++) gA[k] += total[k];
}

class BackwardStrip {
 public:
  BackwardStrip(const Problem& p, const Strip& strip)
      : p(p), strip(strip), A(p.strip_size()), gA(p.strip_size()), gh(p.strip_size()), gB(kSteps * p.states),
        gC(kSteps * p.states) {}

  void run(const float* gy, const float* gend, const Vec* kept, const Gradients& to) {
    for (int64_t j = 0; j < strip.blocks; j++) {
      const Block block(p, strip, j);
      gather(p.A + block.channel * p.states, block.lanes, p.states, &A[j * p.states], kLog2E);
      gather(gend + state_at(block), block.lanes, p.states, &gh[j * p.states]);
    }
    for (int64_t chunk = p.chunks() - 1; chunk >= 0; chunk--) {
      const int64_t t0 = strip.row * p.length + chunk * kSteps, steps = std::min(kSteps, p.length - chunk * kSteps);
      std::fill(gB.begin(), gB.end(), Vec{});
      std::fill(gC.begin(), gC.end(), Vec{});
      for (int64_t j = 0; j < strip.blocks; j++)
        chunk_block(j, t0, steps, gy, kept + chunk * p.strip_size() + j * p.states, to);
      // over the lanes of the strip; rows and strips stay apart
      const int64_t at = (strip.first / (kStrip * kLanes) * p.batch * p.length + t0) * p.states;
      for (int64_t t = 0; t < steps; t++)
        for (int64_t n = 0; n < p.states; n++) {
          to.B[at + t * p.states + n] = sum(gB[n * kSteps + t]);
          to.C[at + t * p.states + n] = sum(gC[n * kSteps + t]);
        }
    }
    for (int64_t j = 0; j < strip.blocks; j++) {
      const Block block(p, strip, j);
      scatter(&gh[j * p.states], block.lanes, p.states, to.start + state_at(block));
      scatter(&gA[j * p.states], block.lanes, p.states, to.A + state_at(block));
      store(to.D + strip.row * p.channels + block.channel, gD[j], block.lanes);
      store(to.bias + strip.row * p.channels + block.channel, gbias[j], block.lanes);
    }
  }

 private:
  const Problem& p;
  const Strip& strip;
  std::vector<Vec> A, gA, gh, gB, gC;  // A log2(e); gB, gC (state, step)
  Vec gD[kStrip] = {}, gbias[kStrip] = {};
  Tile x;
  Sums s;

  int64_t state_at(const Block& block) const { return (strip.row * p.channels + block.channel) * p.states; }

  void chunk_block(int64_t j, int64_t t0, int64_t steps, const float* gy, const Vec* kept, const Gradients& to) {
    const Block block(p, strip, j);
    const int64_t at = t0 * p.channels + block.channel;
    const Vec skip = load(p.D + block.channel, block.lanes);
    x.read(p, block, at, steps);
    for (int64_t t = 0; t < steps; t++) {
      s.g[t] = load(gy + at + t * p.channels, block.lanes);
      if (p.z) s.g[t] *= x.z[t] * x.gate[t];
      s.y[t] = skip * x.u[t];
      s.in[t] = s.dt[t] = Vec{};
    }
    in_pairs(p.states, [&](int64_t n, auto count) {
      const int64_t i = j * p.states + n, shared = t0 * p.states + n;
      scan_back<count>(x, s, &A[i], kept + n, &gh[i], p.B + shared, p.C + shared, p.states, steps, &gA[i],
                       &gB[n * kSteps], &gC[n * kSteps]);
    });
    Vec sumD = {}, sum_bias = {};
    for (int64_t t = 0; t < steps; t++) {
      const int64_t offset = at + t * p.channels;
      const Vec gdelta = (s.dt[t] * kLn2 + s.in[t] * x.u[t]) * x.slope[t];
      store(to.u + offset, s.in[t] * x.dt[t] + s.g[t] * skip, block.lanes);
      store(to.delta + offset, gdelta, block.lanes);
      sum_bias += gdelta;
      sumD += s.g[t] * x.u[t];
      if (p.z) {
        const Vec slope = x.gate[t] * (1.f + x.z[t] * (1.f - x.gate[t]));
        store(to.z + offset, load(gy + offset, block.lanes) * s.y[t] * slope, block.lanes);
      }
    }
    gD[j] += sumD;
    gbias[j] += sum_bias;
  }
};

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

Problem problem(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                const Tensor& D, const OptionalTensor& z, const Tensor& bias) {
  const float* gate = z ? z->const_data_ptr<float>() : nullptr;
  for (const Tensor& x : {u, delta, A, B, C, D, bias}) TORCH_CHECK(x.is_contiguous(), "inputs must be contiguous");
  TORCH_CHECK(!z || z->is_contiguous(), "z must be contiguous");
  return {u.const_data_ptr<float>(), delta.const_data_ptr<float>(), A.const_data_ptr<float>(),
          B.const_data_ptr<float>(), C.const_data_ptr<float>(), D.const_data_ptr<float>(), gate,
          bias.const_data_ptr<float>(), u.size(0), u.size(1), u.size(2), A.size(1)};
}

// y, h at the end, and with `keep` h at every chunk's start for `backward`, in an order of this file's own.
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                                           const Tensor& C, const Tensor& D, const OptionalTensor& z,
                                           const Tensor& bias, const Tensor& start, bool keep) {
  const Problem p = problem(u, delta, A, B, C, D, z, bias);
  const int64_t tasks = p.batch * p.strips(), kept_size = p.chunks() * p.strip_size();
  Tensor y = at::empty_like(u), end = at::empty_like(start);
  Tensor kept = at::empty({keep ? tasks : 0, kept_size, kLanes}, u.options());
  TORCH_CHECK(reinterpret_cast<uintptr_t>(kept.data_ptr()) % alignof(Vec) == 0);
  Vec* kept_at = keep ? reinterpret_cast<Vec*>(kept.mutable_data_ptr<float>()) : nullptr;
  const float* start_at = start.const_data_ptr<float>();
  float *y_at = y.mutable_data_ptr<float>(), *end_at = end.mutable_data_ptr<float>();
  at::parallel_for(0, tasks, 1, [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; task++)
      forward_strip(p, Strip(p, task), start_at, y_at, end_at, keep ? kept_at + task * kept_size : nullptr);
  });
  return {y, end, kept};
}

// Gradients of u, delta, A, B, C, D, z (empty without z), bias and start.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C, const Tensor& D,
    const OptionalTensor& z, const Tensor& bias, const Tensor& kept, const Tensor& gy, const Tensor& gend) {
  const Problem p = problem(u, delta, A, B, C, D, z, bias);
  const int64_t tasks = p.batch * p.strips(), kept_size = p.chunks() * p.strip_size();
  const auto options = u.options();
  Tensor gu = at::empty_like(u), gdelta = at::empty_like(u), gz = z ? at::empty_like(u) : at::empty({0}, options);
  Tensor gstart = at::empty_like(gend), gA = at::empty_like(gend);
  Tensor gD = at::empty({p.batch, p.channels}, options), gbias = at::empty_like(gD);
  Tensor gB = at::empty({p.strips(), p.batch, p.length, p.states}, options), gC = at::empty_like(gB);
  const Gradients to = {gu.mutable_data_ptr<float>(), gdelta.mutable_data_ptr<float>(), gz.mutable_data_ptr<float>(),
                        gstart.mutable_data_ptr<float>(), gA.mutable_data_ptr<float>(), gD.mutable_data_ptr<float>(),
                        gbias.mutable_data_ptr<float>(), gB.mutable_data_ptr<float>(), gC.mutable_data_ptr<float>()};
  const Vec* kept_at = reinterpret_cast<const Vec*>(kept.const_data_ptr<float>());
  const float *gy_at = gy.const_data_ptr<float>(), *gend_at = gend.const_data_ptr<float>();
  at::parallel_for(0, tasks, 1, [&](int64_t from, int64_t until) {
    for (int64_t task = from; task < until; task++) {
      const Strip strip(p, task);
      BackwardStrip(p, strip).run(gy_at, gend_at, kept_at + task * kept_size, to);
    }
  });
  return {gu, gdelta, gA.sum(0), gB.sum(0), gC.sum(0), gD.sum(0), gz, gbias.sum(0), gstart};
}

}  // namespace

TORCH_LIBRARY(lra_selective_scan, m) {
  m.def(
      "forward(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor D, Tensor? z, Tensor bias, Tensor start, "
      "bool keep) -> (Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor D, Tensor? z, Tensor bias, Tensor kept, "
      "Tensor gy, Tensor gend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lra_selective_scan, CPU, m) {
  m.impl("forward", &forward);
  m.impl("backward", &backward);
}
