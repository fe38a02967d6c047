// What a model computes of each token alone, in one pass over float32 tensors on a CPU: RMS norms and rotary embeddings,
// as torch.ops.runahead.rms_norm and torch.ops.runahead.rotate.
//
// Legend: B batch, N query heads, K kv heads, C tokens, H head dim, D normed dim, R rows.
//
// The result for a row depends on nothing but the row.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "vectors.h"
#include "written.h"

namespace {

constexpr int64_t GRAIN = 1 << 14;  // numbers that are worth a thread

void rms_norm_row(const float* x, const float* weight, double eps, int64_t D, float* out) {
  Vec squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= D; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) {
      const Vec part = load(x + i + j * LANES);
      squares[j] += part * part;
    }
  for (; i + LANES <= D; i += LANES) squares[0] += load(x + i) * load(x + i);
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < D; ++i) total += x[i] * x[i];
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(total) / D + eps));
  for (i = 0; i + LANES <= D; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < D; ++i) out[i] = x[i] * scale * weight[i];
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  at::Tensor out = at::empty(x.sizes(), x.options());
  rms_norm_into(x.contiguous(), weight.contiguous(), eps, out)();
  return out;
}

// The heads of a token: x * cos + (-x2, x1) * sin, where x1 and x2 are the halves of x.
void rotate_heads(const float* x, int64_t stride, int64_t heads, const float* cos, const float* sin, int64_t H, float* out) {
  for (int64_t head = 0; head < heads; ++head, x += stride, out += H)
    for (int64_t i = 0; i < H / 2; i += LANES) {
      const Vec low = load(x + i), high = load(x + i + H / 2);
      store(out + i, low * load(cos + i) - high * load(sin + i));
      store(out + i + H / 2, high * load(cos + i + H / 2) + low * load(sin + i + H / 2));
    }
}

std::tuple<at::Tensor, at::Tensor> rotate(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                          const at::Tensor& sin) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "queries and keys have 4 dims");
  const auto empty = [](const at::Tensor& x) {  // as tokens are stored
    return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
  };
  at::Tensor q_out = empty(q), k_out = empty(k);
  rotate_into(q, k, cos, sin, q_out, k_out)();
  return {q_out, k_out};
}

}  // namespace

Work rms_norm_into(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "norms are of float32");
  TORCH_CHECK(weight.dim() == 1 && x.dim() > 0 && x.size(-1) == weight.size(0), "a weight of ", weight.sizes(),
              " for a norm of ", x.sizes());
  const int64_t D = weight.size(0), R = D ? x.numel() / D : 0;
  return [from = x.const_data_ptr<float>(), factors = weight.const_data_ptr<float>(), to = out.mutable_data_ptr<float>(), D,
          R, eps] {
    at::parallel_for(0, R, std::max<int64_t>(1, GRAIN / std::max<int64_t>(D, 1)), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) rms_norm_row(from + row * D, factors, eps, D, to + row * D);
    });
  };
}

Work rotate_into(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                 const at::Tensor& q_out, const at::Tensor& k_out) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && cos.dim() == 3 && sin.sizes() == cos.sizes(),
              "queries and keys have 4 dims, their angles 3");
  const auto B = q.size(0), N = q.size(1), K = k.size(1), C = q.size(2), H = q.size(3);
  TORCH_CHECK(k.size(0) == B && k.size(2) == C && k.size(3) == H && (cos.size(0) == B || cos.size(0) == 1) &&
                  cos.size(1) == C && cos.size(2) == H,
              "queries ", q.sizes(), ", keys ", k.sizes(), " and angles ", cos.sizes(), " do not belong together");
  TORCH_CHECK(H % (2 * LANES) == 0, "head dim ", H, " is no multiple of ", 2 * LANES);
  for (const at::Tensor& each : {q, k, cos, sin})
    TORCH_CHECK(each.scalar_type() == at::kFloat && each.stride(-1) == 1, "numbers are float32, beside each other");
  struct Given {
    const float* data;
    int64_t row, head, token;
  };
  const auto heads = [](const at::Tensor& x) { return Given{x.const_data_ptr<float>(), x.stride(0), x.stride(1), x.stride(2)}; };
  const auto angles = [](const at::Tensor& x) {  // one row of them may be for all rows
    return Given{x.const_data_ptr<float>(), x.size(0) == 1 ? 0 : x.stride(0), 0, x.stride(1)};
  };
  return [of_q = heads(q), of_k = heads(k), of_cos = angles(cos), of_sin = angles(sin),
          to_q = q_out.mutable_data_ptr<float>(), to_k = k_out.mutable_data_ptr<float>(), B, N, K, C, H] {
    at::parallel_for(0, B * C, std::max<int64_t>(1, GRAIN / ((N + K) * H)), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const auto at = [b = i / C, c = i % C](const Given& x) { return x.data + b * x.row + c * x.token; };
        rotate_heads(at(of_q), of_q.head, N, at(of_cos), at(of_sin), H, to_q + i * N * H);
        rotate_heads(at(of_k), of_k.head, K, at(of_cos), at(of_sin), H, to_k + i * K * H);
      }
    });
  };
}

TORCH_LIBRARY_FRAGMENT(runahead, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("rotate(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(runahead, CPU, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("rotate", rotate);
}
