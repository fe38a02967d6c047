// Products of linear layers with weights in 8 bits, of float32 or bfloat16 tensors, as torch.ops.runahead.linear_int8.
//
// Legend: R rows, I input features, O output features, G = ceil(I / 64) groups of a row.
//
// A weight is a code from -128 to 127 times the scale of its output feature. The numbers of a row are codes, too, from -127
// to 127, times the scale of 64 of them: an outlier costs accuracy in its own group alone. They are multiplied as
// unsigned bytes, 128 larger, by which processors multiply several at a time; what that adds to a sum is 128 times that of
// the weights. Sums of a group are exact integers; groups are added in float32, in order. So the result for a row depends
// on nothing but the row.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "vectors.h"
#include "written.h"

namespace {

constexpr int GROUP = 64;             // numbers of a row with one scale
constexpr int QUAD = 4;               // numbers that are multiplied and added in one lane
constexpr int BLOCK = 32;             // output features whose weights lie together: quad by quad, in each one by one
constexpr int VECS = BLOCK / LANES;   // vectors of a block's sums
constexpr int TILE = VECS == 2 ? 6 : 2;  // rows that read weights together: their sums lie in registers
constexpr int64_t PART_ROWS = 96;     // of one thread's work
constexpr int64_t MOST_ROWS = 5 * PART_ROWS;  // whose codes are in memory at a time
constexpr int64_t SMALL = 1 << 14;    // up to so many numbers are turned into codes by one thread

typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t Shorts __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

inline Vec to_float(Ints x) { return __builtin_convertvector(x, Vec); }

// Adds to each lane the products of four codes of a row, as unsigned bytes, with four codes of weights.
inline Ints dot(Ints sum, Ints row, Ints weights) {
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row, (__m512i)weights);
#elif !defined(__AVX512BW__) && defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)row, (__m256i)weights);
#elif defined(__AVX512BW__)  // products of bytes are added in pairs of 16 bits, so the row's are signed and at most 127;
                             // weights give them their sign, since -128 has no opposite
  const __m512i codes = _mm512_xor_si512((__m512i)row, _mm512_set1_epi8(-128));
  const __mmask64 negative = _mm512_movepi8_mask((__m512i)weights);
  const __m512i turned = _mm512_mask_sub_epi8(codes, negative, _mm512_setzero_si512(), codes);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)weights), turned);
  return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
  const __m256i codes = _mm256_xor_si256((__m256i)row, _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), _mm256_sign_epi8(codes, (__m256i)weights));
  return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

// What a sum begins with, given the sums of the weights: less what the rows' codes are too large by, if `dot` takes them so.
inline Ints beginning(const int16_t* sums) {
#if (defined(__AVX512BW__) && defined(__AVX512VNNI__)) || (!defined(__AVX512BW__) && defined(__AVXVNNI__))
  return __builtin_convertvector(*reinterpret_cast<const Shorts*>(sums), Ints) * -128;
#else
  return Ints{};
#endif
}

struct Weights {
  const int8_t* codes;   // (blocks, quads, BLOCK, QUAD)
  const int16_t* sums;   // (blocks, G, BLOCK), of a group's codes
  const float *scales, *bias;  // (O); no bias: null
  int64_t I, O, quads, groups;
  int64_t blocks() const { return (O + BLOCK - 1) / BLOCK; }
};

// The rows of a tile as unsigned codes (quads, COUNT, QUAD), filled up with zeros, and their scales (G, COUNT).
struct Rows {
  uint8_t* codes;
  float* scales;
};

// Makes one of the COUNT rows of a tile, which begins at `to`.
template <typename T>
void encode_row(const T* from, const Weights& of, int64_t row, int64_t count_rows, const Rows& to) {
  float x[GROUP];
  for (int64_t g = 0; g < of.groups; ++g) {
    const int64_t first = g * GROUP, count = std::min<int64_t>(GROUP, of.I - first);
    Vec most{}, wrong{};
    if (count < GROUP) std::fill(x, x + GROUP, 0.f);
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(from[first + i]);
    for (int i = 0; i < GROUP; i += LANES) {
      const Vec given = load(x + i), size = given < 0.f ? -given : given;
      most = larger(most, size);
      wrong += given * 0.f;  // NaN for what is no finite number
    }
    float largest = 0;
    for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]);
    const bool is_zero = largest < 1e-30f;  // 127 / largest has to be a number
    to.scales[g * count_rows + row] = (is_zero ? 0.f : largest / 127.f) + sum(wrong);
    const Vec factor = all(is_zero ? 0.f : 127.f / largest);
    const int64_t first_quad = first / QUAD, there = std::min<int64_t>(GROUP / QUAD, of.quads - first_quad);
    uint8_t found[GROUP];
    for (int i = 0; i < GROUP; i += LANES) {
      const Vec shifted = load(x + i) * factor + 12582912.f;  // 1.5 * 2^23: the last bits are those of the rounded number
      const Ints code = (((Ints)shifted & 0x3FFFFF) + 128) & 0xFF;
      *reinterpret_cast<Bytes*>(found + i) = __builtin_convertvector(code, Bytes);
    }
    for (int64_t q = 0; q < there; ++q)
      std::memcpy(to.codes + ((first_quad + q) * count_rows + row) * QUAD, found + q * QUAD, QUAD);
  }
}

// Products (COUNT, BLOCK) of rows with the weights of a block, without the weights' scales.
template <int COUNT>
[[gnu::always_inline]] inline void multiply(const Rows& rows, const Weights& of, const int8_t* codes, const int16_t* sums,
                     Vec (&total)[COUNT][VECS]) {
  for (auto& row : total)
    for (auto& vec : row) vec = Vec{};
  for (int64_t g = 0; g < of.groups; ++g) {
    Ints sum[COUNT][VECS];
    for (int v = 0; v < VECS; ++v) {
      const Ints begin = beginning(sums + g * BLOCK + v * LANES);
      for (int r = 0; r < COUNT; ++r) sum[r][v] = begin;
    }
    const int64_t last = std::min<int64_t>(of.quads, (g + 1) * (GROUP / QUAD));
    for (int64_t q = g * (GROUP / QUAD); q < last; ++q) {
      Ints weights[VECS];
      for (int v = 0; v < VECS; ++v) {
        Ints of_vec = *reinterpret_cast<const Ints*>(codes + (q * BLOCK + v * LANES) * QUAD);
        if (COUNT > 1) asm("" : "+v"(of_vec));  // read once, not for each row
        weights[v] = of_vec;
      }
      for (int r = 0; r < COUNT; ++r) {
        int32_t four;
        std::memcpy(&four, rows.codes + (q * COUNT + r) * QUAD, QUAD);
        const Ints row = Ints{} + four;
        for (int v = 0; v < VECS; ++v) sum[r][v] = dot(sum[r][v], row, weights[v]);
      }
    }
    for (int r = 0; r < COUNT; ++r)
      for (int v = 0; v < VECS; ++v) total[r][v] += rows.scales[g * COUNT + r] * to_float(sum[r][v]);
  }
}

// Products of some rows, at most TILE, with the weights of a block, into (R, O).
template <typename T, int COUNT = TILE>
void write_tile(int64_t count, const Rows& rows, const Weights& of, int64_t block, T* out) {
  if constexpr (COUNT > 1)
    if (count < COUNT) return write_tile<T, COUNT - 1>(count, rows, of, block, out);
  Vec total[COUNT][VECS];
  multiply<COUNT>(rows, of, of.codes + block * of.quads * BLOCK * QUAD, of.sums + block * of.groups * BLOCK, total);
  const int64_t first = block * BLOCK, there = std::min<int64_t>(BLOCK, of.O - first);
  for (int r = 0; r < COUNT; ++r) {
    float found[BLOCK];
    for (int v = 0; v < VECS; ++v) store(found + v * LANES, total[r][v]);
    T* to = out + r * of.O + first;
    for (int64_t o = 0; o < there; ++o)
      to[o] = static_cast<T>(found[o] * of.scales[first + o] + (of.bias ? of.bias[first + o] : 0.f));
  }
}

template <typename T>
void multiply_all(const T* x, int64_t num_rows, const Weights& of, T* out) {
  static thread_local std::vector<uint8_t> codes;
  static thread_local std::vector<float> scales;
  const int64_t most = std::min(num_rows, MOST_ROWS), stride = of.quads * QUAD;
  if (static_cast<int64_t>(codes.size()) < most * stride) codes.resize(most * stride);
  if (static_cast<int64_t>(scales.size()) < most * of.groups) scales.resize(most * of.groups);
  const auto tile = [&, codes = codes.data(), scales = scales.data()](int64_t row) {  // of this thread, also in the others
    return Rows{codes + row * stride, scales + row * of.groups};
  };
  for (int64_t start = 0; start < num_rows; start += MOST_ROWS) {
    const int64_t rows = std::min(MOST_ROWS, num_rows - start);
    const auto encode = [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const int64_t begin = r / TILE * TILE;
        encode_row(x + (start + r) * of.I, of, r - begin, std::min<int64_t>(TILE, rows - begin), tile(begin));
      }
    };
    if (rows * of.I <= SMALL) encode(0, rows);
    else at::parallel_for(0, rows, 1, encode);
    const int64_t parts = (rows + PART_ROWS - 1) / PART_ROWS;
    // Weights of blocks after one another lie beside each other in memory: a thread reads several.
    const int64_t together = std::max<int64_t>(1, of.blocks() / (8 * at::get_num_threads()));
    const int64_t shares = (of.blocks() + together - 1) / together;
    share_out(parts * shares, [&](int64_t i) {
      const int64_t first_row = i / shares * PART_ROWS, last_row = std::min(rows, first_row + PART_ROWS);
      const int64_t first = i % shares * together, last = std::min(of.blocks(), first + together);
      for (int64_t block = first; block < last; ++block)
        for (int64_t r = first_row; r < last_row; r += TILE)
          write_tile(last_row - r, tile(r), of, block, out + (start + r) * of.O);
    });
  }
}

at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& sums, const at::Tensor& scales,
                       const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.dim() > 0, "dims of other tensors");
  auto sizes = x.sizes().vec();
  sizes.back() = scales.numel();
  at::Tensor out = at::empty(sizes, x.options());
  linear_int8_into(x.contiguous(), codes, sums, scales, bias, out)();
  return out;
}

}  // namespace

Work linear_int8_into(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& sums, const at::Tensor& scales,
                      const std::optional<at::Tensor>& bias, const at::Tensor& out) {
  TORCH_CHECK(x.dim() > 0 && codes.dim() == 4 && sums.dim() == 3 && scales.dim() == 1, "dims of other tensors");
  const int64_t I = x.size(-1), O = scales.numel(), blocks = (O + BLOCK - 1) / BLOCK;
  const int64_t quads = (I + QUAD - 1) / QUAD, groups = (I + GROUP - 1) / GROUP;
  TORCH_CHECK(codes.sizes() == at::IntArrayRef({blocks, quads, BLOCK, QUAD}) &&
                  sums.sizes() == at::IntArrayRef({blocks, groups, BLOCK}) && (!bias || bias->numel() == O),
              "codes ", codes.sizes(), " and sums ", sums.sizes(), " are not of ", I, " input and ", O, " output features");
  TORCH_CHECK(codes.scalar_type() == at::kChar && sums.scalar_type() == at::kShort &&
                  scales.scalar_type() == at::kFloat && (!bias || bias->scalar_type() == at::kFloat),
              "codes in int8, sums in int16, scales and bias in float32");
  TORCH_CHECK(codes.is_contiguous() && sums.is_contiguous() && scales.is_contiguous() && (!bias || bias->is_contiguous()),
              "weights are not contiguous");
  const int64_t num_rows = I ? x.numel() / I : 0;
  const Weights of{codes.const_data_ptr<int8_t>(), sums.const_data_ptr<int16_t>(), scales.const_data_ptr<float>(),
                   bias ? bias->const_data_ptr<float>() : nullptr, I, O, quads, groups};
  const auto work = [&](auto type) -> Work {
    using T = decltype(type);
    return [from = x.const_data_ptr<T>(), to = out.mutable_data_ptr<T>(), num_rows, of] {
      multiply_all(from, num_rows, of, to);
    };
  };
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "products of ", x.scalar_type(),
              " with weights in 8 bits are not to be had");
  return x.scalar_type() == at::kFloat ? work(float{}) : work(BFloat16{});
}

TORCH_LIBRARY_FRAGMENT(runahead, library) {
  library.def("linear_int8(Tensor x, Tensor codes, Tensor sums, Tensor scales, Tensor? bias=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(runahead, CPU, library) { library.impl("linear_int8", linear_int8); }
