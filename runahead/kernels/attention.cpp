// Attention on a CPU in float32, of float32 or bfloat16 tensors, as torch.ops.runahead.attend.
//
// Legend: B batch, N query heads, K kv heads, G = N / K heads of a group, C queries, S keys, H head dim (key), V head dim
// (value). A row is a query of one head of a group; the rows of a KV head are in the order (C, G), so that few of them
// see different keys. Vectors hold a number of several rows (tiles), or several numbers of a row (few rows).
//
// The result for a row depends on its query, on the keys that it sees, and on whether these are read for few rows: not on
// the number of threads.
//
// Where blocks of keys were chosen for a block of queries, its rows see these as if they were all: copies of them lie
// side by side.

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
constexpr int MOST_TILES = 8;   // that read the same copies of keys and values
constexpr int KEY_BLOCK = 120;  // keys of a tile, a multiple of TILE: their weights lie in the first-level cache
constexpr float GROWTH = 8;     // powers of 2 by which a score may be larger than what scores are counted from
constexpr int FEW_ROWS = 16;    // up to so many rows of a KV head are computed one by one, as fast as keys are read
constexpr int AHEAD = 16;       // keys by which few rows ask for others' before they are read
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
  const bool* chosen = nullptr;  // (B, K, query_blocks, key_blocks): keys that a block of queries sees; null: all of them
  int64_t query_blocks = 0, key_blocks = 0, block = 0;  // tokens of a block
  int64_t q_first = 0, k_first = 0;  // number of the first query, and of the first key, within its block

  int64_t last(int64_t c) const { return causal ? c + S - C : S - 1; }  // key that a query sees
  int64_t first(int64_t c) const { return firsts ? std::max<int64_t>(0, firsts[c] - k_start) : 0; }
  int64_t start(int64_t b) const { return starts ? starts[b] : 0; }
  int64_t seen(int64_t b) const { return used ? used[b] : S; }
};

// Keys that the rows of a KV head see, numbered one after another, as pieces of the memory.
struct Pieces {
  struct Piece {
    int64_t number, key;  // of its first key: among those that are seen, and in the memory
  };
  std::vector<Piece> pieces;
  int64_t count;

  // All keys, or those that were chosen for the block of query `c`.
  template <typename T>
  Pieces(const Call<T>& call, int64_t b, int64_t head, int64_t c) : count(call.S) {
    if (!call.chosen) {
      pieces.push_back({0, 0});
      return;
    }
    const int64_t of = (b * call.K + head) * call.query_blocks + (c + call.q_first) / call.block;
    const bool* chosen = call.chosen + of * call.key_blocks;
    count = 0;
    for (int64_t i = 0; i < call.key_blocks; ++i) {
      const int64_t key = std::max<int64_t>(0, i * call.block - call.k_first);
      const int64_t end = std::min(call.S, (i + 1) * call.block - call.k_first);
      if (!chosen[i] || key >= end) continue;
      if (pieces.empty() || key - pieces.back().key != count - pieces.back().number) pieces.push_back({count, key});
      count += end - key;
    }
  }

  // Number of the last key that is seen up to one of the memory; -1: none is.
  int64_t last(int64_t key) const {
    for (int64_t i = pieces.size() - 1, end = count; i >= 0; end = pieces[i--].number)
      if (pieces[i].key <= key) return std::min(end - 1, pieces[i].number + key - pieces[i].key);
    return -1;
  }

  // Call work(key, number, count) for pieces of the memory with the numbers [begin, end).
  template <typename Work>
  void each(int64_t begin, int64_t end, const Work& work) const {
    if (begin >= end) return;
    auto piece = std::upper_bound(pieces.begin(), pieces.end(), begin,
                                  [](int64_t number, const Piece& other) { return number < other.number; });
    for (--piece; begin < end; ++piece) {
      const int64_t next = piece + 1 == pieces.end() ? end : std::min(end, piece[1].number);
      work(piece->key + begin - piece->number, begin, next - begin);
      begin = next;
    }
  }
};

template <typename T>
void copy(const T* from, int64_t stride, int64_t tokens, int64_t width, float* to) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < width; i += LANES) store(to + t * width + i, load(from + t * stride + i));
}

// A block of keys (KEY_BLOCK, H) and values (numbers by TILE, KEY_BLOCK, TILE), as copies that rows in tiles read.
struct Block {
  float *keys, *values, *row;  // `row` takes a value

  static constexpr int64_t GROUP = KEY_BLOCK * TILE + LANES;  // values in steps of so many, since copies go over the end
  static size_t size(int64_t H, int64_t V) { return KEY_BLOCK * H + (V / TILE + 1) * GROUP + V + LANES; }

  Block(float* memory, int64_t H, int64_t V) : keys(memory) {
    values = keys + KEY_BLOCK * H;
    row = values + (V / TILE + 1) * GROUP;
  }

  template <typename T>
  void take(const Call<T>& call, int64_t b, int64_t head, const Pieces& seen, int64_t start, int64_t count) {
    typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
    const int64_t next = start + KEY_BLOCK;
    seen.each(next, std::min(next + KEY_BLOCK, seen.count), [&](int64_t key, int64_t, int64_t num) {
      const T *k = call.k.at(b, head, key), *v = call.v.at(b, head, key);
      for (int64_t t = 0; t < num; ++t) {
        for (int64_t i = 0; i < call.H; i += 64 / sizeof(T)) __builtin_prefetch(k + t * call.k.token + i, 0, 2);
        for (int64_t i = 0; i < call.V; i += 64 / sizeof(T)) __builtin_prefetch(v + t * call.v.token + i, 0, 2);
      }
    });
    seen.each(start, start + count, [&](int64_t key, int64_t number, int64_t num) {
      const T* v = call.v.at(b, head, key);
      copy(call.k.at(b, head, key), call.k.token, num, call.H, keys + (number - start) * call.H);
      for (int64_t t = number - start; t < number - start + num; ++t, v += call.v.token) {
        copy(v, 0, 1, call.V, row);
        float* to = values + t * TILE;
        int64_t i = 0;
        for (; i + TILE <= call.V; i += TILE, to += GROUP)  // what is too much of each is overwritten by the next
          *reinterpret_cast<Eight*>(to) = *reinterpret_cast<const Eight*>(row + i);
        to -= t * (TILE - (call.V - i));
        for (int64_t j = 0; i + j < call.V; ++j) to[j] = row[i + j];
      }
    });
  }
};

// A tile: rows of a KV head, with their numbers in columns. A row's scores are counted from its base, which is near the
// largest so far: it changes, and what was added up with it, only where a score is 2^GROWTH times as large.
template <int VECS>
struct Tile {
  static constexpr int ROWS = VECS * LANES;
  float *q, *out;  // (H, ROWS), (V, ROWS)
  Vec less_base[VECS], limit[VECS], total[VECS];  // 0 and NONE before a row has seen a key; else -base and GROWTH

  // TILE scores per row, counted from the base, are too large for some rows, whose base becomes the largest of them.
  // `block` has the weights of the keys before, since the last were added to values.
  __attribute__((noinline)) void grow(float* scores, float* block, int64_t V) {
    for (int j = 0; j < VECS; ++j) {
      Vec most = load(scores + j * LANES);
      for (int i = 1; i < TILE; ++i) most = larger(load(scores + i * ROWS + j * LANES), most);
      const Ints grows = most > limit[j];
      const Vec by = grows ? most : Vec{}, shrink = exp2(grows & (limit[j] == NONE) ? all(NONE) : -by);
      less_base[j] -= by;
      limit[j] = grows ? all(GROWTH) : limit[j];
      total[j] *= shrink;
      for (float* at = block + j * LANES; at < scores; at += ROWS) store(at, load(at) * shrink);
      for (int i = 0; i < TILE; ++i) store(scores + i * ROWS + j * LANES, load(scores + i * ROWS + j * LANES) - by);
      for (int64_t v = 0; v < V; ++v) store(out + v * ROWS + j * LANES, load(out + v * ROWS + j * LANES) * shrink);
    }
  }

  // Scores of TILE keys from number `key` of the block on become weights. Rows see keys from firsts[r] to lasts[r], if
  // any are hidden.
  template <bool HIDES>
  void weigh(const float* k, float* block, int64_t key, int64_t H, int64_t V, const int32_t* firsts,
             const int32_t* lasts) {
    float* const weights = block + key * ROWS;
    Vec found[TILE][VECS];
#pragma GCC unroll 6
    for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < VECS; ++j) found[i][j] = less_base[j];
    for (int64_t h = 0; h < H; ++h)
      for (int i = 0; i < TILE; ++i)
        for (int j = 0; j < VECS; ++j) found[i][j] += k[i * H + h] * load(q + h * ROWS + j * LANES);
    Ints grown = {};
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) {
      if constexpr (HIDES) {
        const Ints first = *reinterpret_cast<const Ints*>(firsts + j * LANES);
        const Ints last = *reinterpret_cast<const Ints*>(lasts + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < TILE; ++i) {
          const Ints number = Ints{} + static_cast<int32_t>(key + i);
          found[i][j] = (number < first) | (number > last) ? all(NONE) : found[i][j];
        }
      }
      Vec most = found[0][j];
#pragma GCC unroll 6
      for (int i = 1; i < TILE; ++i) most = larger(found[i][j], most);
      grown |= most > limit[j];
    }
    if (__builtin_expect(any(grown), 0)) {
#pragma GCC unroll 6
      for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; ++j) store(weights + i * ROWS + j * LANES, found[i][j]);
      grow(weights, block, V);
#pragma GCC unroll 6
      for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; ++j) found[i][j] = load(weights + i * ROWS + j * LANES);
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) {
      Vec sum = total[j];
#pragma GCC unroll 6
      for (int i = 0; i < TILE; ++i) {
        const Vec weight = exp2(found[i][j]);
        store(weights + i * ROWS + j * LANES, weight);
        sum += weight;
      }
      total[j] = sum;
    }
  }

  // M numbers of `count` values, by their weights.
  template <int M>
  void add(const float* v, const float* weights, float* to, int64_t count) {
    Vec found[M][VECS];
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < VECS; ++j) found[i][j] = load(to + i * ROWS + j * LANES);
    for (int64_t key = 0; key < count; ++key)
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < VECS; ++j) found[i][j] += v[key * M + i] * load(weights + key * ROWS + j * LANES);
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < VECS; ++j) store(to + i * ROWS + j * LANES, found[i][j]);
  }

  // Attend to `count` keys of a block.
  template <bool HIDES>
  void attend(const Block& block, float* weights, int64_t count, int64_t H, int64_t V, const int32_t* firsts,
              const int32_t* lasts) {
    for (int64_t key = 0; key < count; key += TILE)
      weigh<HIDES>(block.keys + key * H, weights, key, H, V, firsts, lasts);
    const float* v = block.values;
    int64_t i = 0;
    for (; i + TILE <= V; i += TILE, v += Block::GROUP) add<TILE>(v, weights, out + i * ROWS, count);
    if (V - i == 4) add<4>(v, weights, out + i * ROWS, count);
    if (V - i == 2) add<2>(v, weights, out + i * ROWS, count);
  }
};

// The rows [begin, end) of a KV head, in tiles that read the same copies of keys and values.
template <int VECS, typename T>
void attend_tiles(const Call<T>& call, int64_t b, int64_t head, int64_t begin, int64_t end) {
  constexpr int ROWS = VECS * LANES;
  const int64_t H = call.H, V = call.V, G = call.G, tiles = (end - begin + ROWS - 1) / ROWS;
  float* weights = scratch(KEY_BLOCK * ROWS + Block::size(H, V) + tiles * ROWS * (H + V));
  float* memory = weights + KEY_BLOCK * ROWS;
  Block block(memory, H, V);
  memory += Block::size(H, V);
  struct Row {
    int64_t n, c;
  };
  std::vector<Tile<VECS>> of(tiles);
  std::vector<Row> rows(tiles * ROWS);  // those that are none repeat the last
  for (int64_t i = 0; i < tiles * ROWS; ++i) {
    const int64_t row = std::min(begin + i, end - 1);
    rows[i] = {head * G + row % G, row / G};
  }
  for (int64_t i = 0; i < tiles; ++i) {
    Tile<VECS>& tile = of[i];
    tile.q = memory + i * ROWS * (H + V);
    tile.out = tile.q + ROWS * H;
    std::fill(tile.out, tile.out + V * ROWS, 0.f);
    for (int j = 0; j < VECS; ++j) tile.less_base[j] = tile.total[j] = Vec{}, tile.limit[j] = all(NONE);
    for (int r = 0; r < ROWS; r += LANES)
      for (int64_t h = 0; h < H; h += LANES) {
        Vec x[LANES];
        for (int j = 0; j < LANES; ++j) {
          const Row row = rows[i * ROWS + r + j];
          x[j] = load(call.q.at(b, row.n, row.c) + h) * call.scaling;
        }
        transpose(x);
        for (int j = 0; j < LANES; ++j) store(tile.q + (h + j) * ROWS + r, x[j]);
      }
  }
  const Pieces pieces(call, b, head, rows[0].c);
  const auto last_of = [&](int64_t c) { return pieces.last(call.last(c)); };
  const int64_t seen = last_of(rows.back().c) + 1;
  // Blocks begin at multiples, so that a row's sums are of the same blocks beside any other rows.
  for (int64_t start = call.first(rows[0].c) / KEY_BLOCK * KEY_BLOCK; start < seen; start += KEY_BLOCK) {
    block.take(call, b, head, pieces, start, std::min<int64_t>(KEY_BLOCK, seen - start));
    for (int64_t i = 0; i < tiles; ++i) {
      const Row* row = &rows[i * ROWS];
      const int64_t first = row[0].c, last = row[ROWS - 1].c;
      const int64_t count = std::min<int64_t>(KEY_BLOCK, last_of(last) + 1 - start);
      if (count <= 0 || call.first(first) >= start + count) continue;  // none of its rows sees one of these keys
      int32_t firsts[ROWS], lasts[ROWS];
      const bool hides = start + count > last_of(first) + 1 || call.first(last) > start || count % TILE;
      for (int64_t r = 0; hides && r < ROWS; ++r) {
        firsts[r] = static_cast<int32_t>(std::min<int64_t>(count, call.first(row[r].c) - start));
        lasts[r] = static_cast<int32_t>(std::min<int64_t>(count - 1, last_of(row[r].c) - start));
      }
      if (hides) of[i].template attend<true>(block, weights, count, H, V, firsts, lasts);
      else of[i].template attend<false>(block, weights, count, H, V, firsts, lasts);
    }
  }
  for (int64_t r = 0; r < end - begin; r += LANES) {
    const Tile<VECS>& tile = of[r / ROWS];
    const int64_t j = r % ROWS / LANES, count = std::min<int64_t>(LANES, end - begin - r);
    const Vec total = tile.total[j], share = total == 0.f ? Vec{} : 1.f / total;  // 0: of a row that sees no key
    for (int64_t i = 0; i < count; ++i)
      *call.lse.at(b, rows[r + i].n, rows[r + i].c) = std::log(total[i]) - tile.less_base[j][i] * LN_2;
    for (int64_t v = 0; v < V; v += LANES) {
      Vec x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = load(tile.out + (v + i) * ROWS + j * LANES) * share;
      transpose(x);
      for (int64_t i = 0; i < count; ++i) store(call.out.at(b, rows[r + i].n, rows[r + i].c) + v, x[i]);
    }
  }
}

template <int VECS, typename T>
void attend_rest(const Call<T>& call, int64_t b, int64_t head, int64_t begin, int64_t end) {
  if constexpr (VECS > 1)
    if (end - begin <= (VECS - 1) * LANES) return attend_rest<VECS - 1>(call, b, head, begin, end);
  attend_tiles<VECS>(call, b, head, begin, end);
}

// As `attend_tiles`, in the fewest tiles.
template <typename T>
void attend_rows(const Call<T>& call, int64_t b, int64_t head, int64_t begin, int64_t end) {
  const int64_t rest = end - (end - begin) % MOST_ROWS;
  if (begin < rest) attend_tiles<MOST_VECS>(call, b, head, begin, rest);
  if (rest < end) attend_rest<MOST_VECS>(call, b, head, rest, end);
}

template <typename T>
void attend_to_chosen(const Call<T>& call) {
  const int64_t heads = call.B * call.K, rows = call.G * call.C;
  share_out(call.query_blocks * heads, [&](int64_t i) {
    const int64_t block = call.query_blocks - 1 - i / heads, of = i % heads;
    const int64_t first = std::max<int64_t>(0, block * call.block - call.q_first) * call.G;
    const int64_t end = std::min(rows, ((block + 1) * call.block - call.q_first) * call.G);
    for (int64_t begin = first; begin < end; begin += MOST_ROWS * MOST_TILES)
      attend_rows(call, of / call.K, of % call.K, begin, std::min<int64_t>(end, begin + MOST_ROWS * MOST_TILES));
  });
}

template <typename T>
void attend_in_tiles(const Call<T>& call) {
  const int64_t rows = call.G * call.C, heads = call.B * call.K, tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t fair = tiles * heads / (4 * at::get_num_threads());  // so that threads end at about the same time
  const int64_t together = MOST_ROWS * std::clamp<int64_t>(fair, 1, MOST_TILES);
  const int64_t parts = (rows + together - 1) / together;
  share_out(parts * heads, [&](int64_t i) {  // the last rows of a chunk first, since they see most
    const int64_t part = parts - 1 - i / heads, of = i % heads;
    const int64_t begin = part * together, end = std::min(rows, begin + together);
    attend_rows(call, of / call.K, of % call.K, begin, end);
  });
}

// What some keys have given to few rows; scores are counted from bases as in a tile.
struct Few {
  float *out, *totals, *less_base, *limit;  // (rows, V), (rows, LANES), (rows), (rows)

  static int64_t size(int64_t rows, int64_t V) { return rows * (V + LANES + 2); }

  Few(float* memory, int64_t rows, int64_t V)
      : out(memory), totals(out + rows * V), less_base(totals + rows * LANES), limit(less_base + rows) {}

  // The base of a row becomes the largest of its scores, which are counted from it.
  __attribute__((noinline)) Vec grow(int64_t row, int64_t V, Vec scores) {
    float most = NONE;
    for (int i = 0; i < LANES; ++i) most = scores[i] > most ? scores[i] : most;
    const Vec shrink = exp2(all(limit[row] == NONE ? NONE : -most));
    less_base[row] -= most;
    limit[row] = GROWTH;
    store(totals + row * LANES, load(totals + row * LANES) * shrink);
    for (int64_t i = row * V; i < (row + 1) * V; i += LANES) store(out + i, load(out + i) * shrink);
    return scores - most;
  }
};

// VECS vectors of the values of `count` keys, whose weights are (ROWS, LANES), are added to `out` (ROWS, V).
template <int ROWS, int VECS, typename T>
inline void add_values(const float* weights, const T* v, int64_t stride, int64_t count, int64_t ahead, float* out,
                       int64_t V) {
  Vec found[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) found[r][j] = load(out + r * V + j * LANES);
  for (int64_t key = 0; key < count; ++key)
    for (int j = 0; j < VECS; ++j) {
      const Vec of_key = load(v + key * stride + j * LANES);
      if (j * LANES * sizeof(T) % 64 == 0) __builtin_prefetch(v + (key + ahead) * stride + j * LANES);
      for (int r = 0; r < ROWS; ++r) found[r][j] += weights[r * LANES + key] * of_key;
    }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECS; ++j) store(out + r * V + j * LANES, found[r][j]);
}

// At most LANES keys are added to ROWS rows, from number `row` on, with queries (ROWS, H).
template <int ROWS, typename T>
void add_few(const Call<T>& call, const float* q, const T* k, const T* v, int64_t count, int64_t ahead, int64_t row,
             Few few) {
  constexpr int KEYS = 4;  // whose products with all rows' queries are summed up in registers
  const int64_t H = call.H, V = call.V;
  Vec found[ROWS][LANES];
  for (int key = 0; key < LANES; key += KEYS) {
    const T* of_keys[KEYS];  // those that are none repeat the last
    for (int i = 0; i < KEYS; ++i) of_keys[i] = k + std::min<int64_t>(key + i, count - 1) * call.k.token;
    Vec summed[ROWS][KEYS] = {};
    for (int64_t h = 0; h < H; h += LANES)
      for (int i = 0; i < KEYS; ++i) {
        const Vec of_key = load(of_keys[i] + h);
        if (h * sizeof(T) % 64 == 0) __builtin_prefetch(of_keys[i] + ahead * call.k.token + h);
        for (int r = 0; r < ROWS; ++r) summed[r][i] += of_key * load(q + r * H + h);
      }
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < KEYS; ++i) found[r][key + i] = summed[r][i];
  }
  float weights[ROWS * LANES];
  for (int r = 0; r < ROWS; ++r) {
    Vec scores = numbered() < static_cast<int32_t>(count) ? sums(found[r]) + few.less_base[row + r] : all(NONE);
    if (__builtin_expect(any(scores > few.limit[row + r]), 0)) scores = few.grow(row + r, V, scores);
    const Vec of_row = exp2(scores);
    store(weights + r * LANES, of_row);
    store(few.totals + (row + r) * LANES, load(few.totals + (row + r) * LANES) + of_row);
  }
  float* out = few.out + row * V;
  const int64_t stride = call.v.token;
  int64_t i = 0;
  for (; i + 4 * LANES <= V; i += 4 * LANES) add_values<ROWS, 4>(weights, v + i, stride, count, ahead, out + i, V);
  for (; i < V; i += LANES) add_values<ROWS, 1>(weights, v + i, stride, count, ahead, out + i, V);
}

template <int ROWS = TOGETHER, typename T, typename... Rest>
void add_rows(int64_t rows, const Call<T>& call, Rest... rest) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return add_rows<ROWS - 1>(rows, call, rest...);
  add_few<ROWS>(call, rest...);
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
  const int64_t size = Few::size(all_rows, V);
  std::vector<float> found(parts.size() * size), queries(call.B * all_rows * H);  // queries (B, K, rows, H)
  for (int64_t b = 0; b < call.B; ++b)
    for (int64_t i = 0; i < all_rows; ++i) {
      const int64_t head = i / rows, row = i % rows;
      const T* q = call.q.at(b, head * call.G + row % call.G, row / call.G);
      for (int64_t h = 0; h < H; ++h) queries[(b * all_rows + i) * H + h] = static_cast<float>(q[h]) * call.scaling;
    }
  share_out(parts.size(), [&](int64_t i) {
    const auto [b, first] = parts[i];
    const int64_t last = std::min(call.seen(b), first + PART), start = call.start(b);
    Few few(&found[i * size], all_rows, V);
    std::fill(few.limit, few.limit + all_rows, NONE);
    for (int64_t key = first; key < last; key += LANES)  // of all heads at once, since they lie beside each other
      for (int64_t head = 0; head < call.K; ++head) {
        const int64_t count = std::min<int64_t>(LANES, last - key);
        int64_t ahead = key + LANES < call.seen(b) ? AHEAD : 0;
        for (int64_t row = head * rows; row < (head + 1) * rows; row += TOGETHER, ahead = 0)
          add_rows((head + 1) * rows - row, call, &queries[(b * all_rows + row) * H], call.k.at(b, head, start + key),
                   call.v.at(b, head, start + key), count, ahead, row, few);
      }
  });
  for (int64_t b = 0; b < call.B; ++b)
    for (int64_t i = 0; i < all_rows; ++i) {
      const int64_t n = i / rows * call.G + i % rows % call.G, c = i % rows / call.G;
      const int64_t count = part_of[b + 1] - part_of[b];
      const auto part = [&](int64_t p) { return Few(&found[(part_of[b] + p) * size], all_rows, V); };
      const auto base = [&](int64_t p) { return part(p).limit[i] == NONE ? NONE : -part(p).less_base[i]; };
      float most = NONE, total = 0;
      for (int64_t p = 0; p < count; ++p) most = std::max(most, base(p));
      std::vector<float> shares(count);
      for (int64_t p = 0; p < count; ++p) {
        shares[p] = exp2(all(base(p) - most))[0];
        total += shares[p] * sum(load(part(p).totals + i * LANES));
      }
      T* out = call.out.at(b, n, c);
      for (int64_t j = 0; j < V; j += LANES) {
        Vec number = {};
        for (int64_t p = 0; p < count; ++p) number += shares[p] * load(part(p).out + i * V + j);
        store(out + j, count ? number / total : Vec{});
      }
      *call.lse.at(b, n, c) = count ? most * LN_2 + std::log(total) : NONE;
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
                bool causal, double scaling, const int64_t* firsts, int64_t k_start,
                const std::optional<at::Tensor>& chosen, int64_t block, int64_t q_first, int64_t k_first) {
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
  if (chosen) {
    call.chosen = chosen->const_data_ptr<bool>();
    call.query_blocks = chosen->size(2), call.key_blocks = chosen->size(3), call.block = block;
    call.q_first = q_first, call.k_first = k_first;
    attend_to_chosen(call);
  } else if (!causal && !firsts && call.G * call.C <= FEW_ROWS) attend_few(call);
  else attend_in_tiles(call);
}

std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                                          double scaling, const std::optional<at::Tensor>& firsts, int64_t k_start,
                                          const std::optional<at::Tensor>& chosen, int64_t block, int64_t q_first,
                                          int64_t k_first) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "queries, keys and values have 4 dims");
  const auto B = q.size(0), N = q.size(1), C = q.size(2), H = q.size(3), S = k.size(2), V = v.size(3);
  TORCH_CHECK(k.size(0) == B && v.size(0) == B && k.size(1) == v.size(1) && v.size(2) == S && k.size(3) == H &&
                  N % k.size(1) == 0 && (!causal || C <= S) && C > 0 && S > 0,
              "queries ", q.sizes(), ", keys ", k.sizes(), " and values ", v.sizes(), " do not belong together");
  TORCH_CHECK(!firsts || (firsts->scalar_type() == at::kLong && firsts->is_contiguous() && firsts->numel() == C),
              "each of ", C, " queries has a first key, as int64");
  TORCH_CHECK(!chosen || (!firsts && chosen->scalar_type() == at::kBool && chosen->is_contiguous() && chosen->dim() == 4 &&
                          chosen->size(0) == B && chosen->size(1) == k.size(1) && 0 <= q_first && q_first < block &&
                          0 <= k_first && k_first < block && chosen->size(2) * block >= q_first + C &&
                          chosen->size(3) * block >= k_first + S),
              "blocks are chosen for all queries of all KV heads among all keys, without first keys");
  TORCH_CHECK(H % LANES == 0 && V % LANES == 0, "head dims ", H, " and ", V, " are no multiples of ", LANES);
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "dtypes differ");
  const auto beside = [](const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); };
  at::Tensor out = at::empty({B, C, N, V}, q.options()).transpose(1, 2);
  at::Tensor lse = at::empty({B, N, C}, q.options().dtype(at::kFloat));
  const int64_t* first = firsts ? firsts->const_data_ptr<int64_t>() : nullptr;
  const at::Tensor queries = beside(q), keys = beside(k), values = beside(v);
  const auto all = [&](auto number) {
    attend_all<decltype(number)>(queries, keys, values, out, lse, causal, scaling, first, k_start, chosen, block, q_first,
                                 k_first);
  };
  if (q.scalar_type() == at::kFloat) all(float{});
  else if (q.scalar_type() == at::kBFloat16) all(BFloat16{});
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
      "attend(Tensor q, Tensor k, Tensor v, bool causal, float scaling, Tensor? firsts=None, int k_start=0,"
      " Tensor? chosen=None, int block=0, int q_first=0, int k_first=0) -> (Tensor, Tensor)");
  library.def(
      "attend_sequences(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor used, float scaling) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(runahead, CPU, library) {
  library.impl(
      "attend", static_cast<std::tuple<at::Tensor, at::Tensor> (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                                   bool, double, const std::optional<at::Tensor>&,
                                                                   int64_t, const std::optional<at::Tensor>&, int64_t,
                                                                   int64_t, int64_t)>(attend));
  library.impl("attend_sequences", attend_sequences);
}
