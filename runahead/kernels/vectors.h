// Vectors of the kernels, and how threads share work. All is in GCC's and Clang's vectors of any processor, without
// intrinsics.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace {

#ifdef __AVX512F__
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
inline Vec all(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// 2^x for x <= 0, within 2e-7 of it; 0 below 2^-126. A NaN stays one.
inline Vec exp2(Vec x) {
  const Vec shifted = x + 12582912.f;  // 1.5 * 2^23: the last bits are those of the rounded number
  const Vec f = x - (shifted - 12582912.f);
  Vec power = all(1.5461445e-4f);
  for (float factor : {1.3400428e-3f, 9.6180567e-3f, 5.5503272e-2f, 2.4022651e-1f, 6.9314721e-1f, 1.f})
    power = power * f + factor;
  const Vec found = (Vec)((Ints)power + ((Ints)shifted << 23));
  return x < -126.f ? Vec{} : x == x ? found : x;  // a NaN's low bits would be added to its power
}

inline Ints numbered() {
  Ints found;
  for (int i = 0; i < LANES; ++i) found[i] = i;
  return found;
}

// Lane i of it: the sum of two lanes of a, or of b where bit STEP of i is set.
template <int STEP>
inline Vec fold(Vec a, Vec b) {
  Vec own, other;
#ifdef __clang__
  for (int i = 0; i < LANES; ++i) own[i] = (i & STEP ? b : a)[i], other[i] = (i & STEP ? b : a)[i ^ STEP];
#else
  const Ints lane = numbered(), source = (lane & STEP) != 0 ? Ints{} + LANES : Ints{};
  own = __builtin_shuffle(a, b, lane + source);
  other = __builtin_shuffle(a, b, (lane ^ STEP) + source);
#endif
  return own + other;
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
