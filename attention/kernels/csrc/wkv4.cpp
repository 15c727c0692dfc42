// WKV-4 on the CPU: a forward scan and a backward pass of one sweep each, vectorised over channels.
//
//   y_t = A_t / D_t,  A_t = sum_{i<t} e^{(t-1-i)w + k_i} v_i + e^{u + k_t} v_t,  D_t the same without v
//
// (Peng et al. 2023, eq. 14). With r = g / D, q = r y, R_i = sum_{t>i} e^{(t-1-i)w} r_t, Q_i likewise of q:
//
//   gv_i = e^{k_i} (R_i + e^u r_i)               gu = e^u sum_i e^{k_i} (r_i v_i - q_i)
//   gk_i = v_i gv_i - e^{k_i} (Q_i + e^u q_i)    gw = sum_i e^{k_i} (v_i dR_i/dw - dQ_i/dw)
//
// Bidirectional, A_t and D_t also sum over i > t, with e^{(i-t-1)w + k_i} (Bi-WKV: Duan et al. 2024, eq. 3), and R_i
// and Q_i over t < i: the gradients are linear in them, so that a pass in each direction adds its part.
//
// Sums are kept as x 2^exponent: changing the exponent is exact, so that no error piles up over a long sequence.
// Rows go in tiles. Where the keys of a tile and the sums before it lie close enough (nearly always), one exponent a
// channel serves the whole tile, and a row costs one exponential and no logarithm in either pass; otherwise every row
// of that tile takes exponents of its own. Either way all exponentials are of bounded arguments: nothing overflows.
//
// A masked row adds nothing: it only lengthens the gap by which the sums still have to decay. Its k, v and gradient
// are never read. Results of a channel do not depend on the number of threads.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "wkv4_backward.h"
#include "wkv4_both.h"
#include "wkv4_forward.h"

namespace {

constexpr int kTile = 16;             // rows that share an exponent
constexpr int kGroup = 4;             // most channel blocks a thread takes through a tile together
constexpr int64_t kGrain = 1 << 15;   // elements below which a second thread does not pay
constexpr int64_t kPast = 1 << 20;    // elements a tensor from which results leave the caches before they are read

using Optional = std::optional<at::Tensor>;

// Tensors that both passes take, fp32. k, v: (B, L, C); w, u: (C); mask: (B, L); state: three (B, C).
struct Inputs {
  const at::Tensor &w, &u, &k, &v;
  const Optional &mask, &num, &den, &max;
  bool reverse;

  int64_t batch() const { return k.size(0); }
  int64_t length() const { return k.size(1); }
  int64_t width() const { return k.size(2); }
  bool past_caches() const { return k.numel() >= kPast; }
  int64_t tiles() const { return (length() + kTile - 1) / kTile; }

  Rows<const bool> mask_rows(int64_t b) const {
    if (!mask) return {nullptr, 0};
    const bool* base = mask->data_ptr<bool>() + b * length();
    return reverse ? Rows<const bool>{base + length() - 1, -1} : Rows<const bool>{base, 1};
  }
};

// How tiles were computed: exponents (B, tiles, C) int32, even (B, tiles, blocks) uint8.
struct Tiles {
  const at::Tensor &exponents, &even;

  Tile operator()(int64_t b, int64_t tile, int64_t block, int lanes) const {
    if (!even.numel()) return {nullptr, nullptr};
    return {exponents.data_ptr<int>() + (b * exponents.size(1) + tile) * exponents.size(2) + block * lanes,
            even.data_ptr<uint8_t>() + (b * even.size(1) + tile) * even.size(2) + block};
  }
};

int lanes_for(int64_t width) { return width % 64 == 0 || width > 128 ? 64 : 32; }

// Calls run(batch, first block, last block) in parallel. Blocks of a group go through a tile one after the other, so
// that memory is read in whole rows; a group is as large as an even load of the threads allows.
template <typename Run>
void over_groups(const Inputs& in, int lanes, const Run& run) {
  const int64_t blocks = (in.width() + lanes - 1) / lanes, threads = at::get_num_threads();
  int64_t best = 1, best_load = std::numeric_limits<int64_t>::max();
  for (int64_t size = 1; size <= std::min<int64_t>(blocks, kGroup); size++) {
    const int64_t tasks = in.batch() * ((blocks + size - 1) / size);
    const int64_t load = (tasks + threads - 1) / threads * size;
    if (load <= best_load) best = size, best_load = load;
  }
  const int64_t groups = (blocks + best - 1) / best;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, in.length() * lanes * best));
  at::parallel_for(0, in.batch() * groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      const int64_t first = task % groups * best;
      run(task / groups, first, std::min(first + best, blocks));
    }
    finish_writes();
  });
}

template <int LANES>
Channels<LANES> channels_at(const Inputs& in, int64_t channel) {
  const int count = static_cast<int>(std::min<int64_t>(LANES, in.width() - channel));
  return {in.w.data_ptr<float>() + channel, in.u.data_ptr<float>() + channel, count};
}

template <int LANES>
void run_forward(const Inputs& in, const at::Tensor& y, const at::Tensor& saved, const Tiles& tiles,
                 const at::Tensor& num, const at::Tensor& den, const at::Tensor& max) {
  over_groups(in, LANES, [&](int64_t b, int64_t first, int64_t last) {
    std::vector<Forward<LANES>> blocks;
    for (int64_t block = first; block < last; block++) {
      const int64_t channel = block * LANES, at = b * in.width() + channel;
      blocks.push_back({channels_at<LANES>(in, channel), rows<const float>(in.k, b, channel, in.reverse),
                        rows<const float>(in.v, b, channel, in.reverse), rows<float>(y, b, channel, in.reverse),
                        saved.numel() ? rows<float>(saved, b, channel, in.reverse) : Rows<float>{nullptr, 0},
                        in.mask_rows(b)});
      if (in.past_caches()) blocks.back().write_past_caches();
      if (in.num) {
        blocks.back().start(in.num->data_ptr<float>() + at, in.den->data_ptr<float>() + at,
                            in.max->data_ptr<float>() + at);
      }
    }
    for (int64_t tile = 0; tile < in.tiles(); tile++) {
      const int64_t begin = tile * kTile, end = std::min(begin + kTile, in.length());
      for (int64_t block = first; block < last; block++) {
        blocks[block - first].tile(begin, end, tiles(b, tile, block, LANES));
      }
    }
    for (int64_t block = first; block < last; block++) {
      const int64_t at = b * in.width() + block * LANES;
      blocks[block - first].finish(num.data_ptr<float>() + at, den.data_ptr<float>() + at,
                                   max.data_ptr<float>() + at);
    }
  });
}

// What the backward pass reads and writes beyond its inputs.
struct Gradients {
  const at::Tensor &y, &saved, &end_max, &grad_y;
  const Optional &grad_end_num, &grad_end_den;  // both or none
  const at::Tensor &w, &u, &k, &v, &num, &den;  // w, u: (B, C) in fp64, to be summed over B
};

template <int LANES>
void run_backward(const Inputs& in, const Tiles& tiles, const Gradients& grad) {
  over_groups(in, LANES, [&](int64_t b, int64_t first, int64_t last) {
    std::vector<Backward<LANES>> blocks;
    for (int64_t block = first; block < last; block++) {
      const int64_t channel = block * LANES, at = b * in.width() + channel;
      const auto read = [&](const at::Tensor& x) { return rows<const float>(x, b, channel, in.reverse); };
      blocks.push_back({channels_at<LANES>(in, channel), read(in.k), read(in.v), read(grad.y), read(grad.grad_y),
                        rows<const float>(grad.saved, b, channel, in.reverse), in.mask_rows(b),
                        rows<float>(grad.k, b, channel, in.reverse), rows<float>(grad.v, b, channel, in.reverse)});
      if (in.past_caches()) blocks.back().write_past_caches();
      if (grad.grad_end_num) {
        blocks.back().start(grad.grad_end_num->data_ptr<float>() + at, grad.grad_end_den->data_ptr<float>() + at,
                            grad.end_max.data_ptr<float>() + at);
      }
    }
    for (int64_t tile = in.tiles() - 1; tile >= 0; tile--) {
      const int64_t begin = tile * kTile, end = std::min(begin + kTile, in.length());
      for (int64_t block = first; block < last; block++) {
        blocks[block - first].tile(begin, end, tiles(b, tile, block, LANES));
      }
    }
    for (int64_t block = first; block < last; block++) {
      const int64_t at = b * in.width() + block * LANES;
      Backward<LANES>& done = blocks[block - first];
      if (in.num) {
        done.finish(in.num->data_ptr<float>() + at, in.den->data_ptr<float>() + at, in.max->data_ptr<float>() + at,
                    grad.num.data_ptr<float>() + at, grad.den.data_ptr<float>() + at);
      }
      std::copy_n(done.grad_w, done.channels.count, grad.w.data_ptr<double>() + at);
      std::copy_n(done.grad_u, done.channels.count, grad.u.data_ptr<double>() + at);
    }
  });
}

// Bidirectional: two sweeps forward, and two backward passes of which the second sees the rows in reverse.
template <int LANES>
void run_both(const Inputs& in, const at::Tensor& y, const at::Tensor& saved, const Tiles& tiles) {
  over_groups(in, LANES, [&](int64_t b, int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block++) {
      const int64_t channel = block * LANES;
      Both<LANES, kTile> both{channels_at<LANES>(in, channel),
                              rows<const float>(in.k, b, channel, false),
                              rows<const float>(in.v, b, channel, false),
                              rows<float>(y, b, channel, false),
                              saved.numel() ? rows<float>(saved, b, channel, false) : Rows<float>{nullptr, 0},
                              in.mask_rows(b),
                              std::vector<Sums<LANES, 2>>(in.tiles())};
      for (int64_t tile = in.tiles() - 1; tile >= 0; tile--) {
        both.note(tile * kTile, std::min((tile + 1) * kTile, in.length()));
      }
      for (int64_t tile = 0; tile < in.tiles(); tile++) {
        both.tile(tile * kTile, std::min((tile + 1) * kTile, in.length()), tiles(b, tile, block, LANES));
      }
    }
  });
}

template <int LANES>
void run_both_backward(const Inputs& in, const Tiles& tiles, const Gradients& grad) {
  // the same rows must make up a tile in either direction: counted from the end, the first ones may not exist
  const int64_t slots = in.tiles() * kTile, absent = slots - in.length();
  over_groups(in, LANES, [&](int64_t b, int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block++) {
      const int64_t channel = block * LANES, at = b * in.width() + channel;
      const auto read = [&](const at::Tensor& x) { return rows<const float>(x, b, channel, false); };
      const auto write = [&](const at::Tensor& x) { return rows<float>(x, b, channel, false); };
      Backward<LANES> later{channels_at<LANES>(in, channel), read(in.k), read(in.v), read(grad.y),
                                      read(grad.grad_y), rows<const float>(grad.saved, b, channel, false),
                                      in.mask_rows(b), write(grad.k), write(grad.v)};
      for (int64_t tile = in.tiles() - 1; tile >= 0; tile--) {
        later.tile(tile * kTile, std::min((tile + 1) * kTile, in.length()), tiles(b, tile, block, LANES));
      }
      const auto turned = [&](auto from) { return from.reversed(slots - 1); };
      Backward<LANES> earlier{later.channels, turned(later.k), turned(later.v), turned(later.y),
                                        turned(later.grad_y), turned(later.saved), turned(later.mask),
                                        turned(later.grad_k), turned(later.grad_v), true};
      for (int64_t tile = in.tiles() - 1; tile >= 0; tile--) {
        earlier.tile(std::max(tile * kTile, absent), (tile + 1) * kTile,
                     tiles(b, in.tiles() - 1 - tile, block, LANES));
      }
      for (int c = 0; c < later.channels.count; c++) {
        grad.w.data_ptr<double>()[at + c] = later.grad_w[c] + earlier.grad_w[c];
        grad.u.data_ptr<double>()[at + c] = later.grad_u[c];
      }
    }
  });
}

// Calls run with as many lanes as suit the width of k.
template <typename Run>
void for_lanes(const Inputs& in, const Run& run) {
  if (lanes_for(in.width()) == 64) {
    run(std::integral_constant<int, 64>());
  } else {
    run(std::integral_constant<int, 32>());
  }
}

// y, and what the backward pass takes, which is empty where no gradient is wanted.
struct Outputs {
  at::Tensor y, saved, exponents, even;
};

Outputs outputs(const Inputs& in, bool save) {
  const int64_t lanes = lanes_for(in.width()), blocks = (in.width() + lanes - 1) / lanes;
  const int64_t tiles = save ? in.tiles() : 0;
  const auto options = in.k.options();
  return {at::empty(in.k.sizes(), options), save ? at::empty(in.k.sizes(), options) : at::empty({0}, options),
          at::empty({in.batch(), tiles, in.width()}, options.dtype(at::kInt)),
          at::empty({in.batch(), tiles, blocks}, options.dtype(at::kByte))};
}

using Forwards = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Forwards forward(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
                 const Optional& mask, const Optional& num, const Optional& den, const Optional& max, bool reverse,
                 bool save) {
  const Inputs in{w, u, k, v, mask, num, den, max, reverse};
  const Outputs out = outputs(in, save);
  const at::Tensor end_num = at::empty({in.batch(), in.width()}, k.options()), end_den = at::empty_like(end_num),
                   end_max = at::empty_like(end_num);
  for_lanes(in, [&](auto lanes) {
    run_forward<lanes()>(in, out.y, out.saved, {out.exponents, out.even}, end_num, end_den, end_max);
  });
  return {out.y, end_num, end_den, end_max, out.saved, out.exponents, out.even};
}

using Backwards = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Backwards backward(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
                   const Optional& mask, const Optional& num, const Optional& den, const Optional& max, bool reverse,
                   const at::Tensor& y, const at::Tensor& end_max, const at::Tensor& saved,
                   const at::Tensor& exponents, const at::Tensor& even, const at::Tensor& grad_y,
                   const Optional& grad_end_num, const Optional& grad_end_den) {
  const Inputs in{w, u, k, v, mask, num, den, max, reverse};
  const auto options = k.options();
  const at::Tensor grad_k = at::empty(k.sizes(), options), grad_v = at::empty_like(grad_k);
  const at::Tensor grad_w = at::empty({in.batch(), in.width()}, options.dtype(at::kDouble)),
                   grad_u = at::empty_like(grad_w);
  const at::Tensor grad_num = at::zeros({in.batch(), in.width()}, options), grad_den = at::zeros_like(grad_num);
  const Gradients grad{y,      saved,  end_max, grad_y, grad_end_num, grad_end_den,
                       grad_w, grad_u, grad_k,  grad_v, grad_num,     grad_den};
  for_lanes(in, [&](auto lanes) {
    run_backward<lanes()>(in, {exponents, even}, grad);
  });
  return {grad_w, grad_u, grad_k, grad_v, grad_num, grad_den};
}

using BothForwards = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

BothForwards both_forward(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
                          const Optional& mask, bool save) {
  const Optional none;
  const Inputs in{w, u, k, v, mask, none, none, none, false};
  const Outputs out = outputs(in, save);
  for_lanes(in, [&](auto lanes) {
    run_both<lanes()>(in, out.y, out.saved, {out.exponents, out.even});
  });
  return {out.y, out.saved, out.exponents, out.even};
}

BothForwards both_backward(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k, const at::Tensor& v,
                           const Optional& mask, const at::Tensor& y, const at::Tensor& saved,
                           const at::Tensor& exponents, const at::Tensor& even, const at::Tensor& grad_y) {
  const Optional none;
  const at::Tensor no_state;
  const Inputs in{w, u, k, v, mask, none, none, none, false};
  const at::Tensor grad_k = at::empty(k.sizes(), k.options()), grad_v = at::empty_like(grad_k);
  const at::Tensor grad_w = at::empty({in.batch(), in.width()}, k.options().dtype(at::kDouble)),
                   grad_u = at::empty_like(grad_w);
  const Gradients grad{y, saved, no_state, grad_y, none, none, grad_w, grad_u, grad_k, grad_v, no_state, no_state};
  for_lanes(in, [&](auto lanes) {
    run_both_backward<lanes()>(in, {exponents, even}, grad);
  });
  return {grad_w, grad_u, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY(lra_wkv4, m) {
  m.def(
      "forward(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? mask, Tensor? num, Tensor? den, Tensor? max, "
      "bool reverse, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? mask, Tensor? num, Tensor? den, Tensor? max, "
      "bool reverse, Tensor y, Tensor end_max, Tensor saved, Tensor exponents, Tensor even, Tensor grad_y, "
      "Tensor? grad_end_num, Tensor? grad_end_den) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "both_forward(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? mask, bool save) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "both_backward(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? mask, Tensor y, Tensor saved, Tensor exponents, "
      "Tensor even, Tensor grad_y) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lra_wkv4, CPU, m) {
  m.impl("forward", &forward);
  m.impl("backward", &backward);
  m.impl("both_forward", &both_forward);
  m.impl("both_backward", &both_backward);
}
