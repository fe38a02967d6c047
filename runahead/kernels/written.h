// Operators whose result is written to memory that is given: as they are called, and again whenever a step is replayed. Each
// function checks its tensors, which others hold, and returns the work.

#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

using Work = std::function<void()>;

// x / sqrt(mean(x^2) + eps) * weight; all contiguous, in float32.
Work rms_norm_into(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out);

// Queries and keys of rotated heads, token-major: (B, C, N, H) and (B, C, K, H), transposed.
Work rotate_into(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
                 const at::Tensor& q_out, const at::Tensor& k_out);

// Products with weights in 8 bits; all contiguous.
Work linear_int8_into(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& sums, const at::Tensor& scales,
                      const std::optional<at::Tensor>& bias, const at::Tensor& out);
