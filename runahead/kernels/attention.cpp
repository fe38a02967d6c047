// Attention on a CPU in float32, of float32 or bfloat16 tensors, as torch.ops.runahead.attend.
//
// Legend: B batch, N query heads, K kv heads, G = N / K heads of a group, C queries, S keys, H head dim (key), V head dim
// (value). A row is a query of one head of a group; the rows of a KV head are in the order (C, G), so that few of them
// see different keys. Vectors hold a number of several rows (tiles), or several numbers of a row (few rows).
//
// The result for a row depends on its query, on the keys that it sees, and on whether these are read for few rows: not on
// the number of threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"
#include "vectors.h"

namespace {

constexpr int MOST_VECS = LANES / 4;  // of 32 registers, or 16, the accumulators of a tile take 24, or 12
constexpr int TILE = 6;         // keys, or numbers of a value, that are multiplied by the vectors of the rows at a time
constexpr int MOST_ROWS = MOST_VECS * LANES;  // of a tile
constexpr int KEY_BLOCK = 128;  // keys of a tile: its scores and its keys lie in the second-level cache
constexpr int FEW_ROWS = 16;    // up to so many rows of a KV head are computed one by one, as fast as keys are read
constexpr int FEW_KEYS = 64;    // keys of few rows that are read at a time
constexpr int PART = 256;       // keys of a part of few rows, which is one thread's work
constexpr int TOGETHER = 4;     // few rows that read keys together
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

// A tensor (B, heads, tokens, numbers), whose numbers lie beside each other.
template <typename T>
struct Numbers {
  T* data;
  int64_t batch, head, token;
  T* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

template <typename T>
Numbers<const T> numbers(const at::Tensor& x) {
  return {x.const_data_ptr<T>(), x.stride(0), x.stride(1), x.stride(2)};
}

template <typename T>
struct Call {
  Numbers<const T> q, k, v;
  Numbers<T> out;
  Numbers<float> lse;  // of one number per token
  int64_t B, N, K, G, C, S, H, V;
  bool causal;
  float scaling;  // of scores in powers of 2
  const int64_t* firsts;  // the first key that each query sees, which never decreases; null: it sees all of them
  int64_t k_start;        // number of the first of these keys
  const int32_t *starts = nullptr, *used = nullptr;  // of each of the batch, in one memory; null: all see S keys

  int64_t first(int64_t c) const { return firsts ? std::max<int64_t>(0, firsts[c] - k_start) : 0; }
  int64_t start(int64_t b) const { return starts ? starts[b] : 0; }
  int64_t seen(int64_t b) const { return used ? used[b] : S; }
};

template <typename T>
void copy(const T* from, int64_t stride, int64_t tokens, int64_t width, float* to) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < width; i += LANES) store(to + t * width + i, load(from + t * stride + i));
}

// A tile: the rows of a KV head [first, last), with their numbers in columns.
template <int VECS>
struct Tile {
  static constexpr int ROWS = VECS * LANES;
  float *q, *scores, *out, *keys, *values;  // (H, ROWS), (KEY_BLOCK, ROWS), (V, ROWS), (KEY_BLOCK, H or V)
  Vec most[VECS], total[VECS];

  static size_t size(int64_t H, int64_t V) { return ROWS * (H + V + KEY_BLOCK) + KEY_BLOCK * (H + V); }

  Tile(float* memory, int64_t H, int64_t V) {
    q = memory;
    scores = q + H * ROWS;
    out = scores + KEY_BLOCK * ROWS;
    keys = out + V * ROWS;
    values = keys + KEY_BLOCK * H;
    std::fill(out, out + V * ROWS, 0.f);
    for (int j = 0; j < VECS; ++j) most[j] = all(NONE), total[j] = Vec{};
  }

  template <int M>
  void score(int64_t key, int64_t H) {
    Vec found[M][VECS] = {};
    const float* k = keys + key * H;
    for (int64_t h = 0; h < H; ++h)
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < VECS; ++j) found[i][j] += k[i * H + h] * load(q + h * ROWS + j * LANES);
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < VECS; ++j) store(scores + (key + i) * ROWS + j * LANES, found[i][j]);
  }

  template <int M>
  void add(int64_t number, int64_t count, int64_t V, const Vec* shrink) {
    Vec found[M][VECS];
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < VECS; ++j) found[i][j] = load(out + (number + i) * ROWS + j * LANES) * shrink[j];
    for (int64_t key = 0; key < count; ++key)
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < VECS; ++j)
          found[i][j] += values[key * V + number + i] * load(scores + key * ROWS + j * LANES);
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < VECS; ++j) store(out + (number + i) * ROWS + j * LANES, found[i][j]);
  }

  // Attend to `count` keys in memory, of which row r sees those from firsts[r] to lasts[r], if any are hidden.
  void attend(int64_t count, int64_t H, int64_t V, bool hides, const int32_t* firsts, const int32_t* lasts) {
    int64_t key = 0;
    for (; key + TILE <= count; key += TILE) score<TILE>(key, H);
    for (; key < count; ++key) score<1>(key, H);
    Vec shrink[VECS];
    for (int j = 0; j < VECS; ++j) {
      float* column = scores + j * LANES;
      if (hides) {
        const Ints first = *reinterpret_cast<const Ints*>(firsts + j * LANES);
        const Ints last = *reinterpret_cast<const Ints*>(lasts + j * LANES);
        for (int64_t i = 0; i < count; ++i) {
          const Ints key = Ints{} + (int32_t)i;
          store(column + i * ROWS, (key < first) | (key > last) ? all(NONE) : load(column + i * ROWS));
        }
      }
      Vec now = most[j];
      for (int64_t i = 0; i < count; ++i) now = larger(load(column + i * ROWS), now);
      const Vec before = most[j];
      most[j] = now;
      if (hides) now = now == NONE ? Vec{} : now;  // of a row that has seen no key yet
      shrink[j] = exp2(before - now);
      Vec added = total[j] * shrink[j];
      for (int64_t i = 0; i < count; ++i) {
        const Vec weight = exp2(load(column + i * ROWS) - now);
        store(column + i * ROWS, weight);
        added += weight;
      }
      total[j] = added;
    }
    int64_t number = 0;
    for (; number + TILE <= V; number += TILE) add<TILE>(number, count, V, shrink);
    for (; number + 2 <= V; number += 2) add<2>(number, count, V, shrink);  // V is even
  }
};

template <int VECS, typename T>
void attend_tile(const Call<T>& call, int64_t b, int64_t head, int64_t first, int64_t last) {
  constexpr int ROWS = VECS * LANES;
  const int64_t H = call.H, V = call.V, G = call.G, num = last - first;
  Tile<VECS> tile(scratch(Tile<VECS>::size(H, V)), H, V);
  for (int64_t r = 0; r < ROWS; ++r) {  // rows that are none repeat the last
    const int64_t row = first + std::min(r, num - 1);
    const T* q = call.q.at(b, head * G + row % G, row / G);
    for (int64_t h = 0; h < H; ++h) tile.q[h * ROWS + r] = static_cast<float>(q[h]) * call.scaling;
  }
  const int64_t seen_by_all = call.causal ? first / G + 1 : call.S;
  const int64_t seen = call.causal ? (last - 1) / G + 1 : call.S;
  // Blocks begin at multiples, so that a row's sums are of the same blocks beside any other rows.
  for (int64_t start = call.first(first / G) / KEY_BLOCK * KEY_BLOCK; start < seen; start += KEY_BLOCK) {
    const int64_t count = std::min<int64_t>(KEY_BLOCK, seen - start);
    copy(call.k.at(b, head, start), call.k.token, count, H, tile.keys);
    copy(call.v.at(b, head, start), call.v.token, count, V, tile.values);
    int32_t firsts[ROWS], lasts[ROWS];
    const bool hides = start + count > seen_by_all || call.first((last - 1) / G) > start;
    for (int64_t r = 0; hides && r < ROWS; ++r) {
      const int64_t c = (first + std::min(r, num - 1)) / G;
      firsts[r] = static_cast<int32_t>(std::min<int64_t>(count, call.first(c) - start));
      lasts[r] = static_cast<int32_t>(call.causal ? std::min<int64_t>(count, c - start) : count);
    }
    tile.attend(count, H, V, hides, firsts, lasts);
  }
  for (int64_t r = 0; r < num; ++r) {
    const int64_t n = head * G + (first + r) % G, c = (first + r) / G;
    const float total = tile.total[r / LANES][r % LANES], most = tile.most[r / LANES][r % LANES];
    T* out = call.out.at(b, n, c);
    const bool sees_none = call.first(c) >= (call.causal ? c + 1 : call.S);
    for (int64_t i = 0; i < V; ++i) out[i] = static_cast<T>(sees_none ? 0.f : tile.out[i * ROWS + r] / total);
    *call.lse.at(b, n, c) = sees_none ? NONE : most * LN_2 + std::log(total);
  }
}

template <int VECS, typename T>
void attend_rows(const Call<T>& call, int64_t b, int64_t head, int64_t first, int64_t last) {
  if constexpr (VECS > 1)
    if (last - first <= (VECS - 1) * LANES) return attend_rows<VECS - 1>(call, b, head, first, last);
  attend_tile<VECS>(call, b, head, first, last);
}

template <typename T>
void attend_in_tiles(const Call<T>& call) {
  const int64_t rows = call.G * call.C, tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  share_out(tiles * call.B * call.K, [&](int64_t i) {  // the last rows of a chunk first, since they see most
    const int64_t tile = tiles - 1 - i / (call.B * call.K), of = i % (call.B * call.K);
    attend_rows<MOST_VECS>(call, of / call.K, of % call.K, tile * MOST_ROWS, std::min(rows, (tile + 1) * MOST_ROWS));
  });
}

// Keys or values of some tokens in float32, `stride` numbers apart.
struct Floats {
  const float* data;
  int64_t stride;
  bool is_copy;
};

inline Floats floats(const float* from, int64_t stride, int64_t, int64_t, float*) { return {from, stride, false}; }
inline Floats floats(const BFloat16* from, int64_t stride, int64_t tokens, int64_t width, float* memory) {
  copy(from, stride, tokens, width, memory);
  return {memory, width, true};
}

// The part of VECS vectors of values of `count` keys, whose weights are (ROWS, FEW_KEYS), is added to `out` (ROWS, V).
template <int ROWS, int VECS>
inline void add_values(const float* weights, const float* v, int64_t stride, int64_t count, const float* shrink,
                       float* out, int64_t V) {
  Vec found[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) found[r][j] = load(out + r * V + j * LANES) * shrink[r];
  for (int64_t key = 0; key < count; ++key)
    for (int j = 0; j < VECS; ++j) {
      const Vec of_key = load(v + key * stride + j * LANES);
      for (int r = 0; r < ROWS; ++r) found[r][j] += weights[r * FEW_KEYS + key] * of_key;
    }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) store(out + r * V + j * LANES, found[r][j]);
}

// The part of `count` keys of ROWS rows with queries (ROWS, H), added to `out` (ROWS, V), `most` and `total`.
template <int ROWS>
void add_few(const float* q, Floats k, Floats v, int64_t count, int64_t H, int64_t V, float* out, float* most,
             float* total) {
  float weights[ROWS * FEW_KEYS], shrink[ROWS];
  for (int64_t key = 0; key < FEW_KEYS; key += LANES)
    for (int r = 0; r < ROWS; ++r) {
      Vec found[LANES] = {};
      const float* of_keys[LANES];  // those that are none repeat the last
      for (int i = 0; i < LANES; ++i) of_keys[i] = k.data + std::min(key + i, count - 1) * k.stride;
      if (key < count)
        for (int64_t h = 0; h < H; h += LANES)
          for (int i = 0; i < LANES; ++i) found[i] += load(of_keys[i] + h) * load(q + r * H + h);
      if (r == 0 && key < count && !k.is_copy) {  // what comes next: these keys' values, and the same head's next keys
        for (int i = 0; i < LANES; ++i) {
          for (int64_t n = 0; n < V; n += LANES) __builtin_prefetch(v.data + (key + i) * v.stride + n);
          for (int64_t h = 0; h < H; h += LANES) __builtin_prefetch(of_keys[i] + FEW_KEYS * k.stride + h);
        }
      }
      store(weights + r * FEW_KEYS + key, numbered() < (int32_t)(count - key) ? sums(found) : all(NONE));
    }
  for (int r = 0; r < ROWS; ++r) {
    float* of_row = weights + r * FEW_KEYS;
    Vec highest = all(most[r]), added = {};
    for (int i = 0; i < FEW_KEYS; i += LANES) highest = larger(load(of_row + i), highest);
    float now = highest[0];
    for (int i = 1; i < LANES; ++i) now = std::max(now, highest[i]);
    for (int i = 0; i < FEW_KEYS; i += LANES) {
      const Vec weight = exp2(load(of_row + i) - now);
      store(of_row + i, weight);
      added += weight;
    }
    shrink[r] = exp2(all(most[r] - now))[0];
    total[r] = total[r] * shrink[r] + sum(added);
    most[r] = now;
  }
  int64_t i = 0;
  for (; i + 4 * LANES <= V; i += 4 * LANES)
    add_values<ROWS, 4>(weights, v.data + i, v.stride, count, shrink, out + i, V);
  for (; i < V; i += LANES) add_values<ROWS, 1>(weights, v.data + i, v.stride, count, shrink, out + i, V);
}

template <int ROWS = TOGETHER, typename... Rest>
void add_rows(int64_t rows, Rest... rest) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return add_rows<ROWS - 1>(rows, rest...);
  add_few<ROWS>(rest...);
}

template <typename T>
void attend_few(const Call<T>& call) {
  const int64_t rows = call.G * call.C, all_rows = call.K * rows, H = call.H, V = call.V;
  std::vector<std::pair<int64_t, int64_t>> parts;  // of the batch: which, and its first key
  std::vector<int64_t> part_of{0};                 // number of the first part of each
  for (int64_t b = 0; b < call.B; ++b) {
    for (int64_t first = 0; first < call.seen(b); first += PART) parts.emplace_back(b, first);
    part_of.push_back(parts.size());
  }
  // Of each part: outputs (K, rows, V), largest scores and sums (K, rows); queries (B, K, rows, H).
  const int64_t size = all_rows * (V + 2);
  std::vector<float> found(parts.size() * size), queries(call.B * all_rows * H);
  for (int64_t b = 0; b < call.B; ++b)
    for (int64_t i = 0; i < all_rows; ++i) {
      const int64_t head = i / rows, row = i % rows;
      const T* q = call.q.at(b, head * call.G + row % call.G, row / call.G);
      for (int64_t h = 0; h < H; ++h) queries[(b * all_rows + i) * H + h] = static_cast<float>(q[h]) * call.scaling;
    }
  share_out(parts.size(), [&](int64_t i) {
    const auto [b, first] = parts[i];
    const int64_t last = std::min(call.seen(b), first + PART), start = call.start(b);
    float *out = &found[i * size], *most = out + all_rows * V, *total = most + all_rows;
    std::fill(most, most + all_rows, NONE);
    float* memory = scratch(FEW_KEYS * (H + V));
    for (int64_t key = first; key < last; key += FEW_KEYS)  // of all heads at once, since they lie beside each other
      for (int64_t head = 0; head < call.K; ++head) {
        const int64_t count = std::min<int64_t>(FEW_KEYS, last - key);
        const Floats k = floats(call.k.at(b, head, start + key), call.k.token, count, H, memory);
        const Floats v = floats(call.v.at(b, head, start + key), call.v.token, count, V, memory + FEW_KEYS * H);
        for (int64_t row = head * rows; row < (head + 1) * rows; row += TOGETHER)
          add_rows((head + 1) * rows - row, &queries[(b * all_rows + row) * H], k, v, count, H, V, out + row * V,
                   most + row, total + row);
      }
  });
  for (int64_t b = 0; b < call.B; ++b)
    for (int64_t i = 0; i < all_rows; ++i) {
      const int64_t n = i / rows * call.G + i % rows % call.G, c = i % rows / call.G;
      const int64_t parts = part_of[b + 1] - part_of[b];
      const float* of = found.data() + part_of[b] * size;
      float most = NONE, total = 0;
      for (int64_t p = 0; p < parts; ++p) most = std::max(most, of[p * size + all_rows * V + i]);
      std::vector<float> shares(parts);
      for (int64_t p = 0; p < parts; ++p) {
        shares[p] = exp2(all(of[p * size + all_rows * V + i] - most))[0];
        total += shares[p] * of[p * size + all_rows * (V + 1) + i];
      }
      T* out = call.out.at(b, n, c);
      for (int64_t j = 0; j < V; ++j) {
        float number = 0;
        for (int64_t p = 0; p < parts; ++p) number += shares[p] * of[p * size + i * V + j];
        out[j] = static_cast<T>(parts ? number / total : 0.f);
      }
      *call.lse.at(b, n, c) = parts ? most * LN_2 + std::log(total) : NONE;
    }
}

// One query for each of S sequences to the keys that it sees, from the first key of the sequence on, in one memory.
template <typename T>
void attend_to_sequences(const Sequences& of, void* out, float* lse) {
  const int64_t N = of.N, K = of.K, H = of.H, V = of.V;
  attend_few<T>({{static_cast<const T*>(of.q), of.q_sequence, of.q_head, 0},
                 {static_cast<const T*>(of.k), 0, of.k_head, of.k_token},
                 {static_cast<const T*>(of.v), 0, of.v_head, of.v_token},
                 {static_cast<T*>(out), N * V, V, 0},
                 {lse, N, 1, 0},
                 of.S, N, K, N / K, 1, 0, H, V,
                 false,
                 static_cast<float>(of.scaling * LOG2_E),
                 nullptr,
                 0,
                 of.starts,
                 of.used});
}

template <typename T>
void attend_all(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& out, at::Tensor& lse,
                bool causal, double scaling, const int64_t* firsts, int64_t k_start) {
  Call<T> call{numbers<T>(q),
               numbers<T>(k),
               numbers<T>(v),
               {out.mutable_data_ptr<T>(), out.stride(0), out.stride(1), out.stride(2)},
               {lse.mutable_data_ptr<float>(), lse.stride(0), lse.stride(1), lse.stride(2)},
               q.size(0), q.size(1), k.size(1), q.size(1) / k.size(1), q.size(2), k.size(2), q.size(3), v.size(3),
               causal,
               static_cast<float>(scaling * LOG2_E),
               firsts,
               k_start};
  if (!causal && !firsts && call.G * call.C <= FEW_ROWS) attend_few(call);
  else attend_in_tiles(call);
}

std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                                          double scaling, const std::optional<at::Tensor>& firsts, int64_t k_start) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "queries, keys and values have 4 dims");
  const auto B = q.size(0), N = q.size(1), C = q.size(2), H = q.size(3), S = k.size(2), V = v.size(3);
  TORCH_CHECK(k.size(0) == B && v.size(0) == B && k.size(1) == v.size(1) && v.size(2) == S && k.size(3) == H &&
                  N % k.size(1) == 0 && (!causal || C == S) && C > 0 && S > 0,
              "queries ", q.sizes(), ", keys ", k.sizes(), " and values ", v.sizes(), " do not belong together");
  TORCH_CHECK(!firsts || (firsts->scalar_type() == at::kLong && firsts->is_contiguous() && firsts->numel() == C),
              "each of ", C, " queries has a first key, as int64");
  TORCH_CHECK(H % LANES == 0 && V % LANES == 0, "head dims ", H, " and ", V, " are no multiples of ", LANES);
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "dtypes differ");
  const auto beside = [](const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); };
  at::Tensor out = at::empty({B, C, N, V}, q.options()).transpose(1, 2);
  at::Tensor lse = at::empty({B, N, C}, q.options().dtype(at::kFloat));
  const int64_t* first = firsts ? firsts->const_data_ptr<int64_t>() : nullptr;
  const at::Tensor queries = beside(q), keys = beside(k), values = beside(v);
  if (q.scalar_type() == at::kFloat) attend_all<float>(queries, keys, values, out, lse, causal, scaling, first, k_start);
  else if (q.scalar_type() == at::kBFloat16)
    attend_all<BFloat16>(queries, keys, values, out, lse, causal, scaling, first, k_start);
  else TORCH_CHECK(false, "attention of ", q.scalar_type(), " is not to be had");
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor> attend_sequences(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& starts, const at::Tensor& used, double scaling) {
  const at::Tensor queries = q.stride(2) == 1 ? q : q.contiguous();
  const Sequences of = sequences(queries, k, v, starts, used, scaling);
  at::Tensor out = at::empty({of.S, of.N, of.V}, q.options()), lse = at::empty({of.S, of.N}, q.options().dtype(at::kFloat));
  attend(of, out.mutable_data_ptr(), lse.mutable_data_ptr<float>());
  return {out, lse};
}

}  // namespace

Sequences sequences(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& starts,
                    const at::Tensor& used, double scaling) {
  TORCH_CHECK(q.dim() == 3 && k.dim() == 4 && v.dim() == 4 && k.size(0) == 1 && v.size(0) == 1,
              "queries have 3 dims, keys and values 4, of which the first is 1");
  const int64_t S = q.size(0), N = q.size(1), K = k.size(1), H = q.size(2), V = v.size(3);
  TORCH_CHECK(v.size(1) == K && k.size(3) == H && N % K == 0 && k.size(2) == v.size(2), "queries ", q.sizes(), ", keys ",
              k.sizes(), " and values ", v.sizes(), " do not belong together");
  TORCH_CHECK(H % LANES == 0 && V % LANES == 0, "head dims ", H, " and ", V, " are no multiples of ", LANES);
  for (const at::Tensor& each : {starts, used})
    TORCH_CHECK(each.scalar_type() == at::kInt && each.is_contiguous(), "starts and lengths of sequences are int32");
  TORCH_CHECK(starts.numel() == S + 1 && used.numel() == S, "each of ", S, " sequences has a start and a length");
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "dtypes differ");
  TORCH_CHECK(q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16, "attention of ", q.scalar_type(),
              " is not to be had");
  TORCH_CHECK(q.stride(2) == 1 && k.stride(3) == 1 && v.stride(3) == 1, "numbers of a head lie beside each other");
  return {q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(), starts.const_data_ptr<int32_t>(),
          used.const_data_ptr<int32_t>(), q.scalar_type() == at::kBFloat16, S, N, K, H, V, q.stride(0), q.stride(1),
          k.stride(1), k.stride(2), v.stride(1), v.stride(2), scaling};
}

void attend(const Sequences& of, void* out, float* lse) {
  if (of.is_bfloat16) attend_to_sequences<BFloat16>(of, out, lse);
  else attend_to_sequences<float>(of, out, lse);
}

TORCH_LIBRARY(runahead, library) {
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, bool causal, float scaling, Tensor? firsts=None, int k_start=0)"
      " -> (Tensor, Tensor)");
  library.def(
      "attend_sequences(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor used, float scaling) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(runahead, CPU, library) { 
  library.impl(
      "attend", static_cast<std::tuple<at::Tensor, at::Tensor> (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                                   bool, double, const std::optional<at::Tensor>&,
                                                                   int64_t)>(attend));
  library.impl("attend_sequences", attend_sequences);
}
