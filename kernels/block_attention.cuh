// Attention of one tile of 16 queries of one head, by a whole block.
//
// A small problem has few query tiles, so it is the keys that are spread over the warps: each walks
// over its own chunks of 16 keys at its own pace, with an online softmax of its own, and the
// results of all warps are merged in shared memory. K and V of a chunk have one buffer each: V
// arrives while scores are computed, the next K while the weights multiply V.
#pragma once

#include "attention_forward.cuh"  // defines: OnlineSoftmax
#include "projection_tile.cuh"

namespace frx {

template <class Op, int kD>
struct BlockAttentionShape {
  using Element = typename Op::Element;
  using Tile = SmemTile<Element, kD>;
  static constexpr int kQueries = kBlockTileQueries;
  static constexpr int kKeys = 16;                                      // a chunk
  static constexpr int kChunkBytes = 2 * kKeys * kD * sizeof(Element);  // of K and V
  // fp32 outputs of 128 columns leave a thread too few registers, and their chunks too little
  // shared memory: two warps then share a chunk and its columns, each computing the scores for
  // itself.
  static constexpr int kColumnWarps = kChunkBytes > 8 * 1024 ? 2 : 1;
  static constexpr int kKeyWarps = kBlockThreads / 32 / kColumnWarps;
  static constexpr int kOutTiles = kD / kColumnWarps / 8;

  struct Chunk {
    Element k[kKeys * kD];
    Element v[kKeys * kD];
  };
  struct Part {
    float o[kQueries][kD + 8];  // 32 bytes of padding: written without bank conflicts
    float row_max[kQueries];
    float row_sum[kQueries];
  };
  struct SharedStorage {
    alignas(16) Element q[kQueries * kD];
    union {
      alignas(16) Chunk chunks[kKeyWarps];
      Part parts[kKeyWarps];
    };
  };
  static_assert(sizeof(SharedStorage) <= 96 * 1024, "what every GPU since sm_80 gives a block");
  using Softmax = OnlineSoftmax<Element, 1, kKeys / 8, kOutTiles>;
};

// Barrier of the warps that share a chunk.
template <class Shape>
__device__ __forceinline__ void sync_chunk(int key_warp) {
  if constexpr (Shape::kColumnWarps == 1) {
    __syncwarp();
  } else {
    // Barrier 0 is that of the whole block.
    asm volatile("bar.sync %0, %1;" ::"r"(1 + key_warp), "n"(32 * Shape::kColumnWarps) : "memory");
  }
}

// One warp's chunks of keys: weights and weighted values, relative to its own maximum.
template <class Op, int kD>
__device__ __forceinline__ void attend_keys(
    const AttentionForwardParams& p, const HeadScores& scores,
    typename BlockAttentionShape<Op, kD>::SharedStorage& shared, int64_t b, int h, int kv_head,
    int first_query, float (&o)[1][BlockAttentionShape<Op, kD>::kOutTiles][4],
    typename BlockAttentionShape<Op, kD>::Softmax& softmax) {
  using Shape = BlockAttentionShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kKeys = Shape::kKeys, kBytes = sizeof(Element);
  const int thread = threadIdx.x, warp = thread / 32;
  const int key_warp = warp % Shape::kKeyWarps, column_warp = warp / Shape::kKeyWarps;
  const Tile q_tile{shared.q};
  const Tile k_tile{shared.chunks[key_warp].k}, v_tile{shared.chunks[key_warp].v};

  const int num_queries = p.sizes.num_queries, head_dim = p.sizes.head_dim;
  const int end = key_tiles_of_queries(first_query, Shape::kQueries, kKeys, num_queries,
                                       scores.key_count, scores.is_causal)
                      .end;
  const int plain_end =
      scores.is_plain() && first_query + Shape::kQueries <= num_queries
          ? unmasked_key_tiles(first_query, kKeys, num_queries, scores.key_count, scores.is_causal)
          : 0;

  const RowCopier<Tile, kKeys, 32 * Shape::kColumnWarps> chunk_copier(32 * column_warp +
                                                                      thread % 32);
  const int key_row = chunk_copier.row(), column = chunk_copier.column();
  // Keys of a chunk that exist for this thread: none where its column is padding.
  const int key_limit = column < head_dim ? scores.key_count : 0;
  auto load = [&](Tile tile, const char* source, int64_t token_bytes, int chunk) {
    const int first_key = chunk * kKeys, keys = key_limit - first_key;
    if (chunk < end) {
      const char* mine = key_row < keys ? source + (first_key + key_row) * token_bytes : source;
      const int64_t step_bytes = token_bytes * chunk_copier.kRowStep;
      if (scores.key_keep == nullptr && keys >= kKeys) {
        chunk_copier.copy(tile.address(0, 0), mine, step_bytes);
      } else if (scores.key_keep == nullptr) {
        chunk_copier.copy(tile.address(0, 0), mine, step_bytes,
                          [&](int row) { return row < keys; });
      } else {
        chunk_copier.copy(tile.address(0, 0), mine, step_bytes,
                          [&](int row) { return row < keys && scores.key_keep[first_key + row]; });
      }
    }
    commit_copies();  // also an empty group, so that their count is known
  };
  const auto* k = static_cast<const Element*>(p.k.data) + offset_in(p.k, b, 0, kv_head) + column;
  const auto* v = static_cast<const Element*>(p.v.data) + offset_in(p.v, b, 0, kv_head) + column;
  const char* k_bytes = reinterpret_cast<const char*>(k);
  const char* v_bytes = reinterpret_cast<const char*>(v);
  const int64_t k_token_bytes = p.k.token_stride * kBytes,
                v_token_bytes = p.v.token_stride * kBytes;

  const RowCopier<Tile, Shape::kQueries, kBlockThreads> query_copier(thread);
  if (query_copier.row() < Shape::kQueries) {
    const int query = first_query + query_copier.row();
    const bool exists = query < num_queries && query_copier.column() < head_dim;
    const auto* q = static_cast<const Element*>(p.q.data) +
                    (exists ? offset_in(p.q, b, query, h) + query_copier.column() : 0);
    const int queries = query_copier.column() < head_dim ? num_queries - first_query : 0;
    query_copier.copy(q_tile.address(0, 0), reinterpret_cast<const char*>(q),
                      p.q.token_stride * (kBytes * query_copier.kRowStep),
                      [&](int row) { return row < queries; });
  }
  load(k_tile, k_bytes, k_token_bytes, key_warp);  // in one group with the queries
  load(v_tile, v_bytes, v_token_bytes, key_warp);
  wait_copies<1>();
  __syncthreads();  // queries are here, brought by all warps, and the first K

  for (int chunk = key_warp; chunk < end; chunk += Shape::kKeyWarps) {
    const int lane = opaque(thread % 32);
    const int first_row = first_query + lane / 4, first_column = chunk * kKeys + 2 * (lane % 4);
    float s[1][kKeys / 8][4] = {};
    multiply_rows<Op, 1, kKeys / 8, kD>(s, q_tile, 0, k_tile, lane);
    sync_chunk<Shape>(key_warp);  // K has been read
    load(k_tile, k_bytes, k_token_bytes, chunk + Shape::kKeyWarps);
    apply_modifiers<false>(s[0], scores, first_row, first_column, chunk < plain_end);
    softmax.update(s, o);
    wait_copies<1>();
    sync_chunk<Shape>(key_warp);  // V is here
    multiply_accumulators<Op, 1, kKeys / 8, Shape::kOutTiles>(
        o, s, v_tile, 8 * Shape::kOutTiles * column_warp, lane);
    sync_chunk<Shape>(key_warp);  // V has been read
    load(v_tile, v_bytes, v_token_bytes, chunk + Shape::kKeyWarps);
    wait_copies<1>();
    sync_chunk<Shape>(key_warp);  // the next K is here
  }
  softmax.finish();
}

// o and lse of the tile from the warps' parts.
template <class Op, int kD>
__device__ __forceinline__ void merge_parts(
    const AttentionForwardParams& p,
    const typename BlockAttentionShape<Op, kD>::SharedStorage& shared, int64_t b, int h,
    int first_query) {
  using Shape = BlockAttentionShape<Op, kD>;
  using Element = typename Op::Element;
  constexpr int kRowStep = kBlockThreads / (kD / 2);
  static_assert(Shape::kQueries % kRowStep == 0, "every thread has as many rows");
  const int first_row = threadIdx.x / (kD / 2), d = threadIdx.x % (kD / 2) * 2;
  const AttentionSizes& sizes = p.sizes;
#pragma unroll
  for (int row = first_row; row < Shape::kQueries; row += kRowStep) {
    float maxima[Shape::kKeyWarps], row_max = negative_infinity();
#pragma unroll
    for (int w = 0; w < Shape::kKeyWarps; ++w) {
      maxima[w] = shared.parts[w].row_max[row];
      row_max = fmaxf(row_max, maxima[w]);
    }
    // A row without a key: subtract 0 rather than -inf, so that its weights are 0.
    const float base = row_max == negative_infinity() ? 0.f : row_max;
    float sum = 0.f, x = 0.f, y = 0.f;
#pragma unroll
    for (int w = 0; w < Shape::kKeyWarps; ++w) {
      const auto& part = shared.parts[w];
      const float weight = weight_of<Element>(maxima[w] - base);
      const float2 both = *reinterpret_cast<const float2*>(&part.o[row][d]);
      sum = fmaf(weight, part.row_sum[row], sum);
      x = fmaf(weight, both.x, x);
      y = fmaf(weight, both.y, y);
    }
    const int query = first_query + row;
    if (query >= sizes.num_queries || d >= sizes.head_dim) continue;
    const float factor = sum > 0.f ? 1.f / sum : 0.f;
    store2(static_cast<Element*>(p.o.data) + offset_in(p.o, b, query, h) + d, x * factor,
           y * factor);
    if (d == 0) {
      constexpr float kNatural = sizeof(Element) == 2 ? kLn2 : 1.f;
      p.lse[(b * sizes.num_heads + h) * sizes.num_queries + query] =
          sum > 0.f ? fmaf(row_max, kNatural, logf(sum)) : negative_infinity();
    }
  }
}

// q, k and v come from the kernel before this one.
template <class Op, int kD>
__device__ __forceinline__ void attend_tile(const BlockAttentionParams& block, int tile,
                                            char* smem) {
  using Shape = BlockAttentionShape<Op, kD>;
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const AttentionForwardParams& p = block.attention;
  const int batch_head = quotient(tile, block.query_tiles);
  const int first_query = (tile - batch_head * block.query_tiles.value) * Shape::kQueries;
  const int b = quotient(batch_head, block.heads), h = batch_head - b * block.heads.value;
  const HeadScores scores(p.sizes, p.scores, b, h, kScoreUnit<typename Op::Element>);

  float o[1][Shape::kOutTiles][4] = {};
  typename Shape::Softmax softmax;
  wait_for_previous_kernel();
  attend_keys<Op, kD>(p, scores, shared, b, h, quotient(h, block.heads_a_kv_head), first_query, o,
                      softmax);
  __syncthreads();  // every warp is done with its chunks, which the parts replace

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_column = warp / Shape::kKeyWarps * 8 * Shape::kOutTiles + 2 * (lane % 4);
  auto& part = shared.parts[warp % Shape::kKeyWarps];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 8 * half + lane / 4;
    if (first_column == 0) {
      part.row_max[row] = softmax.row_max[0][half];
      part.row_sum[row] = softmax.row_sum[0][half];
    }
#pragma unroll
    for (int n = 0; n < Shape::kOutTiles; ++n) {
      store2(&part.o[row][first_column + 8 * n], o[0][n][2 * half], o[0][n][2 * half + 1]);
    }
  }
  __syncthreads();  // all parts are written
  merge_parts<Op, kD>(p, shared, b, h, first_query);
}

}  // namespace frx
