// Which keys a query sees, and where elements lie: index arithmetic shared by kernels and planner.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "params.h"

namespace frx {

// Half-open range of indices; empty when begin >= end.
struct IndexRange {
  int begin;
  int end;
};

FRX_HOST_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
FRX_HOST_DEVICE int larger(int a, int b) { return a > b ? a : b; }

// a >= 0, b > 0; does not overflow for any such a.
FRX_HOST_DEVICE int ceil_div(int a, int b) { return a / b + (a % b != 0); }
FRX_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Keys that exist for batch element b. kv_lengths [B] or null.
FRX_HOST_DEVICE int key_count(const int32_t* kv_lengths, int64_t b, int num_keys) {
  return kv_lengths == nullptr ? num_keys : larger(0, smaller(kv_lengths[b], num_keys));
}

// Whether one of them does, of which keep [B, num_keys] or null may remove more.
FRX_HOST_DEVICE bool key_exists(const int32_t* kv_lengths, const bool* keep, int64_t b, int key,
                                int num_keys) {
  return key < key_count(kv_lengths, b, num_keys) && (keep == nullptr || keep[b * num_keys + key]);
}

// The first key that `query` does not see; it sees [0, keys_visible). Causality is aligned to the
// bottom right: key <= query + key_count - num_queries. Queries past the end (tile padding) count
// as the last one. Written so that no sum leaves 32 bits.
FRX_HOST_DEVICE int keys_visible(int query, int num_queries, int key_count, bool is_causal) {
  if (!is_causal) return key_count;
  return larger(0, key_count + smaller(0, query - num_queries + 1));
}

// The first query that sees `key`; [first_query_seeing, num_queries) all do. num_queries if none.
FRX_HOST_DEVICE int first_query_seeing(int key, int num_queries, int key_count, bool is_causal) {
  if (key >= key_count) return num_queries;
  if (!is_causal) return 0;
  return larger(0, num_queries + (key - key_count));
}

// Key tiles that at least one query of the tile starting at first_query sees.
FRX_HOST_DEVICE IndexRange key_tiles_of_queries(int first_query, int tile_queries, int tile_keys,
                                                int num_queries, int key_count, bool is_causal) {
  if (first_query >= num_queries) return {0, 0};
  const int rows = smaller(tile_queries, num_queries - first_query);
  const int visible = keys_visible(first_query + rows - 1, num_queries, key_count, is_causal);
  return {0, ceil_div(visible, tile_keys)};
}

// A part of the range out of `count`, as equal as can be; empty when there are more than elements.
FRX_HOST_DEVICE IndexRange part_of_range(IndexRange range, int part, int count) {
  const int length = larger(0, range.end - range.begin);
  const int each = length / count, longer = length % count;
  const int begin = range.begin + part * each + smaller(part, longer);
  return {begin, begin + each + (part < longer)};
}

// Key tiles [0, result) are seen whole by every query of the tile: lengths and causality remove
// nothing there.
FRX_HOST_DEVICE int unmasked_key_tiles(int first_query, int tile_keys, int num_queries,
                                       int key_count, bool is_causal) {
  return keys_visible(first_query, num_queries, key_count, is_causal) / tile_keys;
}

// Query tiles that hold at least one query seeing a key of the tile starting at first_key.
FRX_HOST_DEVICE IndexRange query_tiles_of_keys(int first_key, int tile_queries, int num_queries,
                                               int key_count, bool is_causal) {
  const int end = ceil_div(num_queries, tile_queries);
  const int first = first_query_seeing(first_key, num_queries, key_count, is_causal);
  return {first >= num_queries ? end : first / tile_queries, end};
}

// Element offsets; every product is 64-bit.
FRX_HOST_DEVICE int64_t offset_in(const HeadsView& view, int64_t b, int64_t token, int64_t head) {
  return b * view.batch_stride + token * view.token_stride + head * view.head_stride;
}

FRX_HOST_DEVICE int64_t offset_in(const ScoresView& view, int64_t b, int64_t head, int64_t query,
                                  int64_t key) {
  return b * view.batch_stride + head * view.head_stride + query * view.query_stride +
         key * view.key_stride;
}

}  // namespace frx
