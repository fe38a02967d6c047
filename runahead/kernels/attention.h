// Attention of one query per sequence, for a step that is replayed.
//
// Legend: S sequences, N query heads, K kv heads, H head dim (key), V head dim (value).

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// Numbers of a head lie beside each other; strides are in numbers.
struct Sequences {
  const void *q, *k, *v;
  const int32_t *starts, *used;  // token of the first key of each, and how many are seen
  bool is_bfloat16;              // else float32
  int64_t S, N, K, H, V, q_sequence, q_head, k_head, k_token, v_head, v_token;
  double scaling;
};

// Queries (S, N, H), keys (1, K, T, H) and values (1, K, T, V) of all sequences, `starts` (S + 1), `used` (S).
Sequences sequences(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& starts,
                    const at::Tensor& used, double scaling);

// Output (S, N, V) in the queries' dtype, log-sum-exp (S, N); 0 and -inf of a sequence of which none is seen.
void attend(const Sequences& of, void* out, float* lse);
