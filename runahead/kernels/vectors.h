// Vectors of the kernels, and how threads share work. All is in GCC's and Clang's vectors, with intrinsics where these
// have no operator.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace {

#ifdef __AVX512BW__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

using BFloat16 = c10::BFloat16;

inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
inline Vec load(const BFloat16* from) {
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Ints) << 16);
}
inline void store(float* to, Vec x) { *reinterpret_cast<Vec*>(to) = x; }
inline void store(BFloat16* to, Vec x) {
  for (int i = 0; i < LANES; ++i) to[i] = static_cast<BFloat16>(x[i]);
}
inline Vec all(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) {  // b if one is a NaN
#ifdef __AVX512BW__
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

// 2^x for x < 127, within 2e-7 of it; 0 below 2^-127. A NaN stays one.
inline Vec exp2(Vec x) {
  x = larger(all(-127.f), x);
  const Vec shifted = x + 12583039.f;  // 1.5 * 2^23 + 127: the last bits are those of the rounded number's exponent
  const Vec f = x - (shifted - 12583039.f);
  Vec power = all(1.3264726e-3f);
  for (float factor : {9.6715130e-3f, 5.5507337e-2f, 2.4022242e-1f, 6.9314698e-1f, 1.f}) power = power * f + factor;
  return power * (Vec)((Ints)shifted << 23);
}

inline Vec magnitude(Vec x) { return x < 0.f ? -x : x; }
inline Vec sigmoid(Vec x) {  // of either sign without overflow
  const Vec power = exp2(magnitude(x) * -1.44269504088896341f);
  return (x < 0.f ? power : all(1.f)) / (1.f + power);
}
inline Vec tanh(Vec x) {
  const Vec power = exp2(magnitude(x) * -2.88539008177792681f), found = (1.f - power) / (1.f + power);
  return x < 0.f ? -found : found;
}
inline Vec gelu_tanh(Vec x) { return 0.5f * x * (1.f + tanh(0.797884560802865356f * (x + 0.044715f * x * x * x))); }

inline Ints numbered() {
  Ints found;
  for (int i = 0; i < LANES; ++i) found[i] = i;
  return found;
}

inline bool any(Ints x) {
#ifdef __AVX512BW__
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#else
  return _mm256_movemask_ps((__m256)x) != 0;
#endif
}

// Lane i of it: lane which[i] of a, then b.
inline Vec shuffled(Vec a, Vec b, Ints which) {
#ifdef __clang__
  Vec found;
  for (int i = 0; i < LANES; ++i) found[i] = which[i] < LANES ? a[which[i]] : b[which[i] - LANES];
  return found;
#else
  return __builtin_shuffle(a, b, which);
#endif
}

// Lane i of it: the sum of two lanes of a, or of b where bit STEP of i is set.
template <int STEP>
inline Vec fold(Vec a, Vec b) {
  const Ints lane = numbered(), source = (lane & STEP) != 0 ? Ints{} + LANES : Ints{};
  return shuffled(a, b, lane + source) + shuffled(a, b, (lane ^ STEP) + source);
}

// Lane i of it: the sum of the lanes of x[i].
template <int STEP = LANES / 2>
inline Vec sums(Vec* x) {
  for (int i = 0; i < STEP; ++i) x[i] = fold<STEP>(x[i], x[i + STEP]);
  if constexpr (STEP > 1) return sums<STEP / 2>(x);
  return x[0];
}

template <int STEP = LANES / 2>
inline float sum(Vec x) {
  x = fold<STEP>(x, x);
  if constexpr (STEP > 1) return sum<STEP / 2>(x);
  return x[0];
}

// Lane i of x[j] becomes lane j of x[i].
template <int STEP = LANES / 2>
inline void transpose(Vec* x) {
  const Ints lane = numbered(), upper = (lane & STEP) != 0;
  for (int i = 0; i < LANES; ++i)
    if (!(i & STEP)) {
      const Vec a = x[i], b = x[i + STEP];
      x[i] = shuffled(a, b, upper ? lane - STEP + LANES : lane);
      x[i + STEP] = shuffled(a, b, upper ? lane + LANES : lane + STEP);
    }
  if constexpr (STEP > 1) transpose<STEP / 2>(x);
}

// Memory of a thread, which it keeps.
inline float* scratch(size_t size) {
  static thread_local std::vector<float> memory;
  if (memory.size() < size + LANES) memory.resize(size + LANES);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (-address % (LANES * 4)) / 4;
}

// Call work(0) .. work(count - 1) on all threads, each by whichever is free.
template <typename Work>
void share_out(int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next++) < count;) work(i);
  });
}

}  // namespace
