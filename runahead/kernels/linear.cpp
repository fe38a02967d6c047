// Products of many rows with weights of linear layers, in float32: torch.ops.runahead.linear, and gated_mlp of three.
//
// Legend: K input features, N output features, I inner features of an MLP; a panel is TOKENS rows, transposed: (K, TOKENS).
//
// Lanes of a vector are rows, so a weight's numbers are read as they lie, each for a whole panel: no layout of weights has
// to be made or kept. Each output is the sum in order of k in one lane, whatever is computed beside it: its bits depend on
// nothing but its row and its weights. The sums of a panel lie as a panel does, so what becomes of gate and up is given to
// down as it is, of so few rows at a time that it stays in a core's cache.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "vectors.h"

namespace {

constexpr int TOKENS = 2 * LANES;           // of a panel: two vectors
constexpr int TILE = LANES == 16 ? 12 : 6;  // features whose sums lie in registers: 24 vectors of 32, or 12 of 16
constexpr int LINE = 16;                    // numbers that are fetched at a time
constexpr int64_t DEPTH = 640;              // input features at a time: a tile's weights are in the nearest cache,
constexpr int64_t WIDTH = 20 * TILE;        // and of so many features the sums, with the numbers,
constexpr int64_t PANELS = 4;               // of so many panels in a core's own; fewer read the weights more often

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t filled_up(int64_t features) { return ceil_div(features, LINE) * LINE; }

// Numbers of the memory in which a thread computes `rows` rows of a product, or of a gated MLP: rows as they are given,
// sums, and what is between.
int64_t of_linear(int64_t rows, int64_t K) { return rows * (filled_up(K) + WIDTH); }
int64_t of_gated(int64_t rows, int64_t K, int64_t I) { return rows * (filled_up(K) + 2 * WIDTH + filled_up(I)); }

struct Weight {
  const float *data, *bias;  // (N, K); (N) or null
  int64_t N, K, stride;
};

// sums (TILE, TOKENS) = those before + weights (TILE, count) at a stride times numbers (count, TOKENS); `count` is a
// multiple of LINE. Where it FETCHES, as many weights are fetched from `ahead` on.
template <bool FETCHES>
void add_tile(const float* w, int64_t stride, const float* x, int64_t count, const float* ahead, const float* before,
              float* sums) {
  Vec found[TILE][2];
  for (int r = 0; r < TILE; ++r)
    for (int j = 0; j < 2; ++j) found[r][j] = load(before + r * TOKENS + j * LANES);
  for (int64_t k = 0; k < count; k += LINE) {
    if constexpr (FETCHES)
      for (int r = 0; r < TILE; ++r) __builtin_prefetch(ahead + r * stride + k);
#pragma GCC unroll 2
    for (int i = 0; i < LINE; ++i) {
      const Vec first = load(x + (k + i) * TOKENS), second = load(x + (k + i) * TOKENS + LANES);
#pragma GCC unroll 12
      for (int r = 0; r < TILE; ++r) {
        const Vec weight = all(w[r * stride + k + i]);
        found[r][0] += weight * first;
        found[r][1] += weight * second;
      }
    }
  }
  for (int r = 0; r < TILE; ++r)
    for (int j = 0; j < 2; ++j) store(sums + r * TOKENS + j * LANES, found[r][j]);
}

// Sums (panels, WIDTH, TOKENS) of `count` features from a first one on, for panels (panels, filled up K, TOKENS).
void multiply(const float* x, int64_t panels, const Weight& w, int64_t first, int64_t count, float* sums) {
  const int64_t K = filled_up(w.K), step = filled_up(ceil_div(K, ceil_div(K, DEPTH)));
  static constexpr float none[TILE * TOKENS] = {};
  for (int64_t k = 0; k < K; k += step) {
    const int64_t size = std::min(step, K - k);
    for (int64_t i = 0; i < count; i += TILE) {
      const float* tile = w.data + (first + i) * w.stride + k;
      int64_t stride = w.stride;
      alignas(64) float copy[TILE * DEPTH];
      if (count - i < TILE || k + size > w.K) {  // with zeros for what is not there
        std::fill_n(copy, TILE * DEPTH, 0.f);
        for (int r = 0; r < std::min<int64_t>(TILE, count - i); ++r)
          std::copy_n(tile + r * stride, std::min(size, w.K - k), copy + r * DEPTH);
        tile = copy, stride = DEPTH;
      }
      const float* next = count - i < 2 * TILE ? tile : tile + TILE * stride;
      for (int64_t p = 0; p < panels; ++p) {
        float* to = sums + (p * WIDTH + i) * TOKENS;
        (p ? add_tile<false> : add_tile<true>)(tile, stride, x + (p * K + k) * TOKENS, size, next, k ? to : none, to);
      }
    }
  }
}

// Rows (rows, columns) at a stride as a panel (filled up columns, TOKENS), with zeros for what is not there.
void pack(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
  Vec x[LANES];
  for (int first = 0; first < TOKENS; first += LANES) {
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
      for (int i = 0; i < LANES; ++i) x[i] = first + i < rows ? load(from + (first + i) * stride + c) : Vec{};
      transpose(x);
      for (int i = 0; i < LANES; ++i) store(to + (c + i) * TOKENS + first, x[i]);
    }
    for (; c < columns; ++c)
      for (int i = first; i < first + LANES; ++i) to[c * TOKENS + i] = i < rows ? from[i * stride + c] : 0.f;
  }
  std::fill_n(to + columns * TOKENS, (filled_up(columns) - columns) * TOKENS, 0.f);
}

// The other way: a panel (columns, TOKENS), plus a bias (columns) unless it is null, as rows.
void unpack(const float* from, int64_t rows, int64_t columns, const float* bias, float* to, int64_t stride) {
  Vec x[LANES];
  for (int first = 0; first < std::min<int64_t>(rows, TOKENS); first += LANES) {
    const int64_t there = std::min<int64_t>(LANES, rows - first);
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
      for (int i = 0; i < LANES; ++i) x[i] = load(from + (c + i) * TOKENS + first);
      transpose(x);
      const Vec added = bias ? load(bias + c) : Vec{};
      for (int i = 0; i < there; ++i) store(to + (first + i) * stride + c, bias ? x[i] + added : x[i]);
    }
    for (; c < columns; ++c)
      for (int i = first; i < first + there; ++i) to[i * stride + c] = from[c * TOKENS + i] + (bias ? bias[c] : 0.f);
  }
}

Weight weight_of(const at::Tensor& weight, const std::optional<at::Tensor>& bias, const char* name) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat && weight.size(1) > 0 && weight.stride(1) == 1,
              name, " has to be a matrix of float32 with columns, whose rows' numbers lie beside each other");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->scalar_type() == at::kFloat &&
                        bias->is_contiguous()),
              "a bias of ", name, " that does not belong to it");
  return {weight.const_data_ptr<float>(), bias ? bias->const_data_ptr<float>() : nullptr, weight.size(0), weight.size(1),
          weight.stride(0)};
}

// How rows and features are shared out: blocks of rows, where there are too few for all threads each in parts.
struct Split {
  int64_t rows, panels, blocks, parts;

  explicit Split(int64_t rows) : rows(rows), panels(ceil_div(rows, TOKENS)) {
    const int64_t threads = at::get_num_threads();
    blocks = std::min(panels, ceil_div(ceil_div(panels, PANELS), threads) * threads);
    parts = panels < threads ? ceil_div(threads, panels) : 1;
  }
  int64_t row(int64_t block) const { return std::min(rows, panels * block / blocks * TOKENS); }  // the first
  int64_t most_panels() const { return ceil_div(panels, blocks); }

  // Call work(block, part) for all.
  template <typename Part>
  void share(const Part& work) const {
    share_out(blocks * parts, [&](int64_t i) { work(i / parts, i % parts); });
  }
};

// The first of the features of a part.
int64_t begin(int64_t features, int64_t part, int64_t parts) { return ceil_div(features, TILE) * part / parts * TILE; }

void pack_block(const float* x, int64_t rows, int64_t K, float* to) {
  for (int64_t row = 0; row < rows; row += TOKENS) pack(x + row * K, K, rows - row, K, to + row * filled_up(K));
}

// Features first .. last - 1 of rows, given as panels; `sums` is memory for (panels, WIDTH, TOKENS).
void write_features(const float* x, int64_t rows, const Weight& w, int64_t first, int64_t last, float* out, float* sums) {
  const int64_t panels = ceil_div(rows, TOKENS);
  for (int64_t n = first; n < std::min(last, w.N); n += WIDTH) {
    const int64_t count = std::min({WIDTH, last - n, w.N - n});
    multiply(x, panels, w, n, count, sums);
    for (int64_t p = 0; p < panels; ++p)
      unpack(sums + p * WIDTH * TOKENS, rows - p * TOKENS, count, w.bias ? w.bias + n : nullptr, out + p * TOKENS * w.N + n,
             w.N);
  }
}

using Activation = Vec (*)(Vec);
inline Vec silu(Vec x) { return x * sigmoid(x); }
inline Vec relu(Vec x) { return x < 0.f ? Vec{} : x; }

// Features first .. last - 1 of act(gate) * up, as panels (panels, filled up I, TOKENS). `sums` is memory for twice as many
// panels (WIDTH, TOKENS).
template <Activation ACT>
void write_inner(const float* x, int64_t panels, const Weight& gate, const Weight& up, int64_t first, int64_t last,
                 float* inner, float* sums) {
  const int64_t I = filled_up(gate.N);
  float* of_up = sums + panels * WIDTH * TOKENS;
  for (int64_t n = first; n < std::min(last, gate.N); n += WIDTH) {
    const int64_t count = std::min({WIDTH, last - n, gate.N - n});
    multiply(x, panels, gate, n, count, sums);
    multiply(x, panels, up, n, count, of_up);
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t i = 0; i < count; ++i) {
        const float gate_bias = gate.bias ? gate.bias[n + i] : 0.f, up_bias = up.bias ? up.bias[n + i] : 0.f;
        for (int j = 0; j < TOKENS; j += LANES) {
          const int64_t at = (p * WIDTH + i) * TOKENS + j;
          store(inner + (p * I + n + i) * TOKENS + j, ACT(load(sums + at) + gate_bias) * (load(of_up + at) + up_bias));
        }
      }
  }
}

at::Tensor rows_of(const at::Tensor& x, int64_t K, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() > 0 && x.size(-1) == K, name, " takes float32 numbers (..., ", K,
              "), not ", x.sizes());
  return x.contiguous();
}

at::Tensor outputs(const at::Tensor& x, int64_t N) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = N;
  return at::empty(sizes, x.options());
}

at::Tensor linear(const at::Tensor& given, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const Weight w = weight_of(weight, bias, "linear");
  const at::Tensor rows = rows_of(given, w.K, "linear"), out = outputs(rows, w.N);
  if (out.numel() == 0) return out;
  const Split split(out.numel() / w.N);
  const float* x = rows.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  split.share([&](int64_t block, int64_t part) {
    const int64_t row = split.row(block), count = split.row(block + 1) - row, room = split.most_panels() * TOKENS;
    float *panels = scratch(of_linear(room, w.K)), *sums = panels + room * filled_up(w.K);
    pack_block(x + row * w.K, count, w.K, panels);
    write_features(panels, count, w, begin(w.N, part, split.parts), begin(w.N, part + 1, split.parts), to + row * w.N, sums);
  });
  return out;
}

template <Activation ACT>
void gated(const float* x, const Split& split, const Weight& gate, const Weight& up, const Weight& down, float* out) {
  const int64_t K = filled_up(gate.K), I = filled_up(gate.N), N = down.N, room = split.most_panels() * TOKENS;
  const auto first = [&](int64_t block, int64_t part, float* memory, float* inner) {
    const int64_t row = split.row(block), count = split.row(block + 1) - row;
    pack_block(x + row * gate.K, count, gate.K, memory);
    write_inner<ACT>(memory, ceil_div(count, TOKENS), gate, up, begin(gate.N, part, split.parts),
                     begin(gate.N, part + 1, split.parts), inner, memory + room * K);
    if (part == 0)
      for (int64_t p = 0; p * TOKENS < count; ++p)
        std::fill_n(inner + (p * I + gate.N) * TOKENS, (I - gate.N) * TOKENS, 0.f);
  };
  const auto second = [&](int64_t block, int64_t part, float* memory, const float* inner) {
    const int64_t row = split.row(block), count = split.row(block + 1) - row;
    write_features(inner, count, down, begin(N, part, split.parts), begin(N, part + 1, split.parts), out + row * N, memory);
  };
  if (split.parts == 1) {
    split.share([&](int64_t block, int64_t part) {
      float *memory = scratch(of_gated(room, K, I)), *inner = memory + of_gated(room, K, 0);
      first(block, part, memory, inner);
      second(block, part, memory, inner);
    });
    return;
  }
  std::vector<float> inner(split.panels * TOKENS * I);  // of few rows
  const auto of = [&](int64_t block) { return inner.data() + split.row(block) * I; };
  split.share([&](int64_t block, int64_t part) { first(block, part, scratch(of_gated(room, K, 0)), of(block)); });
  split.share([&](int64_t block, int64_t part) { second(block, part, scratch(room * WIDTH), of(block)); });
}

// down(act(gate(x)) * up(x)).
at::Tensor gated_mlp(const at::Tensor& given, const at::Tensor& gate, const std::optional<at::Tensor>& gate_bias,
                     const at::Tensor& up, const std::optional<at::Tensor>& up_bias, const at::Tensor& down,
                     const std::optional<at::Tensor>& down_bias, std::string_view activation) {
  const Weight g = weight_of(gate, gate_bias, "gate"), u = weight_of(up, up_bias, "up"), d = weight_of(down, down_bias, "down");
  TORCH_CHECK(g.K == u.K && g.N == u.N && g.N == d.K, "weights of a gated MLP do not belong together: ", gate.sizes(),
              ", ", up.sizes(), ", ", down.sizes());
  const at::Tensor rows = rows_of(given, g.K, "gated_mlp"), out = outputs(rows, d.N);
  if (out.numel() == 0) return out;
  const float* x = rows.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const Split split(out.numel() / d.N);
  if (activation == "swish") gated<silu>(x, split, g, u, d, to);
  else if (activation == "gelu_tanh") gated<gelu_tanh>(x, split, g, u, d, to);
  else if (activation == "relu") gated<relu>(x, split, g, u, d, to);
  else TORCH_CHECK(false, "unknown activation ", activation);
  return out;
}

// Most bytes of memory that each thread keeps, for products of K input features or, unless I is 0, for gated MLPs.
int64_t kept_bytes(int64_t K, int64_t I) {
  const int64_t rows = PANELS * TOKENS;
  return sizeof(float) * (I ? of_gated(rows, K, I) : of_linear(rows, K));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(runahead, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def(
      "gated_mlp(Tensor x, Tensor gate, Tensor? gate_bias, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, "
      "str activation) -> Tensor");
  library.def("kept_bytes(int inputs, int inner) -> int", kept_bytes);
}

TORCH_LIBRARY_IMPL(runahead, CPU, library) {
  library.impl("linear", linear);
  library.impl("gated_mlp", gated_mlp);
}
