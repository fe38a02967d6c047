// A decoding step on a CPU as a program: the operators that one step has called, which are called again on the same
// memory, most of them without torch's dispatcher.
//
// What a step computes has a place in memory of the program, which it shares with what is needed at another time; views
// need no work, as in a CUDA graph. What is replayed is what changes memory: from inputs whose numbers may be others in
// each step. Operators in `OWN` are computed here, if their tensors are of float32 or bfloat16 in a plain layout; all else
// by the dispatcher. Results do not depend on the number of threads.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "attention.h"
#include "products.h"
#include "vectors.h"
#include "written.h"

namespace {

using at::Tensor;
using c10::IValue;
using Values = std::vector<IValue>;
using Tensors = std::vector<Tensor>;

constexpr auto KEY = c10::DispatchKey::TESTING_ONLY_GenericMode;  // of no use to anybody else in a process

constexpr int64_t SHARED_NUMBERS = 32768;  // from so many on, threads share an operator that is no product

// ---- Operators of our own ----

bool is_plain(const Tensor& x) {
  return x.defined() && x.device().is_cpu() && x.layout() == at::kStrided && !x.is_neg() &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}

bool is_half(const Tensor& x) { return x.scalar_type() == at::kBFloat16; }

// Numbers of one tensor as an operator goes over those of its result.
struct Operand {
  char* data;
  bool half;
  std::vector<int64_t> strides;  // in numbers, of the result's dims
  Tensor held;

  float get(int64_t at) const {
    return half ? static_cast<float>(reinterpret_cast<const BFloat16*>(data)[at]) : reinterpret_cast<const float*>(data)[at];
  }
  void set(int64_t at, float x) const {
    if (half) reinterpret_cast<BFloat16*>(data)[at] = x;
    else reinterpret_cast<float*>(data)[at] = x;
  }
};

// A loop over the numbers of a result and of N tensors, in as few dims as their strides allow.
template <int N>
struct Loop {
  Operand out;
  std::array<Operand, N> in;
  std::vector<int64_t> sizes;
  int64_t rows = 1, length = 1;
  bool is_fast = true;  // float32, and the numbers of a row lie beside each other, or are one

  static std::optional<Loop> of(const Tensor& out, const std::array<Tensor, N>& in) {
    if (!is_plain(out)) return std::nullopt;
    std::array<Tensor, N> wide;
    for (int i = 0; i < N; ++i) {
      if (!is_plain(in[i]) || in[i].dim() > out.dim()) return std::nullopt;
      wide[i] = in[i].expand(out.sizes());
    }
    std::vector<int64_t> order;
    for (int64_t d = 0; d < out.dim(); ++d)
      if (out.size(d) != 1) order.push_back(d);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return out.stride(a) > out.stride(b); });
    Loop loop;
    const auto operand = [&](const Tensor& x) {
      return Operand{static_cast<char*>(const_cast<void*>(x.const_data_ptr())), is_half(x), {}, x};
    };
    loop.out = operand(out);
    for (int i = 0; i < N; ++i) loop.in[i] = operand(wide[i]);
    for (int64_t d : order) {
      const int64_t size = out.size(d);
      bool joins = !loop.sizes.empty() && loop.out.strides.back() == out.stride(d) * size;
      for (int i = 0; joins && i < N; ++i) joins = loop.in[i].strides.back() == wide[i].stride(d) * size;
      if (joins) {
        loop.sizes.back() *= size;
        loop.out.strides.back() = out.stride(d);
        for (int i = 0; i < N; ++i) loop.in[i].strides.back() = wide[i].stride(d);
      } else {
        loop.sizes.push_back(size);
        loop.out.strides.push_back(out.stride(d));
        for (int i = 0; i < N; ++i) loop.in[i].strides.push_back(wide[i].stride(d));
      }
    }
    if (loop.sizes.empty()) {
      loop.sizes = {1};
      loop.out.strides = {1};
      for (int i = 0; i < N; ++i) loop.in[i].strides = {1};
    }
    loop.length = loop.sizes.back();
    for (size_t d = 0; d + 1 < loop.sizes.size(); ++d) loop.rows *= loop.sizes[d];
    loop.is_fast = !loop.out.half && loop.out.strides.back() == 1;
    for (const Operand& each : loop.in) loop.is_fast &= !each.half && (each.strides.back() == 1 || each.strides.back() == 0);
    return loop;
  }

  template <typename F>
  void row(int64_t number, const F& f) const {
    int64_t to = 0;
    std::array<int64_t, N> from{};
    for (int64_t d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d) {
      const int64_t at = number % sizes[d];
      number /= sizes[d];
      to += at * out.strides[d];
      for (int i = 0; i < N; ++i) from[i] += at * in[i].strides[d];
    }
    int64_t n = 0;
    std::array<Vec, N> x;
    if (is_fast)
      for (; n + LANES <= length; n += LANES) {
        for (int i = 0; i < N; ++i) {
          const float* data = reinterpret_cast<const float*>(in[i].data) + from[i];
          x[i] = in[i].strides.back() ? load(data + n) : ::all(*data);
        }
        store(reinterpret_cast<float*>(out.data) + to + n, f(x));
      }
    for (; n < length; n += LANES) {
      const int64_t count = std::min<int64_t>(LANES, length - n);
      for (int i = 0; i < N; ++i) {
        float numbers[LANES] = {};
        for (int64_t j = 0; j < count; ++j) numbers[j] = in[i].get(from[i] + (n + j) * in[i].strides.back());
        x[i] = load(numbers);
      }
      const Vec found = f(x);
      for (int64_t j = 0; j < count; ++j) out.set(to + (n + j) * out.strides.back(), found[j]);
    }
  }

  template <typename F>
  void run(const F& f) const {
    if (rows * length < SHARED_NUMBERS || rows == 1) {
      for (int64_t i = 0; i < rows; ++i) row(i, f);
      return;
    }
    at::parallel_for(0, rows, 1 + SHARED_NUMBERS / 4 / length, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) row(i, f);
    });
  }
};

template <int N, typename F>
Work each(const Tensor& out, const std::array<Tensor, N>& in, F f) {
  auto loop = Loop<N>::of(out, in);
  if (!loop) return nullptr;
  return [loop = std::move(*loop), f] { loop.run(f); };
}

inline Vec square_root(Vec x) {
  for (int i = 0; i < LANES; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

// A number that an operator of two tensors is given in place of a tensor, as a tensor of the other's dtype.
Tensor as_float(const Tensor& x) {
  if (!x.defined() || is_plain(x)) return x;
  return x.dim() == 0 && x.unsafeGetTensorImpl()->is_wrapped_number() ? x.to(at::kFloat) : x;
}

using Build = Work (*)(const Values& args, const Tensors& outs);

template <typename F>
Work binary(const Values& args, const Tensors& outs, F f) {
  if (!args[1].isTensor()) return nullptr;
  return each<2>(outs[0], {as_float(args[0].toTensor()), as_float(args[1].toTensor())}, f);
}

Work add(const Values& args, const Tensors& outs) {
  const float alpha = args[2].toScalar().toFloat();
  if (alpha == 1) return binary(args, outs, [](const auto& x) { return x[0] + x[1]; });
  return binary(args, outs, [alpha](const auto& x) { return x[0] + alpha * x[1]; });
}
Work sub(const Values& args, const Tensors& outs) {
  const float alpha = args[2].toScalar().toFloat();
  return binary(args, outs, [alpha](const auto& x) { return x[0] - alpha * x[1]; });
}
Work mul(const Values& args, const Tensors& outs) {
  return binary(args, outs, [](const auto& x) { return x[0] * x[1]; });
}
Work div(const Values& args, const Tensors& outs) {
  return binary(args, outs, [](const auto& x) { return x[0] / x[1]; });
}

template <typename F>
Work unary(const Values& args, const Tensors& outs, F f) {
  return each<1>(outs[0], {args[0].toTensor()}, f);
}

Work copy(const Values& args, const Tensors& outs) {
  return unary(args, outs, [](const auto& x) { return x[0]; });
}
Work copy_into(const Values& args, const Tensors& outs) {
  return each<1>(args[0].toTensor(), {args[1].toTensor()}, [](const auto& x) { return x[0]; });
}
Work negative(const Values& args, const Tensors& outs) {
  return unary(args, outs, [](const auto& x) { return -x[0]; });
}
Work silu(const Values& args, const Tensors& outs) {
  return unary(args, outs, [](const auto& x) { return x[0] * sigmoid(x[0]); });
}
Work sigmoids(const Values& args, const Tensors& outs) {
  return unary(args, outs, [](const auto& x) { return sigmoid(x[0]); });
}
Work tanhs(const Values& args, const Tensors& outs) {
  return unary(args, outs, [](const auto& x) { return tanh(x[0]); });
}
Work relu(const Values& args, const Tensors& outs) {
  return unary(args, outs, [](const auto& x) { return x[0] < 0.f ? Vec{} : x[0]; });
}
Work gelu(const Values& args, const Tensors& outs) {
  if (args[1].toStringRef() != "tanh") return nullptr;
  return unary(args, outs, [](const auto& x) { return gelu_tanh(x[0]); });
}
Work inverse_root(const Values& args, const Tensors& outs) {
  return unary(args, outs, [](const auto& x) { return 1.f / square_root(x[0]); });
}
Work power(const Values& args, const Tensors& outs) {
  const double exponent = args[1].toScalar().toDouble();
  if (exponent == 2) return unary(args, outs, [](const auto& x) { return x[0] * x[0]; });
  if (exponent == 3) return unary(args, outs, [](const auto& x) { return x[0] * x[0] * x[0]; });
  return nullptr;
}

Work cat(const Values& args, const Tensors& outs) {
  std::vector<Loop<1>> loops;
  int64_t at = 0, dim = at::maybe_wrap_dim(args[1].toInt(), outs[0].dim());
  for (const Tensor& part : args[0].toTensorVector()) {
    if (part.dim() != outs[0].dim()) return nullptr;
    auto loop = Loop<1>::of(outs[0].narrow(dim, at, part.size(dim)), {part});
    if (!loop) return nullptr;
    at += part.size(dim);
    loops.push_back(std::move(*loop));
  }
  return [loops = std::move(loops)] {
    for (const auto& loop : loops) loop.run([](const auto& x) { return x[0]; });
  };
}

// Rows of the last dim of contiguous tensors.
struct Rows {
  Operand from, to;
  int64_t count, length;

  static std::optional<Rows> of(const Tensor& from, const Tensor& to) {
    if (!is_plain(from) || !is_plain(to) || !from.is_contiguous() || !to.is_contiguous() || from.dim() == 0)
      return std::nullopt;
    const auto operand = [](const Tensor& x) {
      return Operand{static_cast<char*>(const_cast<void*>(x.const_data_ptr())), is_half(x), {}, x};
    };
    const int64_t length = from.size(-1);
    return Rows{operand(from), operand(to), from.numel() / std::max<int64_t>(1, length), length};
  }

  // A row in float32, in memory of the thread if it is not.
  const float* numbers(int64_t row) const {
    if (!from.half) return reinterpret_cast<const float*>(from.data) + row * length;
    float* memory = scratch(length);
    for (int64_t i = 0; i < length; ++i) memory[i] = from.get(row * length + i);
    return memory;
  }
};

template <typename F>
float total(const float* x, int64_t length, F f) {
  Vec found = {};
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES) found += f(load(x + i));
  float rest = 0;
  for (; i < length; ++i) rest += f(::all(x[i]))[0];
  return sum(found) + rest;
}

// x * scale + shift by the row, times a weight, plus a bias.
void write_normed(const Rows& rows, int64_t row, const float* x, float shift, float scale, const float* weight,
                  const float* bias) {
  int64_t i = 0;
  if (!rows.to.half) {
    float* to = reinterpret_cast<float*>(rows.to.data) + row * rows.length;
    for (; i + LANES <= rows.length; i += LANES) {
      Vec found = (load(x + i) - shift) * scale;
      if (weight) found *= load(weight + i);
      if (bias) found += load(bias + i);
      store(to + i, found);
    }
  }
  for (; i < rows.length; ++i) {
    const float found = (x[i] - shift) * scale * (weight ? weight[i] : 1.f);
    rows.to.set(row * rows.length + i, found + (bias ? bias[i] : 0.f));
  }
}

std::optional<Tensor> last_dim_weight(const IValue& given, int64_t length) {
  if (given.isNone()) return Tensor();
  const Tensor& weight = given.toTensor();
  if (!is_plain(weight) || weight.numel() != length || !weight.is_contiguous() || is_half(weight)) return std::nullopt;
  return weight;
}

Work rms_norm(const Values& args, const Tensors& outs) {
  const auto rows = Rows::of(args[0].toTensor(), outs[0]);
  if (!rows || args[1].toIntVector().size() != 1 || args[3].isNone()) return nullptr;
  const auto weight = last_dim_weight(args[2], rows->length);
  if (!weight) return nullptr;
  if (weight->defined() && !rows->from.half && !rows->to.half)
    return rms_norm_into(args[0].toTensor(), *weight, args[3].toDouble(), outs[0]);
  const float* weights = weight->defined() ? weight->const_data_ptr<float>() : nullptr;
  return [rows = *rows, weights, eps = args[3].toDouble()] {
    for (int64_t row = 0; row < rows.count; ++row) {
      const float* x = rows.numbers(row);
      const float mean = total(x, rows.length, [](Vec each) { return each * each; }) / rows.length;
      write_normed(rows, row, x, 0, 1.f / std::sqrt(mean + static_cast<float>(eps)), weights, nullptr);
    }
  };
}

Work layer_norm(const Values& args, const Tensors& outs) {
  const auto rows = Rows::of(args[0].toTensor(), outs[0]);
  if (!rows || args[1].toIntVector().size() != 1) return nullptr;
  const auto weight = last_dim_weight(args[2], rows->length), bias = last_dim_weight(args[3], rows->length);
  if (!weight || !bias) return nullptr;
  const float* weights = weight->defined() ? weight->const_data_ptr<float>() : nullptr;
  const float* biases = bias->defined() ? bias->const_data_ptr<float>() : nullptr;
  return [rows = *rows, weights, biases, eps = args[4].toDouble()] {
    for (int64_t row = 0; row < rows.count; ++row) {
      const float* x = rows.numbers(row);
      const float mean = total(x, rows.length, [](Vec each) { return each; }) / rows.length;
      const float variance =
          total(x, rows.length, [mean](Vec each) { return (each - mean) * (each - mean); }) / rows.length;
      write_normed(rows, row, x, mean, 1.f / std::sqrt(variance + static_cast<float>(eps)), weights, biases);
    }
  };
}

Work mean(const Values& args, const Tensors& outs) {
  const Tensor& x = args[0].toTensor();
  const auto rows = Rows::of(x, outs[0]);
  if (!rows || args[1].isNone() || rows->count != outs[0].numel()) return nullptr;
  const auto dims = args[1].toIntVector();
  if (dims.size() != 1 || at::maybe_wrap_dim(dims[0], x.dim()) != x.dim() - 1) return nullptr;
  return [rows = *rows] {
    for (int64_t row = 0; row < rows.count; ++row)
      rows.to.set(row, total(rows.numbers(row), rows.length, [](Vec each) { return each; }) / rows.length);
  };
}

template <typename T>
Work product_of(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
  const int64_t K = weight.size(1), M = x.numel() / K;
  Product<T> product{nullptr,
                     weight.const_data_ptr<T>(),
                     bias.defined() ? bias.const_data_ptr<T>() : nullptr,
                     out.mutable_data_ptr<T>(),
                     M, weight.size(0), K, weight.stride(0)};
  if constexpr (std::is_same_v<T, float>) {
    product.x = x.const_data_ptr<float>();
    return [product] { product.all(); };
  } else {
    return [product, from = x.const_data_ptr<T>()]() mutable {
      float* memory = scratch(product.M * product.K);
      for (int64_t i = 0; i < product.M * product.K; ++i) memory[i] = static_cast<float>(from[i]);
      product.x = memory;
      product.all();
    };
  }
}

// x (..., K) times a weight (N, K), if both are plain.
Work product(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
  if (!is_plain(x) || !is_plain(weight) || !is_plain(out) || weight.dim() != 2 || weight.size(1) == 0) return nullptr;
  if (weight.stride(1) != 1 || !x.is_contiguous() || !out.is_contiguous()) return nullptr;
  if (x.scalar_type() != weight.scalar_type() || out.scalar_type() != x.scalar_type()) return nullptr;
  if (bias.defined() && (bias.scalar_type() != x.scalar_type() || bias.dim() != 1 || !bias.is_contiguous()))
    return nullptr;
  if (x.numel() / weight.size(1) > MOST_PRODUCT_ROWS) return nullptr;
  return is_half(x) ? product_of<BFloat16>(x, weight, bias, out) : product_of<float>(x, weight, bias, out);
}

Tensor tensor_or_none(const IValue& given) { return given.isNone() ? Tensor() : given.toTensor(); }

Work linear(const Values& args, const Tensors& outs) {
  return product(args[0].toTensor(), args[1].toTensor(), tensor_or_none(args[2]), outs[0]);
}

// Both, one after the other.
Work in_turn(Work first, Work then) {
  if (!first || !then) return nullptr;
  return [first = std::move(first), then = std::move(then)] { first(), then(); };
}

Work linear_of_onednn(const Values& args, const Tensors& outs) {
  const std::string& activation = args[3].toStringRef();
  if (activation == "none") return linear(args, outs);
  const Values found = {outs[0]};
  if (activation == "swish") return in_turn(linear(args, outs), silu(found, outs));
  if (activation == "relu") return in_turn(linear(args, outs), relu(found, outs));
  if (activation == "gelu" && args[5].isString()) return in_turn(linear(args, outs), gelu({outs[0], args[5]}, outs));
  return nullptr;
}
Work linear_times(const Values& args, const Tensors& outs) {
  if (args[4].toStringRef() != "mul") return nullptr;
  return in_turn(linear({args[0], args[2], args[3]}, outs), mul({outs[0], args[1]}, outs));
}
Work times_transposed(const Values& args, const Tensors& outs) {
  return product(args[0].toTensor(), args[1].toTensor().t(), Tensor(), outs[0]);
}
Work times_vector(const Values& args, const Tensors& outs) {
  const Tensor& x = args[1].toTensor();
  return x.is_contiguous() ? product(x, args[0].toTensor(), Tensor(), outs[0]) : nullptr;
}

Work embedding(const Values& args, const Tensors& outs) {
  const Tensor &weight = args[0].toTensor(), &ids = args[1].toTensor(), &out = outs[0];
  if (!weight.is_contiguous() || !out.is_contiguous() || !ids.is_contiguous() || ids.scalar_type() != at::kLong)
    return nullptr;
  const int64_t bytes = weight.size(1) * weight.element_size(), count = ids.numel(), most = weight.size(0);
  const auto* from = static_cast<const char*>(weight.const_data_ptr());
  return [from, to = static_cast<char*>(out.mutable_data_ptr()), id = ids.const_data_ptr<int64_t>(), bytes, count, most] {
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < most, "token id ", id[i], " is not in an embedding of ", most);
      std::memcpy(to + i * bytes, from + id[i] * bytes, bytes);
    }
  };
}

Work index_copy(const Values& args, const Tensors&) {
  const Tensor &to = args[0].toTensor(), &index = args[2].toTensor(), &from = args[3].toTensor();
  if (args[1].toInt() != 0 || !to.is_contiguous() || !from.is_contiguous() || from.dtype() != to.dtype()) return nullptr;
  if (index.scalar_type() != at::kLong || !index.is_contiguous() || to.dim() == 0) return nullptr;
  const int64_t most = to.size(0), bytes = to.stride(0) * to.element_size(), count = index.numel();
  return [to = static_cast<char*>(to.mutable_data_ptr()), from = static_cast<const char*>(from.const_data_ptr()),
          at = index.const_data_ptr<int64_t>(), most, bytes, count] {
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_INDEX(at[i] >= 0 && at[i] < most, "slot ", at[i], " is not among ", most);
      std::memcpy(to + at[i] * bytes, from + i * bytes, bytes);
    }
  };
}

Work attend_sequences(const Values& args, const Tensors& outs) {
  const Tensor& q = args[0].toTensor();
  if (q.stride(2) != 1) return nullptr;
  const Sequences of = sequences(q, args[1].toTensor(), args[2].toTensor(), args[3].toTensor(), args[4].toTensor(),
                                 args[5].toDouble());
  return [of, out = outs[0].mutable_data_ptr(), lse = outs[1].mutable_data_ptr<float>()] { attend(of, out, lse); };
}

// Ours, whose memory is contiguous as they are called; else they make it so.
Work own_rms_norm(const Values& args, const Tensors& outs) {
  const Tensor &x = args[0].toTensor(), &weight = args[1].toTensor();
  if (!x.is_contiguous() || !weight.is_contiguous() || !outs[0].is_contiguous()) return nullptr;
  return rms_norm_into(x, weight, args[2].toDouble(), outs[0]);
}
Work own_rotation(const Values& args, const Tensors& outs) {
  for (const Tensor& out : outs)
    if (!out.transpose(1, 2).is_contiguous()) return nullptr;
  return rotate_into(args[0].toTensor(), args[1].toTensor(), args[2].toTensor(), args[3].toTensor(), outs[0], outs[1]);
}
Work own_linear_int8(const Values& args, const Tensors& outs) {
  const Tensor& x = args[0].toTensor();
  if (!x.is_contiguous() || !outs[0].is_contiguous()) return nullptr;
  return linear_int8_into(x, args[1].toTensor(), args[2].toTensor(), args[3].toTensor(), args[4].toOptional<Tensor>(), outs[0]);
}

// Operators by name; those of torch that are made of others are recorded as one if they are here.
const std::map<std::string, Build> OWN = {
    {"aten::add.Tensor", add},
    {"aten::add_.Tensor", add},
    {"aten::sub.Tensor", sub},
    {"aten::sub_.Tensor", sub},
    {"aten::mul.Tensor", mul},
    {"aten::mul_.Tensor", mul},
    {"aten::div.Tensor", div},
    {"aten::div_.Tensor", div},
    {"aten::neg", negative},
    {"aten::silu", silu},
    {"aten::silu_", silu},
    {"aten::sigmoid", sigmoids},
    {"aten::tanh", tanhs},
    {"aten::relu", relu},
    {"aten::gelu", gelu},
    {"aten::rsqrt", inverse_root},
    {"aten::pow.Tensor_Scalar", power},
    {"aten::clone", copy},
    {"aten::_to_copy", copy},
    {"aten::copy_", copy_into},
    {"aten::cat", cat},
    {"aten::rms_norm", rms_norm},
    {"aten::layer_norm", layer_norm},
    {"aten::mean.dim", mean},
    {"aten::linear", linear},
    {"mkldnn::_linear_pointwise", linear_of_onednn},
    {"mkldnn::_linear_pointwise.binary", linear_times},
    {"aten::mm", times_transposed},
    {"aten::mv", times_vector},
    {"aten::embedding", embedding},
    {"aten::index_copy_", index_copy},
    {"runahead::attend_sequences", attend_sequences},
    {"runahead::rms_norm", own_rms_norm},
    {"runahead::rotate", own_rotation},
    {"runahead::linear_int8", own_linear_int8},
};

// Those of torch's whose results have other last bits here.
const std::set<std::string> ROUNDED_OTHERWISE = {
    "aten::silu",  "aten::silu_",      "aten::sigmoid",   "aten::tanh",  "aten::gelu", "aten::rsqrt", "aten::rms_norm",
    "aten::layer_norm", "aten::mean.dim", "aten::linear", "mkldnn::_linear_pointwise",
    "mkldnn::_linear_pointwise.binary", "aten::mm", "aten::mv"};

// ---- Recording ----

c10::StorageImpl* storage(const Tensor& x) { return x.storage().unsafeGetStorageImpl(); }

template <typename F>
void for_tensors(const IValue& value, const F& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& inner : value.toListRef()) for_tensors(inner, f);
  }
}

template <typename F>
void for_tensors(const Values& values, const F& f) {
  for (const IValue& value : values) for_tensors(value, f);
}

// One operator that changes memory, as it was called.
struct Recorded {
  c10::OperatorHandle op;
  std::string name;
  Values args, outs;
  Tensors changed;  // those of the arguments that it writes
};

struct Recording {
  std::vector<Recorded> calls;
  Tensors lifted;      // made of numbers of the host, as by torch.tensor
  std::string reason;  // why it cannot be replayed

  void refuse(const std::string& why) {
    if (reason.empty()) reason = why;
  }
  void add(const c10::OperatorHandle& op, std::string name, Values args, Values outs);
};

thread_local std::unique_ptr<Recording> recording;

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Whether an operator whose result's shape may depend on numbers takes indices alone, of which it does not.
bool takes_indices(const std::string& name, const Values& args) {
  if (name != "aten::index.Tensor") return false;
  bool found = true;
  for_tensors(args[1], [&](const Tensor& x) { found &= x.scalar_type() != at::kBool && x.scalar_type() != at::kByte; });
  return found;
}

void Recording::add(const c10::OperatorHandle& op, std::string name, Values args, Values outs) {
  const auto& schema = op.schema();
  if (name.rfind("c10d", 0) == 0 || name.rfind("_c10d", 0) == 0) return refuse(name + " asks other ranks");
  bool has_memory = true;
  const auto look = [&](const Tensor& x) { has_memory &= x.has_storage() && !x.unsafeGetTensorImpl()->is_python_dispatch(); };
  for_tensors(args, look);
  for_tensors(outs, look);
  if (!has_memory) return refuse(name + " takes or gives a tensor that is no plain memory (sparse, of oneDNN, a subclass)");
  if (name == "aten::detach_") return;  // torch.tensor calls it
  if (name == "aten::lift_fresh") return for_tensors(outs, [&](const Tensor& x) { lifted.push_back(x); });
  const bool is_number = args.size() == 1 && args[0].isTensor() && args[0].toTensor().unsafeGetTensorImpl()->is_wrapped_number();
  if (is_number && name == "aten::_local_scalar_dense") return;  // of the program's text
  if (op.hasTag(at::Tag::inplace_view)) return refuse(name + " changes the shape of a tensor in place");
  Tensors changed;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) for_tensors(args[i], [&](const Tensor& x) { changed.push_back(x); });
  }
  std::unordered_set<c10::StorageImpl*> given;
  for_tensors(args, [&](const Tensor& x) { given.insert(storage(x)); });
  int64_t views = 0, fresh = 0;
  bool others = false;
  for (const IValue& out : outs) {
    bool is_known = out.isNone();
    if (out.isTensor() && !out.toTensor().defined()) is_known = true;
    for_tensors(out, [&](const Tensor& x) { is_known = true, ++(given.count(storage(x)) ? views : fresh); });
    others |= !is_known;
  }
  if (others) return refuse(name + " asks for a number that the step computes");
  if (op.hasTag(at::Tag::dynamic_output_shape) && !takes_indices(name, args))
    return refuse(name + " gives a shape that depends on numbers that the step computes");
  if (changed.empty()) {
    if (fresh == 0) {
      if (views == 0) refuse(name + " has an effect that is not known");
      return;  // views, of memory that is held where it is made or used
    }
    if (views) return refuse(name + " gives new memory and old");
  } else if (fresh) {
    return refuse(name + " changes memory and gives new");
  }
  calls.push_back({op, std::move(name), std::move(args), std::move(outs), std::move(changed)});
}

bool is_made_of_others(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  for (auto key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional})
    if (op.hasKernelForDispatchKey(key)) return false;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

// A boxed fallback of all operators while a thread records.
void on_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
  std::string name = name_of(op);
  if (is_made_of_others(op) && !OWN.count(name)) return op.redispatchBoxed(below, stack);
  const auto num_args = static_cast<int64_t>(op.schema().arguments().size());
  Values args(stack->end() - num_args, stack->end());
  const size_t before = stack->size() - num_args;
  {
    c10::impl::ExcludeDispatchKeyGuard guard(KEY);
    op.redispatchBoxed(below, stack);
  }
  if (recording) recording->add(op, std::move(name), std::move(args), Values(stack->begin() + before, stack->end()));
}

// ---- Programs ----

using Storages = std::unordered_set<c10::StorageImpl*>;

struct Program {
  std::vector<Recorded> calls;  // holds the memory
  std::vector<size_t> replayed;  // numbers of calls, in order
  std::vector<Work> work;        // of these
  std::vector<std::string> names;  // of these; by the dispatcher if in brackets
  Tensors memory;                  // of a prompt, which can be exchanged
  std::unordered_map<c10::StorageImpl*, size_t> made;  // memory of its own, by the call that makes it
  std::optional<Tensor> result;
  int64_t num_bytes = 0;  // of what calls compute anew
  std::string reason;

  // Whether it rounds numbers to 8 bits: another last bit before may be another code then, one of 127.
  bool rounds_to_codes() const {
    return std::any_of(calls.begin(), calls.end(), [](const Recorded& call) { return call.name == "runahead::linear_int8"; });
  }
};

bool makes_empty(const std::string& name) {
  return name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
}

Work by_dispatcher(const Recorded& call) {
  if (!call.changed.empty())
    return [op = call.op, args = call.args] {
      torch::jit::Stack stack = args;
      op.callBoxed(stack);
    };
  Tensors to;
  for_tensors(call.outs, [&](const Tensor& x) { to.push_back(x); });
  return [op = call.op, args = call.args, to = std::move(to)] {
    torch::jit::Stack stack = args;
    op.callBoxed(stack);
    size_t i = 0;
    for_tensors(stack, [&](const Tensor& x) { to[i++].copy_(x); });
  };
}

// What computes a recorded call again, and its name; with the same bits, if it has to.
std::pair<Work, std::string> work_of(const Recorded& call, bool has_same_bits) {
  Work work;
  Tensors outs;
  for_tensors(call.outs, [&](const Tensor& x) { outs.push_back(x); });
  const auto own = OWN.find(call.name);
  if (own != OWN.end() && !(has_same_bits && ROUNDED_OTHERWISE.count(call.name))) work = own->second(call.args, outs);
  if (!work) return {by_dispatcher(call), "(" + call.name + ")"};
  return {std::move(work), call.name};
}

// Memory that a step makes: from which call to which it is needed, and where it lies in that of the program.
struct Life {
  c10::StorageImpl* of;
  size_t first, last;
  int64_t bytes, at;
};

constexpr int64_t ALIGNED_BYTES = 64;

// Places memory so that what is needed at the same time lies apart; returns how much it is.
int64_t place(std::vector<Life>& lives) {  // in the order in which they begin
  std::map<int64_t, const Life*> taken;
  int64_t size = 0;
  for (Life& life : lives) {
    for (auto other = taken.begin(); other != taken.end();)
      other = other->second->last < life.first ? taken.erase(other) : std::next(other);
    life.at = 0;
    for (const auto& [begin, other] : taken) {
      if (begin - life.at >= life.bytes) break;
      life.at = begin + other->bytes;
    }
    taken.emplace(life.at, &life);
    size = std::max(size, life.at + life.bytes);
  }
  return size;
}

Tensor tensor_in(const c10::Storage& memory, const Tensor& like, int64_t offset, at::IntArrayRef sizes) {
  c10::InferenceMode guard(like.is_inference());
  Tensor made = at::empty({0}, like.options());
  made.set_(memory, offset, sizes, like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Tensors of a step in other memory than they were. What the step has made stays as it is, as others may hold it.
struct Moved {
  // Where a memory is now. One with more or less room in its first dim was `before` and is `after`.
  struct Place {
    c10::Storage memory;
    Tensor before, after;
  };
  std::unordered_map<c10::StorageImpl*, Place> to;

  Moved() = default;
  Moved(const std::vector<Life>& lives, int64_t bytes) {
    const auto memory = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(bytes));
    for (const Life& life : lives) {
      c10::DataPtr part(static_cast<char*>(memory->get()) + life.at, new std::shared_ptr<c10::DataPtr>(memory),
                        [](void* held) { delete static_cast<std::shared_ptr<c10::DataPtr>*>(held); }, at::kCPU);
      to.emplace(life.of, Place{c10::Storage(c10::Storage::use_byte_size_t(), life.of->nbytes(), std::move(part)), {}, {}});
    }
  }

  Tensor of(const Tensor& x) const {
    if (!x.defined()) return x;
    const auto found = to.find(storage(x));
    if (found == to.end()) return x;
    const auto& [memory, before, after] = found->second;
    if (!before.defined()) return tensor_in(memory, x, x.storage_offset(), x.sizes());
    auto sizes = x.sizes().vec();
    for (int64_t d = 0; d < x.dim(); ++d)
      if (is_room(x, d, before)) sizes[d] = after.size(0);
    return tensor_in(memory, x, x.storage_offset() - before.storage_offset() + after.storage_offset(), sizes);
  }
  static bool is_room(const Tensor& x, int64_t dim, const Tensor& memory) {
    return x.size(dim) == memory.size(0) && x.stride(dim) == memory.stride(0);
  }
  IValue of(const IValue& value) const {
    if (value.isTensor()) return of(value.toTensor());
    if (!value.isList()) return value;
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, of(list.get(i)));
    return IValue(std::move(list));
  }
  template <typename T>
  void all(std::vector<T>& values) const {
    for (T& value : values) value = of(value);
  }
};

bool can_move(const Tensor& x) {
  return x.layout() == at::kStrided && x.device().is_cpu() && !x.is_neg() && !x.is_conj();
}

// Gives what calls compute anew memory of the program, in which what is not needed at the same time shares.
void move(Program& program, const Storages& constant) {
  std::vector<Life> lives;
  std::unordered_map<c10::StorageImpl*, size_t> places;
  Storages stay = constant;
  for (const auto& [made, call] : program.made) {
    if (stay.count(made)) continue;
    lives.push_back({made, call, call, 0, 0});
    const auto bytes = static_cast<int64_t>(made->nbytes());
    lives.back().bytes = std::max<int64_t>(1, (bytes + ALIGNED_BYTES - 1) / ALIGNED_BYTES) * ALIGNED_BYTES;
  }
  std::stable_sort(lives.begin(), lives.end(), [](const Life& a, const Life& b) { return a.first < b.first; });
  for (size_t i = 0; i < lives.size(); ++i) places.emplace(lives[i].of, i);
  const auto use = [&](const Tensor& x, size_t call) {
    if (const auto found = places.find(storage(x)); found != places.end()) lives[found->second].last = call;
    if (!can_move(x)) stay.insert(storage(x));
  };
  for (size_t call = 0; call < program.calls.size(); ++call) {
    for_tensors(program.calls[call].args, [&](const Tensor& x) { use(x, call); });
    for_tensors(program.calls[call].outs, [&](const Tensor& x) { use(x, call); });
  }
  if (program.result) use(*program.result, program.calls.size());
  lives.erase(std::remove_if(lives.begin(), lives.end(), [&](const Life& life) { return stay.count(life.of); }), lives.end());
  program.num_bytes = place(lives);
  const Moved moved(lives, program.num_bytes);
  const auto before = program.calls;  // no address is given twice meanwhile
  for (Recorded& call : program.calls) {
    moved.all(call.args);
    moved.all(call.outs);
    moved.all(call.changed);
  }
  if (program.result) program.result = moved.of(*program.result);
  for (const Life& life : lives) {
    program.made.erase(life.of);
    program.made.emplace(moved.to.at(life.of).memory.unsafeGetStorageImpl(), life.first);
  }
}

std::shared_ptr<Program> program_of(Recording&& recorded, std::optional<Tensor> result, Tensors memory) {
  auto program = std::make_shared<Program>();
  program->memory = std::move(memory);
  program->reason = recorded.reason;
  if (!program->reason.empty()) return program;
  program->calls = std::move(recorded.calls);
  program->result = std::move(result);
  Storages changed, constant, filled;
  for (const Tensor& x : recorded.lifted) filled.insert(storage(x));
  for (const Recorded& call : program->calls)
    for (const Tensor& x : call.changed) changed.insert(storage(x));
  for (size_t i = 0; i < program->calls.size(); ++i) {
    const Recorded& call = program->calls[i];
    if (!call.changed.empty()) continue;
    for_tensors(call.outs, [&](const Tensor& x) {  // what is empty and not changed the host has filled
      if (!makes_empty(call.name) || (changed.count(storage(x)) && !filled.count(storage(x))))
        program->made.emplace(storage(x), i);
    });
  }
  for (c10::StorageImpl* each : filled)
    if (changed.count(each) && !program->made.count(each)) {
      program->calls.clear();
      program->reason = "a tensor that the host has filled is changed in place";
      return program;
    }
  std::vector<bool> is_replayed;
  for (const Recorded& call : program->calls) {
    bool is_constant = call.changed.empty() && !call.op.hasTag(at::Tag::nondeterministic_seeded);
    for_tensors(call.args, [&](const Tensor& x) {
      is_constant &= x.unsafeGetTensorImpl()->is_wrapped_number() || constant.count(storage(x)) > 0;
    });
    for_tensors(call.outs, [&](const Tensor& x) { is_constant &= !changed.count(storage(x)); });
    if (is_constant) for_tensors(call.outs, [&](const Tensor& x) { constant.insert(storage(x)); });
    is_replayed.push_back(!is_constant && !makes_empty(call.name));
  }
  move(*program, constant);
  const bool has_same_bits = program->rounds_to_codes();
  for (size_t i = 0; i < program->calls.size(); ++i) {
    if (!is_replayed[i]) continue;
    auto [work, name] = work_of(program->calls[i], has_same_bits);
    program->replayed.push_back(i);
    program->work.push_back(std::move(work));
    program->names.push_back(std::move(name));
  }
  return program;
}

// Memory of others that a program changes.
Tensors changed_by(const Program& program) {
  Tensors found;
  for (const Recorded& call : program.calls)
    for (const Tensor& x : call.changed)
      if (!program.made.count(storage(x))) found.push_back(x);
  return found;
}

// ---- Programs over the memory of another prompt ----

// Arguments of which an operator reads or writes slots that it is told, however many there are.
const std::map<std::string, std::set<size_t>> ANY_ROOM = {{"aten::index_copy_", {0}}, {"runahead::attend_sequences", {1, 2}}};

bool is_of(const Tensor& x, const Tensor& memory) { return storage(x) == storage(memory); }

// Whether a call takes a memory as one with another first dim would be taken.
bool takes_any_room(const Recorded& call, const Tensor& memory) {
  const auto known = ANY_ROOM.find(call.name);
  bool found = true;
  for (size_t i = 0; i < call.args.size(); ++i)
    for_tensors(call.args[i], [&](const Tensor& x) {
      if (!is_of(x, memory)) return;
      int64_t rooms = 0;
      for (int64_t d = 0; d < x.dim(); ++d) rooms += Moved::is_room(x, d, memory);
      found &= rooms == 1 && known != ANY_ROOM.end() && known->second.count(i) > 0;
    });
  return found;
}

// Whether a program can compute in other memory in place of what it has.
bool can_exchange(const Program& program, const Tensors& to) {
  if (program.memory.size() != to.size()) return false;
  Storages seen;
  for (size_t i = 0; i < to.size(); ++i) {
    const Tensor &before = program.memory[i], &after = to[i];
    if (before.dim() == 0 || before.dim() != after.dim() || before.scalar_type() != after.scalar_type()) return false;
    if (before.strides() != after.strides() || before.sizes().slice(1) != after.sizes().slice(1)) return false;
    if (!seen.insert(storage(before)).second) return false;
    for (const Recorded& call : program.calls) {
      bool is_same_dtype = true;
      for_tensors(call.args, [&](const Tensor& x) { is_same_dtype &= !is_of(x, before) || x.dtype() == before.dtype(); });
      if (!is_same_dtype || (before.size(0) != after.size(0) && !takes_any_room(call, before))) return false;
    }
  }
  for (const Tensor& x : changed_by(program))
    if (!seen.count(storage(x))) return false;  // it is of the prompt, too
  return !program.result || !seen.count(storage(*program.result));
}

// Give a program other memory in place of what it has; without work it holds nothing of it and cannot be replayed.
void exchange(Program& program, const Tensors& to, bool has_work) {
  Moved moved;
  const bool has_same_bits = program.rounds_to_codes();
  for (size_t i = 0; i < to.size(); ++i)
    moved.to.emplace(storage(program.memory[i]), Moved::Place{to[i].storage(), program.memory[i], to[i]});
  for (size_t i = 0, next = 0; i < program.calls.size(); ++i) {
    Recorded& call = program.calls[i];
    const bool is_replayed = next < program.replayed.size() && program.replayed[next] == i;
    const size_t number = is_replayed ? next++ : 0;
    bool is_moved = false;
    for_tensors(call.args, [&](const Tensor& x) { is_moved |= moved.to.count(storage(x)) > 0; });
    if (!is_moved) continue;
    moved.all(call.args);
    moved.all(call.outs);
    moved.all(call.changed);
    if (!is_replayed) continue;
    program.work[number] = nullptr;  // which holds tensors
    if (has_work) std::tie(program.work[number], program.names[number]) = work_of(call, has_same_bits);
  }
  program.memory = to;
}

// A tensor without memory.
Tensor hollow(const Tensor& like) {
  const c10::Storage nothing(c10::Storage::use_byte_size_t(), like.storage().nbytes(), c10::DataPtr(nullptr, at::kCPU));
  return tensor_in(nothing, like, like.storage_offset(), like.sizes());
}

// Two recordings of the same step.
struct Recordings {
  const Program &first, &second;
  Storages changed;  // by the first

  Recordings(const Program& first, const Program& second) : first(first), second(second) {
    for (const Tensor& x : changed_by(first)) changed.insert(storage(x));
  }

  // Whether tensors are made by the same call, the same memory of others, or the same numbers of the host.
  bool are_same(const Tensor& a, const Tensor& b) const {
    if (!a.defined() || !b.defined()) return a.defined() == b.defined();
    if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes() || a.strides() != b.strides()) return false;
    const auto made = first.made.find(storage(a)), again = second.made.find(storage(b));
    const bool is_made = made != first.made.end();
    if (is_made != (again != second.made.end())) return false;
    if (is_made || storage(a) == storage(b))
      return a.storage_offset() == b.storage_offset() && (!is_made || made->second == again->second);
    if (changed.count(storage(a))) return false;
    const Tensor ours = a.contiguous(), theirs = b.contiguous();
    return ours.nbytes() == 0 || std::memcmp(ours.const_data_ptr(), theirs.const_data_ptr(), ours.nbytes()) == 0;
  }
  bool are_same(const IValue& a, const IValue& b) const {
    if (a.isTensor() && b.isTensor()) return are_same(a.toTensor(), b.toTensor());
    if (!a.isList() || !b.isList()) return !a.isTensor() && !b.isTensor() && a == b;
    const auto ours = a.toListRef(), theirs = b.toListRef();
    for (size_t i = 0; ours.size() == theirs.size() && i < ours.size(); ++i)
      if (!are_same(ours[i], theirs[i])) return false;
    return ours.size() == theirs.size();
  }
  std::string difference() const {
    if (first.calls.size() != second.calls.size()) return "it calls other operators the next time";
    for (size_t i = 0; i < first.calls.size(); ++i) {
      const Recorded &a = first.calls[i], &b = second.calls[i];
      if (a.name != b.name) return "it calls " + b.name + " for " + a.name + " the next time";
      for (size_t j = 0; j < a.args.size(); ++j)
        if (!are_same(a.args[j], b.args[j]))
          return a.name + " is given another " + a.op.schema().arguments()[j].name() + " by the host the next time";
    }
    return "";
  }
};

std::mutex programs_mutex;
std::unordered_map<int64_t, std::shared_ptr<Program>> programs;
int64_t num_programs = 0;

std::shared_ptr<Program> program(int64_t number) {
  const std::lock_guard<std::mutex> lock(programs_mutex);
  const auto found = programs.find(number);
  TORCH_CHECK(found != programs.end(), "there is no program ", number);
  return found->second;
}

void record() {
  TORCH_CHECK(!recording, "this thread records already");
  recording = std::make_unique<Recording>();
  c10::impl::tls_set_dispatch_key_included(KEY, true);
}

void refuse(const std::string& why) {
  if (recording) recording->refuse(why);
}

int64_t recorded(const std::optional<Tensor>& result, Tensors memory) {
  c10::impl::tls_set_dispatch_key_included(KEY, false);
  TORCH_CHECK(recording, "this thread does not record");
  c10::InferenceMode guard;
  const auto made = program_of(std::move(*std::exchange(recording, nullptr)), result, std::move(memory));
  const std::lock_guard<std::mutex> lock(programs_mutex);
  programs[++num_programs] = made;
  return num_programs;
}

// While it lives nothing is a part of the step that this thread records, if it does: Python's collector may free another
// prompt in the midst of it.
struct Aside {
  c10::InferenceMode inference;
  c10::impl::ExcludeDispatchKeyGuard excluded{KEY};
};

void replay(int64_t number) {
  c10::InferenceMode guard;
  const auto found = program(number);
  for (const Work& work : found->work) work();
}

// Give a program the memory of another prompt; false, and it is as before, if it cannot compute there.
bool move_to(int64_t number, const Tensors& memory) {
  const Aside aside;
  const auto found = program(number);
  if (!can_exchange(*found, memory)) return false;
  exchange(*found, memory, true);
  return true;
}

// Let go of a prompt's memory: the program cannot be replayed before it is given another one. False if it cannot be.
bool let_go(int64_t number) {
  const Aside aside;
  const auto found = program(number);
  Tensors to;
  for (const Tensor& x : found->memory) to.push_back(hollow(x));
  if (!can_exchange(*found, to)) return false;
  exchange(*found, to, false);
  return true;
}

void forget(int64_t number) {
  std::shared_ptr<Program> last;
  const std::lock_guard<std::mutex> lock(programs_mutex);
  if (const auto found = programs.find(number); found != programs.end()) {
    last = std::move(found->second);
    programs.erase(found);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(runahead, library) {
  library.def("record() -> ()", record);
  library.def("refuse(str why) -> ()", refuse);
  library.def("recorded(Tensor? result, Tensor[] memory) -> int", recorded);
  library.def("replay(int program) -> ()", replay);
  library.def("move_to(int program, Tensor[] memory) -> bool", move_to);
  library.def("let_go(int program) -> bool", let_go);
  library.def("forget(int program) -> ()", forget);
  library.def("why_not(int program) -> str", [](int64_t number) { return program(number)->reason; });
  library.def("result(int program) -> Tensor", [](int64_t number) {
    const auto found = program(number)->result;
    TORCH_CHECK(found, "program ", number, " has no result");
    return *found;
  });
  library.def("num_bytes(int program) -> int", [](int64_t number) { return program(number)->num_bytes; });
  library.def("difference(int program, int again) -> str", [](int64_t number, int64_t again) {
    const Aside aside;
    return Recordings(*program(number), *program(again)).difference();
  });
  library.def("changed(int program) -> Tensor[]", [](int64_t number) { return changed_by(*program(number)); });
  library.def("names(int program) -> str[]", [](int64_t number) { return program(number)->names; });
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_call>());
}
