// Attention of one tile of 16 queries of one head, by a whole block, or by the blocks of a cluster
// where tiles are so few that multiprocessors would idle.
//
// A small problem has few query tiles, so it is the keys that are spread over the warps: each walks
// over its own chunks of 16 keys at its own pace, with an online softmax of its own, and the
// results of all warps are merged in shared memory. K and V of a chunk have a buffer each, and are
// on their way while earlier chunks are multiplied.
#pragma once

#include "attention_forward.cuh"  // defines: OnlineSoftmax
#include "block_cluster.cuh"
#include "projection_tile.cuh"

namespace frx {

constexpr int kPortableSmem = 99 * 1024;  // what every GPU since sm_80 gives a block

template <class Op_, int kPaddedDim>
struct BlockAttentionShape {
  using Op = Op_;
  using Element = typename Op::Element;
  static constexpr int kD = kPaddedDim;
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
  struct Merged {  // what a block has, for another block of its cluster
    alignas(16) float2 o[kQueries][kD / 2];
    float2 row[kQueries];  // maximum, sum
  };
  struct Results {
    Part parts[kKeyWarps];
    Merged merged;
  };
  // Chunks of a warp that are under way at a time.
  static constexpr int kQueryBytes = kQueries * kD * sizeof(Element);
  static constexpr int kFitting = (kPortableSmem - kQueryBytes) / (kKeyWarps * kChunkBytes);
  static constexpr int kStages = kFitting < 4 ? kFitting : 4;
  static_assert(kStages >= 1, "a chunk for every warp");
  struct SharedStorage {
    alignas(16) Element q[kQueries * kD];
    union {
      alignas(16) Chunk chunks[kStages][kKeyWarps];
      Results results;
    };
  };
  static_assert(sizeof(SharedStorage) <= kPortableSmem, "the results of all warps, too");
  using Softmax = OnlineSoftmax<Element, 1, kKeys / 8, kOutTiles>;
};

// Barrier of the warps that share a chunk.
template <class Shape>
__device__ __forceinline__ void sync_chunk(int key_warp) {
  if constexpr (Shape::kColumnWarps == 1) {
    __syncwarp();
  } else {
    sync_threads(1 + key_warp, 32 * Shape::kColumnWarps);
  }
}

// A block's place among those that share the keys of a tile.
struct KeyShare {
  int rank;
  int splits;
};

// Copies the tile's queries to shared memory, by all threads of the block. Those that do not exist
// become zeros, whose results nobody reads.
template <class Shape>
class QueryCopier {
 public:
  __device__ __forceinline__ QueryCopier(const AttentionForwardParams& p, int64_t b, int h,
                                         int first_query)
      : copier_(threadIdx.x),
        step_bytes_(p.q.token_stride * static_cast<int>(copier_.kRowStep * sizeof(Element))) {
    const int query = first_query + copier_.row();
    const bool has_column = copier_.column() < p.sizes.head_dim;
    const bool exists = query < p.sizes.num_queries && has_column;
    queries_ = has_column ? p.sizes.num_queries - first_query : 0;
    source_ = settled(reinterpret_cast<const char*>(
        static_cast<const Element*>(p.q.data) +
        (exists ? offset_in(p.q, b, query, h) + copier_.column() : 0)));
  }

  __device__ __forceinline__ void copy(typename Shape::Tile tile) const {
    if (copier_.row() >= Shape::kQueries) return;
    copier_.copy(tile.address(0, 0), source_, step_bytes_, [&](int row) { return row < queries_; });
  }

 private:
  using Element = typename Shape::Element;
  RowCopier<typename Shape::Tile, Shape::kQueries, kBlockThreads> copier_;
  int queries_;
  int64_t step_bytes_;
  const char* source_;
};

// One warp's chunks of keys: weights and weighted values, relative to its own maximum. Waits for
// the kernel before, which makes q, and k and v too unless they were finished long ago.
template <class Shape>
__device__ __forceinline__ void attend_keys(const AttentionForwardParams& p, bool has_finished_keys,
                                            const KeyShare& share, const HeadScores& scores,
                                            typename Shape::SharedStorage& shared, int64_t b, int h,
                                            int kv_head, int first_query,
                                            float (&o)[1][Shape::kOutTiles][4],
                                            typename Shape::Softmax& softmax) {
  using Op = typename Shape::Op;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages, kBytes = sizeof(Element);
  const int thread = threadIdx.x, warp = thread / 32;
  const int key_warp = warp % Shape::kKeyWarps, column_warp = warp / Shape::kKeyWarps;
  const Tile q_tile{shared.q};
  auto k_tile = [&](int slot) { return Tile{shared.chunks[slot][key_warp].k}; };
  auto v_tile = [&](int slot) { return Tile{shared.chunks[slot][key_warp].v}; };

  const int num_queries = p.sizes.num_queries, head_dim = p.sizes.head_dim;
  const int end = key_tiles_of_queries(first_query, Shape::kQueries, kKeys, num_queries,
                                       scores.key_count, scores.is_causal)
                      .end;
  const int plain_end = scores.is_plain() ? unmasked_key_tiles(first_query, kKeys, num_queries,
                                                               scores.key_count, scores.is_causal)
                                          : 0;

  const RowCopier<Tile, kKeys, 32 * Shape::kColumnWarps> chunk_copier(32 * column_warp +
                                                                      thread % 32);
  const int key_row = chunk_copier.row(), column = chunk_copier.column();
  // Keys of a chunk that exist for this thread: none where its column is padding.
  const int key_limit = column < head_dim ? scores.key_count : 0;
  const int first_chunk = share.rank * Shape::kKeyWarps + key_warp;
  const int chunk_step = share.splits * Shape::kKeyWarps;
  // This thread's part of a chunk, moved on to the warp's next chunk by every copy.
  auto first_part = [&](const HeadsView& view) {
    const int64_t at = offset_in(view, b, first_chunk * kKeys + key_row, kv_head) + column;
    return settled(static_cast<const char*>(view.data) + at * kBytes);
  };
  auto copy = [&](Tile tile, const char*& source, int64_t token_bytes, int chunk) {
    const int first_key = chunk * kKeys, keys = key_limit - first_key;
    if (chunk < end) {
      const int64_t step_bytes = token_bytes * chunk_copier.kRowStep;
      if (scores.key_keep == nullptr && keys >= kKeys) {
        chunk_copier.copy(tile.address(0, 0), source, step_bytes);
      } else if (scores.key_keep == nullptr) {
        chunk_copier.copy(tile.address(0, 0), source, step_bytes,
                          [&](int row) { return row < keys; });
      } else {
        chunk_copier.copy(tile.address(0, 0), source, step_bytes,
                          [&](int row) { return row < keys && scores.key_keep[first_key + row]; });
      }
      source += token_bytes * (chunk_step * kKeys);
    }
  };
  const char *k_part = first_part(p.k), *v_part = first_part(p.v);
  const int64_t k_token_bytes = p.k.token_stride * kBytes,
                v_token_bytes = p.v.token_stride * kBytes;
  // Groups of copies also where there is no chunk, so that counting them is counting chunks.
  auto load_k = [&](int chunk, int slot) {
    copy(k_tile(slot), k_part, k_token_bytes, chunk);
    commit_copies();
  };
  auto load_v = [&](int chunk, int slot) {
    copy(v_tile(slot), v_part, v_token_bytes, chunk);
    commit_copies();
  };

  const QueryCopier<Shape> query_copier(p, b, h, first_query);
  if (!has_finished_keys) {
    wait_for_previous_kernel();
    query_copier.copy(q_tile);  // in one group with the first K
  }
  int loaded = 0;
#pragma unroll 1
  for (; loaded < kStages && first_chunk + loaded * chunk_step < end; ++loaded) {
    load_k(first_chunk + loaded * chunk_step, loaded);
    load_v(first_chunk + loaded * chunk_step, loaded);
  }
#pragma unroll 1
  for (; loaded < kStages; ++loaded) {
    commit_copies();
    commit_copies();
  }
  if (has_finished_keys) {
    wait_for_previous_kernel();
    query_copier.copy(q_tile);
    commit_copies();
    wait_copies<0>();
  }
  let_next_kernel_start();
  wait_copies<2 * kStages - 1>();
  __syncthreads();  // queries are here, brought by all warps

  int slot = 0;
  for (int chunk = first_chunk; chunk < end; chunk += chunk_step) {
    const int lane = opaque(thread % 32);
    const int first_row = first_query + lane / 4, first_column = chunk * kKeys + 2 * (lane % 4);
    float s[1][kKeys / 8][4] = {};
    wait_copies<2 * kStages - 1>();
    sync_chunk<Shape>(key_warp);  // K is here
    multiply_rows<Op, 1, kKeys / 8, Shape::kD>(s, q_tile, 0, k_tile(slot), lane);
    sync_chunk<Shape>(key_warp);  // K has been read
    load_k(chunk + kStages * chunk_step, slot);
    apply_modifiers<false>(s[0], scores, first_row, first_column, chunk < plain_end);
    softmax.update(s, o);
    wait_copies<2 * kStages - 1>();
    sync_chunk<Shape>(key_warp);  // V is here
    multiply_accumulators<Op, 1, kKeys / 8, Shape::kOutTiles>(
        o, s, v_tile(slot), 8 * Shape::kOutTiles * column_warp, lane);
    sync_chunk<Shape>(key_warp);  // V has been read
    load_v(chunk + kStages * chunk_step, slot);
    slot = slot + 1 < kStages ? slot + 1 : 0;
  }
  softmax.finish();
}

// Two columns of one row, summed over some keys relative to their maximum.
struct RowPart {
  float row_max, row_sum;
  float2 o;
};

template <class Element, int kCount>
__device__ __forceinline__ RowPart merge(const RowPart (&parts)[kCount]) {
  RowPart all{negative_infinity(), 0.f, {0.f, 0.f}};
#pragma unroll
  for (int i = 0; i < kCount; ++i) all.row_max = fmaxf(all.row_max, parts[i].row_max);
  // A row without a key: subtract 0 rather than -inf, so that its weights are 0.
  const float base = all.row_max == negative_infinity() ? 0.f : all.row_max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float weight = weight_of<Element>(parts[i].row_max - base);
    all.row_sum = fmaf(weight, parts[i].row_sum, all.row_sum);
    all.o.x = fmaf(weight, parts[i].o.x, all.o.x);
    all.o.y = fmaf(weight, parts[i].o.y, all.o.y);
  }
  return all;
}

// Of columns d and d + 1, over the warps of the block.
template <class Shape>
__device__ __forceinline__ RowPart merge_warps(const typename Shape::SharedStorage& shared, int row,
                                               int d) {
  RowPart parts[Shape::kKeyWarps];
#pragma unroll
  for (int w = 0; w < Shape::kKeyWarps; ++w) {
    const auto& part = shared.results.parts[w];
    parts[w] = {part.row_max[row], part.row_sum[row],
                *reinterpret_cast<const float2*>(&part.o[row][d])};
  }
  return merge<typename Shape::Element>(parts);
}

// Of columns d and d + 1, over the blocks of the cluster.
template <class Shape>
__device__ __forceinline__ RowPart merge_blocks(const typename Shape::Merged& merged, int row,
                                                int d, int splits) {
  RowPart parts[1 << kLargestLog2Splits];
#pragma unroll
  for (int peer = 0; peer < 1 << kLargestLog2Splits; ++peer) {
    parts[peer] = {negative_infinity(), 0.f, {0.f, 0.f}};
    if (peer < splits) {
      const float2 state = load_from_peer(&merged.row[row], peer);
      parts[peer] = {state.x, state.y, load_from_peer(&merged.o[row][d / 2], peer)};
    }
  }
  return merge<typename Shape::Element>(parts);
}

// Where a thread's two columns of o and its rows of lse lie. Found in front of the wait.
template <class Shape>
struct MergePlace {
  using Element = typename Shape::Element;
  static constexpr int kRowStep = kBlockThreads / (Shape::kD / 2);
  static_assert(Shape::kQueries % kRowStep == 0, "every thread has as many rows");
  static __device__ __forceinline__ int first_row() { return threadIdx.x / (Shape::kD / 2); }
  static __device__ __forceinline__ int column() { return threadIdx.x % (Shape::kD / 2) * 2; }

  char* o;  // of the first row
  char* lse;
  int rows;  // from there on; none where the columns do not exist

  __device__ __forceinline__ MergePlace(const AttentionForwardParams& p, int64_t b, int h,
                                        int first_query) {
    const AttentionSizes& sizes = p.sizes;
    const int query = first_query + first_row();
    o = settled(reinterpret_cast<char*>(static_cast<Element*>(p.o.data) +
                                        offset_in(p.o, b, query, h) + column()));
    lse = settled(
        reinterpret_cast<char*>(p.lse + (b * sizes.num_heads + h) * sizes.num_queries + query));
    rows = column() < sizes.head_dim ? sizes.num_queries - query : 0;
  }
};

// o and lse of the tile from the warps' parts, and from other blocks' where they share the tile:
// each then finishes every splits-th row.
template <class Shape>
__device__ __forceinline__ void merge_parts(const AttentionForwardParams& p, const KeyShare& share,
                                            typename Shape::SharedStorage& shared,
                                            const MergePlace<Shape>& place) {
  using Element = typename Shape::Element;
  constexpr int kRowStep = MergePlace<Shape>::kRowStep;
  const int first_row = place.first_row(), d = place.column();
  if (share.splits > 1) {
#pragma unroll 1
    for (int i = 0; i < Shape::kQueries && i < place.rows; i += kRowStep) {
      const int row = first_row + i;
      const RowPart part = merge_warps<Shape>(shared, row, d);
      shared.results.merged.o[row][d / 2] = part.o;
      if (d == 0) shared.results.merged.row[row] = make_float2(part.row_max, part.row_sum);
    }
    sync_cluster();  // what all blocks have is written
  }
#pragma unroll
  for (int i = 0; i < Shape::kQueries; i += kRowStep) {
    const int row = first_row + i;
    if (i >= place.rows) continue;
    if ((row & (share.splits - 1)) != share.rank) continue;
    const RowPart part = share.splits > 1
                             ? merge_blocks<Shape>(shared.results.merged, row, d, share.splits)
                             : merge_warps<Shape>(shared, row, d);
    const float factor = part.row_sum > 0.f ? 1.f / part.row_sum : 0.f;
    store2(reinterpret_cast<Element*>(place.o) + i * p.o.token_stride, part.o.x * factor,
           part.o.y * factor);
    if (d == 0) {
      constexpr float kNatural = sizeof(Element) == 2 ? kLn2 : 1.f;
      reinterpret_cast<float*>(place.lse)[i] =
          part.row_sum > 0.f ? fmaf(part.row_max, kNatural, logf(part.row_sum))
                             : negative_infinity();
    }
  }
  if (share.splits > 1) sync_cluster();  // every block has read what it needs of this one
}

// What a block attends to.
struct AttentionTile {
  KeyShare share;
  int b, h;
  int first_query;
};

__device__ __forceinline__ AttentionTile locate_tile(const BlockAttentionParams& p, int block) {
  const int splits = 1 << p.log2_key_splits, tile = block >> p.log2_key_splits;
  const int batch_head = quotient(tile, p.query_tiles);
  const int b = quotient(batch_head, p.heads);
  return {{block & (splits - 1), splits},
          b,
          batch_head - b * static_cast<int>(p.heads.value),
          (tile - batch_head * static_cast<int>(p.query_tiles.value)) * kBlockTileQueries};
}

template <class Shape>
__device__ __forceinline__ void attend_tile(const BlockAttentionParams& block,
                                            typename Shape::SharedStorage& shared) {
  using Element = typename Shape::Element;
  const AttentionForwardParams& p = block.attention;
  const AttentionTile at = locate_tile(block, blockIdx.x);
  const HeadScores scores(p.sizes, p.scores, at.b, at.h, kScoreUnit<Element>);
  const MergePlace<Shape> place(p, at.b, at.h, at.first_query);

  float o[1][Shape::kOutTiles][4] = {};
  typename Shape::Softmax softmax;
  attend_keys<Shape>(p, block.has_finished_keys, at.share, scores, shared, at.b, at.h,
                     quotient(at.h, block.heads_a_kv_head), at.first_query, o, softmax);
  __syncthreads();  // every warp is done with its chunks, which the parts replace

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_column = warp / Shape::kKeyWarps * 8 * Shape::kOutTiles + 2 * (lane % 4);
  auto& part = shared.results.parts[warp % Shape::kKeyWarps];
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
  merge_parts<Shape>(p, at.share, shared, place);
}

}  // namespace frx
