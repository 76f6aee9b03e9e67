// The kernels' torch-free helpers, called from tests/test_device_helpers.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "block_params.h"
#include "divisor.h"
#include "dropout.cuh"
#include "dropout_bits.cuh"
#include "gradient_windows.h"
#include "key_pieces.h"
#include "mask.cuh"
#include "norm_rope_plan.h"
#include "rope.cuh"

namespace py = pybind11;

namespace frx {
namespace {

std::pair<float, float> as_tuple(Pair x) { return {x.first, x.second}; }
std::pair<int, int> as_tuple(IndexRange range) { return {range.begin, range.end}; }

std::vector<uint32_t> philox_words(const std::vector<uint32_t>& counter,
                                   const std::vector<uint32_t>& key) {
  const PhiloxWords words =
      philox({{counter.at(0), counter.at(1), counter.at(2), counter.at(3)}}, key.at(0), key.at(1));
  return {words.w, words.w + 4};
}

// Dims of every vector that the lanes of a head hold, and the pair of each vector's first dim.
template <int kVec>
py::list unit_places(int num_units, int head_dim, int rotary_dim, int axes, bool interleaved) {
  py::list places;
  for (int unit = 0; unit < num_units; ++unit) {
    const norm_rope::UnitPlace place =
        norm_rope::place_of_unit<kVec>(unit, head_dim, rotary_dim, axes, interleaved);
    places.append(py::make_tuple(place.dim[0], place.dim[1], place.pair[0], place.pair[1]));
  }
  return places;
}

// The final bits of a warp's 32 threads for 16 rows and 64 columns, as the kernels make them.
template <bool kTransposed>
std::vector<uint32_t> warp_dropout_bits(uint64_t seed, uint64_t batch_head, uint32_t threshold,
                                        uint32_t row_block, uint32_t column_block) {
  std::vector<uint32_t> own(32), bits(32);
  for (int lane = 0; lane < 32; ++lane) {
    const DropoutLane<kTransposed> draws(seed, batch_head, threshold, lane / 4, lane % 4);
    own[lane] = draws.template draw_bits<4>(row_block, column_block);
  }
  for (int lane = 0; lane < 32; ++lane) {
    bits[lane] = kTransposed ? exchange_bits(own[lane], own[lane ^ 4], lane / 4) : own[lane];
  }
  return bits;
}

void bind_dropout(py::module_& m) {
  m.def("dropped_flags", py::vectorize([](uint32_t draws, uint32_t keep_threshold) {
          return dropped_flags(draws, drop_test(keep_threshold));
        }));
  m.def("warp_dropout_bits", &warp_dropout_bits<false>);
  m.def("warp_dropout_bits_transposed", &warp_dropout_bits<true>);
  m.def("philox", &philox_words);
  m.def("dropout_keep", py::vectorize([](uint64_t seed, uint64_t batch_head, uint32_t query,
                                         uint32_t key, uint32_t keep_threshold) {
          return dropout_keep(seed, batch_head, query, key, keep_threshold);
        }));
  m.def("dropout_words", [](uint64_t seed, uint64_t batch_head, uint32_t query, uint32_t key) {
    const PhiloxWords words = dropout_words(seed, batch_head, query, key);
    return std::vector<uint32_t>(words.w, words.w + 4);
  });
}

void bind_mask(py::module_& m) {
  m.def("key_count", [](const std::vector<int32_t>& kv_lengths, int64_t b, int num_keys) {
    return key_count(kv_lengths.empty() ? nullptr : kv_lengths.data(), b, num_keys);
  });
  m.def("keys_visible", py::vectorize(keys_visible));
  m.def("first_query_seeing", py::vectorize(first_query_seeing));
  m.def("key_tiles_of_queries", [](int first_query, int tile_queries, int tile_keys,
                                   int num_queries, int key_count, bool is_causal) {
    return as_tuple(key_tiles_of_queries(first_query, tile_queries, tile_keys, num_queries,
                                         key_count, is_causal));
  });
  m.def("unmasked_key_tiles", &unmasked_key_tiles);
  m.def("query_tiles_of_keys",
        [](int first_key, int tile_queries, int num_queries, int key_count, bool is_causal) {
          return as_tuple(
              query_tiles_of_keys(first_key, tile_queries, num_queries, key_count, is_causal));
        });
  m.def("heads_offset", [](int64_t b, int64_t token, int64_t head, int64_t batch_stride,
                           int64_t token_stride, int64_t head_stride) {
    return offset_in(HeadsView{nullptr, batch_stride, token_stride, head_stride}, b, token, head);
  });
}

void bind_rope(py::module_& m) {
  m.def("turns_of", py::vectorize([](double position, int pair, int axis_width, double log2_base) {
          return turns_of(position, pair, axis_width, log2_base);
        }));
  m.def("inverse_frequency", &inverse_frequency);
  m.def("cos_sin", [](double turns) {
    const CosSin result = cos_sin(turns);
    return std::make_pair(result.cos, result.sin);
  });
  m.def("pair_dims", [](int pair, int rotary_dim, int axes, bool interleaved) {
    const PairDims dims = pair_dims(pair, rotary_dim, axes, interleaved);
    return std::make_pair(dims.first, dims.second);
  });
  m.def("rotate",
        [](float x0, float x1, float c, float s) { return as_tuple(rotate(Pair{x0, x1}, c, s)); });
  m.def("rotate_back", [](float g0, float g1, float c, float s) {
    return as_tuple(rotate_back(Pair{g0, g1}, c, s));
  });
  m.def("rotate", [](float x0, float x1, float c0, float s0, float c1, float s1) {
    return as_tuple(rotate(Pair{x0, x1}, CosSin{c0, s0}, CosSin{c1, s1}));
  });
  m.def("rotate_back", [](float g0, float g1, float c0, float s0, float c1, float s1) {
    return as_tuple(rotate_back(Pair{g0, g1}, CosSin{c0, s0}, CosSin{c1, s1}));
  });
}

void bind_norm_rope_plan(py::module_& m) {
  m.def("unit_places_wide", &unit_places<norm_rope::kWideVector>);
  m.def("unit_places_scalar", &unit_places<1>);
}

void bind_block(py::module_& m) {
  m.def("quotient", [](int32_t dividend, int32_t divisor) {
    return quotient(dividend, make_divisor(divisor));
  });
  // Rows and columns of a tile, tiles of each projection.
  m.def("plan_projections", [](const std::vector<std::pair<int32_t, int32_t>>& rows_and_columns,
                               int head_columns, int num_sms, bool is_fp32) {
    ProjectionGroup group{};
    for (const auto& [rows, columns] : rows_and_columns) {
      group.members[group.count].rows = rows;
      group.members[group.count++].columns = columns;
    }
    plan_projections(group, head_columns, num_sms, is_fp32);
    return std::make_tuple(group.tile_rows, group.tile_columns,
                           std::vector<int32_t>(group.tiles, group.tiles + group.count));
  });
}

// batch, queries, keys, heads, key heads, padded head dim
using Sizes = std::tuple<int64_t, int, int, int, int, int>;

AttentionSizes attention_sizes(const Sizes& sizes) {
  const auto [batch, queries, keys, heads, kv_heads, head_dim] = sizes;
  return {batch, queries, keys, heads, kv_heads, head_dim};
}

// A cut is its first block and the number of pieces.
void bind_key_pieces(py::module_& m) {
  m.def("cut_last_wave", [](const Sizes& sizes, bool is_causal, int num_sms) {
    const AttentionSizes s = attention_sizes(sizes);
    const KeyCut cut = cut_last_wave(s, is_causal, s.head_dim, num_sms);
    return std::make_pair(cut.first_block, cut.pieces);
  });
  m.def("key_blocks", [](const Sizes& sizes, int first_block, int pieces) {
    return key_blocks(attention_sizes(sizes), KeyCut{first_block, pieces});
  });
  m.def("dkv_part_floats", [](const Sizes& sizes, int first_block, int pieces) {
    const AttentionSizes s = attention_sizes(sizes);
    return dkv_part_floats(s, KeyCut{first_block, pieces}, s.head_dim);
  });
  m.def("key_block_of", [](int first_block, int pieces, int index) {
    const KeyBlock place = key_block_of(KeyCut{first_block, pieces}, index);
    return std::make_pair(place.block, place.piece);
  });
  m.def("part_of_range", [](int begin, int end, int part, int count) {
    return as_tuple(part_of_range({begin, end}, part, count));
  });
}

// tiles, stride, share
using Shares = std::tuple<int, int, int>;

KeyShares key_shares(const Shares& shares) {
  const auto [tiles, stride, share] = shares;
  return {tiles, stride, share};
}

Shares as_tuple(const KeyShares& cut) { return {cut.tiles, cut.stride, cut.share}; }

void bind_key_shares(py::module_& m) {
  m.attr("most_pieces") = kMostPieces;
  m.attr("most_cut_blocks") = kMostCutBlocks;
  m.attr("most_pieces_of_block") = kMostPiecesOfBlock;
  m.def("equal_shares",
        [](int tiles, int pieces) { return as_tuple(equal_shares(tiles, pieces)); });
  m.def("even_shares", [](int tiles, int blocks, int num_sms) {
    return as_tuple(even_shares(tiles, blocks, num_sms));
  });
  m.def("parts_of_block", [](const Shares& shares, int block) {
    return as_tuple(parts_of_block(key_shares(shares), block));
  });
  m.def("tiles_of_piece", [](const Shares& shares, int block, int piece) {
    return as_tuple(tiles_of_piece(key_shares(shares), block, piece));
  });
  m.def("order_pieces", [](const Shares& shares, int blocks) {
    const PieceOrder order = order_pieces(key_shares(shares), blocks);
    std::vector<std::pair<int, int>> pieces;
    for (int i = 0; i < order.count; ++i) {
      pieces.emplace_back(order.pieces[i].block, order.pieces[i].piece);
    }
    return pieces;
  });
}

// A window's cut is its blocks that are whole and the others' shares.
using Cut = std::pair<int, Shares>;

Cut as_tuple(const WindowCut& cut) { return {cut.whole_blocks, as_tuple(cut.shares)}; }

// A plan of windows is (blocks, cut, the last one's cut).
using Windows = std::tuple<int, Cut, Cut>;

WindowPlan window_plan(const Windows& windows) {
  const auto& [blocks, cut, last_cut] = windows;
  return {blocks,
          {cut.first, key_shares(cut.second), 0},
          {last_cut.first, key_shares(last_cut.second), 0}};
}

void bind_gradient_windows(py::module_& m) {
  m.attr("most_window_bytes") = kMostWindowBytes;
  m.def("window_block_bytes",
        [](const Sizes& sizes) { return window_block_bytes(attention_sizes(sizes)); });
  m.def("plan_windows", [](const Sizes& sizes, int num_sms) {
    const AttentionSizes s = attention_sizes(sizes);
    const WindowPlan plan = plan_windows(s, s.head_dim, num_sms);
    return Windows(plan.blocks, as_tuple(plan.cut), as_tuple(plan.last_cut));
  });
  m.def("cut_window", [](const Sizes& sizes, int64_t blocks, int num_sms) {
    const AttentionSizes s = attention_sizes(sizes);
    return as_tuple(cut_window(s, blocks, s.head_dim, num_sms));
  });
  m.def("cut_time", [](const Sizes& sizes, const Shares& shares, int blocks, int num_sms) {
    const AttentionSizes s = attention_sizes(sizes);
    return cut_time(s, key_shares(shares), blocks, s.head_dim, num_sms);
  });
  m.def("window_part_floats", [](const Sizes& sizes, const Windows& windows) {
    const AttentionSizes s = attention_sizes(sizes);
    return window_part_floats(s, window_plan(windows), s.head_dim);
  });
  m.def("shape_of_window", [](const Sizes& sizes, int first_block, int end_block, int cluster) {
    const WindowShape s = shape_of_window(attention_sizes(sizes), first_block, end_block, cluster);
    return std::make_tuple(s.first_head, s.heads, s.head_blocks, s.head_clusters, s.first_cluster,
                           s.dk_clusters, s.query_clusters);
  });
  m.def("cluster_of_window",
        [](const Sizes& sizes) { return cluster_of_window(attention_sizes(sizes)); });
  m.def("window_tiles",
        [](int64_t first_block, int64_t end_block, int64_t head, int num_keys, int key_count) {
          return as_tuple(window_tiles(first_block, end_block, head, num_keys, key_count));
        });
  m.def("split_of_tiles", [](int begin, int end, int split, int splits, int first_split) {
    return as_tuple(split_of_tiles({begin, end}, split, splits, first_split));
  });
  // Tiles of the first split, and the time; time of equal splits.
  m.def("plan_splits", [](const Sizes& sizes, int64_t first_block, int64_t end_block, int splits,
                          int num_sms) {
    const WindowWork work = work_of_window(attention_sizes(sizes), first_block, end_block, num_sms);
    const SplitPlan plan = plan_splits(work, splits, num_sms);
    return std::make_tuple(plan.first_split, plan.time, equal_splits_time(work, splits, num_sms));
  });
  m.def("dq_splits_of_windows", [](const Sizes& sizes, int64_t blocks, int num_sms) {
    return dq_splits_of_windows(attention_sizes(sizes), blocks, num_sms);
  });
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(helpers, m) {
  frx::bind_dropout(m);
  frx::bind_mask(m);
  frx::bind_rope(m);
  frx::bind_norm_rope_plan(m);
  frx::bind_block(m);
  frx::bind_key_pieces(m);
  frx::bind_key_shares(m);
  frx::bind_gradient_windows(m);
}
