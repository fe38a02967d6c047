// Products of a few rows with the weight of a linear layer, at the rate at which the weight is read.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {

constexpr int64_t MOST_PRODUCT_ROWS = 32;   // more are not bound by memory
constexpr int64_t BLOCK_BYTES = 128 << 10;  // of a weight, which are one piece of work
constexpr int64_t BLOCK_ROWS = 12;          // of a weight, of which a piece has a multiple, if there are several rows

// Rows of numbers that are multiplied at a time by rows of a weight. The more of these, the more often numbers are used
// that were loaded, as far as registers last: 24 accumulators of 32, or 8 of 16.
constexpr bool IS_WIDE = LANES == 16;
constexpr int MOST_TOGETHER = IS_WIDE ? 8 : 2;

// How far ahead of more than one row a weight is fetched, in bytes: what is computed meanwhile takes longer with more.
constexpr int64_t ahead_bytes(int64_t rows) { return rows == 2 ? 4608 : 16384; }

inline void put(float* to, float x) { *to = x; }
inline void put(BFloat16* to, float x) { *to = x; }

// out[m][r] of R rows of a weight and M rows of numbers, while as much of the weight is fetched from `ahead` on where it
// FETCHES. Each is summed in the same order beside any others.
template <int R, int M, bool FETCHES, typename T>
inline void multiply(const float* x, const T* w, int64_t stride, int64_t K, const T* ahead, float (*out)[R]) {
  Vec found[M * R] = {};
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) {
    Vec of_weight[R];
    for (int r = 0; r < R; ++r) {
      if constexpr (FETCHES) __builtin_prefetch(ahead + k * R + r * LANES);
      of_weight[r] = load(w + r * stride + k);
    }
    for (int m = 0; m < M; ++m) {
      const Vec of_row = load(x + m * K + k);
      for (int r = 0; r < R; ++r) found[m * R + r] += of_weight[r] * of_row;
    }
  }
  int i = 0;
  for (; i + LANES <= M * R; i += LANES) store(out[0] + i, sums(found + i));  // each of the same pairs as alone
  for (; i < M * R; ++i) out[0][i] = sum(found[i]);
  for (; k < K; ++k)
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < R; ++r) out[m][r] += x[m * K + k] * static_cast<float>(w[r * stride + k]);
}

// The same of one row of numbers.
template <int R, typename T>
inline void multiply_one(const float* x, const T* w, int64_t stride, int64_t K, float* out) {
  Vec found[1][R] = {};
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) {
    const Vec of_row = load(x + k);
    for (int r = 0; r < R; ++r) {
      const Vec of_weight = load(w + r * stride + k);
      found[0][r] += of_weight * of_row;
    }
  }
  for (int r = 0; r < R; ++r) out[r] = sum(found[0][r]);
  for (; k < K; ++k)
    for (int r = 0; r < R; ++r) out[r] += x[k] * static_cast<float>(w[r * stride + k]);
}

// Rows (M, K) times a weight (N, K), plus a bias (N) unless it is null: (M, N).
template <typename T>
struct Product {
  const float* x;
  const T *w, *bias;
  T* out;
  int64_t M, N, K, stride;

  template <int R, bool FETCHES, int ROWS>
  void some(int64_t n, int64_t m, int64_t rows) const {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return some<R, FETCHES, ROWS - 1>(n, m, rows);
    float found[ROWS][R];
    const T* from = w + n * stride;
    multiply<R, ROWS, FETCHES>(x + m * K, from, stride, K, from + ahead_bytes(M) / sizeof(T), found);
    for (int i = 0; i < ROWS; ++i)
      for (int r = 0; r < R; ++r) put(out + (m + i) * N + n + r, found[i][r] + (bias ? static_cast<float>(bias[n + r]) : 0.f));
  }

  template <int R>
  void one(int64_t n) const {
    float found[R];
    multiply_one<R>(x, w + n * stride, stride, K, found);
    for (int r = 0; r < R; ++r) put(out + n + r, found[r] + (bias ? static_cast<float>(bias[n + r]) : 0.f));
  }

  // One row of numbers. Nothing is fetched ahead, which the processor does; apart from others, as the compiler makes a
  // slower loop of both in one function.
  __attribute__((noinline)) void all_of_one() const {
    const int64_t fits = BLOCK_BYTES / (K * sizeof(T)), block = std::max<int64_t>(1, fits / 4) * 4;
    share_out((N + block - 1) / block, [&](int64_t i) {
      int64_t n = i * block;
      const int64_t end = std::min(N, n + block);
      for (; n + 4 <= end; n += 4) one<4>(n);
      for (; n < end; ++n) one<1>(n);
    });
  }

  // The rows [n, end) of a weight, R at a time and MOST rows of numbers; returns the first of those that are left.
  template <int R, int MOST>
  int64_t some_of_weight(int64_t n, int64_t end) const {
    for (; n + R <= end; n += R) {
      some<R, true, MOST>(n, 0, M);
      for (int64_t m = MOST; m < M; m += MOST) some<R, false, MOST>(n, m, M - m);
    }
    return n;
  }

  void all() const {
    if (M == 1) return all_of_one();
    const int64_t fits = BLOCK_BYTES / (K * sizeof(T)), block = std::max<int64_t>(1, fits / BLOCK_ROWS) * BLOCK_ROWS;
    share_out((N + block - 1) / block, [&](int64_t i) {
      int64_t n = i * block;
      const int64_t end = std::min(N, n + block);
      if (M > 2 && M <= 4) n = some_of_weight<IS_WIDE ? 6 : 4, IS_WIDE ? 4 : 2>(n, end);
      else if (M > 4) n = some_of_weight<IS_WIDE ? 3 : 4, MOST_TOGETHER>(n, end);
      some_of_weight<1, MOST_TOGETHER>(n, end);  // of two rows all, which are read in their order
    });
  }
};

}  // namespace
