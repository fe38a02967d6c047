// Products of a few rows with the weight of a linear layer, at the rate at which the weight is read.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {

constexpr int64_t MOST_PRODUCT_ROWS = 32;   // more are not bound by memory
constexpr int TOGETHER_WEIGHTS = 4;         // rows of a weight that are read at a time
constexpr int TOGETHER_ROWS = LANES / 4;    // rows that are multiplied by them: 16 accumulators of 32 registers, or 8 of 16
constexpr int64_t BLOCK_BYTES = 128 << 10;  // of a weight, which are one piece of work

inline void put(float* to, float x) { *to = x; }
inline void put(BFloat16* to, float x) { *to = x; }

// out[m][r] of R rows of a weight and M rows of numbers. Each is summed in the same order beside any others.
template <int R, int M, typename T>
inline void multiply(const float* x, const T* w, int64_t stride, int64_t K, float (*out)[R]) {
  Vec found[M][R] = {};
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) {
    Vec of_row[M];
    for (int m = 0; m < M; ++m) of_row[m] = load(x + m * K + k);
    for (int r = 0; r < R; ++r) {
      if constexpr (M > 1) __builtin_prefetch(w + (R + r) * stride + k);  // of the rows that come next
      const Vec of_weight = load(w + r * stride + k);
      for (int m = 0; m < M; ++m) found[m][r] += of_weight * of_row[m];
    }
  }
  if constexpr (M * R == LANES) {  // all sums at once, each of the same pairs as alone
    store(out[0], sums(found[0]));
  } else {
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < R; ++r) out[m][r] = sum(found[m][r]);
  }
  for (; k < K; ++k)
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < R; ++r) out[m][r] += x[m * K + k] * static_cast<float>(w[r * stride + k]);
}

// Rows (M, K) times a weight (N, K), plus a bias (N) unless it is null: (M, N).
template <typename T>
struct Product {
  const float* x;
  const T *w, *bias;
  T* out;
  int64_t M, N, K, stride;

  template <int R, int ROWS = TOGETHER_ROWS>
  void some(int64_t n, int64_t m, int64_t rows) const {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return some<R, ROWS - 1>(n, m, rows);
    float found[ROWS][R];
    multiply<R, ROWS>(x + m * K, w + n * stride, stride, K, found);
    for (int i = 0; i < ROWS; ++i)
      for (int r = 0; r < R; ++r) put(out + (m + i) * N + n + r, found[i][r] + (bias ? static_cast<float>(bias[n + r]) : 0.f));
  }

  void all() const {
    const int64_t fits = BLOCK_BYTES / (K * sizeof(T)), block = std::max<int64_t>(1, fits / 4) * 4;
    share_out((N + block - 1) / block, [&](int64_t i) {
      int64_t n = i * block;
      const int64_t end = std::min(N, n + block);
      for (; n + TOGETHER_WEIGHTS <= end; n += TOGETHER_WEIGHTS)
        for (int64_t m = 0; m < M; m += TOGETHER_ROWS) some<TOGETHER_WEIGHTS>(n, m, M - m);
      for (; n < end; ++n)
        for (int64_t m = 0; m < M; m += TOGETHER_ROWS) some<1>(n, m, M - m);
    });
  }
};

}  // namespace
