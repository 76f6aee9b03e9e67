#include "attention_bwd_keys_sm90.cuh"
#include "attention_bwd_window_sm90.cuh"
#include "attention_sm90.h"

namespace frx {

void attention_backward_sm90_windows_d256(const AttentionBackwardParams& p, cudaStream_t stream) {
  // head dim, queries a tile, stages of Q and dO in turn; whether it makes dk, dv, dq, keeps ds
  using Keys = KeySideConfig<256, 64, 3, 0, false, true, false, true>;
  using Products = WindowConfig<256, 4>;
  AttentionBackwardParams dv_only = p;
  dv_only.dq_parts = nullptr;
  const int64_t all = key_blocks(p.sizes);
  for (int64_t first = 0; first < all; first += p.windows.blocks) {
    const int64_t end = std::min(all, first + p.windows.blocks);
    const KeyWindow window = {static_cast<int32_t>(first), static_cast<int32_t>(end),
                              static_cast<int32_t>(grid_index(p.key_cut, first)), 1};
    run_backward_window<Keys>(p, window, stream);
    const int first_cut = larger(window.first_block, p.key_cut.first_block);
    if (p.key_cut.pieces > 1 && first_cut < window.end_block) {
      attention_backward_sm90_sum(dv_only, {first_cut, window.end_block}, stream);
    }
    run_window_products<Products>(p, window, stream);
  }
  AttentionBackwardParams dq_only = p;
  dq_only.dkv_parts = nullptr;
  attention_backward_sm90_sum(dq_only, {0, 0}, stream);
}

}  // namespace frx
