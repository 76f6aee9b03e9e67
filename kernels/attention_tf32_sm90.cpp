// Host side of Hopper's TF32 backward: what it takes, its copies, the order of launches.
#include "attention_tf32_sm90.h"

#include <stdexcept>
#include <string>

#include "tensor_map.h"
#include "transpose_heads_sm90.h"

namespace frx {

const char* attention_backward_tf32_sm90_obstacle(const AttentionBackwardParams& p) {
  constexpr int kElementBytes = 4;
  const AttentionSizes& s = p.sizes;
  if (p.dtype != DType::kTF32) return "these kernels multiply in TF32";
  if (s.head_dim % 8 != 0 || s.head_dim > 128) {
    return "the Hopper kernels need a head dim that is a multiple of 8 and at most 128 in TF32";
  }
  if (s.batch == 0 || s.num_keys == 0 || s.num_queries == 0) return "there is nothing to compute";
  if (!is_tensor_map_possible(p.q, s.batch, s.num_queries, s.num_heads, kElementBytes) ||
      !is_tensor_map_possible(p.dout, s.batch, s.num_queries, s.num_heads, kElementBytes) ||
      !is_tensor_map_possible(p.k, s.batch, s.num_keys, s.num_kv_heads, kElementBytes) ||
      !is_tensor_map_possible(p.v, s.batch, s.num_keys, s.num_kv_heads, kElementBytes)) {
    return "the copy engine needs 16-byte aligned rows and no broadcast (stride 0) dimension";
  }
  if (!is_transposable(s.batch, s.num_queries, s.num_heads, s.head_dim) ||
      !is_transposable(s.batch, s.num_keys, s.num_kv_heads, s.head_dim)) {
    return "there are more tokens than one pass over them counts";
  }
  return nullptr;
}

bool attention_backward_tf32_sm90_pays(const AttentionBackwardParams& p) {
  // As the forward decides: an o that was divided by the sum of rounded weights makes a better
  // delta.
  constexpr int kMinTokens = 64;
  constexpr double kMinFlops = 2e8;
  const AttentionSizes& s = p.sizes;
  const double flops =
      4.0 * static_cast<double>(s.batch) * s.num_heads * s.num_queries * s.num_keys * s.head_dim;
  return s.num_queries >= kMinTokens && s.num_keys >= kMinTokens && flops >= kMinFlops &&
         (p.dq.data != nullptr || p.dk.data != nullptr) &&
         attention_backward_tf32_sm90_obstacle(p) == nullptr;
}

Tf32BackwardCopies tf32_backward_copies(const AttentionBackwardParams& p) {
  const AttentionSizes& s = p.sizes;
  const int64_t queries = transposed_floats(s.batch, s.num_queries, s.num_heads, s.head_dim);
  const int64_t keys = transposed_floats(s.batch, s.num_keys, s.num_kv_heads, s.head_dim);
  Tf32BackwardCopies copies = {};
  const auto take = [&](int64_t floats) {
    float* part = p.copies == nullptr ? nullptr : p.copies + copies.floats;
    copies.floats += floats;
    return part;
  };
  if (p.dk.data != nullptr) {
    copies.q = take(queries);
    copies.dout = take(queries);
  }
  if (p.dq.data != nullptr) copies.k = take(keys);
  return copies;
}

namespace {

void make_copies(const AttentionBackwardParams& p, cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  const Tf32BackwardCopies copies = tf32_backward_copies(p);
  HeadsTranspose jobs[kMaxTransposes];
  int count = 0;
  const auto add_queries = [&](const HeadsView& view, float* out) {
    jobs[count++] = {view, out, s.batch, s.num_queries, s.num_heads, s.head_dim, nullptr, nullptr};
  };
  if (p.dk.data != nullptr) {
    add_queries(p.q, copies.q);
    add_queries(p.dout, copies.dout);
  }
  if (p.dq.data != nullptr) {
    jobs[count++] = {p.k,
                     copies.k,
                     s.batch,
                     s.num_keys,
                     s.num_kv_heads,
                     s.head_dim,
                     p.scores.kv_lengths,
                     p.scores.key_keep};
  }
  transpose_heads_sm90(jobs, count, stream);
}

void run_keys(const AttentionBackwardParams& p, cudaStream_t stream) {
  if (p.sizes.head_dim <= 32) return attention_backward_keys_tf32_sm90_d32(p, true, stream);
  if (p.sizes.head_dim <= 64) return attention_backward_keys_tf32_sm90_d64(p, true, stream);
  attention_backward_keys_tf32_sm90_d128(p, true, stream);
}

void run_queries(const AttentionBackwardParams& p, bool follows_copies, cudaStream_t stream) {
  if (p.sizes.head_dim <= 32) {
    return attention_backward_queries_tf32_sm90_d32(p, follows_copies, stream);
  }
  if (p.sizes.head_dim <= 64) {
    return attention_backward_queries_tf32_sm90_d64(p, follows_copies, stream);
  }
  attention_backward_queries_tf32_sm90_d128(p, follows_copies, stream);
}

}  // namespace

void run_attention_backward_tf32_sm90(const AttentionBackwardParams& p, cudaStream_t stream) {
  if (const char* obstacle = attention_backward_tf32_sm90_obstacle(p)) {
    throw std::runtime_error(std::string("fused_rope_xattn: ") + obstacle);
  }
  make_copies(p, stream);
  const bool wants_dkv = p.dk.data != nullptr;
  if (wants_dkv) run_keys(p, stream);
  // Beside the last blocks of the kernel before, of which it needs nothing.
  if (p.dq.data != nullptr) run_queries(p, !wants_dkv, stream);
}

}  // namespace frx
